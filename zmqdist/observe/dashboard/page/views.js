// The views. Each has `root`, and `update()`, which the page calls while the view is shown.

import { Chart } from "./charts.js";
import { bar, colour, el, head, panel, prepared, setText, share, stateOf } from "./dom.js";
import * as f from "./format.js";
import { ask } from "./session.js";
import { Stream } from "./stream.js";
import { Table, fault, figure, functionName, words } from "./table.js";

const LOG_LINES_MAX = 2_000;
const FROM_NOW = -2;
const KEPT = -1;
const LINES_BEFORE = 12;
const LATE_LINES_S = 0.05;
const LOGS_EVERY_MS = 1_000;
const LONG_S = 60;
const MAP_FROM = 24;

const total = (row) => row.sum_s;
const sum = (rows, value) => rows.reduce((before, row) => before + (value(row) ?? 0), 0);
const running = (worker) => (worker.slots_now ?? []).filter((slot) => slot.state === "running");

/** The sentence for each thing that needs a look: { kind, text, view }. */
export function notes(store) {
  const { facts } = store;
  const found = [];
  const add = (kind, text, view) => found.push({ kind, text: f.clean(text, 400), view });
  for (const row of facts.waiting ?? []) {
    if (row.count && row.stuck) {
      add("bad", `${work(row.count)} cannot start: ${row.sentence}.`, "waiting");
    }
  }
  if (!facts.workers.length) add("bad", "No worker has registered, so nothing runs.", "workers");
  const { failed } = facts.totals;
  if (failed) {
    const last = store.failures.at(-1);
    const text = last
      ? `; the last: ${last.error} in ${f.shortName(last.function)} on ${last.worker}, ${f.ago(facts.at - last.at)}`
      : "";
    add("bad", `${f.plural(failed, "run")} failed${text}.`, "failures");
  }
  for (const row of facts.workers.filter((worker) => worker.slot_deaths).slice(0, 5)) {
    const last = store.deaths.filter((death) => death.worker === row.name).at(-1);
    const how = last ? `; the last, in ${f.shortName(last.function) || "no function"}: ${last.how}` : "";
    const text = `${row.name} lost ${f.plural(row.slot_deaths, "slot process", "slot processes")}`;
    add("bad", `${text}${how}.`, "losses");
  }
  if (facts.losses_count) {
    const last = facts.losses.reduce((a, b) => (b.ago_s < a.ago_s ? b : a), facts.losses[0]);
    const text = last ? `; the last: ${last.name} ${f.ago(last.ago_s)}, ${last.reason}` : "";
    add("bad", `${f.plural(facts.losses_count, "worker")} lost${text}.`, "losses");
  }
  const slots = facts.workers.flatMap((worker) => running(worker).map((slot) => [worker, slot]));
  const [worker, slot] = slots.reduce(
    (longest, pair) => ((pair[1].since_s ?? 0) > (longest[1]?.since_s ?? 0) ? pair : longest),
    [null, null],
  );
  if (slot && slot.since_s >= LONG_S) {
    const text = `${f.shortName(slot.function)} has run for ${f.seconds(slot.since_s)} on ${worker.name}`;
    add("warn", `${text}, slot ${slot.slot}: the longest of all that run.`, "workers");
  }
  for (const row of facts.workers) {
    const free = row.host_memory_free_bytes;
    if (row.host_memory_bytes && free < row.host_memory_bytes * 0.08) {
      add("warn", `The host of ${row.name} has ${f.bytes(free)} of memory left.`, "workers");
      break;
    }
  }
  if (facts.relayed) {
    const text = `${f.plural(facts.relayed, "piece")} of large payloads went through the dispatcher`;
    add("warn", `${text}, because a data port could not be reached.`, "overview");
  }
  if (facts.refused_handshakes) {
    const text = f.plural(facts.refused_handshakes, "connection");
    add("warn", `${text} refused: a wrong token or key, or no zmqdist.`, "losses");
  }
  return found;
}

const work = (number) => `${f.plural(number, "function")}`;

class Overview {
  constructor({ store, palette, go }) {
    Object.assign(this, { store, palette, go });
    this.figures = new Map();
    this.list = el("dl", { class: "figures" });
    this.notes = el("ul", { class: "notes" });
    const needs = panel("Needs a look", this.notes);
    this.rates = new Chart(
      store,
      [
        { name: "done", label: "done", tone: "bar" },
        { name: "failed", label: "failed", tone: "bad" },
      ],
      f.rate,
    );
    this.loads = new Chart(
      store,
      [
        { name: "queued", label: "queued", tone: "warn" },
        { name: "running", label: "running", tone: "bar" },
      ],
      f.compact,
    );
    this.time = new FunctionTable({ store, palette }, true);
    const rates = panel("Work that ends, a second", this.rates.root);
    rates.tools.append(this.rates.keys);
    const loads = panel("Work that waits and runs", this.loads.root);
    loads.tools.append(this.loads.keys);
    const time = panel("Where the time goes", this.time.table.root);
    this.root = el(
      "div",
      {},
      head("Overview", "What runs, what waits and why, what failed.").root,
      this.list,
      needs.root,
      el("div", { class: "columns" }, rates.root, loads.root),
      time.root,
    );
  }

