// Where a tree's nodes stand: a column a depth, the best path on the root's own row, what is less likely above and below.

import { shown } from "./svg.js";

const JUDGED = new Set(["accepted", "own"]);

// Gives every node that is drawn a column, a row and its path's value; and how many are not drawn.
export function layout(state, { rows, characters }) {
  const children = new Map();
  const root = { ...state.root, depth: 0, row: 0, value: 1, label: shown(state.root.text, characters) };
  for (const node of state.nodes.values()) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const all = [];
  collect(root, children, all);
  const kept = choose(all, root.id, rows);
  const placed = [];
  place(root, children, kept, placed, characters);
  return { root, nodes: placed, hidden: all.length - placed.length };
}

function collect(top, children, all) {
  const stack = [top];
  while (stack.length) {
    const parent = stack.pop();
    for (const node of children.get(parent.id) ?? []) {
      const reached = { ...node, depth: parent.depth + 1, value: parent.value * node.acceptance };
      all.push(reached);
      stack.push(reached);
    }
  }
}

// The accepted path is drawn, then the likeliest nodes, as long as there are rows; a row is a leaf.
function choose(all, rootId, rows) {
  const kept = new Map();
  const withChild = new Set();
  let leaves = 0;
  const first = (node) => (JUDGED.has(node.state) ? 1 : 0);
  const order = [...all].sort((a, b) => first(b) - first(a) || b.value - a.value || a.depth - b.depth);
  for (const node of order) {
    if (node.parent !== rootId && !kept.has(node.parent)) continue;
    const opens = withChild.has(node.parent) ? 1 : 0;
    if (leaves + opens + (leaves ? 0 : 1) > rows) continue;
    if (!leaves) leaves = 1;
    else leaves += opens;
    withChild.add(node.parent);
    kept.set(node.id, node);
  }
  return kept;
}

function place(root, children, kept, placed, characters) {
  // Extents first, from the leaves up: how many rows a node's descendants take above and below its own.
  const extents = (node) => {
    const own = (children.get(node.id) ?? []).map((child) => kept.get(child.id)).filter(Boolean);
    own.sort((a, b) => b.value - a.value || a.id - b.id);
    const found = { node, above: 0, below: 0, rows: [] };
    own.forEach((child, number) => {
      const its = extents(child);
      let offset = 0;
      if (number > 0 && found.below <= found.above) offset = found.below + 1 + its.above;
      else if (number > 0) offset = -(found.above + 1 + its.below);
      found.above = Math.max(found.above, its.above - offset);
      found.below = Math.max(found.below, its.below + offset);
      found.rows.push([its, offset]);
    });
    return found;
  };
  const settle = (found, row) => {
    found.node.row = row;
    if (found.node !== root) {
      found.node.label = shown(found.node.text, characters);
      placed.push(found.node);
    }
    for (const [its, offset] of found.rows) settle(its, row + offset);
  };
  settle(extents(root), 0);
}
