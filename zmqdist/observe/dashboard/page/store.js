// What the page knows: the newest facts, the figures of the last minutes, and a ring of events.

const HISTORY_MAX = 1_200; // ten minutes of messages
const EVENTS_MAX = 1 << 18;
const FUNCTIONS_MAX = 5_000;
export const FAILED = 1;
export const OTHER = 2;

/** Events of ended work as columns, because a quarter of a million objects would be slow. */
class Events {
  constructor() {
    this.clear();
  }

  clear() {
    this.total = 0;
    this.started = new Float64Array(EVENTS_MAX);
    this.ended = new Float64Array(EVENTS_MAX);
    this.submitted = new Float64Array(EVENTS_MAX);
    this.assigned = new Float64Array(EVENTS_MAX);
    this.functions = new Uint16Array(EVENTS_MAX);
    this.rows = new Uint32Array(EVENTS_MAX);
    this.outcomes = new Uint8Array(EVENTS_MAX);
    this.works = new Float64Array(EVENTS_MAX);
    this.names = new Map();
    this.slots = new Map();
    this.newest = 0;
  }

  add([, , work, , name, worker, slot, submitted, assigned, started, ended, outcome]) {
    const at = this.total++ & (EVENTS_MAX - 1);
    this.started[at] = started ?? ended;
    this.ended[at] = ended;
    this.submitted[at] = submitted ?? 0;
    this.assigned[at] = assigned ?? 0;
    this.functions[at] = this.functionOf(name);
    this.rows[at] = this.rowOf(worker, slot);
    this.outcomes[at] = outcome === "value" ? 0 : outcome === "cancelled" ? OTHER : FAILED;
    this.works[at] = work;
    if (ended > this.newest) this.newest = ended;
  }

  functionOf(name) {
    let number = this.names.get(name);
    if (number === undefined) {
      number = Math.min(this.names.size, FUNCTIONS_MAX);
      if (number < FUNCTIONS_MAX) this.names.set(name, number);
    }
    return number;
  }

  rowOf(worker, slot) {
    const key = `${worker}\n${slot}`;
    let row = this.slots.get(key);
    if (row === undefined) this.slots.set(key, (row = { number: this.slots.size, worker, slot }));
    return row.number;
  }

  /** Call fn(index) for the events that end after `from`, the newest first. */
  since(from, fn) {
    const oldest = Math.max(0, this.total - EVENTS_MAX);
    for (let number = this.total - 1; number >= oldest; number -= 1) {
      const at = number & (EVENTS_MAX - 1);
      if (this.ended[at] < from - 10) return; // workers report up to seconds apart
      if (this.ended[at] >= from) fn(at);
    }
  }
}

export class Store {
  constructor() {
    this.events = new Events();
    this.clear();
  }

  clear() {
    this.facts = null;
    this.problem = "";
    this.run = 0;
    this.events.clear();
    this.failures = [];
    this.deaths = [];
    this.refusals = [];
    this.history = { at: [], done: [], failed: [], running: [], queued: [], cpu: [], rss: [] };
  }

  take(message) {
    if (message.run !== this.run) {
      this.clear();
      this.run = message.run;
    }
    for (const event of message.timeline) this.events.add(event);
    this.failures = [...this.failures, ...message.failures].slice(-1_000);
    this.deaths = [...this.deaths, ...message.slot_deaths].slice(-1_000);
    this.refusals = [...this.refusals, ...message.refusals].slice(-200);
    this.problem = message.facts.problem ?? "";
    if (this.problem || message.facts.at === undefined) return;
    this.note(this.facts, message.facts);
    this.facts = message.facts;
    this.received = performance.now();
  }

  /** The dispatcher's time now, in Unix seconds. */
  now() {
    return this.facts ? this.facts.at + (performance.now() - this.received) / 1000 : 0;
  }

  note(before, facts) {
    const workers = facts.workers;
    const sum = (field) => workers.reduce((total, row) => total + (row[field] ?? 0), 0);
    const past = before ? Math.max(0.05, facts.at - before.at) : 0;
    const perSecond = (field) =>
      past ? Math.max(0, facts.totals[field] - before.totals[field]) / past : null;
    const point = {
      at: facts.at,
      done: perSecond("done"),
      failed: perSecond("failed"),
      running: sum("running"),
      queued: facts.queued,
      cpu: sum("cpu_percent"),
      rss: sum("rss_bytes"),
    };
    for (const [name, column] of Object.entries(this.history)) {
      column.push(point[name]);
      if (column.length > HISTORY_MAX) column.shift();
    }
  }

  /** Work that ended a second, over the last few seconds. */
  get perSecond() {
    const recent = this.history.done.slice(-8).filter((value) => value !== null);
    return recent.length ? recent.reduce((total, value) => total + value, 0) / recent.length : null;
  }
}
