// Stands before a Worker: what it throws becomes an answer that the edge can tell from its own.

export default {
  async fetch(request, env) {
    try {
      return await env.USER.fetch(request);
    } catch (error) {
      const what = { name: error?.name ?? "Error", message: error?.message ?? String(error) };
      return new Response(JSON.stringify(what), {
        status: 500,
        headers: { "x-skerry-worker-threw": env.MARK },
      });
    }
  },
};
