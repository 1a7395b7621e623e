// The AI binding: what a Worker sees as env.AI, over the edge's own Workers AI interface.
// `edge` leads to the edge and says which Worker is asking; `cache` leads to the host's store.

const KNOWN = ["gateway", "extraHeaders", "returnRawResponse", "queueRequest", "rejectIfBusy",
  "signal", "prefix", "tags", "sessionOptions"];
const GATEWAY = ["id", "skipCache", "cacheTtl", "cacheKey", "collectLog", "metadata"];
const KEPT_BY_KEY_S = 300;
const MOST_TTL_S = 2592000;

export class InferenceUpstreamError extends Error {
  constructor(message, name = "InferenceUpstreamError") {
    super(message);
    this.name = name;
  }
}

class Ai {
  #edge;
  #cache;
  lastRequestId = null;
  aiGatewayLogId = null;

  constructor(env) {
    this.#edge = env.edge;
    this.#cache = env.cache;
  }

  async run(model, inputs, options = {}) {
    if (typeof model !== "string" || /(^|\/)\.\.?(\/|$)/.test(model)) {
      throw new TypeError("AI.run: the first argument is the name of a model");
    }
    if (inputs === null || typeof inputs !== "object") {
      throw new TypeError("AI.run: the inputs are an object");
    }
    options = options ?? {};
    refuseUnknown(options, KNOWN, "option");
    const plan = caching(options.gateway);
    const body = JSON.stringify(inputs);
    const key = plan && (plan.key ?? (await digest(`${model}\n${body}`)));
    let answer = key && (await this.#cached(key));
    if (!answer) {
      answer = await unwrapped(await this.#ask(model, inputs, body, options));
      this.lastRequestId = answer.headers.get("x-request-id");
      if (key && answer.ok) answer = this.#keep(key, plan.ttl, answer);
    }
    if (options.returnRawResponse) return answer;
    if (!answer.ok) throw await upstreamError(answer);
    const kind = answer.headers.get("content-type") ?? "";
    return kind.startsWith("application/json") ? await answer.json() : answer.body;
  }

  async models(query = {}) {
    const search = new URLSearchParams(query);
    const answer = await this.#edge.fetch(`http://edge/client/v4/accounts/worker/ai/models/search?${search}`);
    const { result } = await answer.json();
    return result;
  }

  gateway() {
    throw new TypeError("AI.gateway is not supported here; AI.run takes the option 'gateway'");
  }

  toMarkdown() {
    throw new TypeError("AI.toMarkdown is not supported here");
  }

  autorag() {
    throw new TypeError("AI.autorag is not supported here");
  }

  #ask(model, inputs, body, options) {
    const queued = options.queueRequest || inputs.request_id !== undefined;
    const path = model.split("/").map(encodeURIComponent).join("/").replaceAll("%40", "@");
    return this.#edge.fetch(
      `http://edge/client/v4/accounts/worker/ai/run/${path}${queued ? "?queueRequest=true" : ""}`,
      { method: "POST", body, headers: headersOf(options), signal: options.signal },
    );
  }

  async #cached(key) {
    const found = await this.#cache.fetch(`http://store/${encodeURIComponent(key)}?urlencoded=true`);
    if (found.status !== 200) return null;
    const headers = JSON.parse(found.headers.get("cf-kv-metadata"));
    return new Response(found.body, { headers: { ...headers, "cf-aig-cache-status": "HIT" } });
  }

  // The answer, which is kept once all of it has passed and was whole.
  #keep(key, ttl, answer) {
    const kind = answer.headers.get("content-type") ?? "application/json";
    const streamed = kind.startsWith("text/event-stream");
    const pieces = [];
    const put = async () => {
      const whole = await new Blob(pieces).arrayBuffer();
      const end = new TextDecoder().decode(whole.slice(-32));
      if (streamed && !end.includes("data: [DONE]")) return;
      await this.#cache.fetch(
        `http://store/${encodeURIComponent(key)}?urlencoded=true&expiration_ttl=${ttl}`,
        { method: "PUT", body: whole,
          headers: { "cf-kv-metadata": JSON.stringify({ "content-type": kind }) } },
      );
    };
    const through = new TransformStream({
      transform(piece, controller) {
        pieces.push(piece);
        controller.enqueue(piece);
      },
      flush: put,
    });
    const headers = new Headers(answer.headers);
    headers.set("cf-aig-cache-status", "MISS");
    return new Response(answer.body.pipeThrough(through), { status: answer.status, headers });
  }
}

function refuseUnknown(given, known, what) {
  for (const name of Object.keys(given)) {
    if (!known.includes(name)) {
      throw new TypeError(`AI.run: the ${what} '${name}' is not supported here; known: ${known.join(", ")}`);
    }
  }
}

// {key?, ttl} where the answer may come from the cache, else null. Without a time or a key of one's
// own nothing is cached: that is a setting of a gateway, and there is none here.
function caching(gateway) {
  if (!gateway) return null;
  refuseUnknown(gateway, GATEWAY, "gateway option");
  const { skipCache, cacheTtl, cacheKey } = gateway;
  if (skipCache || (cacheTtl === undefined && cacheKey === undefined)) return null;
  const ttl = cacheTtl ?? KEPT_BY_KEY_S;
  if (!Number.isInteger(ttl) || ttl < 60 || ttl > MOST_TTL_S) {
    throw new TypeError(`AI.run: gateway.cacheTtl is a number of seconds from 60 to ${MOST_TTL_S}`);
  }
  return { ttl, key: cacheKey };
}

async function digest(text) {
  const bytes = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(bytes)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function headersOf(options) {
  const headers = new Headers();
  const extra = { ...options.sessionOptions?.extraHeaders, ...options.extraHeaders };
  for (const [name, value] of Object.entries(extra)) {
    const low = name.toLowerCase();
    if (low !== "authorization" && !low.startsWith("x-skerry-")) headers.set(name, value);
  }
  headers.set("content-type", "application/json");
  if (options.rejectIfBusy) headers.set("x-skerry-reject-if-busy", "1");
  return headers;
}

// The edge's answer without Cloudflare's envelope, as the binding gives it.
async function unwrapped(answer) {
  const kind = answer.headers.get("content-type") ?? "";
  if (!kind.startsWith("application/json")) return answer;
  const envelope = await answer.json();
  const headers = new Headers(answer.headers);
  headers.delete("content-length");
  const [error] = envelope.errors ?? [];
  const inner = answer.ok ? envelope.result : {
    internalCode: error?.code, message: error?.message, description: error?.message,
    name: "InferenceUpstreamError",
  };
  return new Response(JSON.stringify(inner), { status: answer.status, headers });
}

async function upstreamError(answer) {
  const text = await answer.text();
  try {
    const { internalCode, description, name } = JSON.parse(text);
    return new InferenceUpstreamError(`${internalCode}: ${description}`, name);
  } catch {
    return new InferenceUpstreamError(text);
  }
}

export default function binding(env) {
  return new Ai(env);
}
