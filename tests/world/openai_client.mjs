// The official client in JavaScript, unmodified: one line of JSON that says what it saw.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const schema = {
  type: "object",
  properties: { kind: { enum: ["boat", "é"] } },
  required: ["kind"],
  additionalProperties: false,
};
const said = {};

const whole = await client.chat.completions.create({
  model, messages: question, temperature: 0, max_tokens: 12,
});
said.whole = whole.choices[0].message.content;

said.streamed = "";
const stream = await client.chat.completions.create({
  model, messages: question, temperature: 0, max_tokens: 12, stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  said.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) said.tokens = chunk.usage.completion_tokens;
}

const asked = { model, messages: question, tools, temperature: 0, max_tokens: 80 };
const forced = await client.chat.completions.create({ ...asked, tool_choice: "required" });
said.forced = forced.choices[0].message.tool_calls[0].function;
const joined = await client.chat.completions.stream({ ...asked, tool_choice: "required" });
said.joined = (await joined.finalChatCompletion()).choices[0].message.tool_calls[0].function;

// A whole loop: the client calls the function and sends its result back.
const runner = client.chat.completions.runTools({
  ...asked,
  max_tokens: 200,
  tool_choice: { type: "function", function: { name: "get_weather" } },
  tools: [{
    type: "function",
    function: {
      name: "get_weather", parameters, parse: JSON.parse,
      function: (given) => { said.called = given; return "Sunny, 18 degrees"; },
    },
  }],
});
await runner.done();
said.roles = runner.messages.map((message) => message.role);

const form = { type: "json_schema", json_schema: { name: "kind", schema } };
const document = await client.chat.completions.create({
  model, messages: question, temperature: 1.5, seed: 1, max_tokens: 40, response_format: form,
});
said.document = JSON.parse(document.choices[0].message.content);
try {
  await client.chat.completions.create({
    model, messages: question,
    response_format: { type: "json_schema", json_schema: { name: "n", schema: { not: {} } } },
  });
} catch (error) {
  said.refused = [error.status, error.code, error.message];
}
said.models = [];
for await (const one of client.models.list()) said.models.push(one.id);
console.log(JSON.stringify(said));
