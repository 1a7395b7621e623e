"""A chat: POST {"messages": [...]} and the answer comes back as it is written."""

from http import HTTPMethod

from js import Object
from pyodide.ffi import to_js
from workers import Response, WorkerEntrypoint

MAX_TOKENS = 256


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method != HTTPMethod.POST:
            return Response('POST {"messages": [{"role": "user", "content": "…"}]}\n', status=405)
        try:
            asked = await request.json()
            messages = [{"role": "system", "content": self.env.SYSTEM}, *asked["messages"]]
        except (ValueError, KeyError, TypeError):
            return Response.from_json({"error": "the body is JSON with 'messages'"}, status=400)
        inputs = {"messages": messages, "stream": True, "max_tokens": MAX_TOKENS}
        stream = await self.env.AI.run(
            self.env.MODEL, to_js(inputs, dict_converter=Object.fromEntries)
        )
        return Response(stream, headers={"content-type": "text/event-stream"})
