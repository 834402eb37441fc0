// Lines over the last ten minutes, drawn by uPlot. Under each title stand the newest numbers, or those under the pointer.

import uPlot from "/console/vendor/uplot.js";
import { el } from "./dom.js";
import { time } from "./format.js";
import { colour, onTheme } from "./theme.js";

const SECONDS = 600;
const HEIGHT = 150;
// Half of the widest label of the time axis: its last one stands at the edge.
const EDGE = 18;

const known = (value) => (Number.isFinite(value) ? value : null);

/** Where a value has none on either side: no line reaches it, so it is drawn as a dot. */
export function alone(values) {
  const there = (index) => Number.isFinite(values[index]);
  return [...values.keys()].filter((index) => there(index) && !there(index - 1) && !there(index + 1));
}

/** A chart. `lines`: [{name, colour, of: point => number | null}]; `show`: number -> text. */
export class Chart {
  constructor(title, lines, show) {
    this.lines = lines;
    this.show = show;
    this.points = [];
    this.empty = el("p", { class: "hint" }, "No values in the last ten minutes.");
    this.canvas = el("div", { class: "canvas", role: "img", "aria-label": `${title}: no values.` }, this.empty);
    this.values = lines.map(() => el("b", {}, "–"));
    this.when = el("span", { class: "when" });
    this.title = title;
    const legend = lines.map((line, number) => el("span", { class: "key" },
      el("i", { class: `swatch ${line.colour}` }), line.name, " ", this.values[number]));
    this.node = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), el("div", { class: "legend" }, legend, this.when)), this.canvas);
    this.unsubscribe = onTheme(() => this.draw());
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  /** All points, oldest first. */
  set(points) {
    this.points = points;
    this.empty.hidden = this.data().slice(1).some((values) => values.some((value) => value !== null));
    this.plot ? this.plot.setData(this.data()) : this.draw();
    this.tell(null);
  }

  /** The columns of the plot. What is no finite number is a gap. */
  data() {
    return [this.points.map((point) => point.at), ...this.lines.map((line) => this.points.map((point) => known(line.of(point))))];
  }

  draw() {
    const width = this.canvas.clientWidth;
    this.plot?.destroy();
    this.plot = null;
    if (!width) return;
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width, height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      padding: [8, EDGE, 0, 0],
      scales: {
        x: { range: () => { const end = this.points.at(-1)?.at ?? Date.now() / 1000; return [end - SECONDS, end]; } },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.12 : 1] },
      },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => time(tick).slice(0, 5)), space: 70, size: 24 },
        { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.show(tick))), size: 58, space: 34 },
      ],
      series: [{}, ...this.lines.map((line) => ({
        stroke: colour(line.colour), width: 1.6, spanGaps: false,
        points: { show: false, filter: (plot, number, shown) => (shown ? null : alone(plot.data[number])), size: 5, fill: colour(line.colour) },
        fill: line.area ? `${colour(line.colour)}22` : undefined,
      }))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)] },
    }, this.data(), this.canvas);
  }

  /** Writes down one point's numbers; null: the newest. */
  tell(index) {
    const point = index === null ? this.points.at(-1) : this.points[index];
    if (!point) return this.canvas.setAttribute("aria-label", `${this.title}: no values.`);
    this.lines.forEach((line, number) => {
      const value = known(line.of(point));
      this.values[number].textContent = value === null ? "–" : this.show(value);
    });
    this.when.textContent = index === null ? "" : `at ${time(point.at)}`;
    const told = this.lines.map((line, number) => `${line.name} ${this.values[number].textContent}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title}, last ten minutes. Now: ${told}.`);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width) this.plot.setSize({ width, height: HEIGHT });
    else this.draw();
  }

  end() {
    this.unsubscribe();
    this.observer.disconnect();
    this.plot?.destroy();
  }
}
