// Lines over the last minutes, drawn by uPlot.

import uPlot from "/uplot/uPlot.esm.js";
import { colour, el } from "./dom.js";
import { clock } from "./format.js";

/** series: [{ name (a column of the store's history), label, tone (a CSS variable) }]. */
export class Chart {
  constructor(store, series, show) {
    this.store = store;
    this.series = series;
    this.show = show;
    this.keys = el(
      "span",
      { class: "chart-keys" },
      ...series.map(({ label, tone }) => {
        const line = el("i");
        line.style.background = `var(--${tone})`;
        return el("span", {}, line, label);
      }),
    );
    const name = `Chart of ${series.map(({ label }) => label).join(", ")}`;
    this.root = el("div", { class: "chart", role: "img", "aria-label": name });
    new ResizeObserver(() => this.resize()).observe(this.root);
  }

  data() {
    const { history } = this.store;
    return [history.at, ...this.series.map(({ name }) => history[name])];
  }

  build() {
    const axis = {
      stroke: colour("muted"),
      grid: { stroke: colour("grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    this.theme = axis.stroke;
    this.plot?.destroy();
    this.plot = new uPlot(
      {
        width: this.root.clientWidth - 20,
        height: 180,
        cursor: { show: false },
        legend: { show: false },
        scales: { y: { range: (_, __, most) => [0, Math.max(1, (most ?? 1) * 1.1)] } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(clock), space: 90, size: 32 },
          { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => this.show(tick)) },
        ],
        series: [
          {},
          ...this.series.map(({ tone, fill }) => ({
            stroke: colour(tone),
            fill: fill ? colour(fill) : undefined,
            width: 1.75,
            points: { show: false },
          })),
        ],
      },
      this.data(),
      this.root,
    );
  }

  drawable() {
    return this.root.clientWidth >= 60 && this.store.history.at.length > 2;
  }

  resize() {
    if (!this.drawable()) return;
    if (this.plot) this.plot.setSize({ width: this.root.clientWidth - 20, height: 180 });
    else this.build();
  }

  update() {
    if (!this.drawable()) return;
    if (!this.plot || this.theme !== colour("muted")) this.build();
    else this.plot.setData(this.data());
  }
}
