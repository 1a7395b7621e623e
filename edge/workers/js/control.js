// What the host asks of a Worker's process: is it alive, and run what is due.

export default {
  async fetch(request, env) {
    if (new URL(request.url).pathname !== "/scheduled") return new Response("ok");
    const { cron, time } = await request.json();
    return Response.json(await env.USER.scheduled({ cron, scheduledTime: new Date(time) }));
  },
};
