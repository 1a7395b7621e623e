// Two small charts: hit rates from the regions' counters, times to the first token of requests.

import { el, refill, svg } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [520, 130, 40, 18];
const SPAN_S = 300;
const RATES = [["reusable", "one"], ["routed", "two"], ["delivered", "three"]];
const WORDS = {
  reusable: "reusable: some node of the region held it",
  routed: "routed-to: the chosen node held it",
  delivered: "delivered: it was not computed again",
};

export class Figures {
  constructor(hits, ttft) {
    this.hits = hits;
    this.ttft = ttft;
    this.samples = [];
  }

  // `totals`: {all, reusable, routed, delivered} in tokens since the start, or null when untold.
  world(totals) {
    const at = Date.now() / 1000;
    const last = this.samples.at(-1);
    if (totals && (!last || totals.all !== last.all)) this.samples.push({ at, ...totals });
    if (this.samples.length > SPAN_S) this.samples.shift();
    const series = RATES.map(([name, colour]) => ({ name, colour, points: this.rate(name) }));
    refill(this.hits, this.samples.map((one) => one.all), () => [
      frame("Hit rates", 1, (value) => `${(100 * value).toFixed(0)} %`, at, series.map((one) =>
        svg("polyline", { class: one.colour, points: one.points.map((p) => spot(p, 1, at).join()).join(" ") }))),
      el("div", { class: "key" }, ...series.map(({ name, colour, points }) => {
        const now = points.length ? ` ${(100 * points.at(-1).value).toFixed(0)} %` : "";
        return el("span", {}, el("i", { class: colour }), WORDS[name] + now);
      })),
    ]);
  }

  // The share over the last ten changes: single requests would jump between 0 and 1.
  rate(name) {
    return this.samples.slice(1).map((one, index) => {
      const before = this.samples[Math.max(0, index - 9)];
      return { at: one.at, value: (one[name] - before[name]) / Math.max(1, one.all - before.all) };
    });
  }

  requests(rows) {
    const at = Date.now() / 1000;
    const points = rows.filter((row) => row.ttft_s != null && at - row.at < SPAN_S);
    const most = Math.max(0.1, ...points.map((row) => row.ttft_s)) * 1.1;
    refill(this.ttft, points.map((row) => row.id), () => [
      frame("Times to the first token", most, (value) => `${value.toFixed(most < 1 ? 2 : 1)} s`, at,
        points.map((row) => {
          const [x, y] = spot({ at: row.at, value: row.ttft_s }, most, at);
          const warm = row.cached_tokens > row.prompt_tokens / 2;
          return svg("circle", { cx: x, cy: y, r: 3.5, class: warm ? "three" : "one" });
        })),
      el("div", { class: "key" }, el("span", {}, el("i", { class: "one" }), "mostly computed"),
        el("span", {}, el("i", { class: "three" }), "mostly cached")),
    ]);
  }
}

function spot({ at, value }, most, now) {
  const x = LEFT + (WIDTH - LEFT) * Math.max(0, 1 - (now - at) / SPAN_S);
  return [x.toFixed(1), (8 + (HEIGHT - BOTTOM - 8) * (1 - value / most)).toFixed(1)];
}

function frame(label, most, unit, now, marks) {
  const lines = [0, 0.5, 1].flatMap((share) => {
    const [, y] = spot({ at: now, value: share * most }, most, now);
    return [svg("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y }),
      svg("text", { x: LEFT - 5, y: Number(y) + 4, "text-anchor": "end" }, unit(share * most))];
  });
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `${label}, the last five minutes` }, ...lines, ...marks,
  svg("text", { x: LEFT, y: HEIGHT - 3 }, "5 min ago"),
  svg("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
}
