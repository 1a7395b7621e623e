"""Python Workers in their sandbox: real processes of bubblewrap, asked over their sockets."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable

import httpx
import pytest
from aiohttp import web

from core.config_workers import Workers
from core.errors import WorkerRefused
from edge.workers import process
from edge.workers.python import seccomp
from edge.workers.runtime import THREW_HEADER
from tests.edge.workers.python.running import MARK, TOKEN, running
from tests.servers import needed

HEAD = "from workers import WorkerEntrypoint, Response, Request, fetch, wait_until\n"


def worker(body: str, more: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return (
        f"{HEAD}{more}\nclass Default(WorkerEntrypoint):\n"
        "    async def fetch(self, request):\n"
        f"        path = request.url.split('/', 3)[3]\n{lines}\n"
    )


ALL = worker(
    """
if path == "hello":
    print("seen", request.method)
    return Response(f"{self.env.GREETING}, {request.headers['X-Name']}", status=201,
                    headers=[("set-cookie", "a=1"), ("set-cookie", "b=2")])
if path == "json":
    return Response.json({"got": await request.json(), "secret": self.env.PASSWORD})
if path == "stream":
    async def pieces():
        for number in range(3):
            yield f"data: {number}\\n\\n"
            await asyncio.sleep(0)
    return Response(pieces(), headers={"content-type": "text/event-stream"})
if path == "cut":
    async def pieces():
        yield "a"
        raise ValueError("half way")
    return Response(pieces())
if path == "boom":
    raise ValueError("no good")
if path == "dict":
    return {"a": 1}
if path == "none":
    return None
if path == "later":
    self.ctx.waitUntil(later(self.env))
    return Response("soon")
if path == "notes":
    notes = self.env.NOTES
    await notes.put("one", "1", {"metadata": {"kind": "number"}})
    await notes.put("two", to_js({"a": [1, 2]}) and '{"a": [1, 2]}', expirationTtl=60)
    listed = await notes.list(prefix="")
    pair = await notes.getWithMetadata("one")
    two = await notes.get("two", "json")
    both = await notes.get(["one", "three"])
    await notes.delete("one")
    return Response.json([
        await notes.get("one"), pair.value, pair.metadata.kind, two.a, both.to_py(),
        [one.name for one in listed.keys], listed.list_complete,
    ])
if path == "other":
    answer = await self.env.OTHER.fetch(Request("http://inner/x?y=1", method="POST", body="hi"))
    return Response.json(await answer.json())
if path == "files":
    return Response.json([sorted(os.listdir("/worker")), os.path.exists("/etc/passwd"),
                          os.getuid() == 0, sorted(os.environ),
                          [one for one in ("/", "/dev/shm", "/run/skerry", "/worker", "/skerry")
                           if os.access(one, os.W_OK)]])
if path == "operator":
    out = socket.socket(socket.AF_UNIX)
    out.connect("/run/skerry/out")
    out.sendall(b"GET /explain HTTP/1.1\\r\\nhost: edge\\r\\nx-skerry-to: edge\\r\\n"
                b"connection: close\\r\\n\\r\\n")
    return Response(b"".join(iter(lambda: out.recv(65536), b"")))
if path == "process":
    subprocess.run(["ls"])
if path == "fork":
    libc = ctypes.CDLL(None)
    if libc.fork() == 0:
        libc.sleep(60)
    return Response("forked")
if path == "kernel":
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(made):
        return errno.errorcode.get(ctypes.get_errno(), "?") if made == -1 else "done"
    def call(number, *given):
        ctypes.set_errno(0)
        return refused(libc.syscall(number, *given))
    thread = ctypes.c_ulong()
    idle = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    started = libc.pthread_create(ctypes.byref(thread), None, idle, None)
    libc.pthread_join(thread, None)
    ctypes.set_errno(0)
    return Response.json({
        "fork": refused(libc.fork()), "thread": started,
        "internet": refused(libc.socket(2, 1, 0)), "unix": refused(libc.socket(1, 1, 0)) == "done",
        **{str(number): call(number, 0, 0, 0) for number in await request.json()},
    })
if path == "network":
    socket.create_connection(("127.0.0.1", 1))
if path == "private":
    await fetch("http://127.0.0.1:1/")
if path == "turn":
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    return Response("done")
if path == "loop":
    while True:
        pass
