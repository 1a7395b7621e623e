// The edge that served this page: its pages as JSON, and one streamed answer.

const KEY = "skerry-key";
const SECRET = "skerry-secret";

export const kept = {
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  get secret() { return sessionStorage.getItem(SECRET) ?? ""; },
  keep(key, secret) {
    sessionStorage.setItem(KEY, key.trim());
    sessionStorage.setItem(SECRET, secret.trim());
  },
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  const all = { ...more };
  if (kept.key) all.authorization = `Bearer ${kept.key}`;
  return all;
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch { /* not JSON: the status line has to do */ }
  return new Refused(response.status, message);
}

export async function ask(path, { operator = false } = {}) {
  const more = operator && kept.secret ? { "x-skerry-secret": kept.secret } : {};
  const response = await fetch(path, { headers: headers(more), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Yields {head: Headers} first, then each parsed event. Ends at [DONE]; throws Refused for an
// error before or inside the stream, and for a stream that stops without its end.
export async function* answer(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  yield { head: response.headers };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the answer was cut off");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      const parsed = JSON.parse(line.slice(6));
      if (parsed.error) throw new Refused(0, parsed.error.message);
      yield parsed;
    }
  }
}
