export default {
  async fetch(request: Request, env: any): Promise<Response> {
    const path = new URL(request.url).pathname;
    if (path === "/ai") {
      const said: unknown[] = [];
      const asked: any[] = [
        ["nope", { prompt: "x" }], ["tiny", { prompt: "x", bogus: 1 }],
        ["tiny", { prompt: "x" }, { bogus: 1 }],
        ["tiny", { prompt: "x" }, { gateway: { id: "g", retries: 1 } }],
        ["../../../../explain", { prompt: "x" }],
      ];
      for (const [model, inputs, options] of asked) {
        try { said.push(await env.AI.run(model, inputs, options)); }
        catch (error: any) { said.push(`${error.name}: ${error.message}`); }
      }
      const gateway = { id: "g", cacheTtl: 60 };
      for (const stream of [false, false, true, true]) {
        const raw = await env.AI.run("tiny", { prompt: env.SEED, stream }, { returnRawResponse: true, gateway });
        const text = await raw.text();
        said.push([raw.status, raw.headers.get("cf-aig-cache-status"), text.includes(stream ? "[DONE]" : env.SEED)]);
      }
      const queued = await env.AI.run("tiny", { requests: [{ prompt: "x" }] }, { queueRequest: true });
      said.push(queued.status);
      const polled = await env.AI.run("tiny", { request_id: queued.request_id });
      said.push(polled.status ?? "done");
      return Response.json(said);
    }
    if (path === "/kv") {
      await env.KV.put("a/b é", JSON.stringify({ x: 1 }), { expirationTtl: 60, metadata: { m: 1 } });
      await env.KV.put("bytes", new Uint8Array([0, 255]).buffer);
      let short = "";
      try { await env.KV.put("k", "v", { expirationTtl: 5 }); } catch (error) { short = String(error); }
      const stream = await env.KV.get("a/b é", "stream");
      const found = [
        await env.KV.get("a/b é"), await env.KV.get("a/b é", "json"),
        (await env.KV.getWithMetadata("a/b é")).metadata,
        [...new Uint8Array(await env.KV.get("bytes", "arrayBuffer"))], await new Response(stream).text(),
        (await env.KV.list({ prefix: "a" })).keys.map((key: any) => [key.name, key.metadata]),
        await env.KV.get("none"), [...await env.KV.get(["bytes!", "a/b é"], "json")], short,
      ];
      const page = await env.KV.list({ limit: 1 });
      found.push([page.list_complete, (await env.KV.list({ limit: 1, cursor: page.cursor })).keys[0].name]);
      await env.KV.delete("a/b é");
      found.push(await env.KV.get("a/b é"));
      return Response.json(found);
    }
    if (path === "/friend") return env.FRIEND.fetch("http://friend/from-a-friend");
    if (path === "/echo") return new Response(request.body, { headers: [["set-cookie", "a=1"], ["set-cookie", "b=2"]] });
    return Response.json({ path, vars: [env.TEXT, env.TREE, env.SECRET ?? null], cf: (request as any).cf,
      ip: request.headers.get("cf-connecting-ip"), ours: [...request.headers.keys()].filter((k) => k.startsWith("x-skerry")) });
  },
  async scheduled(event: any, env: any) { await env.KV.put("cron", `${event.cron} ${event.scheduledTime}`); },
};