  figure(name, text, unit = "", kind = "") {
    if (!this.figures.has(name)) {
      const value = el("dd");
      const box = el("div", { class: "figure" }, el("dt", {}, name), value);
      this.figures.set(name, { box, value });
      this.list.append(box);
    }
    const { box, value } = this.figures.get(name);
    if (value.dataset.shown !== text + unit) {
      value.dataset.shown = text + unit;
      value.replaceChildren(text, unit ? el("small", {}, unit) : "");
    }
    box.dataset.kind = kind;
  }

  update() {
    const { facts } = this.store;
    const { workers, totals } = facts;
    const slots = sum(workers, (row) => row.slots);
    const busy = sum(workers, (row) => row.running);
    this.figure("Workers", f.count(workers.length));
    this.figure("Slots busy", f.count(busy), `of ${f.count(slots)}`);
    this.figure("Queued", f.compact(facts.queued));
    this.figure("Done", f.compact(totals.done), f.rate(this.store.perSecond));
    this.figure("Failed", f.compact(totals.failed), "", totals.failed ? "bad" : "");
    const deaths = sum(workers, (row) => row.slot_deaths) + facts.losses_count;
    this.figure("Lost", f.compact(deaths), "processes", deaths ? "bad" : "");
    this.figure("Processor", f.cores(sum(workers, (row) => row.cpu_percent)), "cores");
    this.figure("Memory", ...f.bytes(sum(workers, (row) => row.rss_bytes)).split(" "));
    const found = notes(this.store);
    const lines = found.length ? found : [{ kind: "good", text: "Nothing: all is well." }];
    const shown = lines.map(({ kind, text }) => kind + text).join("\n");
    if (shown !== this.shown) {
      this.shown = shown;
      this.notes.replaceChildren(
        ...lines.map(({ kind, text, view }) => {
          const link = view && view !== "overview" && el("a", { href: `#/${view}` }, "Look");
          if (link) link.setAttribute("aria-label", `Look at ${view}`);
          return el("li", { "data-kind": kind }, el("span", { class: "text" }, text), link);
        }),
      );
    }
    this.rates.update();
    this.loads.update();
    this.time.update();
  }
}

class Tasks {
  constructor({ store, palette }) {
    this.store = store;
    this.stream = new Stream(store, palette);
    this.top = head("Task stream", "Each block is one run of a function, in the row of its slot.");
    const stream = panel("Stream", this.stream.root, this.stream.legend);
    this.note = stream.note;
    stream.tools.append(...this.stream.tools);
    this.table = new Table(
      [
        functionName("Function", "function"),
        figure("Took", "took", f.seconds),
        figure("Waited before", "waited", f.seconds),
        words("Worker", "worker", { mono: true }),
        figure("Slot", "slot", f.count, { tone: () => "" }),
        { label: "Ended", value: (row) => row.ended, show: (row) => f.clock(row.ended) },
        {
          label: "Outcome",
          value: (row) => String(row.failed),
          show: (row) => (row.failed ? stateOf("failed", "bad") : stateOf("done", "good")),
        },
      ],
      {
        name: "Longest runs",
        key: (row) => row.key,
        sort: "Took",
        empty: "No run has ended in the time shown.",
      },
    );
    const longest = panel("Longest runs in the time shown", this.table.root);
    this.root = el("div", {}, this.top.root, stream.root, longest.root);
    this.hint = "Drag or use the arrow keys to move, + and − to zoom.";
  }

  update() {
    this.stream.draw();
    const { dropped_events: dropped } = this.store.facts;
    const left = dropped ? ` ${f.plural(dropped, "run")} not drawn: too many a second.` : "";
    setText(this.note, `${this.stream.summary ?? ""}.${left}`);
    setText(
      this.top.sentence,
      `Each block is one run of a function, in the row of its slot. ${this.hint}`,
    );
    this.table.update(this.stream.slowest ?? []);
  }
}

