export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Env {
  AI: { run(model: string, inputs: object, options?: object): Promise<Response> };
  ASSETS: { fetch(request: Request): Promise<Response> };
}
