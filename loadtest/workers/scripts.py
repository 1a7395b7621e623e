"""The Workers that are measured, as folders that `skerry worker deploy` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ASKS = """
export default {
  async fetch(request: Request, env: any): Promise<Response> {
    return Response.json(await env.AI.run("double", await request.json()));
  },
};
"""
_ASKS_PYTHON = """
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response.from_json(await self.env.AI.run("double", await request.json()))
"""
_SAYS = "export default { fetch: () => new Response('well') };\n"
_SAYS_PYTHON = """
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("well")
"""
_LOOPS = "export default { fetch() { for (;;); } };\n"


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    file: str
    code: str
    settings: Mapping[str, object]


_AI = {"ai": {"binding": "AI"}}
_FLAGS = {"compatibility_flags": ["python_workers"]}
SCRIPTS = (
    Script("asks", "index.ts", _ASKS, _AI),
    Script("says", "index.ts", _SAYS, {}),
)
LOOPS = Script("loops", "index.ts", _LOOPS, {})
PYTHON = (
    Script("asks-python", "entry.py", _ASKS_PYTHON, {**_AI, **_FLAGS}),
    Script("says-python", "entry.py", _SAYS_PYTHON, _FLAGS),
)


def write(script: Script, folder: Path) -> Path:
    """Its folder."""
    here = folder / script.name
    here.mkdir(exist_ok=True)
    (here / script.file).write_text(script.code, encoding="utf-8")
    wrangler = {
        "name": script.name,
        "main": script.file,
        "compatibility_date": "2025-10-08",
        **script.settings,
    }
    (here / "wrangler.json").write_text(json.dumps(wrangler), encoding="utf-8")
    return here
