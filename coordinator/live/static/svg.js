// Little helpers for SVG, and tokens as they are shown.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const VISIBLE = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

// White space that can be seen, cut to so many characters.
export function shown(text, most) {
  let seen = text.replace(/ {4,}/g, (run) => `${run.length}␣`).replace(/^ | $/g, "␣");
  seen = seen.replace(/[\n\t\r]/g, (character) => VISIBLE[character]).replace(/ /g, "·");
  if (!seen) seen = "∅";
  return seen.length > most ? `${seen.slice(0, most - 1)}…` : seen;
}

export function milliseconds(us) {
  const ms = us / 1000;
  return ms < 10 ? `${ms.toFixed(2)} ms` : ms < 1000 ? `${ms.toFixed(1)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