if path == "memory":
    kept = []
    while True:
        kept.append(bytearray(1 << 20))
return Response("nothing", 404)
""",
    """import asyncio, ctypes, errno, os, socket, subprocess, time
from pyodide.ffi import to_js
async def later(env):
    await asyncio.sleep(0)
    await env.NOTES.put("later", "done")
    raise RuntimeError("too late to be an answer")
""",
)


async def until(holds: Callable[[], bool]) -> None:
    """What a process says is read beside what it answers."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_all_in_one_process() -> None:
    needed("bwrap")
    async with running(ALL) as around:
        http = around.http
        hello = await http.get("/hello", headers={"x-name": "Ada"})
        assert (hello.status_code, hello.text) == (201, "ahoy, Ada")
        assert hello.headers.get_list("set-cookie") == ["a=1", "b=2"]
        await until(lambda: bool(around.lines("log")))
        assert [line.message for line in around.lines("log")] == ["seen GET"]

        told = await http.post("/json", json={"a": [1]})
        assert told.json() == {"got": {"a": [1]}, "secret": "a-secret"}
        stream = await http.get("/stream")
        assert stream.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/cut")

        for path, name, words in (
            ("boom", "ValueError", "no good"),
            ("dict", "TypeError", "not a Response; return Response.from_json"),
            ("none", "TypeError", "fetch returned None, not a Response; is a return missing?"),
            ("process", "PermissionError", "starts no processes"),
            ("network", "PermissionError", "no network but fetch"),
            ("private", "OSError", "no address of the public internet"),
        ):
            failed = await http.get(f"/{path}")
            assert failed.status_code == 500
            assert failed.headers[THREW_HEADER] == MARK
            assert failed.json()["name"] == name
            assert words in failed.json()["message"]
        await until(lambda: any("/private" in str(line.run) for line in around.lines("run")))
        runs = [line.run for line in around.lines("run") if line.run is not None]
        (boom,) = (run.exceptions[0] for run in runs if run.url and run.url.endswith("/boom"))
        assert 'File "entry.py", line' in boom.stack
        assert "/edge/workers" not in boom.stack
        assert boom.message not in boom.stack.splitlines()[0], "said twice in `tail`"

        assert (await http.get("/notes")).json() == [
            None, "1", "number", [1, 2], {"one": "1", "three": None}, ["one", "two"], True,
        ]  # fmt: skip
        assert (await http.get("/other")).json() == {
            "path": "/x?y=1", "host": "inner", "body": "hi", "token": None,
        }  # fmt: skip
        assert (await http.get("/later")).text == "soon"
        await until(lambda: any("too late" in one.message for one in around.lines("error")))

        assert "edge: leads nowhere" in (await http.get("/operator")).text
        assert not around.asked, "a Worker asks its edge for answers of models alone"
        files, passwd, root, names, writable = (await http.get("/files")).json()
        assert (files, passwd, root, writable) == (["entry.py"], False, False, [])
        assert TOKEN not in str(names)
        assert set(names) <= {"HOME", "LC_CTYPE", "PWD", "PYTHONPATH", "TZ"}


async def test_what_fills_its_memory_is_ended_and_started_again() -> None:
    needed("bwrap")
    async with running(ALL) as around:
        with pytest.raises(httpx.RemoteProtocolError):
            await around.http.get("/memory")
        again = await around.http.get("/hello", headers={"x-name": "Ada"})
        assert again.status_code == 201
        assert any("it filled its memory" in line.message for line in around.lines("host"))


@pytest.mark.parametrize(
    ("top", "why"),
    [
        ("while True:\n    pass\n", "there is a loop at its top"),
        ("held = b'x' * 200_000_000\n", r"filled its memory at its top: .* the limit is 64 MB"),
        ("held = []\nwhile True:\n    held.append(b'x' * 1_000_000)\n", "filled its memory at its"),
    ],
)
@pytest.mark.parametrize("trusted", [False, True])
async def test_what_it_does_at_its_top_is_limited_as_well(
    top: str, why: str, trusted: bool
) -> None:
    if not trusted:
        needed("bwrap")
    with pytest.raises(WorkerRefused, match=why):
        async with running(top + worker("return Response('up')"), trusted=trusted):
            pass