class FunctionTable {
  constructor({ store, palette }, brief = false) {
    Object.assign(this, { store, palette });
    const progress = (row) => {
      const all = row.count + (row.running ?? 0) + (row.queued ?? 0) || 1;
      const parts = [
        [(row.count - row.failed) / all, "good"],
        [row.failed / all, "bad"],
        [(row.running ?? 0) / all, "soft"],
      ];
      return share(parts, `${f.compact(row.count)} of ${f.compact(all)}`);
    };
    const columns = [
      functionName("Function", "name"),
      {
        label: "Share of time",
        number: true,
        value: total,
        show: (row) => share([[total(row) / this.all]], f.percent(total(row) / this.all)),
      },
      figure("Total", total, f.seconds),
      {
        label: "Progress",
        value: (row) => row.count,
        show: progress,
        help: "ended of all that were submitted: green done, red failed, pale running",
      },
      fault("Failed", "failed"),
      figure("Mean", "mean_s", f.seconds),
      figure("p50", "p50_s", f.seconds, { help: "half of the runs took less" }),
      figure("p99", "p99_s", f.seconds, { help: "99 of 100 runs took less" }),
      figure("Longest", "max_s", f.seconds),
      figure("Processor", (row) => Math.min(1, row.cpu_s / total(row)) || 0, f.percent, {
        help: "share of the time that the function computed; in the rest it waited",
      }),
      figure("Running", "running", f.count),
      figure("Queued", "queued", f.compact),
      figure("In", "bytes_in", f.bytes, { help: "bytes of arguments" }),
      figure("Out", "bytes_out", f.bytes, { help: "bytes of results" }),
    ];
    const few = ["Function", "Share of time", "Total", "Progress", "Failed", "Mean", "p99", "Processor"];
    this.table = new Table(
      brief ? columns.filter(({ label }) => few.includes(label)) : columns,
      {
        name: "Functions",
        key: (row) => row.name,
        sort: "Share of time",
        empty: "No function has run yet.",
        filter: brief ? undefined : "Filter functions",
        match: (row) => row.name,
      },
    );
    this.brief = brief;
  }

  update() {
    const rows = this.store.facts.functions;
    this.all = sum(rows, total) || 1;
    const most = [...rows].sort((a, b) => total(b) - total(a));
    this.table.update(this.brief ? most.slice(0, 6) : rows);
  }
}

class Functions {
  constructor(context) {
    this.functions = new FunctionTable(context);
    this.store = context.store;
    this.top = head("Functions", "");
    const all = panel("All functions since the dispatcher began", this.functions.table.root);
    all.tools.append(this.functions.table.filter);
    this.root = el("div", {}, this.top.root, all.root);
  }

  update() {
    this.functions.update();
    const rows = this.store.facts.functions;
    const most = rows.reduce((a, b) => (a && total(a) >= total(b) ? a : b), null);
    const part = most && f.percent(total(most) / this.functions.all);
    setText(
      this.top.sentence,
      most ? f.clean(`${f.shortName(most.name)} takes ${part} of the time that all functions ran.`) : "",
    );
  }
}

class Workers {
  constructor({ store, palette }) {
    Object.assign(this, { store, palette });
    this.top = head("Workers", "");
    this.canvas = el("canvas", { role: "img", "aria-label": "A square for each slot" });
    this.map = panel("Slots", el("div", { class: "body map" }, this.canvas));
    this.table = new Table(
      [
        words("Worker", "name", { mono: true }),
        {
          label: "State",
          value: (row) => row.state,
          show: (row) => stateOf(row.state, row.state === "alive" ? "good" : "warn"),
        },
        { label: "Slots", number: true, value: (row) => row.running, show: slots },
        {
          label: "Runs now",
          value: (row) => -(longest(row)?.since_s ?? 0),
          show: (row) => runs(row),
          mono: true,
        },
        figure("Longest", (row) => longest(row)?.since_s, f.seconds),
        {
          label: "Processor",
          number: true,
          value: (row) => row.cpu_percent,
          show: (row) =>
            share([[row.cpu_percent / (100 * row.slots)]], f.percent(row.cpu_percent / 100)),
        },
        {
          label: "Memory",
          number: true,
          value: (row) => row.rss_bytes,
          show: memory,
          help: "of the worker with its slots and actors; the bar is the memory of its host in use",
        },
        figure("Done", "done", f.compact),
        fault("Failed", "failed"),
        fault("Slots lost", "slot_deaths"),
        figure("Waiting", (row) => row.leases - row.running, f.count, {
          help: "functions that the worker has and has not begun",
        }),
        figure("Kept", "kept_bytes", f.bytes, { help: "results that the worker holds for programs" }),
        figure("Shared", "shm_bytes", f.bytes, { help: "shared memory" }),
        figure("In", "bytes_in", f.bytes),
        figure("Out", "bytes_out", f.bytes),
        figure("Heard", "idle_s", f.ago, { tone: () => "" }),
        words("Host", "host"),
        figure("Pid", "pid", String, { tone: () => "" }),
      ],
      {
        name: "Workers",
        key: (row) => row.name,
        sort: "Worker",
        ascending: true,
        filter: "Filter by worker, host or function",
        match: (row) => [row.name, row.host, ...running(row).map((slot) => slot.function)].join(" "),
        detail: (row) => new WorkerDetail(row),
        empty: "No worker has registered.",
      },
    );
    const all = panel("Workers", this.table.root);
    all.tools.append(this.table.filter);
    this.root = el("div", {}, this.top.root, this.map.root, all.root);
  }

  update() {
    const { workers } = this.store.facts;
    const all = sum(workers, (row) => row.slots);
    const busy = sum(workers, (row) => row.running);
    const hosts = new Set(workers.map((row) => row.host)).size;
    setText(
      this.top.sentence,
      `${f.plural(workers.length, "worker")} on ${f.plural(hosts, "host")}; ${f.count(busy)} of ${f.plural(all, "slot")} busy. Open a row to see what each slot runs, and since when.`,
    );
    this.table.update(workers);
    this.map.root.hidden = workers.length < MAP_FROM;
    if (!this.map.root.hidden) this.drawMap(workers);
  }

