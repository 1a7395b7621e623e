// Edges on the left, regions with their nodes on the right, and the ways between them.

import { byId, count, el, relist, svg, tell } from "./dom.js";

const STATES = { fresh: "good", up: "good", suspect: "warn", unknown: "", down: "bad" };

export class World {
  constructor() {
    this.page = null;
    this.path = null;
    this.rates = new Map();
    new ResizeObserver(() => this.ways()).observe(byId("map"));
  }

  show(page) {
    this.page = page;
    const { edges, regions } = page;
    relist(byId("edges"), edges.map((one) => ({ ...one, lit: this.path?.edge === one.name })),
      (one) => one.name, (one) => this.edge(one));
    relist(byId("regions"), regions.map((one) => ({ ...one, age_s: 0, lit: this.litIn(one.name) })),
      (one) => one.name, (one) => this.region(one));
    const nodes = regions.flatMap((region) => region.status?.nodes ?? []);
    const busy = nodes.reduce((sum, node) => sum + node.running, 0);
    tell(byId("world-note"), `${edges.length} edges, ${regions.length} regions, `
      + `${nodes.length} nodes; ${busy} being answered`);
    this.ways();
  }

  // The path of a request: {edge, region, prefill, decode}, or null.
  light(path) {
    this.path = path;
    if (this.page) this.show(this.page);
  }

  // What of a region the path goes through.
  litIn(name) {
    return this.path?.region === name ? [this.path.prefill, this.path.decode] : null;
  }

  edge(edge) {
    const lit = edge.lit ? " lit" : "";
    const load = edge.in_flight == null ? null : `${count(edge.in_flight)} in flight`
      + (edge.held ? `, ${count(edge.held)} held` : "");
    return el("li", { class: `place${edge.here ? " here" : ""}${lit}`, id: `edge-${edge.name}` },
      el("h3", {}, dot(edge.state), edge.name, el("span", {}, edge.place)),
      el("div", { class: "facts" },
        el("span", {}, edge.here ? "this page's edge" : edge.state),
        load ? el("span", {}, load) : null,
        edge.url && !edge.here ? el("a", { href: edge.url }, "its page") : null));
  }

  region(region) {
    const status = region.status;
    const state = region.draining ? "suspect" : region.state;
    const lit = region.lit ? " lit" : "";
    const nodes = (status?.nodes ?? []).map((node) => this.node(node));
    const facts = status ? [
      `${count(status.active)} active`, `${count(status.queued)} queued`,
      `${region.work_s.toFixed(1)} s of work`,
    ] : ["nothing heard yet"];
    if (region.draining) facts.unshift("draining");
    return el("li", { class: `place${lit}`, id: `region-${region.name}` },
      el("h3", {}, dot(state), region.name, el("span", {}, region.place),
        el("span", {}, facts.join(" · "))),
      el("div", { class: "nodes" }, ...nodes));
  }

  node(node) {
    const total = node.blocks_total || 1;
    const used = (100 * node.blocks_used) / total;
    const cached = (100 * node.blocks_cached) / total;
    const lit = [this.path?.prefill, this.path?.decode].includes(node.name) ? " lit" : "";
    const state = node.off ? "unknown" : !node.alive ? "down" : node.draining ? "suspect" : "up";
    const speed = this.speed(node);
    const occupancy = `KV: ${used.toFixed(0)} % in use, ${cached.toFixed(0)} % kept for reuse`;
    return el("div", { class: `node${lit}`, id: `node-${node.name}` },
      el("div", {}, dot(state), " ", el("b", {}, node.name), ` ${node.role}`),
      el("div", { class: "bar", role: "img", "aria-label": occupancy, title: occupancy },
        wide("", used), wide("kept", cached)),
      el("div", { class: "facts" },
        el("span", {}, node.alive ? `${count(node.running)} running` : node.off ? "off until it is needed" : "lost"),
        node.prefill_backlog_tokens ? el("span", {}, `${count(node.prefill_backlog_tokens)} to read`) : null,
        speed >= 0.5 ? el("span", {}, `${speed.toFixed(0)} tokens/s`) : null));
  }

  // Generated and read tokens a second, between the last two changes of the counters.
  speed(node) {
    const now = performance.now();
    const made = node.generated_tokens + node.computed_prompt_tokens;
    const last = this.rates.get(node.name);
    if (!last || made < last.made) {
      this.rates.set(node.name, { made, at: now, speed: 0 });
      return 0;
    }
    if (now - last.at >= 900) {
      this.rates.set(node.name, { made, at: now, speed: (1000 * (made - last.made)) / (now - last.at) });
    }
    return this.rates.get(node.name).speed;
  }

  ways() {
    const map = byId("map");
    const base = map.getBoundingClientRect();
    const lines = [];
    for (const edge of this.page?.edges ?? []) {
      const from = box(`edge-${edge.name}`, base);
      for (const [name, ms] of Object.entries(edge.round_trip_ms ?? {})) {
        const to = box(`region-${name}`, base);
        if (!from || !to) continue;
        const [x1, y1, x2, y2] = [from.right, from.middle, to.left, to.middle];
        const bend = (x2 - x1) / 2;
        const lit = this.path?.edge === edge.name && this.path?.region === name;
        lines.push(svg("path", {
          d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`,
          class: lit ? "lit" : edge.here ? "mine" : "",
        }));
        if (edge.here || lit) {
          lines.push(svg("text", { x: x1 + 0.62 * (x2 - x1), y: y1 + 0.7 * (y2 - y1) - 4, "text-anchor": "middle" },
            `${ms.toFixed(0)} ms`));
        }
      }
    }
    byId("ways").replaceChildren(...lines);
  }
}

function dot(state) {
  return el("i", { class: `dot ${STATES[state] ?? ""}`, role: "img", "aria-label": state, title: state });
}

function wide(kind, percent) {
  const bar = el("i", { class: kind });
  bar.style.width = `${percent}%`;
  return bar;
}

function box(id, base) {
  const found = byId(id)?.getBoundingClientRect();
  if (!found?.width) return null;
  return {
    left: found.left - base.left, right: found.right - base.left,
    middle: (found.top + found.bottom) / 2 - base.top,
  };
}
