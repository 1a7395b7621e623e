/**
 * Send a text, get two sentences.
 *
 *   curl --data-binary @harbour.txt .../w/summariser/
 *
 * The text's digest is the key under which its summary is kept for a day. `x-summary: kept` says
 * that no model was asked.
 */
interface Kept {
  summary: string;
  tokens: number;
}

interface Kv {
  get(key: string, type: "json"): Promise<Kept | null>;
  put(key: string, value: string, options?: object): Promise<void>;
  list(options?: object): Promise<{ keys: { name: string }[]; list_complete: boolean }>;
}

interface Env {
  AI: { run(model: string, inputs: object): Promise<{ response: string; usage: { completion_tokens: number } }> };
  SUMMARIES: Kv;
  MODEL: string;
}

const DAY_S = 86_400;
const MOST_CHARACTERS = 8_000;

export default {
  async fetch(request: Request, env: Env): Promise<Response> {
    if (request.method !== "POST") {
      return new Response("POST a text\n", { status: 405, headers: { allow: "POST" } });
    }
    const text = (await request.text()).trim();
    if (text === "" || text.length > MOST_CHARACTERS) {
      return new Response(`a text has 1 to ${MOST_CHARACTERS} characters\n`, { status: 400 });
    }
    const key = await digest(text);
    const kept = await env.SUMMARIES.get(key, "json");
    if (kept !== null) {
      return Response.json(kept, { headers: { "x-summary": "kept" } });
    }
    const answer = await env.AI.run(env.MODEL, {
      messages: [
        { role: "system", content: "Summarise what you are given in two sentences." },
        { role: "user", content: text },
      ],
      max_tokens: 120,
      temperature: 0,
    });
    const made: Kept = { summary: answer.response, tokens: answer.usage.completion_tokens };
    await env.SUMMARIES.put(key, JSON.stringify(made), {
      expirationTtl: DAY_S,
      metadata: { characters: text.length },
    });
    return Response.json(made, { headers: { "x-summary": "made" } });
  },

  async scheduled(_event: object, env: Env): Promise<void> {
    const { keys, list_complete: all } = await env.SUMMARIES.list();
    console.log(`${keys.length}${all ? "" : " or more"} summaries are kept`);
  },
};

async function digest(text: string): Promise<string> {
  const bytes = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(bytes)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
