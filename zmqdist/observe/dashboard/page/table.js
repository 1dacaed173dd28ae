// A table that sorts, filters, opens rows, and shows as many rows as fit a page.

import { el, setText } from "./dom.js";
import { byName, clean, count, shortName } from "./format.js";

const ROWS_SHOWN = 100;

/**
 * columns: [{ label, value(row), show(row), number, mono, wrap, tone(row), help }]. `value` sorts,
 * `show` returns a text or an element. The first column is the row's heading.
 * options: name (the table's subject), key(row), sort (label), ascending, empty, filter (placeholder),
 * match(row) (the text that the filter looks at), detail(row) -> { root, update(row) }.
 */
export class Table {
  constructor(columns, options) {
    this.columns = columns;
    this.options = options;
    this.sort = columns.find((column) => column.label === options.sort) ?? null;
    this.ascending = options.ascending ?? false;
    this.shown = ROWS_SHOWN;
    this.lines = new Map();
    this.open = new Map();
    this.rows = [];
    this.headings = columns.map((column) => this.heading(column));
    this.body = el("tbody");
    this.foot = el("div", { class: "table-foot row", hidden: true });
    this.empty = el("p", { class: "empty" }, options.empty ?? "Nothing here yet.");
    this.region = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": options.name },
      el("table", {}, el("thead", {}, el("tr", {}, ...this.headings)), this.body),
    );
    this.root = el("div", {}, this.region, this.empty, this.foot);
    this.filter = options.filter
      ? el("input", {
          class: "field",
          type: "search",
          placeholder: options.filter,
          "aria-label": options.filter,
          oninput: () => this.draw(),
        })
      : null;
  }

  heading(column) {
    const classes = column.number ? "number" : null;
    const sorted = () => {
      this.ascending = this.sort === column ? !this.ascending : !column.number;
      this.sort = column;
      this.draw();
    };
    const attributes = { type: "button", title: column.help, onclick: sorted };
    return el("th", { scope: "col", class: classes }, el("button", attributes, column.label));
  }

  update(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const wanted = this.filter?.value.trim().toLowerCase() ?? "";
    const matching = wanted
      ? this.rows.filter((row) => this.options.match(row).toLowerCase().includes(wanted))
      : this.rows;
    const sorted = this.sort ? this.sorted(matching) : matching;
    const visible = sorted.slice(0, this.shown);
    this.headings.forEach((heading, at) => {
      const order = this.ascending ? "ascending" : "descending";
      if (this.columns[at] === this.sort) heading.setAttribute("aria-sort", order);
      else heading.removeAttribute("aria-sort");
    });
    this.region.hidden = !visible.length;
    this.empty.hidden = Boolean(visible.length);
    const text = wanted && this.rows.length ? "No row matches the filter." : this.options.empty;
    setText(this.empty, text ?? "Nothing here yet.");
    this.place(visible);
    this.foot.hidden = sorted.length <= visible.length;
    if (!this.foot.hidden) this.drawFoot(visible.length, sorted.length);
  }

  sorted(rows) {
    const sign = this.ascending ? 1 : -1;
    const value = this.sort.value ?? this.sort.show;
    const compare = this.sort.number
      ? (a, b) => (value(a) ?? -1) - (value(b) ?? -1)
      : (a, b) => byName(String(value(a)), String(value(b)));
    return [...rows].sort((a, b) => sign * compare(a, b));
  }

  drawFoot(shown, total) {
    const more = () => {
      this.shown += 4 * ROWS_SHOWN;
      this.draw();
    };
    if (!this.moreButton) {
      this.moreText = el("span");
      this.moreButton = el("button", { class: "more", type: "button", onclick: more }, "Show more");
      this.foot.append(this.moreText, this.moreButton);
    }
    setText(this.moreText, `${count(shown)} of ${count(total)} rows.`);
  }

  /** Reuse the lines of rows that stay, so that the focus and a selection stay, too. */
  place(rows) {
    const before = this.lines;
    this.lines = new Map();
    const nodes = [];
    for (const row of rows) {
      const key = this.options.key(row);
      const line = before.get(key) ?? this.line(key);
      this.lines.set(key, line);
      line.row = row;
      this.columns.forEach((column, at) => this.fill(line.cells[at], column, row));
      nodes.push(line.node);
      const detail = this.open.get(key);
      if (detail) {
        detail.content.update?.(row);
        nodes.push(detail.node);
      }
    }
    const current = this.body.childNodes;
    if (current.length !== nodes.length || nodes.some((node, at) => current[at] !== node)) {
      this.arrange(nodes);
    }
  }

  arrange(nodes) {
    const kept = new Set(nodes);
    for (const node of [...this.body.childNodes]) if (!kept.has(node)) node.remove();
    nodes.forEach((node, at) => {
      const there = this.body.childNodes[at];
      if (there !== node) this.body.insertBefore(node, there ?? null);
    });
  }

  line(key) {
    const line = { row: null };
    line.cells = this.columns.map((column, at) => {
      const classes = [
        column.number && "number",
        column.mono && "mono",
        column.wrap ? "wrap" : !column.number && "text-cell",
      ];
      const kind = { class: classes.filter(Boolean).join(" ") };
      if (at === 0) {
        const cell = el("th", { ...kind, scope: "row" });
        if (this.options.detail) {
          const label = el("span", { class: "label" });
          const opener = el(
            "button",
            { class: "opener", type: "button", "aria-expanded": "false" },
            label,
          );
          opener.addEventListener("click", () => this.toggle(key, line, opener));
          cell.append(opener);
          cell.target = label;
        }
        return cell;
      }
      return el("td", kind);
    });
    line.node = el("tr", {}, ...line.cells);
    return line;
  }

  fill(cell, column, row) {
    const content = column.show(row);
    const target = cell.target ?? cell;
    if (content instanceof Node) target.replaceChildren(content);
    else {
      const text = clean(content, column.wrap ? 1_000 : 200);
      setText(target, text);
      if (!column.number && !column.wrap && text.length > 24) cell.title = text;
    }
    const tone = column.tone?.(row) ?? "";
    cell.classList.toggle("zero", tone === "zero");
    cell.classList.toggle("alert", tone === "alert");
  }

  toggle(key, line, opener) {
    const opened = this.open.get(key);
    opener.setAttribute("aria-expanded", String(!opened));
    if (opened) {
      opened.node.remove();
      this.open.delete(key);
      return;
    }
    const content = this.options.detail(line.row);
    const cell = el("td", { colspan: String(this.columns.length) }, content.root);
    const node = el("tr", { class: "detail" }, cell);
    this.open.set(key, { node, content });
    line.node.after(node);
  }
}

/** A column of numbers in which 0 stands back. */
export function figure(label, field, show, more = {}) {
  const value = typeof field === "function" ? field : (row) => row[field];
  return {
    label,
    number: true,
    value,
    show: (row) => show(value(row)),
    tone: (row) => (value(row) ? "" : "zero"),
    ...more,
  };
}

/** A column of counts that should be 0. */
export function fault(label, field, more = {}) {
  return figure(label, field, count, { tone: (row) => (row[field] ? "alert" : "zero"), ...more });
}

/** A column of functions, whose module stands back. */
export function functionName(label, field) {
  return {
    label,
    mono: true,
    value: (row) => row[field],
    show: (row) => {
      const name = clean(row[field], 200) || "–";
      const end = shortName(name);
      const module = el("span", { class: "module" }, name.slice(0, name.length - end.length));
      return el("span", { class: "function", title: name }, module, end);
    },
  };
}

export function words(label, field, more = {}) {
  const value = typeof field === "function" ? field : (row) => row[field] ?? "";
  return { label, value, show: value, ...more };
}
