/**
 * A conversation with a model, streamed.
 *
 *   curl -N -d '{"messages": [{"role": "user", "content": "Name a harbour."}]}' .../w/chat/
 *
 * The whole conversation comes with each request, its beginning unchanged: that is what lets the
 * platform send it to the region that has read it already.
 */
import { systemPrompt, type Message } from "./prompt";

interface Env {
  AI: { run(model: string, inputs: object, options?: object): Promise<ReadableStream> };
  MODEL: string;
}

export default {
  async fetch(request: Request, env: Env): Promise<Response> {
    if (request.method !== "POST") {
      return new Response("POST {messages} to chat\n", { status: 405, headers: { allow: "POST" } });
    }
    let messages: Message[];
    try {
      ({ messages } = (await request.json()) as { messages: Message[] });
    } catch {
      return Response.json({ error: "the body is no JSON" }, { status: 400 });
    }
    if (!Array.isArray(messages) || messages.length === 0) {
      return Response.json({ error: "'messages' is a list of messages" }, { status: 400 });
    }
    const stream = await env.AI.run(env.MODEL, {
      messages: [systemPrompt, ...messages],
      max_tokens: 256,
      stream: true,
    });
    return new Response(stream, {
      headers: { "content-type": "text/event-stream", "cache-control": "no-cache" },
    });
  },
};
