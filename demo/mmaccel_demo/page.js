// What a token's title says is written below the picture when it is pointed at, touched or reached by keyboard.
(() => {
  const tell = (event) => {
    const token = event.target.closest?.(".mm-t");
    const line = token?.closest(".mm-view")?.querySelector(".mm-readout");
    if (line) line.textContent = token.querySelector("title").textContent;
  };
  for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, tell);
  document.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const token = event.target.closest?.(".mm-t");
    if (!step || !token) return;
    event.preventDefault();
    const [row, column] = token.dataset.at.split(",").map(Number);
    const next = token.parentNode.querySelector(`.mm-t[data-at="${row + step[0]},${column + step[1]}"]`);
    if (!next) return;
    token.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
})();
