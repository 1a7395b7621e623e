// The last requests, and the story of one: its path, its steps on one scale, what was weighed.

import { Refused, ask } from "./api.js";
import { byId, count, el, relist, seconds, tell } from "./dom.js";

export class Requests {
  constructor({ lit }) {
    this.lit = lit;
    this.rows = [];
    byId("story").addEventListener("close", () => this.closed());
  }

  show(rows) {
    this.rows = rows;
    relist(byId("rows"), rows, (row) => row.id, (row) => this.row(row));
    tell(byId("rows-note"), rows.length ? "" : "Nothing has been asked yet.");
  }

  unseen(message) {
    this.rows = [];
    byId("rows").replaceChildren();
    tell(byId("rows-note"), message);
  }

  row(row) {
    const bad = !["", "ok"].includes(row.outcome);
    const open = el("button", { type: "button", onclick: () => this.open(row.id) }, row.id);
    const path = way(row);
    const why = bad ? row.outcome : [row.reason, row.node_reason].filter(Boolean).join(" / ");
    const tokens = row.outcome === "" ? "running" : `${count(row.completion_tokens)} tok`;
    const on = () => this.lit(row);
    const off = () => this.lit(null);
    return el("tr", { onmouseenter: on, onmouseleave: off, onfocusin: on, onfocusout: off },
      el("td", {}, open), el("td", {}, path || "–"), el("td", { class: bad ? "failed" : "" }, why || "–"),
      el("td", { class: "number" }, count(row.prompt_tokens)),
      el("td", { class: "number" }, count(row.cached_tokens)),
      el("td", { class: "number" }, seconds(row.ttft_s)), el("td", { class: "number" }, tokens));
  }

  // The row that had the focus before may have been made anew meanwhile.
  closed() {
    this.lit(null);
    const now = document.activeElement;
    if (now !== document.body && !byId("story").contains(now)) return;
    const row = [...byId("rows").children].find((one) => one.dataset.key === this.opened);
    row?.querySelector("button").focus({ preventScroll: true });
  }

  async open(id) {
    this.opened = id;
    byId("story-title").textContent = `Request ${id}`;
    byId("story-body").replaceChildren(el("p", { class: "quiet" }, "Asking the edge"));
    if (!byId("story").open) byId("story").showModal();
    try {
      const told = await ask(`/page/requests/${encodeURIComponent(id)}`, { operator: true });
      this.lit(told.row);
      byId("story-body").replaceChildren(...story(told));
    } catch (error) {
      const message = error instanceof Refused ? error.message : "The edge cannot be reached.";
      byId("story-body").replaceChildren(el("p", {}, message));
    }
  }
}

function way(row) {
  const by = row.by && `Worker ${row.by}`;
  return [by, row.edge, row.region, row.prefill, row.decode].filter(Boolean).join(" → ");
}

function story({ row, steps, weighed }) {
  const end = Math.max(...steps.map((step) => step.start_s + step.seconds), 1e-6);
  const path = way(row);
  const parts = [
    el("p", {}, `${path}. ${count(row.prompt_tokens)} prompt tokens, ${count(row.cached_tokens)} cached; `
      + `${count(row.completion_tokens)} generated; first token ${seconds(row.ttft_s)}, all ${seconds(row.total_s)}.`),
    el("ol", { class: "steps", "aria-label": "Where its time went" }, ...steps.map((step) => bar(step, end))),
  ];
  if (weighed.length) parts.push(regions(weighed));
  return parts;
}

function bar(step, end) {
  const inner = step.name === "transfer" ? " inner" : "";
  const fill = el("i");
  fill.style.left = `${(100 * step.start_s) / end}%`;
  fill.style.width = `${(100 * step.seconds) / end}%`;
  return el("li", {},
    el("span", {}, step.name), el("span", { class: `track${inner}` }, fill),
    el("span", { class: "number" }, seconds(step.seconds)),
    step.note ? el("small", {}, step.note) : null);
}

function regions(weighed) {
  const head = ["Region", "Standing", "Round trip", "Wait", "Reading", "Holds"];
  return el("table", {},
    el("caption", { class: "quiet" }, "The regions as they were weighed"),
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...weighed.map((one) => el("tr", {},
      el("td", {}, one.region), el("td", {}, one.standing.replaceAll("_", " ")),
      el("td", {}, seconds(one.round_trip_s)), el("td", {}, seconds(one.wait_s)),
      el("td", {}, seconds(one.read_s)), el("td", {}, `${count(Math.round(one.held_tokens))} tokens`)))));
}
