// Draws the rounds: when drafts grew, when the target verified, when the client was told.

import { element, milliseconds } from "./svg.js";

const LANES = ["draft", "verify", "deliver"];
const TOP = 24, LANE = 30, LEFT = 62, RIGHT = 16;
const ROUNDS = 7;

export class Timeline {
  constructor(container) {
    this.container = container;
    this.svg = element("svg");
    container.append(this.svg);
  }

  draw(state) {
    const width = this.container.clientWidth;
    if (!width) return;
    const rounds = state.rounds.slice(width < 600 ? -4 : -ROUNDS);
    const begin = Math.max(0, rounds[0]?.start ?? state.growth[0]?.t ?? state.now);
    const span = Math.max(state.now - begin, 500);
    const x = (t) => LEFT + ((t - begin) / span) * (width - LEFT - RIGHT);
    const parts = [];
    LANES.forEach((name, lane) => {
      const y = TOP + lane * LANE + LANE / 2;
      parts.push(element("text", { class: "lane", x: 12, y: y + 4 }, name), element("path", { class: "rail", d: `M${LEFT} ${y}H${width - RIGHT}` }));
    });
    const bar = (from, to, kind, height) =>
      element("rect", { class: `bar ${kind}`, x: x(Math.max(from, begin)).toFixed(1), y: TOP + LANE + (LANE - height) / 2, width: Math.max(1.5, x(to) - x(Math.max(from, begin))).toFixed(1), height, rx: 3 });
    for (const round of rounds) {
      const rest = Math.max(0, round.step - round.forward) / 2;
      parts.push(bar(round.start, round.t, "round", 14), bar(round.start + rest, round.t - rest, "forward", 10));
      parts.push(element("text", { class: "gain", x: x((round.start + round.t) / 2).toFixed(1), y: 16, "text-anchor": "middle" }, `+${round.tokens}`));
      if (round.told !== null) parts.push(element("path", { class: "told", d: `M${x(round.told).toFixed(1)} ${TOP + 2 * LANE + 6}v18` }));
    }
    for (const growth of state.growth.slice(-400)) {
      if (growth.t < begin || !growth.nodes) continue;
      const during = rounds.some((round) => round.start <= growth.t && growth.t <= round.t);
      const size = Math.min(7, 2.2 + Math.sqrt(growth.nodes));
      parts.push(element("circle", { class: during ? "grown during" : "grown", cx: x(growth.t).toFixed(1), cy: TOP + LANE / 2, r: size.toFixed(1) }));
    }
    const bottom = TOP + LANES.length * LANE;
    for (const t of state.gaps) if (t >= begin) parts.push(element("path", { class: "gap", d: `M${x(t).toFixed(1)} ${TOP}V${bottom}` }));
    parts.push(element("path", { class: "now", d: `M${x(state.now).toFixed(1)} ${TOP - 4}V${bottom + 2}` }));
    parts.push(element("text", { class: "scale", x: LEFT, y: bottom + 18 }, milliseconds(begin)), element("text", { class: "scale", x: (LEFT + width - RIGHT) / 2, y: bottom + 18, "text-anchor": "middle" }, element("tspan", { class: "dot" }, "●"), width < 600 ? " drafted meanwhile" : " drafted while the target was busy"), element("text", { class: "scale", x: width - RIGHT, y: bottom + 18, "text-anchor": "end" }, milliseconds(state.now)));
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", bottom + 28);
    this.svg.replaceChildren(...parts);
  }
}

// One round in words.
export function inWords(round) {
  if (!round) return "What overlaps is time saved.";
  const what = round.selected ? `verified ${round.selected} ${round.selected === 1 ? "guess" : "guesses"}` : "decoded without guesses";
  return `${what} in ${milliseconds(round.step)}, the model's pass ${milliseconds(round.forward)} of it`;
}
