"""Workers in a running world: deployed by the command line's own functions, asked by callers.

workerd is Cloudflare's own; where npm cannot install it these tests are left out and say so.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from core.errors import ConfigError
from core.usage import UsageReader
from deploy.launcher import LocalWorld
from deploy.worker import act
from deploy.worker.fleet import Admin, Fleet, FleetError, fleet_of
from edge.workers import tools
from edge.workers.python.runtime import sandbox
from tests.edge.workers.doubles import LOOPED
from tests.world.faults import until
from tests.world.scripted import streaming

pytestmark = [pytest.mark.world]

EXAMPLES = Path(__file__).parents[2] / "examples" / "workers"
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


@pytest.fixture(scope="session")
def programs() -> None:
    if not tools.installed() and shutil.which("npm") is None:
        pytest.skip("npm is not installed, and workerd comes from it")
    try:
        tools.install(lambda _: None)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def deployed(world: LocalWorld, programs: None) -> Iterator[Callable[[Path], str]]:
    """Deploys a folder everywhere; what was deployed is gone afterwards."""
    names: list[str] = []

    def deploy(folder: Path) -> str:
        act.deploy(folder, None, world.world, "")
        with fleet_of(world.world) as fleet:
            present = {row.name for _, page in fleet.rows() for row in page.workers}
        names[:] = [*names, *sorted(present - set(names))]
        return names[-1]

    yield deploy
    with fleet_of(world.world) as fleet:
        for name in reversed(names):
            if any(row.name == name for _, page in fleet.rows() for row in page.workers):
                fleet.delete(name)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=60) as client:
        yield client


def project(folder: Path, code: str, **settings: object) -> Path:
    """A folder with a Worker of one file."""
    folder.mkdir(exist_ok=True)
    (folder / "index.ts").write_text(code, encoding="utf-8")
    wrangler = {"main": "index.ts", "compatibility_date": "2025-10-08", **settings}
    (folder / "wrangler.json").write_text(json.dumps(wrangler), encoding="utf-8")
    return folder


def streamed(world: LocalWorld, name: str) -> tuple[list[str], int]:
    """The events of an answer that came as it was made, and for which time it was asked: where
    everybody is late much of one may come at once."""
    body: dict[str, object] = {"messages": [{"role": "user", "content": "a harbour"}]}
    for asked in range(1, 6):
        with streaming(world.edges["ams"], body, f"/w/{name}/") as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            pieces = [chunk for chunk in response.iter_raw() if chunk]
        if len(pieces) > 5:
            return b"".join(pieces).decode().split("\n\n"), asked
    raise AssertionError("no answer of five came as it was made")


def test_the_chat_example_streams_and_is_counted(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client
) -> None:
    name = deployed(EXAMPLES / "chat-typescript")
    assert name == "chat"
    events, times = streamed(world, "chat")
    data = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
    text = "".join(one["response"] for one in data)
    assert "a harbour" in text
    assert "data: [DONE]" in events
    for log in world.logs.iterdir():
        assert "a harbour" not in log.read_text(), "what was asked is in no log"
    usage = data[-1]["usage"]
    records = UsageReader().read(world.world.state / "usage")
    mine = [one for one in records if one.worker == "chat"]
    assert [(one.prompt, one.completion, one.tenant, one.dialect) for one in mine] == [
        (usage["prompt_tokens"], usage["completion_tokens"], "anonymous", "run")
    ] * times
    by_host = client.get(world.edges["nyc"], headers={"host": "chat.localhost:8787"})
    assert (by_host.status_code, by_host.text) == (405, "POST {messages} to chat\n")
    assert client.get(f"{world.edges['ams']}/w/chat").status_code == 308


def test_the_chat_example_in_python(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client
) -> None:
    if sandbox() is None:
        pytest.skip("bubblewrap is not installed, and Python Workers run in it")
    assert deployed(EXAMPLES / "chat-python") == "chat-python"
    assert streamed(world, "chat-python")[0][-2:] == ["data: [DONE]", ""]
    assert client.get(f"{world.edges['ams']}/w/chat-python/").status_code == 405


def test_the_summariser_keeps_what_it_made(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client
) -> None:
    deployed(EXAMPLES / "summariser-typescript")
    text = f"Boats lie in the harbour at {time.time()}."
    first = client.post(f"{world.edges['ams']}/w/summariser/", content=text)
    again = client.post(f"{world.edges['nyc']}/w/summariser/", content=text)
    assert first.headers["x-summary"] == "made"
    assert again.headers["x-summary"] == "kept", "edges of one state folder share their store"
    assert again.json() == first.json()
    assert text in first.json()["summary"]
    empty = client.post(f"{world.edges['ams']}/w/summariser/", content=" ")
    assert empty.status_code == 400


def test_the_router_says_whom_it_asked(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client
) -> None:
    deployed(EXAMPLES / "router-typescript")
    body = {"messages": [{"role": "user", "content": "quick one"}]}
    answer = client.post(f"{world.edges['ams']}/w/router/", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-model"] == MODEL
    assert "quick one" in answer.json()["response"]


def test_a_worker_in_the_shape_of_cloudflares_starter(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client
) -> None:
    """Static files, a raw response, and a stream of it."""
    deployed(EXAMPLES / "starter-typescript")
    host = {"host": "starter.localhost"}
    edge = world.edges["ams"]
    page = client.get(edge, headers=host)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "A chat at the edge" in page.text
    assert "content-security-policy" not in page.headers
    script = client.get(f"{edge}/chat.js", headers=host)
    assert "javascript" in script.headers["content-type"]
    body = {"messages": [{"role": "user", "content": "boats"}], "stream": False}
    whole = client.post(f"{edge}/api/chat", headers=host, json=body)
    assert "boats" in whole.json()["response"]
    streamed = client.post(f"{edge}/api/chat", headers=host, json={**body, "stream": True})
    assert streamed.text.rstrip().endswith("data: [DONE]")
    shared = client.get(f"{edge}/w/starter/")
    assert shared.headers["content-security-policy"].startswith("sandbox"), "no page of ours"


BINDINGS = Path(__file__).with_name("worker_bindings.ts").read_text("utf-8")


def test_bindings_as_cloudflare_documents_them(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client, tmp_path: Path
) -> None:
    deployed(
        project(
            tmp_path / "friend",
            "export default { fetch: (r) => new Response(new URL(r.url).pathname) }",
            name="friend",
        )
    )
    seed = f"seed{time.time_ns()}"
    deployed(
        project(
            tmp_path / "bound", BINDINGS, name="bound", ai={"binding": "AI"},
            kv_namespaces=[{"binding": "KV", "id": seed}],
            services=[{"binding": "FRIEND", "service": "friend"}],
            vars={"TEXT": "a \"b\" é\n", "TREE": {"a": [1, None]}, "SEED": seed},
            routes=["*.shop.localhost/cart/*"],
        )
    )  # fmt: skip
    base = f"{world.edges['ams']}/w/bound"
    act.set_secret("bound", "SECRET", "s3cret", world.world)
    plain = client.get(f"{base}/x%2Fy", headers={"x-skerry-worker": "forged"}).json()
    assert plain["path"] == "/x%2Fy"
    assert plain["vars"] == ['a "b" é\n', {"a": [1, None]}, "s3cret"]
    assert (plain["cf"]["edge"], plain["ip"], plain["ours"]) == ("ams", "127.0.0.1", [])
    routed = client.get(f"{world.edges['nyc']}/cart/1", headers={"host": "eu.shop.localhost"})
    assert routed.json()["path"] == "/cart/1"
    assert client.get(f"{base}/friend").text == "/from-a-friend"
    echo = client.post(f"{base}/echo", content=b"\x00\xff" * 50_000)
    assert echo.content == b"\x00\xff" * 50_000
    assert echo.headers.get_list("set-cookie") == ["a=1", "b=2"]

    kv = client.get(f"{base}/kv").json()
    assert kv == [
        '{"x":1}', {"x": 1}, {"m": 1}, [0, 255], '{"x":1}', [["a/b é", {"m": 1}]], None,
        [["bytes!", None], ["a/b é", {"x": 1}]],
        "Error: KV PUT failed: 400 Invalid expiration_ttl of 5. Expiration TTL must be at least"
        " 60.",
        [False, "bytes"], None,
    ]  # fmt: skip

    ai = client.get(f"{base}/ai").json()
    assert ai[0] == (
        "InferenceUpstreamError: 5007: The model 'nope' does not exist; GET /v1/models lists those"
        " that do."
    )
    assert ai[1].startswith("InferenceUpstreamError: 8001: ")
    assert "bogus" in ai[1]
    assert ai[2].startswith("TypeError: AI.run: the option 'bogus' is not supported here")
    assert ai[3].startswith("TypeError: AI.run: the gateway option 'retries'")
    assert ai[4].startswith("TypeError: AI.run: the first argument is the name of a model")
    assert ai[5:9] == [[200, "MISS", True], [200, "HIT", True]] * 2
    assert ai[9] == "queued"
    assert ai[10] in ("queued", "running", "done")
    records = UsageReader().read(world.world.state / "usage")
    asked = [one for one in records if one.worker == "bound" and one.dialect == "run"]
    assert len(asked) == 2, "what came out of the cache cost nothing"
    assert until(lambda: _queued(world)), (
        "and what waited in the queue is counted as the Worker's too"
    )


FAILS = Path(__file__).with_name("worker_fails.ts").read_text("utf-8")


def _queued(world: LocalWorld) -> bool:
    records = UsageReader().read(world.world.state / "usage")
    return any(one.worker == "bound" and one.dialect != "run" for one in records)


def test_what_fails_says_so_and_hurts_nobody_else(
    world: LocalWorld,
    deployed: Callable[[Path], str],
    client: httpx.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from deploy.worker.tail import tail

    def there(name: str, **settings: object) -> None:
        folder = project(tmp_path / name, FAILS, name=name, **settings)
        (folder / "deep.ts").write_text(
            '// one\n\nexport function deep() {\n  throw new Error("private words");\n}\n'
        )
        deployed(folder)

    def told(path: str, name: str = "fails") -> str:
        answer = client.get(f"{world.edges['ams']}/w/{name}{path}")
        assert answer.status_code == 500, answer.text
        error = answer.json()["error"]
        assert error["code"] == "worker_failed"
        assert f"'{name}'" in error["message"]
        assert f"skerry worker tail {name}" in error["message"]
        message: str = error["message"]
        return message

    def tailed(name: str) -> str:
        capsys.readouterr()
        tail(world.world, name, lines=1000, follow=False, as_json=False)
        return capsys.readouterr().out

    there("fails", limits={"cpu_ms": 1000})
    base = f"{world.edges['ams']}/w/fails"

    thrown = told("/throw")
    assert "threw" in thrown
    assert "private" not in thrown
    assert "no Response" in told("/wrong")
    assert "can never answer" in told("/never")
    assert client.get(f"{base}/flood").text == "well"
    assert "ended while it answered" in told("/loop")
    assert client.get(f"{base}/").text == "well", "it was started again"
    for _ in range(4):  # a second is over too soon on a busy machine; each further rest is longer
        rests = client.get(f"{base}/")
        capsys.readouterr()
        act.listing(world.world)
        if rests.status_code == 503 and "rests for" in capsys.readouterr().out:
            break
        assert until(lambda: client.get(f"{base}/").text == "well")
        told("/loop")
    else:
        pytest.fail("who was ended twice in a row does not rest")
    assert "'fails' rests: it was ended" in rests.json()["error"]["message"]
    assert int(rests.headers["retry-after"]) >= 1
    assert until(lambda: client.get(f"{base}/").text == "well"), "it has room again"
    lines = tailed("fails")
    assert "Error: private words" in lines
    assert "at deep (deep.ts:4:" in lines, "places are those of the sources"
    assert LOOPED.search(lines)
    assert "says too much at once" in lines

    there("fills")  # of its own: one that may hold its thread for 1 s could be ended for that
    assert re.search("filled its memory|ended while it answered", told("/memory", "fills"))
    full = re.compile("filled its memory|allocation failed")
    assert until(lambda: full.search(tailed("fills")) is not None)
    log = (world.logs / "ams.log").read_text()
    assert "private words" not in log


def test_a_deploy_is_everywhere_or_nowhere(
    world: LocalWorld,
    deployed: Callable[[Path], str],
    client: httpx.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def says(text: str) -> str:
        return f"export default {{ fetch: () => new Response({text!r}) }}"

    def heard() -> list[str]:
        return [client.get(f"{url}/w/twice/").text for url in world.edges.values()]

    folder = tmp_path / "twice"
    deployed(project(folder, says("one"), name="twice", routes=["twice.localhost/a/*"]))
    assert heard() == ["one", "one"]
    deployed(project(folder, says("two"), name="twice", routes=["twice.localhost/a/*"]))
    assert heard() == ["two", "two"]

    wrong: list[tuple[str, dict[str, object], str]] = [
        ("export default { fetch( }", {}, "does not build"),
        ("const x = missing.thing; export default {}", {}, "missing is not defined"),
        (says("x"), {"services": [{"binding": "S", "service": "nobody"}]}, "'nobody', which is"),
        (says("x"), {"routes": ["127.0.0.1/*"]}, "the edge itself"),
        (says("x"), {"routes": ["example.com/*"]}, "workers.zones"),
        (says("x"), {"triggers": {"crons": ["61 * * * *"]}}, "'61' is not from 0 to 59"),
    ]
    for code, settings, why in wrong:
        with pytest.raises((ConfigError, FleetError), match=why):
            act.deploy(project(folder, code, name="twice", **settings), None, world.world, "")
    rival = project(tmp_path / "rival", says("r"), name="rival", routes=["twice.localhost/a/*"])
    with pytest.raises(FleetError, match="belongs to the Worker 'twice'"):
        act.deploy(rival, None, world.world, "")
    with pytest.raises(FleetError, match="no tenant is named 'nobody'"):
        act.deploy(folder, None, world.world, "nobody")
    assert heard() == ["two", "two"], "nothing of this changed anything"

    act.rollback("twice", None, world.world)
    assert heard() == ["one", "one"]
    act.versions("twice", world.world)
    act.listing(world.world)
    shown = capsys.readouterr().out
    assert shown.count("rollback") == 1
    assert "twice.localhost/a/*" in shown
    act.delete("twice", world.world)
    assert client.get(f"{world.edges['ams']}/w/twice/").status_code == 404


SLOW = Path(__file__).with_name("worker_slow.ts").read_text("utf-8")


def test_a_stream_outlives_a_deploy_and_ends_with_its_caller(
    world: LocalWorld, deployed: Callable[[Path], str], client: httpx.Client, tmp_path: Path
) -> None:
    folder = project(tmp_path / "slow", SLOW, name="slow", ai={"binding": "AI"})
    deployed(folder)
    with client.stream("GET", f"{world.edges['ams']}/w/slow/") as response:
        pieces = response.iter_text()
        said = next(pieces)
        deployed(
            project(folder, "export default { fetch: () => new Response('new') }", name="slow")
        )
        assert client.get(f"{world.edges['ams']}/w/slow/").text == "new"
        said += "".join(pieces)
    assert said.split() == [str(i) for i in range(8)]

    deployed(project(folder, SLOW, name="slow", ai={"binding": "AI"}))
    with client.stream("GET", f"{world.edges['ams']}/w/slow/ai") as response:
        assert next(response.iter_raw())
    assert until(lambda: _idle(world, client)), "a caller that leaves takes its generation along"


def _idle(world: LocalWorld, client: httpx.Client) -> bool:
    pages = [client.get(f"{url}/status").json() for url in world.routers.values()]
    return all(page["active"] == 0 for page in pages)


def test_a_deploy_while_an_edge_is_down_names_it(world: LocalWorld, programs: None) -> None:
    with fleet_of(world.world) as fleet:
        there = fleet.admins[0]
        half = Fleet([there, Admin("far", "http://127.0.0.1:9", there.client)])
        with pytest.raises(FleetError, match=r"edge 'far' does not answer.*Nothing was changed"):
            half.deploy("late", b"", tenant="anonymous")
        assert b'"late"' not in there.ask("GET", "/workers")