  drawMap(workers) {
    const states = [...workers]
      .sort((a, b) => f.byName(a.name, b.name))
      .flatMap((row) => row.slots_now ?? []);
    const step = states.length > 3_000 ? 6 : states.length > 600 ? 9 : 14;
    const wide = Math.max(1, Math.floor((this.canvas.clientWidth || 300) / step));
    const height = Math.ceil(states.length / wide) * step;
    const { context } = prepared(this.canvas, height);
    const fills = { running: colour("bar"), waiting: colour("warn"), idle: colour("bar-ground") };
    states.forEach((slot, at) => {
      context.fillStyle = fills[slot.state] ?? fills.idle;
      const [x, y] = [(at % wide) * step, Math.floor(at / wide) * step];
      context.fillRect(x, y, step - 2, step - 2);
    });
    const numbers = ["running", "waiting", "idle"].map(
      (state) => `${f.count(states.filter((slot) => slot.state === state).length)} ${state}`,
    );
    setText(this.map.note, numbers.join(", "));
    this.canvas.setAttribute("aria-label", `Slots: ${numbers.join(", ")}`);
  }
}

const longest = (row) =>
  running(row).reduce((a, b) => (a && a.since_s >= b.since_s ? a : b), null);

function slots(row) {
  const squares = (row.slots_now ?? []).slice(0, 32).map((slot) => {
    return el("i", { class: { running: "on", waiting: "wait" }[slot.state] ?? "" });
  });
  const box = el("span", { class: "slots", "aria-hidden": "true" }, ...squares);
  return el("span", { class: "share" }, box, `${row.running} of ${row.slots}`);
}

