// The page: opens the session, follows the facts, and shows one view at a time.

import { el, setText } from "./dom.js";
import { brief, clean, seconds } from "./format.js";
import { Refused, follow, open } from "./session.js";
import { Store } from "./store.js";
import { Palette } from "./stream.js";
import { VIEWS } from "./views.js";

const LATE_MS = 3_000;
const THEMES = ["auto", "light", "dark"];

const store = new Store();
const palette = new Palette();
const place = (id) => document.getElementById(id);
const context = { store, palette };
const views = new Map();
let current = null;
let paused = false;
let lost = "";

const links = new Map(
  VIEWS.map(({ id, title, gap }) => {
    const badge = el("span", { class: "badge", hidden: true });
    const link = el("a", { href: `#/${id}` }, title, badge);
    place("views").append(el("li", { class: gap ? "gap" : null }, link));
    return [id, { link, badge }];
  }),
);

function route() {
  const id = location.hash.replace("#/", "");
  const entry = VIEWS.find((view) => view.id === id) ?? VIEWS[0];
  if (!views.has(entry.id)) views.set(entry.id, new entry.View(context));
  const moved = current && current.entry !== entry;
  current = { entry, view: views.get(entry.id) };
  place("view").replaceChildren(current.view.root);
  for (const [name, { link }] of links) {
    if (name === entry.id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  // not scrollIntoView, from where Tab would go on
  place("side").scrollLeft = links.get(entry.id).link.offsetLeft - 40;
  document.title = `${entry.title} · zmqdist`;
  if (moved) {
    scrollTo(0, 0);
    place("main").focus({ preventScroll: true });
  }
  draw();
}

function draw() {
  if (!store.facts || !current) return;
  current.view.update();
}

function drawFrame() {
  setText(place("target"), clean(store.facts.address, 100));
  palette.rank(store.facts.functions);
  for (const { id, badge: badgeOf } of VIEWS) {
    if (!badgeOf) continue;
    const { badge } = links.get(id);
    const [number, kind] = badgeOf(store);
    badge.hidden = !number;
    setText(badge, brief(number ?? 0));
    badge.dataset.kind = kind ?? "";
  }
}

function showState() {
  const quiet = performance.now() - (store.received ?? 0);
  const problem = lost || store.problem;
  const late = store.facts && quiet > LATE_MS;
  const state = problem ? "off" : !store.facts ? "wait" : late ? "late" : "live";
  const texts = {
    off: "not connected",
    wait: "connecting",
    late: `${seconds(quiet / 1000)} old`,
    live: paused ? "paused" : "live",
  };
  place("state").dataset.state = paused && state === "live" ? "wait" : state;
  setText(place("state"), texts[state]);
  place("notice").hidden = !problem;
  if (problem) setText(place("notice"), clean(`${problem} The page tries again.`, 500));
}

function take(message) {
  lost = "";
  store.take(message);
  showState();
  if (!store.facts) return;
  drawFrame();
  if (!paused && !document.hidden) draw();
}

function refuse(sentence) {
  place("notice").hidden = false;
  place("notice").classList.add("full");
  setText(place("notice"), clean(sentence, 500));
  place("view").replaceChildren();
  place("state").dataset.state = "off";
  setText(place("state"), "not connected");
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(place("theme"), `Theme: ${theme}`);
  localStorage.setItem("zmqdist-theme", theme);
  draw();
}

place("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
place("pause").addEventListener("click", () => {
  paused = !paused;
  place("pause").setAttribute("aria-pressed", String(paused));
  showState();
  draw();
});
place("skip").addEventListener("click", (event) => {
  event.preventDefault();
  place("main").focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setTheme(localStorage.getItem("zmqdist-theme") ?? "auto");

try {
  await open();
  addEventListener("hashchange", route);
  route();
  setInterval(showState, 1_000);
  await follow(take, (sentence) => {
    lost = sentence;
    showState();
  });
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  refuse(error.message);
}
