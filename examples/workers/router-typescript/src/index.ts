/**
 * OpenAI's chat completions, for whichever model fits the question.
 *
 * Long conversations and those that bring tools go to the thorough model, others to the quick one;
 * when that one has no room it is not waited for: the other one is asked. `x-model` says who it was.
 */
interface Message {
  role: string;
  content: string;
}

interface Question {
  messages: Message[];
  tools?: unknown[];
  stream?: boolean;
}

interface Env {
  AI: { run(model: string, inputs: object, options: object): Promise<Response> };
  MODELS: { quick: string; thorough: string };
  LONG: number;
}

export default {
  async fetch(request: Request, env: Env): Promise<Response> {
    if (request.method !== "POST") {
      return new Response("POST {messages} to ask\n", { status: 405, headers: { allow: "POST" } });
    }
    const question = (await request.json()) as Question;
    const [first, second] = candidates(question, env);
    const { messages, tools, stream } = question;
    const inputs = { messages, tools, stream, max_tokens: 256 };
    const raw = { returnRawResponse: true };
    let model = first;
    let answer = await env.AI.run(first, inputs, { ...raw, rejectIfBusy: true });
    if (answer.status === 429) {
      model = second;
      answer = await env.AI.run(second, inputs, raw);
    }
    const headers = new Headers(answer.headers);
    headers.set("x-model", model);
    return new Response(answer.body, { status: answer.status, headers });
  },
};

function candidates({ messages, tools }: Question, env: Env): [string, string] {
  const { quick, thorough } = env.MODELS;
  const characters = messages.reduce((sum, message) => sum + message.content.length, 0);
  const hard = characters > env.LONG || (tools?.length ?? 0) > 0;
  return hard ? [thorough, quick] : [quick, thorough];
}
