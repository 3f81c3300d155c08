// A recorded tree: its lines as they came, and the state that they lead to. docs/live-page.md has the format.

export const FORMAT = "outrider-tree";
export const VERSION = 2;
// Of what one page holds; a longer session goes on unseen.
export const MAX_EVENTS = 60_000;
export const MAX_CHARACTERS = 16 << 20;

export class Trace {
  constructor() {
    this.header = null;
    this.lines = [];
    this.events = [];
    this.characters = 0;
    this.isFull = false;
    this.offset = 0;
    this.last = 0;
  }

  // Takes one line; throws where it is none of this format.
  take(line) {
    if (this.isFull || !line.trim()) return;
    const event = JSON.parse(line);
    if (event.format !== undefined) {
      if (event.format !== FORMAT) throw new Error(`a trace of ${event.format}, not of ${FORMAT}`);
      if (event.version !== VERSION) throw new Error(`version ${event.version} of the format; this page reads ${VERSION}`);
      // A request that was resumed at another coordinator begins anew, with a clock of its own.
      if (this.header) this.push({ e: "gap", lost: 0 }, null);
      this.offset = this.header ? this.last : 0;
      this.header ??= event;
      this.lines.push(line);
      return;
    }
    if (!this.header) throw new Error(`no header: the first line of a trace names its format, ${FORMAT}`);
    this.push(event, line);
  }

  push(event, line) {
    event.t = event.t === undefined ? this.last : event.t + this.offset;
    // A verdict's time is when the tokens were committed, which may lie before growth that was told first.
    event.at = Math.max(this.last, event.t);
    this.last = event.at;
    this.events.push(event);
    if (line !== null) {
      this.lines.push(line);
      this.characters += line.length;
    }
    this.isFull = this.events.length >= MAX_EVENTS || this.characters >= MAX_CHARACTERS;
  }

  get isEnded() {
    return this.events.at(-1)?.e === "end";
  }
}

const ZERO = { rounds: 0, grown: 0, selected: 0, accepted: 0, abandoned: 0, emitted: 0 };

// What the events up to a place say. Nodes that a verdict has judged stay until the next event: that they can be seen.
export class TreeState {
  constructor(header) {
    this.header = header;
    this.nodes = new Map();
    this.root = { id: 0, parent: -1, text: lastToken(header?.prompt ?? ""), kind: "own", state: "own" };
    this.path = [];
    this.output = [];
    this.counts = { ...ZERO };
    this.rounds = [];
    this.growth = [];
    this.gaps = [];
    this.workers = [];
    this.verdict = null;
    this.now = 0;
    this.note = "";
    this.ended = null;
  }

  apply(event) {
    this.settle();
    this.now = event.at;
    this[`on_${event.e}`]?.(event);
  }

  // Clears away what the last verdict has judged: the root moves.
  settle() {
    const verdict = this.verdict;
    if (!verdict) return;
    this.verdict = null;
    for (const [id, node] of this.nodes) {
      if (node.state !== "guess") this.nodes.delete(id);
    }
    this.path.push(this.root, ...verdict.tokens.slice(0, -1));
    this.path.splice(0, this.path.length - 12);
    this.root = verdict.tokens.at(-1) ?? this.root;
  }

  on_tree(event) {
    this.nodes.clear();
    for (const [id, parent, token, text, acceptance] of event.nodes) {
      this.nodes.set(id, { id, parent, token, text, acceptance, state: "guess" });
    }
    const [id, token, text] = event.root;
    this.root = { id, parent: -1, token, text, kind: "own", state: "own" };
    this.path = [];
    if (event.text || this.output.length) this.output = event.text ? [{ text: event.text, kind: "unseen", round: -1 }] : [];
    this.counts = { ...event.counts };
  }

  on_grow(event) {
    for (const [id, parent, token, text, acceptance] of event.nodes) {
      this.nodes.set(id, { id, parent, token, text, acceptance, state: "guess" });
    }
    this.counts.grown += event.nodes.length;
    this.growth.push({ t: event.t, nodes: event.nodes.length, worker: event.worker });
    if (!this.workers.includes(event.worker)) this.workers.push(event.worker);
    const worker = this.workers.length > 1 ? `draft ${this.workers.indexOf(event.worker) + 1}` : "the draft";
    this.note = event.nodes.length
      ? `${worker} guesses ${event.nodes.length} more ${event.nodes.length === 1 ? "token" : "tokens"}`
      : `${worker} sends nothing that is new in this tree`;
  }

  on_drop(event) {
    this.count("abandoned", event.nodes.length);
    for (const id of event.nodes) this.nodes.delete(id);
    this.note = `${event.nodes.length} guesses are given up`;
  }

  on_verdict(event) {
    for (const id of event.abandoned) this.mark(id, "abandoned");
    const accepted = new Set(event.accepted);
    let parent = this.root.id;
    const tokens = event.emitted.map(([id, token, text]) => {
      const kind = accepted.has(id) ? "accepted" : "own";
      const guess = this.nodes.get(id);
      const node = { id, parent, token, text, acceptance: guess?.acceptance ?? 0.01, kind, state: kind };
      this.nodes.set(id, node);
      parent = id;
      return node;
    });
    this.verdict = { tokens };
    const round = this.counts.rounds;
    for (const node of tokens) this.output.push({ text: node.text, kind: node.kind, round });
    this.count("rounds", 1);
    this.count("selected", event.selected);
    for (const name of ["accepted", "abandoned"]) this.count(name, event[name].length);
    this.count("emitted", tokens.length);
    this.rounds.push({
      t: event.t, start: event.t - event.step, step: event.step, forward: event.forward,
      selected: event.selected, accepted: event.accepted.length, tokens: tokens.length, told: null,
    });
    this.note = verdictNote(event, tokens.length);
  }

  on_deliver(event) {
    const round = this.rounds.at(-1);
    if (round) round.told = event.t;
    this.note = "the client is told";
  }

  on_gap(event) {
    this.gaps.push(event.at);
    this.note = event.lost ? `gap: ${event.lost} events missed, this page was too slow for them` : "gap: resumed elsewhere";
  }

  on_end(event) {
    this.ended = event.reason;
    this.nodes.clear();
    this.note = { length: "done: as many tokens as were asked for", stop: "done: the text has ended", cancelled: "cancelled" }[event.reason] ?? event.reason;
  }

  mark(id, state) {
    const node = this.nodes.get(id);
    if (node) node.state = state;
  }

  count(name, more) {
    this.counts[name] += more;
  }
}

function verdictNote(event, emitted) {
  const tokens = emitted === 1 ? "1 token" : `${emitted} tokens`;
  if (!event.selected) return `the target's own token`;
  return `${event.accepted.length} of ${event.selected} accepted: ${tokens} out of one round`;
}

// A guess of where the prompt's last token begins: nobody has said.
function lastToken(prompt) {
  return /(\w+|[^\w\s]+|\s+)$/.exec(prompt)?.[0] ?? "";
}