async def test_turns_one_after_the_other_are_no_loop() -> None:
    """Each is short; all of them are longer than the limit of one."""
    async with running(ALL, limits=Workers(turn_s=1.5), trusted=True) as around:

        async def ask() -> list[str]:
            return [(await around.http.get("/turn")).text for _ in range(8)]

        one, other = await asyncio.gather(ask(), ask())
        assert one == other == ["done"] * 8
        assert around.unit.starts == 1


async def test_a_caller_that_leaves_takes_its_generation_along() -> None:
    left = asyncio.Event()

    async def run(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return answer

    edge = web.Application()
    edge.router.add_post("/v4/accounts/worker/ai/run/tiny", run)
    code = worker("""
answer = await self.env.AI.run("tiny", {"prompt": "Hi", "stream": True})
return Response(answer)
""")
    async with running(code, edge, trusted=True) as around:
        async with around.http.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"data: 1\n\n"
        async with asyncio.timeout(30):
            await left.wait()


async def test_the_kernel_refuses_processes_and_ways_out() -> None:
    needed("bwrap")
    machine = seccomp.MACHINES.get(platform.machine())
    if machine is None:
        pytest.skip(f"no filter is known for {platform.machine()}")
    async with running(ALL) as around:
        answer = await around.http.post("/kernel", json=sorted(machine.denied.values()))
        told = answer.json()
    assert (told.pop("fork"), told.pop("thread")) == ("EPERM", 0)
    assert (told.pop("internet"), told.pop("unix")) == ("EAFNOSUPPORT", True)
    assert told == {str(number): "EPERM" for number in machine.denied.values()}


async def test_what_forks_behind_our_back_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine for which we have no filter."""
    needed("bwrap")
    monkeypatch.setattr(process, "OTHERS_EACH", 1)
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    async with running(ALL) as around:
        assert (await around.http.get("/fork")).text == "forked"
        await until(
            lambda: any("it started process" in one.message for one in around.lines("host"))
        )
        again = await around.http.get("/hello", headers={"x-name": "Ada"})
        assert again.status_code == 201


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import numpy\n", "Python Workers have the standard library and their own files"),
        ("x = 1\n", "neither a class Default"),
        ("raise RuntimeError('not today')\n", "not today"),
        ("class Default: pass\n", "no class that is made from WorkerEntrypoint"),
    ],
)
async def test_what_does_not_start_says_why(code: str, words: str) -> None:
    with pytest.raises(WorkerRefused, match=words):
        async with running(code, trusted=True):
            pass


async def test_the_older_style_timers_and_the_model_without_a_sandbox() -> None:
    code = """
from workers import Response, handler
from js import Object
from pyodide.ffi import to_js

@handler
async def on_fetch(request, env):
    if request.url.endswith("/bad"):
        await env.AI.run("@cf/acme/tiny", {}, {"gatway": 1})
    inputs = to_js({"prompt": "Hi", "stream": request.url.endswith("/stream")},
                   dict_converter=Object.fromEntries)
    answer = await env.AI.run("@cf/acme/tiny", inputs, extraHeaders={"authorization": "no"})
    if request.url.endswith("/stream"):
        return Response(answer, headers={"content-type": "text/event-stream"})
    return Response(answer.response)

async def on_scheduled(controller, env, ctx):
    await env.NOTES.put("ticked", controller.cron)
"""

    async def run(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked["prompt"] == "Hi" and asked["stream"]:
            return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")
        return web.json_response({"success": True, "result": {"response": "ahoy"}})

    edge = web.Application()
    edge.router.add_post("/v4/accounts/worker/ai/run/@cf/acme/tiny", run)
    async with running(code, edge, trusted=True) as around:
        assert (await around.http.get("/")).text == "ahoy"
        path, headers, body = around.asked[-1]
        assert path == "/client/v4/accounts/worker/ai/run/@cf/acme/tiny"
        assert headers["x-skerry-worker"] == TOKEN
        assert "authorization" not in {name.lower() for name in headers}
        assert json.loads(body) == {"prompt": "Hi", "stream": False}
        assert (await around.http.get("/stream")).text == "data: [DONE]\n\n"
        assert "'gatway' is not supported" in (await around.http.get("/bad")).json()["message"]
        transport = httpx.AsyncHTTPTransport(uds=str(around.unit.control))
        async with httpx.AsyncClient(transport=transport, base_url="http://control") as control:
            due = {"cron": "* * * * *", "time": 1000}
            assert (await control.post("/scheduled", json=due)).json() == {"outcome": "ok"}
