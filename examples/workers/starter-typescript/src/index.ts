import type { ChatMessage, Env } from "./types";

const MODEL_ID = "@cf/huggingfacetb/smollm2-135m-instruct";
const SYSTEM_PROMPT = "You are a helpful assistant. Your answers are short and correct.";

export default {
  async fetch(request: Request, env: Env, _ctx: unknown): Promise<Response> {
    const url = new URL(request.url);
    if (url.pathname === "/" || !url.pathname.startsWith("/api/")) {
      return env.ASSETS.fetch(request);
    }
    if (url.pathname === "/api/chat") {
      return request.method === "POST"
        ? chat(request, env)
        : new Response("Method not allowed", { status: 405 });
    }
    return new Response("Not found", { status: 404 });
  },
};

async function chat(request: Request, env: Env): Promise<Response> {
  try {
    const { messages = [], stream = true } = (await request.json()) as {
      messages?: ChatMessage[];
      stream?: boolean;
    };
    if (!messages.some((message) => message.role === "system")) {
      messages.unshift({ role: "system", content: SYSTEM_PROMPT });
    }
    const response = await env.AI.run(
      MODEL_ID,
      { messages, max_tokens: 256, stream },
      { returnRawResponse: true },
    );
    return response;
  } catch (error) {
    console.error("chat failed:", error);
    return Response.json({ error: "the chat failed" }, { status: 500 });
  }
}
