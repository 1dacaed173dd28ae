// Elements without markup: every text becomes a text node.

import { clean } from "./format.js";

/** A new element. `attributes` whose name begins with "on" are handlers. Texts become text nodes. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function panel(title, ...parts) {
  const note = el("span", { class: "muted" });
  const tools = el("div", { class: "row" });
  const head = el("header", {}, el("h2", {}, title, " ", note), tools);
  const root = el("section", { class: "panel", "aria-label": title }, head, ...parts);
  return { root, note, tools, head };
}

export function head(title, lead) {
  const sentence = el("p", { class: "lead" }, lead);
  return { root: el("div", { class: "head" }, el("h1", {}, title), sentence), sentence };
}

/** A bar of parts: [[fraction, kind], ...]. */
export function bar(parts) {
  const root = el("span", { class: "bar", "aria-hidden": "true" });
  for (const [fraction, kind] of parts) {
    const piece = el("i", { "data-kind": kind });
    piece.style.width = `${Math.max(0, Math.min(1, fraction || 0)) * 100}%`;
    root.append(piece);
  }
  return root;
}

export function share(parts, text) {
  return el("span", { class: "share" }, bar(parts), el("span", { class: "amount" }, text));
}

export function stateOf(text, kind, most = 60) {
  return el("span", { class: "state", "data-kind": kind }, el("span", {}, clean(text, most)));
}

/** The colour that a CSS variable has now, for a canvas. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const probe = el("span", { hidden: true, "aria-hidden": "true" });
document.documentElement.append(probe);

/** A canvas with the pixels of the screen. Returns its context, and its size in CSS pixels. */
export function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const pixels = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
    [canvas.width, canvas.height] = pixels;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
