const messages = [];
const output = document.querySelector("output");

document.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { question } = event.target.elements;
  messages.push({ role: "user", content: question.value });
  question.value = "";
  output.textContent = "";
  const answer = await fetch("/api/chat", { method: "POST", body: JSON.stringify({ messages }) });
  let rest = "";
  for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data: {"))) {
      output.textContent += JSON.parse(line.slice(6)).response;
    }
  }
  messages.push({ role: "assistant", content: output.textContent });
});
