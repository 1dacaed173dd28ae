// The task stream: a row a slot, time to the right, a block for each run of a function.

import { colour, el, prepared } from "./dom.js";
import { byName, clean, clock, count, percent, plural, seconds, shortName } from "./format.js";
import { FAILED } from "./store.js";

const WINDOWS = [10, 30, 120, 600];
const LABEL_PX = 132;
const NARROW_LABEL_PX = 74;
const AXIS_PX = 24;
const ROW_PX_MAX = 22;
const ROW_PX_MIN = 7;
const HEIGHT_MAX = 520;
const LONGEST = 12;
const COLOURS = [
  ["#3b6fd4", "#6c9bf5"],
  ["#d9822b", "#f0a04b"],
  ["#2f9e77", "#4fc49a"],
  ["#7a5cc9", "#a58bf0"],
  ["#3f9fc0", "#63c3e3"],
  ["#b39516", "#d8bd3f"],
  ["#8c6a4f", "#bd9775"],
  ["#5f7f8f", "#93b3c4"],
];

/** Colours for the functions that take the most time; grey for the rest. */
export class Palette {
  constructor() {
    this.places = new Map();
  }

  rank(functions) {
    for (const row of functions) {
      if (this.places.size >= COLOURS.length) return;
      if (!this.places.has(row.name)) this.places.set(row.name, this.places.size);
    }
  }