function runs(row) {
  const counts = new Map();
  for (const slot of running(row)) {
    const name = f.shortName(slot.function);
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const parts = [...counts].map(([name, times]) => (times > 1 ? `${name} ×${times}` : name));
  return parts.join(", ") || "–";
}

function memory(row) {
  const used = row.host_memory_bytes - row.host_memory_free_bytes;
  const part = row.host_memory_bytes ? used / row.host_memory_bytes : 0;
  return share([[part, part > 0.92 ? "bad" : part > 0.8 ? "warn" : ""]], f.bytes(row.rss_bytes));
}

class WorkerDetail {
  constructor(row) {
    this.table = new Table(
      [
        figure("Slot", "slot", f.count, { tone: () => "" }),
        {
          label: "State",
          value: (slot) => slot.state,
          show: (slot) =>
            stateOf(slot.state, { running: "good", waiting: "warn" }[slot.state] ?? ""),
        },
        functionName("Function", "function"),
        figure("Since", "since_s", f.seconds),
        figure("Processor", "cpu_percent", (value) => f.percent(value == null ? null : value / 100)),
        figure("Memory", "rss_bytes", f.bytes),
        figure("Pid", "pid", String, { tone: () => "" }),
        words("Work", (slot) => (slot.function ? `${slot.work}` : "")),
        words("Attempt", (slot) => (slot.function ? `${slot.attempt}` : "")),
      ],
      {
        name: "Slots of the worker",
        key: (slot) => slot.slot,
        sort: "Slot",
        ascending: true,
        empty: "The worker has not reported its slots yet.",
      },
    );
    this.stacks = el("div");
    const button = el("button", { class: "more", type: "button" }, "Show Python stacks");
    button.addEventListener("click", () => this.ask(row.name));
    this.root = el("div", {}, this.table.root, el("p", { class: "row above" }, button), this.stacks);
    this.update(row);
  }

  update(row) {
    this.table.update(row.slots_now ?? []);
  }

  async ask(worker) {
    this.stacks.replaceChildren(el("p", { class: "muted" }, "Asking the worker …"));
    try {
      const answer = await ask("stack", { worker });
      this.stacks.replaceChildren(
        ...Object.entries(answer).map(([name, text]) =>
          el("pre", { tabindex: "0" }, `${f.clean(name)}\n${f.cleanLines(text)}`),
        ),
      );
    } catch (error) {
      this.stacks.replaceChildren(el("p", { class: "muted" }, f.clean(error.message, 500)));
    }
  }
}

class Waiting {
  constructor({ store }) {
    this.store = store;
    this.top = head("Why work waits", "");
    this.table = new Table(
      [
        {
          label: "Why",
          value: reason,
          show: (row) => stateOf(reason(row), row.stuck ? "bad" : "", 1_000),
          wrap: true,
        },
        figure("Waiting", "count", f.count),
        words("What helps", (row) => REMEDIES[row.reason] ?? "", { wrap: true }),
        words("Program", (row) => this.programs.get(row.coordinator) ?? ""),
        words("Reason", "reason", { mono: true }),
      ],
      {
        name: "Why work waits",
        key: (row) => `${row.coordinator} ${row.reason} ${row.detail}`,
        empty: "No function waits.",
      },
    );
    this.coordinators = new Table(
      [
        words("Program", programOf),
        words("Host", "host"),
        figure("Pid", "pid", (value) => String(value || "–"), { tone: () => "" }),
        figure("Queued", "queued", f.count),
        figure("At workers", "out", f.count, { help: "functions that workers have" }),
        figure("Wait for input", "waits_for_input", f.count, {
          help: "functions whose input is the result of one that has not ended",
        }),
        figure("Submitted", "submitted", f.compact),
        figure("Finished", "finished", f.compact),
        figure("Results held", "held", f.count, { help: "results that workers hold" }),
        figure("Held", "held_bytes", f.bytes),
      ],
      {
        name: "Programs",
        key: (row) => row.coordinator,
        sort: "Queued",
        empty: "No program is connected.",
      },
    );
    this.reasons = panel("Reasons", this.table.root);
    this.root = el(
      "div",
      {},
      this.top.root,
      this.reasons.root,
      panel("Programs", this.coordinators.root).root,
    );
  }

  update() {
    const { facts } = this.store;
    this.programs = new Map(facts.coordinators.map((row) => [row.coordinator, programOf(row)]));
    const rows = (facts.waiting ?? []).filter((row) => row.count);
    rows.sort((a, b) => (b.stuck ?? false) - (a.stuck ?? false) || b.count - a.count);
    this.table.update(rows);
    this.coordinators.update(facts.coordinators);
    const [first] = rows;
    const number = sum(rows, (row) => row.count);
    const text = first
      ? `${work(number)} ${number === 1 ? "waits" : "wait"}. ${first.stuck ? `${f.count(first.count)} cannot start` : "The most"}: ${first.sentence}.`
      : "No function waits.";
    setText(this.top.sentence, f.clean(text, 500));
  }
}

const REMEDIES = {
  no_worker: "Start a worker: zmqdist worker, zmqdist scale, or cluster.scale().",
  all_busy: "Nothing is wrong. More workers or slots end the work sooner.",
  window: "Nothing is wrong: workers have a little work ahead, so that they never idle.",
  away: "The worker's host or network does not answer. It comes back, or the work runs elsewhere.",
  pinned: "The work has worker=: start that worker again, or leave worker= out.",
  resources: "Start a worker with --resource, or request less.",
  inputs_elsewhere: "Nothing is wrong: the work waits for room where its large inputs are.",
  input: "Nothing is wrong: the functions before it run, or wait themselves.",
  nested_bound: "Raise the bound of nested work, or let functions wait for fewer others.",
  ending_round: "An error has ended the round: see Failures.",
};
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const reason = (row) => capital(row.sentence);
const programOf = (row) => (row.name || `program ${row.pid}`).replace(/^coordinator /, "");

class Failures {
  constructor({ store }) {
    this.store = store;
    this.top = head("Failures", "");
    this.groups = new Table(
      [
        functionName("Function", "function"),
        words("Error", "error", { mono: true }),
        figure("Failures", "count", f.count, { tone: () => "alert" }),
        words("Last message", "message", { wrap: true }),
        words("Workers", "workers"),
        figure("Last", "age", f.ago, { tone: () => "" }),
      ],
      {
        name: "Failures by function and error",
        key: (row) => row.key,
        sort: "Failures",
        empty: "Nothing has failed.",
      },
    );
    this.table = new Table(
      [
        functionName("Function", "function"),
        words("Error", "error", { mono: true }),
        words("Message", "message", { wrap: true }),
        words("Worker", "worker", { mono: true }),
        figure("Attempt", "attempt", f.count, { tone: () => "" }),
        figure("When", (row) => this.store.facts.at - row.at, f.ago, { tone: () => "" }),
        words("Host", "host"),
        figure("Pid", "pid", (value) => String(value || "–"), { tone: () => "" }),
      ],
      {
        name: "Failures, newest first",
        key: (row) => row.seq,
        sort: "When",
        ascending: true,
        filter: "Filter failures",
        match: (row) => [row.function, row.error, row.message, row.worker, row.host].join(" "),
        detail: (row) => ({
          root: el("pre", { tabindex: "0" }, f.cleanLines(row.traceback || "No traceback.")),
        }),
        empty: "Nothing has failed.",
      },
    );
    const each = panel("Newest first; open a row for the remote traceback", this.table.root);
    each.tools.append(this.table.filter);
    this.root = el(
      "div",
      {},
      this.top.root,
      panel("By function and error", this.groups.root).root,
      each.root,
    );
  }

  update() {
    const { facts, failures } = this.store;
    const groups = new Map();
    for (const row of failures) {
      const key = `${row.function}\n${row.error}`;
      const group = groups.get(key) ?? { key, ...row, count: 0, names: new Set() };
      group.count += 1;
      group.names.add(row.worker);
      group.message = row.message;
      group.age = facts.at - row.at;
      groups.set(key, group);
    }
    for (const group of groups.values()) {
      const names = [...group.names].sort(f.byName);
      group.workers =
        names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
    }
    this.groups.update([...groups.values()]);
    this.table.update(failures);
    const { failed } = facts.totals;
    const kept = failures.length < failed ? ` The last ${f.count(failures.length)} are kept.` : "";
    const text = failed ? `${f.plural(failed, "run")} failed since the dispatcher began.${kept}` : "";
    setText(this.top.sentence, text);
  }
}

const CAUSES = {
  "killed by SIGKILL": "often by the kernel, when the host has no memory left",
  "killed by SIGSEGV": "a mistake in native code, which the function calls",
  "killed by SIGABRT": "native code gave up",
};

function howOf(row) {
  if (!row.how) return "its end was not seen";
  return CAUSES[row.how] ? `${row.how}: ${CAUSES[row.how]}` : row.how;
}

/** What the processes of a worker printed before one of them died. */
class LinesBefore {
  constructor(row) {
    this.root = el("pre", { tabindex: "0" }, "Asking the worker for its last lines …");
    this.ask(row);
  }

  async ask({ worker, at }) {
    try {
      const { rows } = await ask("logs", { worker, since: KEPT });
      const before = rows.filter((row) => row[2] <= at + LATE_LINES_S).slice(-LINES_BEFORE);
      const text = before.map(([, , when, process, , line]) => `${f.clock(when)} ${process}  ${line}`);
      setText(this.root, f.cleanLines(text.join("\n")) || "No lines of its output were kept.");
    } catch (error) {
      setText(this.root, f.clean(error.message, 500));
    }
  }
}

class Losses {
  constructor({ store }) {
    this.store = store;
    this.top = head("Lost processes", "");
    const lines = (row) => ({
      root: el("pre", { tabindex: "0" }, f.cleanLines(row.last_lines || "No lines of its output were kept.")),
    });
    this.deaths = new Table(
      [
        words("Worker", "worker", { mono: true }),
        { label: "How it ended", show: howOf, wrap: true },
        functionName("Function", "function"),
        figure("When", (row) => this.store.facts.at - row.at, f.ago, { tone: () => "" }),
        figure("Pid", "pid", (value) => String(value || "–"), { tone: () => "" }),
      ],
      {
        name: "Slot processes that died",
        key: (row) => row.seq,
        sort: "When",
        ascending: true,
        detail: (row) => (row.last_lines ? lines(row) : new LinesBefore(row)),
        empty: "No slot process has died.",
      },
    );
    this.lost = new Table(
      [
        words("Worker", "name", { mono: true }),
        { label: "How it ended", show: howOf, wrap: true },
        words("Why", "reason", { wrap: true }),
        figure("When", "ago_s", f.ago, { tone: () => "" }),
      ],
      {
        name: "Workers that were lost",
        key: (row) => `${row.name} ${Math.round(this.store.facts.at - row.ago_s)}`,
        sort: "When",
        ascending: true,
        detail: lines,
        empty: "No worker was lost.",
      },
    );
    this.refused = new Table(
      [
        words("Peer", "peer", { mono: true }),
        words("Why", "reason", { wrap: true }),
        figure("When", (row) => this.store.facts.at - row.at, f.ago, { tone: () => "" }),
      ],
      {
        name: "Refused peers",
        key: (row) => row.seq,
        sort: "When",
        ascending: true,
        empty: "No peer was refused.",
      },
    );
    const dead = panel("Slot processes", this.deaths.root);
    this.note = dead.note;
    this.root = el(
      "div",
      {},
      this.top.root,
      dead.root,
      panel("Workers", this.lost.root).root,
      panel("Refused peers", this.refused.root).root,
    );
  }

  update() {
    const { facts, deaths, refusals } = this.store;
    const having = facts.workers.filter((row) => row.slot_deaths);
    const named = having.map((row) => `${row.name} ${f.count(row.slot_deaths)}`);
    setText(this.note, f.clean(named.slice(0, 6).join(", ")));
    this.deaths.update(deaths);
    this.lost.update(facts.losses ?? []);
    this.refused.update(refusals);
    const dead = sum(having, (row) => row.slot_deaths);
    setText(
      this.top.sentence,
      `${f.plural(dead, "slot process", "slot processes")} and ${f.plural(facts.losses_count, "worker")} lost. Open a row for the last lines that the process printed.`,
    );
  }
}

/** A view that is one table of the facts. */
function single(title, lead, name, columns, options, rows) {
  return class {
    constructor({ store }) {
      this.store = store;
      this.table = new Table(columns, { name, match: () => "", ...options });
      const box = panel(name, this.table.root);
      if (this.table.filter) box.tools.append(this.table.filter);
      this.root = el("div", {}, head(title, lead).root, box.root);
    }

    update() {
      this.table.update(rows(this.store.facts));
    }
  };
}

const STALLS = {
  producer: ["workers wait: readers are slow", "warn"],
  consumer: ["readers wait: workers are slow", "warn"],
};

const Data = single(
  "Data service",
  "How fast each dataset flows, and which side makes the other wait.",
  "Jobs",
  [
    words("Job", "job", { mono: true }),
    figure("Elements", "elements_per_s", f.rate),
    figure("Bytes", "bytes_per_s", (value) => (value == null ? "–" : `${f.bytes(value)}/s`)),
    {
      label: "Buffered",
      number: true,
      value: (row) => row.buffered / row.room,
      show: (row) =>
        share([[row.buffered / row.room]], `${f.count(row.buffered)} of ${f.count(row.room)}`),
    },
    {
      label: "Waits",
      value: (row) => row.waits,
      show: (row) => (STALLS[row.waits] ? stateOf(...STALLS[row.waits]) : "–"),
    },
    figure("Readers wait", "readers_wait", f.percent, { help: "share of time, for an element" }),
    figure("Workers wait", "workers_wait", f.percent, { help: "share of time, for readers" }),
    words("Mode", "mode"),
    figure("Iteration", "iteration", f.count, { tone: () => "" }),
    { label: "Tasks", number: true, show: (row) => `${row.tasks} of ${row.tasks_count}` },
    figure("Readers", "clients", f.count),
    words("Left", (row) =>
      (row.positions_left ?? []).map((left) => (left == null ? "endless" : f.count(left))).join(", "),
    ),
  ],
  { key: (row) => `${row.job} ${row.iteration}`, sort: "Job", empty: "No data job runs." },
  (facts) => facts.data?.jobs ?? [],
);

const Variables = single(
  "Variables",
  "What the parameter servers hold, and how often it changes.",
  "Variables",
  [
    words("Variable", "name", { mono: true }),
    words("Server", "server", { mono: true }),
    words("Shape", (row) => `(${(row.shape ?? []).join(", ")})`),
    words("Type", "dtype"),
    figure("Size", "bytes", f.bytes),
    figure("Updates", "updates", f.compact),
    figure("Rate", "updates_per_s", f.rate),
    figure("Waits", "waits_s", f.seconds, { help: "time that updates waited for each other" }),
  ],
  {
    key: (row) => `${row.server} ${row.name}`,
    sort: "Size",
    filter: "Filter variables",
    match: (row) => `${row.name} ${row.server}`,
    empty: "No parameter server holds a variable.",
  },
  (facts) => facts.variables ?? [],
);

const Rpc = single(
  "RPC",
  "The methods of servers in programs, tasks and the dispatcher, from a call to its reply.",
  "Methods",
  [
    words("Method", "method", { mono: true }),
    words("Process", "process", { mono: true }),
    figure("Calls", "count", f.compact),
    fault("Failed", "failed"),
    figure("Now", "in_flight", f.count, { help: "calls that wait or run" }),
    figure("Mean", "mean_s", f.seconds),
    figure("p50", "p50_s", f.seconds),
    figure("p99", "p99_s", f.seconds),
  ],
  {
    key: (row) => `${row.process} ${row.method}`,
    sort: "Calls",
    filter: "Filter methods",
    match: (row) => `${row.method} ${row.process}`,
    empty: "No method has been called.",
  },
  (facts) => facts.rpc ?? [],
);

const Actors = single(
  "Actors",
  "Where each actor lives, what it costs, and how long its calls take.",
  "Actors",
  [
    words("Actor", "name", { mono: true }),
    words("Class", "cls", { mono: true }),
    {
      label: "State",
      value: (row) => row.state,
      show: (row) => stateOf(row.state, row.state === "alive" ? "good" : "warn"),
    },
    words("Worker", "worker", { mono: true }),
    figure("Calls", "calls", f.compact),
    figure("Rate", "calls_per_s", f.rate),
    figure("Waiting", "waiting", f.count),
    fault("Failed", "failed"),
    figure("p50", "p50_s", f.seconds),
    figure("p99", "p99_s", f.seconds),
    figure("Memory", "rss_bytes", f.bytes),
    figure("Processor", "cpu_percent", (value) => f.percent(value == null ? null : value / 100)),
    { label: "Restarts", number: true, show: (row) => `${row.restarts - row.restarts_left} of ${row.restarts}` },
    words("Why", "reason", { wrap: true }),
  ],
  {
    key: (row) => row.actor,
    sort: "Actor",
    ascending: true,
    filter: "Filter actors",
    match: (row) => `${row.name} ${row.cls} ${row.worker}`,
    empty: "There is no actor.",
  },
  (facts) => facts.actors ?? [],
);

class Logs {
  constructor({ store }) {
    this.store = store;
    this.since = null;
    this.lines = [];
    this.due = 0;
    this.workers = el("select", { class: "field", "aria-label": "Worker" });
    this.choices = [""];
    this.workers.addEventListener("change", () => this.restart());
    this.filter = el("input", {
      class: "field",
      type: "search",
      placeholder: "Filter lines",
      "aria-label": "Filter lines",
      oninput: () => this.draw(),
    });
    this.box = el("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log lines", "aria-live": "off" });
    this.text = el("p", { class: "empty" }, "Asking for lines …");
    const lines = panel("Lines", this.text, this.box);
    lines.tools.append(this.workers, this.filter);
    this.note = lines.note;
    this.root = el(
      "div",
      {},
      head("Logs", "What functions and actors print and log, by worker.").root,
      lines.root,
    );
  }

  chosen() {
    return this.choices[this.workers.selectedIndex] ?? "";
  }

  restart() {
    this.since = null;
    this.lines = [];
    this.due = 0;
    this.draw();
    this.update();
  }

  update() {
    const names = this.store.facts.workers.map((row) => row.name).sort(f.byName).slice(0, 1_000);
    if (names.join("\n") !== this.names) {
      this.names = names.join("\n");
      const chosen = this.chosen();
      this.choices = ["", ...names];
      this.workers.replaceChildren(
        el("option", {}, "All workers"),
        ...names.map((name) => el("option", {}, f.clean(name, 100))),
      );
      this.workers.selectedIndex = Math.max(0, this.choices.indexOf(chosen));
    }
    if (performance.now() < this.due) return;
    this.due = Infinity; // until the answer is there
    this.ask().finally(() => (this.due = performance.now() + LOGS_EVERY_MS));
  }

  async ask() {
    const worker = this.chosen();
    try {
      // the number of the newest line first: what follows it comes with the next questions
      const first = this.since === null;
      const { next } = first ? await ask("logs", { worker, since: FROM_NOW }) : {};
      const answer = await ask("logs", { worker, since: first ? KEPT : this.since });
      if (worker !== this.chosen()) return;
      this.since = first ? next : answer.next;
      this.add(answer.rows);
      const [failed] = Object.entries(answer.failed);
      this.problem = failed ? f.clean(failed.join(": "), 500) : "";
    } catch (error) {
      this.problem = f.clean(error.message, 500);
    }
    this.draw();
  }

  add(rows) {
    const known = new Set(this.lines.slice(-200).map((line) => line.key));
    for (const [number, worker, at, process, stream, text] of rows) {
      const key = `${worker} ${process} ${at} ${text}`;
      const seq = `${number} ${at}`;
      if (!known.has(key)) this.lines.push({ key, seq, worker, at, process, stream, text });
    }
    this.lines = this.lines.slice(-LOG_LINES_MAX);
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const lines = this.lines.filter(
      (line) => !wanted || `${line.worker} ${line.text}`.toLowerCase().includes(wanted),
    );
    const shown = `${wanted}\n${lines.length}\n${lines.at(-1)?.seq}\n${lines[0]?.seq}`;
    this.box.hidden = !lines.length;
    this.text.hidden = Boolean(lines.length);
    setText(this.text, this.problem || "No line was printed.");
    const shownLines = lines.length ? f.plural(lines.length, "line") : "";
    setText(this.note, [shownLines, lines.length && this.problem].filter(Boolean).join("; "));
    if (shown === this.shown) return;
    this.shown = shown;
    const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 8;
    this.box.replaceChildren(
      ...lines.map((line) =>
        el(
          "div",
          {},
          el("time", {}, line.at ? f.clock(line.at) : ""),
          el("span", { class: "who" }, f.clean(`${line.worker} ${line.process}`, 60)),
          el("span", { class: "what" }, f.clean(line.text, 4_096)),
        ),
      ),
    );
    if (atEnd) this.box.scrollTop = this.box.scrollHeight;
  }
}

