export default {
  async fetch(request: Request, env: any, ctx: any): Promise<Response> {
    if (new URL(request.url).pathname === "/ai") {
      const prompt = "word ".repeat(1500);
      return new Response(await env.AI.run("tiny", { prompt, stream: true, max_tokens: 3000 }));
    }
    const { readable, writable } = new TransformStream();
    const writer = writable.getWriter();
    ctx.waitUntil((async () => {
      for (let i = 0; i < 8; i++) {
        await writer.write(new TextEncoder().encode(`${i} `));
        await new Promise((done) => setTimeout(done, 60));
      }
      await writer.close();
    })());
    return new Response(readable);
  },
};
