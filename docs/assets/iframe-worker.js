// A worker for pages that are opened from a folder: browsers start no worker there, and the search of the site needs one. It runs in
// a hidden frame. The builder would load a script for this from another host; this one has what the search uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inner = frame.contentWindow
      window.addEventListener("message", ({source, data}) => {
        if (source !== this.inner) return
        const message = new MessageEvent("message", {data})
        this.dispatchEvent(message)
        this.onmessage?.(message)
      })
      // what a worker has and a frame does not
      const load = (...files) => files.reduce((before, src) => before.then(() => new Promise((done) => {
        document.body.appendChild(Object.assign(document.createElement("script"), {src, onload: done}))
      })), Promise.resolve())
      const page = this.inner.document
      page.open()
      page.write(`<body><script>postMessage = (data) => parent.postMessage(data, "*"); importScripts = ${load}</script>` +
        `<script src="${address}"></script></body>`)
      page.close()
      this.ready = new Promise((done) => { this.inner.onload = done })
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data: structuredClone(data)})))
    }
  }
}