/** Every view: its name in the address, its title, its class, and the badge in the list of views. */
export const VIEWS = [
  { id: "overview", title: "Overview", View: Overview },
  { id: "tasks", title: "Task stream", View: Tasks },
  { id: "functions", title: "Functions", View: Functions },
  { id: "workers", title: "Workers", View: Workers, badge: ({ facts }) => [facts.workers.length] },
  { id: "waiting", title: "Why work waits", View: Waiting, badge: waitingBadge },
  {
    id: "failures",
    title: "Failures",
    View: Failures,
    gap: true,
    badge: ({ facts }) => [facts.totals.failed, "bad"],
  },
  {
    id: "losses",
    title: "Lost processes",
    View: Losses,
    badge: ({ facts }) => [sum(facts.workers, (row) => row.slot_deaths) + facts.losses_count, "bad"],
  },
  { id: "logs", title: "Logs", View: Logs },
  {
    id: "data",
    title: "Data service",
    View: Data,
    gap: true,
    badge: ({ facts }) => [facts.data?.jobs.length],
  },
  { id: "variables", title: "Variables", View: Variables, badge: ({ facts }) => [facts.variables?.length] },
  { id: "actors", title: "Actors", View: Actors, badge: ({ facts }) => [facts.actors?.length] },
  { id: "rpc", title: "RPC", View: Rpc },
];

function waitingBadge({ facts }) {
  const rows = facts.waiting ?? [];
  const stuck = rows.some((row) => row.count && row.stuck);
  return [sum(rows, (row) => row.count), stuck ? "bad" : ""];
}
