// The same call in four forms, with this edge's address and the chosen model.

import { byId, el } from "./dom.js";

const FORMS = {
  curl: (base, model, key) => `curl -N ${base}/v1/chat/completions \\
${key ? '  -H "Authorization: Bearer $SKERRY_KEY" \\\n' : ""}  -H "Content-Type: application/json" \\
  -d '{"model": "${model}", "stream": true,
       "messages": [{"role": "user", "content": "What is a skerry?"}]}'`,
  Python: (base, model, key) => `${key ? "import os\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${key ? 'os.environ["SKERRY_KEY"]' : '"none"'})
stream = client.chat.completions.create(
    model="${model}",
    messages=[{"role": "user", "content": "What is a skerry?"}],
    stream=True,
)
for event in stream:
    print(event.choices[0].delta.content or "", end="", flush=True)`,
  JavaScript: (base, model, key) => `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${base}/v1", apiKey: ${key ? "process.env.SKERRY_KEY" : '"none"'} });
const stream = await client.chat.completions.create({
  model: "${model}",
  messages: [{ role: "user", content: "What is a skerry?" }],
  stream: true,
});
for await (const event of stream) process.stdout.write(event.choices[0]?.delta?.content ?? "");`,
  Worker: (base, model) => `// worker.ts, with ai = { binding = "AI" } in wrangler.toml; then: skerry worker deploy
export default {
  async fetch(request: Request, env: { AI: Ai }): Promise<Response> {
    const stream = await env.AI.run("${model}", {
      messages: [{ role: "user", content: "What is a skerry?" }],
      stream: true,
    });
    return new Response(stream, { headers: { "content-type": "text/event-stream" } });
  },
};`,
};

export class Snippets {
  constructor(copied) {
    this.chosen = "curl";
    this.model = "default";
    this.key = false;
    const names = Object.keys(FORMS);
    this.tabs = names.map((name) => el("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "snippet",
      onclick: () => this.choose(name),
    }, name));
    byId("tabs").append(...this.tabs);
    byId("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = (names.indexOf(this.chosen) + step + names.length) % names.length;
      this.choose(names[next]);
      this.tabs[next].focus();
    });
    byId("copy").addEventListener("click", async () => {
      await navigator.clipboard.writeText(byId("code").textContent);
      copied(byId("copy"));
    });
    this.choose("curl");
  }

  with(model, key) {
    if (model === this.model && key === this.key) return;
    [this.model, this.key] = [model, key];
    this.choose(this.chosen);
  }

  choose(name) {
    this.chosen = name;
    for (const tab of this.tabs) {
      const on = tab.textContent === name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    }
    byId("snippet").setAttribute("aria-labelledby", `tab-${name}`);
    byId("code").textContent = FORMS[name](location.origin, this.model, this.key);
  }
}