  of(name) {
    const place = this.places.get(name);
    const dark = colour("panel") !== colour("text") && isDark();
    return place === undefined ? (dark ? "#7d8794" : "#9aa3ad") : COLOURS[place][dark ? 1 : 0];
  }
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export class Stream {
  constructor(store, palette) {
    this.store = store;
    this.palette = palette;
    this.span = 30;
    this.end = null; // null follows the present
    this.top = 0;
    this.blocks = [];
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": "Task stream. Arrow keys move, plus and minus zoom, Home shows the present.",
    });
    this.bubble = el("div", { class: "bubble", hidden: true });
    this.legend = el("ul", { class: "legend" });
    this.filter = el("input", {
      class: "field",
      type: "search",
      placeholder: "Filter workers",
      "aria-label": "Filter workers",
      oninput: () => this.draw(),
    });
    this.buttons = WINDOWS.map((span) =>
      el(
        "button",
        { type: "button", onclick: () => this.show(span) },
        span < 60 ? `${span} s` : `${span / 60} min`,
      ),
    );
    this.live = el("button", { class: "quiet", type: "button", onclick: () => this.show() }, "Live");
    this.tools = [
      this.filter,
      el("span", { class: "segments", role: "group", "aria-label": "Time shown" }, ...this.buttons),
      this.live,
    ];
    this.root = el("div", { class: "stream" }, this.canvas, this.bubble);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.bubble.hidden = true));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  show(span = this.span) {
    this.span = span;
    this.end = null;
    this.draw();
  }

  move(share) {
    this.end = (this.end ?? this.present()) + share * this.span;
    if (this.end >= this.present()) this.end = null;
    this.draw();
  }

  zoom(factor) {
    this.span = Math.max(0.02, Math.min(1200, this.span * factor));
    this.draw();
  }

  scroll(rows) {
    this.top += rows;
    this.draw();
  }

  /** Runs are reported up to two seconds late, so the present of the stream stands back. */
  present() {
    return this.store.now() + Math.min(0.5, this.span / 20);
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.move(-0.2),
      ArrowRight: () => this.move(0.2),
      ArrowUp: () => this.scroll(-1),
      ArrowDown: () => this.scroll(1),
      PageUp: () => this.scroll(-10),
      PageDown: () => this.scroll(10),
      Home: () => this.show(),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  wheel(event) {
    if (event.ctrlKey || event.shiftKey) {
      event.preventDefault();
      this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8);
    } else if (this.rowsHidden) {
      const before = this.top;
      this.scroll(Math.sign(event.deltaY) * 2);
      if (this.top !== before) event.preventDefault();
    }
  }

  grab(event) {
    const start = { x: event.clientX, end: this.end ?? this.present() };
    const move = (moved) => {
      if (Math.abs(moved.clientX - start.x) < 3) return;
      const shift = ((start.x - moved.clientX) / (this.plotWidth || 1)) * this.span;
      this.end = Math.min(start.end + shift, this.present());
      this.draw();
    };
    const stop = () => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  }

  /** The slots, in the order of the workers' names. */
  rows() {
    const wanted = this.filter.value.trim().toLowerCase();
    const known = new Map();
    for (const { number, worker, slot } of this.store.events.slots.values()) {
      known.set(`${worker}\n${slot}`, { number, worker, slot, now: null });
    }
    for (const worker of this.store.facts?.workers ?? []) {
      for (const now of worker.slots_now ?? []) {
        const key = `${worker.name}\n${now.slot}`;
        const row = known.get(key) ?? { number: -1, worker: worker.name, slot: now.slot };
        row.now = now;
        known.set(key, row);
      }
    }
    return [...known.values()]
      .filter((row) => !wanted || row.worker.toLowerCase().includes(wanted))
      .sort((a, b) => byName(a.worker, b.worker) || byName(String(a.slot), String(b.slot)));
  }

  draw() {
    if (!this.canvas.isConnected || !this.canvas.clientWidth) return;
    const rows = this.rows();
    const rowPx = Math.max(ROW_PX_MIN, Math.min(ROW_PX_MAX, (HEIGHT_MAX - AXIS_PX) / rows.length));
    const fits = Math.max(1, Math.min(rows.length, Math.floor((HEIGHT_MAX - AXIS_PX) / rowPx)));
    this.top = Math.max(0, Math.min(this.top, rows.length - fits));
    this.rowsHidden = rows.length > fits;
    const shown = rows.slice(this.top, this.top + fits);
    const { context, width, height } = prepared(this.canvas, fits * rowPx + AXIS_PX);
    const left = width < 560 ? NARROW_LABEL_PX : LABEL_PX;
    this.plotWidth = width - left;
    const to = this.end ?? this.present();
    const from = to - this.span;
    const scale = this.plotWidth / this.span;
    this.view = { left, from, scale, rowPx, shown, height };
    this.axis(context, width, height, left, from, to);
    const places = new Map(rows.map((row, place) => [row.number, place - this.top]));
    const busy = this.ended(context, places, fits, from, to);
    this.running(context, rows, fits, from, to, busy);
    this.labels(context, shown, width, left);
    this.buttons.forEach((button, at) =>
      button.setAttribute("aria-pressed", String(WINDOWS[at] === this.span)),
    );
    this.live.setAttribute("aria-pressed", String(this.end === null));
    this.drawLegend(busy, from, to, rows.length);
    this.slowest = this.longest(from, to);
  }

  axis(context, width, height, left, from, to) {
    const steps = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300];
    const least = (this.span * 84) / (width - left);
    const step = steps.find((value) => value >= least) ?? 600;
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    const { scale } = this.view;
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = Math.round(left + (at - from) * scale) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS_PX);
      context.stroke();
      const label =
        step < 1 ? `${clock(at)}.${String(Math.round((at % 1) * 1000)).padStart(3, "0")}` : clock(at);
      if (x > left + 26 && x < width - 26) context.fillText(label, x, height - AXIS_PX / 2 + 2);
    }
  }

  /** Draw the runs that have ended. Returns the seconds of each function in the window. */
  ended(context, places, fits, from, to) {
    const { events } = this.store;
    const { left, scale, rowPx } = this.view;
    const gap = rowPx >= 12 ? 2 : rowPx >= 6 ? 1 : 0;
    const names = [...events.names.keys()];
    const fills = names.map((name) => this.palette.of(name));
    const bad = colour("bad");
    const busy = new Map();
    const last = new Map();
    const failures = [];
    this.blocks = [];
    events.since(from, (at) => {
      const started = events.started[at];
      const place = places.get(events.rows[at]);
      if (started > to || place === undefined) return;
      const name = events.functions[at];
      const spent = Math.min(events.ended[at], to) - Math.max(started, from);
      busy.set(names[name], (busy.get(names[name]) ?? 0) + Math.max(0, spent));
      if (place < 0 || place >= fits) return;
      const x = left + Math.max(0, (started - from) * scale);
      const wide = Math.min(events.ended[at], to) - Math.max(started, from);
      const pixels = Math.max(1, wide * scale - (wide * scale > 4 ? 1 : 0));
      const failed = events.outcomes[at] === FAILED;
      const pixel = Math.floor(x);
      if (!failed && pixels <= 1 && last.get(place) === pixel) return;
      last.set(place, pixel);
      const y = place * rowPx + gap / 2;
      if (failed) failures.push([x, y, pixels]);
      else {
        context.fillStyle = fills[name] ?? "#9aa3ad";
        context.fillRect(x, y, pixels, rowPx - gap);
      }
      if (this.blocks.length < 50_000) this.blocks.push([x, place, pixels, at]);
    });
    context.fillStyle = bad;
    for (const [x, y, pixels] of failures) {
      context.fillRect(x, y, Math.max(3, pixels), rowPx - gap);
    }
    return busy;
  }

  /** Draw the runs that have not ended: an outline, open to the present. */
  running(context, rows, fits, from, to, busy) {
    const { left, scale, rowPx } = this.view;
    const now = this.store.now();
    const gap = rowPx >= 12 ? 2 : rowPx >= 6 ? 1 : 0;
    this.open = [];
    rows.forEach((row, at) => {
      const place = at - this.top;
      if (row.now?.state !== "running" || row.now.since_s == null) return;
      const age = (performance.now() - this.store.received) / 1000;
      const started = now - row.now.since_s - age;
      if (started > to || now < from) return;
      const spent = Math.min(now, to) - Math.max(started, from);
      busy.set(row.now.function, (busy.get(row.now.function) ?? 0) + Math.max(0, spent));
      if (place < 0 || place >= fits) return;
      const x = left + Math.max(0, (started - from) * scale);
      const right = left + (Math.min(now, to) - from) * scale;
      const pixels = Math.max(1, right - x);
      const fill = this.palette.of(row.now.function);
      context.globalAlpha = 0.35;
      context.fillStyle = fill;
      context.fillRect(x, place * rowPx + gap / 2, pixels, rowPx - gap);
      context.globalAlpha = 1;
      if (rowPx >= 6) {
        context.strokeStyle = fill;
        context.strokeRect(x + 0.5, place * rowPx + gap / 2 + 0.5, pixels - 1, rowPx - gap - 1);
      }
      this.open.push([x, place, pixels, row]);
    });
  }

  labels(context, shown, width, left) {
    const { rowPx } = this.view;
    context.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    const names = new Set();
    let free = 0; // from here on there is room for a name
    shown.forEach((row, place) => {
      const first = !names.has(row.worker);
      names.add(row.worker);
      if (place && first && rowPx >= 6) {
        context.fillStyle = colour("line");
        context.fillRect(0, Math.round(place * rowPx), width, 1);
      }
      const y = Math.max(8, place * rowPx + rowPx / 2);
      const slot = rowPx >= 14 ? String(row.slot) : "";
      if (first && y - 7 >= free) {
        free = y + 7;
        context.fillStyle = colour("text");
        const room = left - 22 - slot.length * 7;
        context.fillText(cut(context, clean(row.worker, 40), room), 12, y);
      }
      context.fillStyle = colour("muted");
      if (slot) context.fillText(slot, left - 10 - slot.length * 7, y);
    });
  }

  drawLegend(busy, from, to, rows) {
    const total = [...busy.values()].reduce((sum, value) => sum + value, 0);
    const span = Math.max(1e-9, Math.min(to, this.store.now()) - from);
    const items = [...busy].sort((a, b) => b[1] - a[1]).slice(0, 9);
    this.legend.replaceChildren(
      ...items.map(([name, spent]) => {
        const key = el("span", { class: "key" });
        key.style.background = this.palette.of(name);
        const text = `${seconds(spent)}, ${percent(spent / total)}`;
        const label = el("span", { class: "mono", title: clean(name) }, clean(shortName(name), 60));
        return el("li", {}, key, label, el("span", { class: "muted" }, text));
      }),
      ...(total ? [legendOfFailures()] : []),
    );
    const used = rows ? percent(total / (span * rows)) : "–";
    const { shown } = this.view;
    const part = this.rowsHidden
      ? `; rows ${count(this.top + 1)} to ${count(this.top + shown.length)} drawn, scroll for others`
      : "";
    this.summary = `${plural(rows, "slot")}, busy ${used} of the time shown${part}`;
    this.canvas.setAttribute(
      "aria-label",
      `Task stream of ${this.summary}. Arrow keys move, plus and minus zoom, Home shows the present.`,
    );
  }

  /** The longest runs in the window, for the table below. */
  longest(from, to) {
    const { events } = this.store;
    const names = [...events.names.keys()];
    const rows = new Map([...events.slots.values()].map((row) => [row.number, row]));
    const top = [];
    events.since(from, (at) => {
      if (events.started[at] > to) return;
      const took = events.ended[at] - events.started[at];
      if (top.length >= LONGEST && took <= top[top.length - 1].took) return;
      top.push({ at, took });
      top.sort((a, b) => b.took - a.took);
      top.length = Math.min(top.length, LONGEST);
    });
    return top.map(({ at, took }) => this.describe(at, took, names, rows));
  }

  describe(at, took, names, rows) {
    const { events } = this.store;
    const row = rows.get(events.rows[at]);
    const known = events.submitted[at] || events.assigned[at];
    return {
      key: `${events.works[at]} ${events.started[at]}`,
      function: names[events.functions[at]] ?? "other",
      worker: row?.worker ?? "",
      slot: row?.slot ?? "",
      took,
      waited: known ? events.started[at] - known : null,
      inWorker: events.assigned[at] ? events.started[at] - events.assigned[at] : null,
      ended: events.ended[at],
      failed: events.outcomes[at] === FAILED,
    };
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const place = Math.floor(y / (this.view?.rowPx ?? 1));
    const under = ([from, row, wide]) => row === place && x >= from - 2 && x <= from + wide + 2;
    const block = this.blocks.find(under);
    const open = this.open?.find(under);
    if (!block && !open) {
      this.bubble.hidden = true;
      return;
    }
    this.tell(block, open);
    this.bubble.hidden = false;
    const wide = this.canvas.clientWidth;
    this.bubble.style.left = `${Math.max(4, Math.min(x + 14, wide - this.bubble.offsetWidth - 4))}px`;
    this.bubble.style.top = `${y + 18}px`;
  }

  tell(block, open) {
    const { events } = this.store;
    if (!block) {
      const [, , , row] = open;
      const text = ` has run for ${seconds(row.now.since_s)} on ${row.worker}, slot ${row.slot}`;
      this.bubble.replaceChildren(el("strong", {}, clean(row.now.function, 100)), clean(text));
      return;
    }
    const rows = new Map([...events.slots.values()].map((row) => [row.number, row]));
    const names = [...events.names.keys()];
    const at = block[3];
    const run = this.describe(at, events.ended[at] - events.started[at], names, rows);
    const inWorker = run.inWorker === null ? "" : ` (${seconds(run.inWorker)} at the worker)`;
    const waited = run.waited === null ? "" : `, waited ${seconds(run.waited)} before${inWorker}`;
    const text = ` ${run.failed ? "failed after" : "took"} ${seconds(run.took)} on ${run.worker}, slot ${run.slot}${waited}; ended ${clock(run.ended)}`;
    this.bubble.replaceChildren(el("strong", {}, clean(run.function, 100)), clean(text));
  }
}

function cut(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let shown = text;
  while (shown.length > 1 && context.measureText(`${shown}…`).width > room) {
    shown = shown.slice(0, -1);
  }
  return `${shown}…`;
}

function legendOfFailures() {
  const key = el("span", { class: "key" });
  key.style.background = "var(--bad)";
  return el("li", {}, key, el("span", { class: "muted" }, "failed"));
}

