// Moves through a trace: as time went by but slower, an event or a round at a time, or at the newest.

import { Trace, TreeState } from "./trace.js";

// How long the eye is given after an event, where time is stretched anyway.
const DWELL_MS = { grow: 260, verdict: 1100, deliver: 60, drop: 200, tree: 60, gap: 900, end: 0 };
const LONGEST_MS = 1600;
const UNSTRETCHED = 0.5;

export class Player {
  constructor(onChange) {
    this.onChange = onChange;
    this.speed = 0.02;
    this.isPlaying = false;
    this.isFollowing = false;
    this.timer = null;
    this.load(new Trace());
  }

  load(trace) {
    this.trace = trace;
    this.isFollowing = false;
    this.rewind();
  }

  rewind() {
    this.state = new TreeState(this.trace.header);
    this.place = 0;
    this.changed(true);
  }

  // New lines have come.
  grown() {
    if (this.place === 0 && !this.state.header) this.state = new TreeState(this.trace.header);
    if (this.isFollowing) this.seek(this.trace.events.length);
    else this.changed(false);
  }

  get atEnd() {
    return this.place >= this.trace.events.length;
  }

  play() {
    if (this.atEnd && this.trace.isEnded) this.rewind();
    this.isFollowing = false;
    this.isPlaying = true;
    this.changed(false);
  }

  pause() {
    this.isPlaying = this.isFollowing = false;
    clearTimeout(this.timer);
    this.timer = null;
    this.changed(false);
  }

  follow() {
    this.pause();
    this.isFollowing = !this.trace.isEnded;
    this.seek(this.trace.events.length);
  }

  step() {
    this.pause();
    this.advance();
  }

  // To behind the next verdict, or the one before the last.
  nextRound() {
    this.pause();
    const events = this.trace.events;
    let place = this.place;
    while (place < events.length && events[place].e !== "verdict") place++;
    this.seek(Math.min(place + 1, events.length));
  }

  previousRound() {
    this.pause();
    let place = this.place - 2;
    while (place >= 0 && this.trace.events[place].e !== "verdict") place--;
    this.seek(place + 1);
  }

  seek(place) {
    if (place < this.place) {
      this.state = new TreeState(this.trace.header);
      this.place = 0;
    }
    while (this.place < place && !this.atEnd) this.state.apply(this.trace.events[this.place++]);
    this.changed(true);
  }

  advance() {
    if (this.atEnd) return;
    this.state.apply(this.trace.events[this.place++]);
    this.changed(true);
  }

  changed(hasMoved) {
    this.onChange(hasMoved);
    if (this.isPlaying && this.timer === null && !this.atEnd) {
      this.timer = setTimeout(() => {
        this.timer = null;
        if (this.isPlaying) this.advance();
      }, this.pauseMs());
    }
    if (this.isPlaying && this.atEnd && this.trace.isEnded) this.pause();
  }

  // From what is shown to the next event.
  pauseMs() {
    const [now, next] = [this.trace.events[this.place - 1], this.trace.events[this.place]];
    if (!now) return 0;
    const ms = (next.at - now.at) / 1000 / this.speed;
    if (this.speed >= UNSTRETCHED) return Math.min(ms, LONGEST_MS);
    const dwell = (DWELL_MS[now.e] ?? 0) * Math.min(1, 0.02 / this.speed + 0.1);
    return Math.min(Math.max(ms, dwell), LONGEST_MS);
  }
}
