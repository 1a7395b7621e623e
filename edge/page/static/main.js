// Puts the parts together: one poll a second while the page is seen, and the two dialogs.

import { Refused, ask, kept } from "./api.js";
import { Chat } from "./chat.js";
import { Figures } from "./charts.js";
import { byId, el, refill, tell } from "./dom.js";
import { Requests } from "./requests.js";
import { Snippets } from "./snippets.js";
import { World } from "./world.js";

const EVERY_MS = 1000;
const THEMES = ["", "light", "dark"];
const THEME_WORDS = ["as the system", "light", "dark"];

const world = new World();
const requests = new Requests({ lit: (row) => world.light(row) });
const chat = new Chat({
  openStory: (id) => requests.open(id),
  wantKey: (why) => wantKey(why),
  lit: (id) => latest(id),
});
const figures = new Figures(byId("hits"), byId("ttft"));
const snippets = new Snippets((button) => {
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

let asked = false; // for a key, once
let awaited = null; // the request whose path is to be lit

async function poll() {
  try {
    const page = await ask("/page/world", { operator: true });
    byId("trouble").hidden = true;
    shown(page);
    await pollRequests(page);
  } catch (error) {
    const refused = error instanceof Refused;
    trouble(refused ? error.message : "This edge does not answer; trying again every second.");
    if (error.status === 401 || error.status === 403) wantKey(error.message, { once: true });
  }
}

async function pollRequests(page) {
  try {
    const { rows } = await ask("/page/requests", { operator: true });
    requests.show(rows);
    figures.requests(rows);
    const row = awaited && rows.find((one) => one.id === awaited);
    if (row) { world.light(row); awaited = null; }
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    requests.unseen(page.near ? error.message
      : "The list of requests is the operator's: give the secret under Key.");
  }
}

function shown(page) {
  const place = page.place ? ` (${page.place})` : "";
  tell(byId("here"), `edge ${page.edge}${place}, version ${page.version}`);
  const names = page.models.map((model) => shortest(model));
  const before = byId("model").value;
  refill(byId("model"), page.models.map((model) => [model.id, model.ready]), () =>
    page.models.map((model) => el("option", { value: shortest(model) },
      `${model.id}${model.ready ? "" : " (not ready)"}`)));
  if (names.includes(before)) byId("model").value = before;
  snippets.with(byId("model").value, page.needs_key);
  world.show(page);
  figures.world(page.tokens);
}

const shortest = (model) => [model.id, ...model.aliases].reduce((a, b) => (b.length < a.length ? b : a));

function latest(id) {
  awaited = id;
}

function trouble(message) {
  tell(byId("trouble"), message);
  byId("trouble").hidden = false;
}

function wantKey(why, { once = false } = {}) {
  if (byId("key-dialog").open || (once && asked)) return;
  asked = true;
  byId("key-why").textContent = why ?? "";
  byId("key").value = kept.key;
  byId("secret").value = kept.secret;
  byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", () => wantKey(""));
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "keep") return;
  kept.keep(byId("key").value, byId("secret").value);
  poll();
});
byId("model").addEventListener("change", () => snippets.with(byId("model").value, snippets.key));

function theme(number) {
  const name = THEMES[number];
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  byId("theme").setAttribute("aria-label", `Colours: ${THEME_WORDS[number]}`);
  byId("theme").textContent = "◐○●"[number];
  localStorage.setItem("skerry-theme", name);
}
let chosen = Math.max(0, THEMES.indexOf(localStorage.getItem("skerry-theme") ?? ""));
theme(chosen);
byId("theme").addEventListener("click", () => {
  chosen = (chosen + 1) % THEMES.length;
  theme(chosen);
});

(async () => {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
  }
})();
