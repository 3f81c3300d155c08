// The text so far: what the drafts had guessed, and what the target said itself.

const MOST_TOKENS = 1500;

export class TextView {
  constructor(container) {
    this.container = container;
    this.drawn = 0;
    this.first = null;
    this.round = -1;
  }

  draw(state) {
    const prompt = state.header?.prompt ?? "";
    const isNew = this.first !== state.output || state.output.length < this.drawn || this.header !== state.header;
    if (isNew) {
      this.container.replaceChildren();
      this.first = state.output;
      this.header = state.header;
      this.drawn = 0;
      const before = document.createElement("span");
      before.className = "prompt";
      before.textContent = prompt.split("\n").slice(-8).join("\n");
      this.container.append(before);
    }
    for (const old of this.container.querySelectorAll(".fresh")) old.classList.remove("fresh");
    const latest = state.rounds.length ? state.output.at(-1)?.round : -1;
    for (const token of state.output.slice(this.drawn)) {
      // White space is not underlined: indentation would be all lines.
      const [, before, core, after] = /^(\s*)(.*?)(\s*)$/s.exec(token.text);
      const span = document.createElement("span");
      span.className = token.kind;
      span.textContent = core;
      span.dataset.round = token.round;
      this.container.append(before, span, after);
    }
    this.drawn = state.output.length;
    while (this.container.childElementCount > MOST_TOKENS) this.container.firstChild.remove();
    for (let span = this.container.lastElementChild; span && span.dataset.round === String(latest); span = span.previousElementSibling) span.classList.add("fresh");
    this.container.scrollTop = this.container.scrollHeight;
  }
}
