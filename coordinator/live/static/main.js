// The page: buttons to sources and player, the player's state to the pictures.

import { Player } from "./player.js";
import * as source from "./source.js";
import { milliseconds } from "./svg.js";
import { TextView } from "./text-view.js";
import { inWords, Timeline } from "./timeline.js";
import { MAX_CHARACTERS, Trace } from "./trace.js";
import { TreeView } from "./tree-view.js";

const SESSIONS_EVERY_MS = 2000;
const $ = (id) => document.getElementById(id);
const tree = new TreeView($("tree"));
const timeline = new Timeline($("timeline"));
const text = new TextView($("text"));
const legend = new Map([...$("legend").children].map((item) => [item.dataset.state, item.querySelector("b")]));
let connection = null;
let problem = "";
let waiting = false;

const player = new Player((hasMoved) => {
  if (!waiting) {
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }
  if (hasMoved) problem = "";
});

function draw() {
  const { state, trace } = player;
  tree.draw(state);
  timeline.draw(state);
  text.draw(state);
  const states = [...state.nodes.values()];
  const now = (name) => states.filter((node) => node.state === name).length;
  const { counts } = state;
  const values = { guess: now("guess"), accepted: counts.accepted, abandoned: counts.abandoned, own: counts.emitted - counts.accepted };
  for (const [name, value] of Object.entries(values)) legend.get(name).textContent = String(value);
  const seconds = (state.now - (state.rounds[0]?.start ?? 0)) / 1e6;
  $("figures").textContent = counts.rounds
    ? `${counts.emitted} ${counts.emitted === 1 ? "token" : "tokens"} in ${counts.rounds} ${counts.rounds === 1 ? "round" : "rounds"}, ${(counts.emitted / counts.rounds).toFixed(2)} a round, ${counts.accepted} of ${counts.selected} verified guesses accepted, ${(state.output.length / seconds).toFixed(0)} a second`
    : "";
  $("round").textContent = inWords(state.rounds.at(-1));
  $("status").textContent = problem || state.note || "\u00a0";
  $("invite").hidden = trace.header !== null || connection !== null;
  $("status").classList.toggle("problem", Boolean(problem));
  $("clock").textContent = milliseconds(state.now);
  const seek = $("seek");
  seek.max = String(trace.events.length);
  seek.value = String(player.place);
  seek.style.setProperty("--share", trace.events.length ? `${(100 * player.place) / trace.events.length}%` : "0%");
  const play = $("play");
  play.dataset.playing = String(player.isPlaying);
  play.setAttribute("aria-label", player.isPlaying ? "Pause" : "Play");
  $("live").setAttribute("aria-pressed", String(player.isFollowing));
  $("download").disabled = !trace.events.length;
  document.body.dataset.state = trace.isEnded ? "whole" : connection ? "coming" : "idle";
  document.body.dataset.events = String(trace.events.length);
  document.body.dataset.place = String(player.place);
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (error instanceof source.NeedsToken) {
    $("login").hidden = false;
    $("token").focus();
  }
  problem = error.message;
  draw();
}

// Starts a new trace, fed by `read`, which gets a function to take lines and a signal to stop.
async function open(read, { plays }) {
  connection?.abort();
  const mine = (connection = new AbortController());
  const trace = new Trace();
  player.pause();
  player.load(trace);
  if (plays) player.play();
  else player.follow();
  try {
    await read((lines) => {
      if (mine !== connection) return;
      for (const line of lines) trace.take(line);
      player.grown();
    }, mine.signal);
    if (mine === connection && !trace.isEnded && trace.events.length) problem = "the connection has ended";
  } catch (error) {
    if (mine === connection) fail(error);
  }
  if (mine === connection) connection = null;
  draw();
}

async function refreshSessions() {
  if (!document.hidden && $("login").hidden) {
    try {
      showSessions(await source.sessions());
    } catch (error) {
      if (error instanceof source.NeedsToken) fail(error);
      else showSessions([], "The coordinator does not answer");
    }
  }
  setTimeout(refreshSessions, SESSIONS_EVERY_MS);
}

function showSessions(running, none = "No session runs") {
  const select = $("sessions");
  if (document.activeElement === select) return;
  const options = running.map((session) => new Option(`#${session.session_id} · ${session.mode} · ${session.output_tokens} tokens`, session.session_id));
  select.replaceChildren(new Option(running.length ? `${running.length} running: choose one` : none, ""), ...options);
  select.disabled = !running.length;
}

$("demo").addEventListener("click", () => open((take, signal) => source.demo({}, take, signal), { plays: true }));
$("sessions").addEventListener("change", (event) => {
  const id = event.target.value;
  event.target.blur();
  if (id) open((take, signal) => source.watch(id, take, signal), { plays: false });
});
$("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) open((take) => source.readFile(file, take, MAX_CHARACTERS), { plays: true });
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) open((take) => source.readFile(file, take, MAX_CHARACTERS), { plays: true });
});
$("download").addEventListener("click", () => source.save(player.trace.lines, `${player.trace.header?.request_id ?? "outrider"}.jsonl`));
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  source.keepToken($("token").value.trim());
  $("token").value = "";
  $("login").hidden = true;
  problem = "";
  draw();
});

const ACTIONS = {
  restart: () => (player.pause(), player.seek(0)),
  back: () => player.previousRound(),
  play: () => (player.isPlaying ? player.pause() : player.play()),
  step: () => player.step(),
  next: () => player.nextRound(),
  live: () => player.follow(),
};
for (const [id, action] of Object.entries(ACTIONS)) $(id).addEventListener("click", action);
$("seek").addEventListener("input", (event) => (player.pause(), player.seek(Number(event.target.value))));
$("speed").addEventListener("change", (event) => (player.speed = Number(event.target.value)));
const KEYS = { " ": "play", ArrowLeft: "back", ArrowRight: "next", ".": "step", Home: "restart", End: "live" };
document.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|BUTTON/.test(event.target.tagName)) return;
  event.preventDefault();
  ACTIONS[action]();
});
new ResizeObserver(draw).observe($("tree"));
refreshSessions();
draw();
