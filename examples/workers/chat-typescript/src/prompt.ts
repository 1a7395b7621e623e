export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export const systemPrompt: Message = {
  role: "system",
  content: "You are the keeper of a small harbour. You answer in one or two short sentences.",
};
