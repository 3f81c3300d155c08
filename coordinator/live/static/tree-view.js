// Draws the tree: pills for tokens, curves for what follows what; everything glides to its place.

import { layout } from "./layout.js";
import { element, shown } from "./svg.js";

const ROW = 34, PILL = 26, CHARACTER = 7.3, PADDING = 11, MARK = 15;
const NARROWEST = 0.8, WIDEST = 1.2;
const GLIDE_MS = 480;
const MARKS = { guess: "", accepted: "✓", abandoned: "–", own: "◆" };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class TreeView {
  constructor(container) {
    this.container = container;
    this.items = new Map();
    this.svg = element("svg", { class: "tree-svg" });
    this.camera = element("g");
    this.edges = element("g");
    this.pills = element("g");
    this.hidden = element("text", { class: "hidden", "text-anchor": "end" });
    this.goal = { x: 0, y: 0, scale: 1 };
    this.camera.append(this.edges, this.pills);
    this.svg.append(this.camera, this.hidden);
    container.append(this.svg);
    this.frame = 0;
  }

  draw(state) {
    const width = this.container.clientWidth, height = this.container.clientHeight;
    if (!width) return;
    if (!state.header) {
      this.update(new Map());
      return;
    }
    const narrow = width < 600;
    const rows = Math.floor((height - 24) / ROW / (narrow ? NARROWEST : 1)) - 1;
    const found = layout(state, { rows, characters: narrow ? 7 : 14 });
    const trail = state.path.slice(narrow ? -1 : -3);
    const wanted = this.positions(found, trail, narrow);
    this.fit(wanted, width, height, narrow);
    this.hidden.textContent = found.hidden ? `and ${found.hidden} less likely` : "";
    this.hidden.setAttribute("x", width - 14);
    this.hidden.setAttribute("y", height - 12);
    this.update(wanted);
  }

  positions({ root, nodes }, trail, narrow) {
    const most = narrow ? 7 : 14, gap = narrow ? 16 : 34;
    const size = (label) => label.length * CHARACTER + 2 * PADDING + MARK;
    const wanted = new Map();
    const columns = [];
    for (const node of nodes) columns[node.depth] = Math.max(columns[node.depth] ?? 0, size(node.label));
    let x = size(root.label) / 2 + gap;
    const starts = columns.map((widest) => ((x += widest + gap), x - widest - gap));
    wanted.set(root.id, { ...root, state: root.kind, role: "root", x: -size(root.label) / 2, y: 0, width: size(root.label), above: null });
    for (const node of nodes) {
      wanted.set(node.id, { ...node, role: "node", x: starts[node.depth], y: node.row * ROW, width: size(node.label), above: node.parent });
    }
    let left = -size(root.label) / 2, below = root.id;
    for (const node of [...trail].reverse()) {
      const label = shown(node.text, most), width = size(label);
      left -= width + gap * 0.6;
      if (wanted.has(node.id)) break;
      wanted.set(node.id, { ...node, state: node.kind, role: "trail", label, x: left, y: 0, width, above: null, depth: 0 });
      wanted.get(below).above = node.id;
      below = node.id;
    }
    return wanted;
  }

  // The root stands still: what is behind it has a sixth of the width, what is before it the rest.
  fit(wanted, width, height, narrow) {
    let left = 0, right = 0, top = 0, bottom = 0;
    for (const item of wanted.values()) {
      left = Math.min(left, item.x);
      right = Math.max(right, item.x + item.width);
      top = Math.min(top, item.y);
      bottom = Math.max(bottom, item.y);
    }
    const scale = Math.max(NARROWEST, Math.min(narrow ? 1 : WIDEST, (width - 28) / (right - left), (height - 40) / (bottom - top + PILL)));
    const room = (right - left) * scale + 28;
    const shift = Math.max(-left * scale + 14, Math.min(width * 0.2, width - right * scale - 14));
    this.svg.setAttribute("width", Math.max(width, Math.ceil(room)));
    this.svg.setAttribute("height", height);
    const middle = Math.min(height - 22 - bottom * scale, Math.max(22 - top * scale, height / 2));
    this.goal = { x: shift, y: middle, scale };
  }

  update(wanted) {
    const first = this.items.size === 0;
    for (const [id, item] of this.items) {
      if (!wanted.has(id)) {
        item.goal = { ...item.goal, opacity: 0, x: item.role === "trail" ? item.goal.x - 40 : item.goal.x };
        item.leaves = true;
      }
    }
    for (const [id, node] of wanted) {
      let item = this.items.get(id);
      if (!item) {
        const from = (node.above !== null && this.items.get(node.above)) || null;
        item = this.make(id, from ? { x: from.at.x + from.width * 0.5, y: from.at.y, opacity: 0 } : { x: node.x, y: node.y, opacity: 0 });
      }
      item.leaves = false;
      item.above = node.above;
      item.goal = { x: node.x, y: node.y, opacity: node.role === "trail" ? 0.55 : 1 };
      this.dress(item, node);
    }
    for (const item of this.items.values()) item.from = { ...item.at };
    this.before = this.view ? { ...this.view } : { ...this.goal };
    this.began = performance.now();
    if (calm.matches || first || document.hidden) this.began -= GLIDE_MS;
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.glide(now));
  }

  make(id, at) {
    const pill = element("g", { class: "pill" });
    pill.append(
      element("rect", { class: "body", height: PILL, y: -PILL / 2, rx: PILL / 2 }),
      element("rect", { class: "value", height: 2, y: PILL / 2 - 5, x: PADDING, rx: 1 }),
      element("text", { class: "token", x: PADDING, y: 4 }),
      element("text", { class: "mark", y: 4, "text-anchor": "middle" }),
    );
    const edge = element("path", { class: "edge" });
    this.pills.append(pill);
    this.edges.append(edge);
    const item = { pill, edge, at, goal: at, from: at, width: 0, above: null, role: "" };
    this.items.set(id, item);
    return item;
  }

  dress(item, node) {
    const [body, value, token, mark] = item.pill.children;
    item.width = node.width;
    item.role = node.role;
    item.pill.dataset.state = item.edge.dataset.state = node.state;
    item.pill.dataset.role = item.edge.dataset.role = node.role;
    body.setAttribute("width", node.width);
    const share = node.role === "node" && node.state !== "own" ? node.value : 0;
    value.setAttribute("width", Math.max(0, (node.width - 2 * PADDING) * share).toFixed(1));
    token.textContent = node.label;
    mark.textContent = MARKS[node.state] ?? "";
    mark.setAttribute("x", (node.width - PADDING - 2).toFixed(1));
  }

  glide(now) {
    const share = Math.min(1, (now - this.began) / GLIDE_MS);
    const eased = 1 - (1 - share) ** 3;
    const mix = (from, to) => from + (to - from) * eased;
    this.view = { x: mix(this.before.x, this.goal.x), y: mix(this.before.y, this.goal.y), scale: mix(this.before.scale, this.goal.scale) };
    this.camera.setAttribute("transform", `translate(${this.view.x.toFixed(2)} ${this.view.y.toFixed(2)}) scale(${this.view.scale.toFixed(4)})`);
    for (const item of this.items.values()) {
      item.at = { x: mix(item.from.x, item.goal.x), y: mix(item.from.y, item.goal.y), opacity: mix(item.from.opacity, item.goal.opacity) };
      item.pill.setAttribute("transform", `translate(${item.at.x.toFixed(2)} ${item.at.y.toFixed(2)})`);
      item.pill.setAttribute("opacity", item.at.opacity.toFixed(3));
    }
    for (const item of this.items.values()) this.bend(item);
    if (share < 1) {
      this.frame = requestAnimationFrame((next) => this.glide(next));
      return;
    }
    this.frame = 0;
    for (const [id, item] of this.items) {
      if (!item.leaves) continue;
      item.pill.remove();
      item.edge.remove();
      this.items.delete(id);
    }
  }

  bend(item) {
    const above = item.above === null ? null : this.items.get(item.above);
    if (!above) {
      item.edge.setAttribute("opacity", 0);
      return;
    }
    const x1 = above.at.x + above.width, y1 = above.at.y, x2 = item.at.x, y2 = item.at.y;
    const reach = Math.max(10, Math.min(44, (x2 - x1) / 2));
    item.edge.setAttribute("d", `M${x1.toFixed(1)} ${y1.toFixed(1)}C${(x1 + reach).toFixed(1)} ${y1.toFixed(1)} ${(x2 - reach).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`);
    item.edge.setAttribute("opacity", Math.min(item.at.opacity, above.at.opacity).toFixed(3));
  }
}
