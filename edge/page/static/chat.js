// The conversation. Each answer says where it was made and how fast, and leads to its story.

import { Refused, answer } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";

const MOST_TOKENS = 512; // a small model would go on for as long as it may
const HINT = "The edge hashes the beginning of your question, finds the region that holds it, and "
  + "streams the answer back. Ask twice, and the second time most of it is cached.";

export class Chat {
  constructor({ openStory, wantKey, lit }) {
    this.openStory = openStory;
    this.wantKey = wantKey;
    this.lit = lit;
    this.messages = [];
    this.running = null;
    this.talk = byId("talk");
    this.prompt = byId("prompt");
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("fresh").addEventListener("click", () => this.reset());
    byId("stop").addEventListener("click", () => this.running?.abort());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    this.reset();
  }

  reset() {
    this.running?.abort();
    this.messages = [];
    this.talk.replaceChildren(el("p", { class: "hint" }, HINT));
    this.prompt.focus({ preventScroll: true });
  }

  async send() {
    const content = this.prompt.value.trim();
    if (!content || this.running) return;
    if (!this.messages.length) this.talk.replaceChildren();
    const messages = this.messages;
    messages.push({ role: "user", content });
    this.talk.append(el("div", { class: "turn user" }, content));
    this.prompt.value = "";
    const text = el("span");
    const turn = el("div", { class: "turn assistant", "aria-busy": "true" }, text);
    this.talk.append(turn);
    this.show(true);
    this.running = new AbortController();
    try {
      const said = await this.follow(messages, text, turn);
      messages.push({ role: "assistant", content: said });
    } catch (error) {
      const unanswered = !text.textContent;
      if (unanswered) messages.pop(); // a question without any answer is asked anew
      else messages.push({ role: "assistant", content: text.textContent });
      this.failed(error, turn, unanswered ? content : "");
    } finally {
      turn.removeAttribute("aria-busy");
      this.running = null;
      this.show(false);
      this.scroll();
    }
  }

  async follow(messages, text, turn) {
    const started = performance.now();
    const told = { first: null, pieces: 0, usage: null, head: null };
    const body = { model: byId("model").value || "default", messages, max_tokens: MOST_TOKENS };
    for await (const event of answer(body, this.running.signal)) {
      if (event.head) { told.head = event.head; continue; }
      if (event.usage) told.usage = event.usage;
      const piece = event.choices?.[0]?.delta?.content;
      if (!piece) continue;
      told.first ??= performance.now() - started;
      told.pieces += 1;
      text.append(piece);
      this.scroll();
    }
    turn.append(this.facts(told, performance.now() - started));
    return text.textContent;
  }

  facts(told, total) {
    const head = (name) => told.head.get(name);
    const id = head("x-request-id");
    const nodes = [head("x-skerry-prefill"), head("x-skerry-decode")].filter(Boolean);
    const made = told.usage?.completion_tokens ?? told.pieces;
    const rate = told.first != null && total > told.first ? (1000 * (made - 1)) / (total - told.first) : null;
    const usage = told.usage;
    this.lit(id);
    return el("div", { class: "told" },
      el("span", {}, [head("x-skerry-region"), ...nodes].filter(Boolean).join(" → ")),
      el("span", {}, `first token ${seconds(told.first == null ? null : told.first / 1000)}`),
      rate && made > 1 ? el("span", {}, `${rate.toFixed(0)} tokens/s`) : null,
      usage ? el("span", {}, `${count(usage.prompt_tokens)} prompt, `
        + `${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} cached`) : null,
      id ? el("button", { type: "button", onclick: () => this.openStory(id) }, "where the time went") : null);
  }

  failed(error, turn, content) {
    if (error.name === "AbortError") {
      turn.append(el("div", { class: "told" }, "stopped"));
      return;
    }
    turn.classList.add("failed");
    turn.append(el("div", {}, error instanceof Refused ? error.message : "The edge cannot be reached."));
    if (!this.prompt.value) this.prompt.value = content; // to be asked again
    if (error.status !== 401) return;
    this.prompt.focus({ preventScroll: true });
    this.wantKey(error.message);
  }

  show(running) {
    const [shown, gone] = running ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
    shown.hidden = false;
    if (document.activeElement === gone) shown.focus(); // what is hidden loses it
    gone.hidden = true;
  }

  scroll() {
    this.talk.scrollTop = this.talk.scrollHeight;
  }
}
