// What Gradio leaves to the page: names of its controls, the slider between two drawings, and the tokens of a drawing.
const mmaccel = (() => {
  const questions = EXAMPLES;  // of the examples, by the names of their files
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // An own picture or clip clears the question that belongs to an example.
  const ownQuestion = (asked) => (Object.values(questions).includes(asked) ? "" : asked);

  // Gradio gives some of its controls no name, or a number, and does not say what is folded out.
  const set = (element, name, value) => element.getAttribute(name) !== value && element.setAttribute(name, value);
  const nameControls = () => {
    for (const button of all(".mm-thumbs button")) {
      const file = decodeURI(button.querySelector("img, video")?.src ?? "").split("/").pop();
      set(button, "aria-label", `Example: ${questions[file] ?? file}`);
    }
    for (const remove of all(".token-remove")) {
      const label = `Remove ${remove.closest(".token")?.textContent.trim() ?? "all"}`;
      set(remove, "aria-label", label);
      set(remove, "title", label);
    }
    // a label names its first control, which is the button that copies
    for (const field of all("label:has(button) textarea")) {
      set(field, "aria-label", field.closest("label").querySelector("[data-testid=block-info]")?.textContent.trim() ?? "");
    }
    for (const fold of all("button.label-wrap")) set(fold, "aria-expanded", `${fold.classList.contains("open")}`);
    // a list that scrolls would take a stop of its own between the field and what comes next
    for (const list of all("ul[role=listbox]")) set(list, "tabindex", "-1");
  };

  // The slider between two drawings, and the lists that choose them.
  const divide = ({ target }) => {
    if (!target.matches?.(".mm-stack input")) return;
    target.parentNode.style.setProperty("--at", `${target.value}%`);
  };
  const choose = ({ target }) => {
    const pair = target.matches?.("select[data-side]") && target.closest(".mm-pair");
    if (!pair) return;
    const image = pair.querySelector(`.mm-stack img[data-side=${target.dataset.side}]`);
    image.src = all(".mm-sheet img", pair)[target.selectedIndex].src;
    image.alt = target.value;
  };

  // What a token's title says is written below the picture when it is pointed at, touched or reached by keyboard.
  const tell = ({ target }) => {
    const token = target.closest?.(".mm-t");
    const line = token?.closest(".mm-view")?.querySelector(".mm-readout");
    if (line) line.textContent = token.querySelector("title").textContent;
  };
  const step = (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const token = event.target.closest?.(".mm-t");
    if (!move || !token) return;
    event.preventDefault();
    const [row, column] = token.dataset.at.split(",").map(Number);
    const next = token.parentNode.querySelector(`.mm-t[data-at="${row + move[0]},${column + move[1]}"]`);
    if (!next) return;
    token.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  };

  if (typeof document !== "undefined") {
    new MutationObserver(nameControls).observe(document, {
      subtree: true, childList: true, attributes: true, attributeFilter: ["class", "src"],
    });
    for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, tell);
    document.addEventListener("keydown", step);
    document.addEventListener("input", divide);
    document.addEventListener("change", choose);
  }
  return { ownQuestion };
})();
