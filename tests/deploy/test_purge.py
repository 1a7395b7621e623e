"""`skerry purge`: whom it means, whom it asks, what it says is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from core.config import World, load
from core.errors import ConfigError
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.slab import open_slab, slab_name
from core.purge import PURGE_PATH, FilesPurged, NodePurged, PurgeAsk, RegionPurged
from deploy.commands import app
from deploy.purge import namespace_of
from tests.core.kv.tiers.made import SHAPE, chain
from tests.core.kv.tiers.test_slab import BYTES

TOPOLOGY = """
version = 1
[tenants.harbour]
[tenants.one]
namespace = "both"
[tenants.two]
namespace = "both"
[models.m]
source = "package:none"
[[edges]]
name = "e"
[[regions]]
name = "home"
http = "127.0.0.1:{port}"
[[regions.nodes]]
name = "home-1"
role = "combined"
model = "m"
disk_tier = {{ path = "kept" }}
"""


def world(folder: Path, port: int = 0) -> World:
    file = folder / "w.toml"
    file.write_text(TOPOLOGY.format(port=port), encoding="utf-8")
    return load(file, state=folder / "state")


def purge(described: World, *words: str) -> Result:
    options = ["--topology", str(described.path), "--state", str(described.state)]
    return CliRunner().invoke(app, ["purge", *words, *options])


@contextmanager
def router(answer: RegionPurged | None) -> Iterator[tuple[int, list[str]]]:
    """A router that refuses when there is no `answer`; its port, and the namespaces it heard."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, b"{}")

        def do_POST(self) -> None:
            assert self.path == PURGE_PATH
            assert self.headers["x-skerry-secret"]
            body = self.rfile.read(int(self.headers["content-length"]))
            heard.append(msgspec.json.decode(body, type=PurgeAsk).namespace)
            if answer is None:
                self._say(403, b"no")
            else:
                self._say(200, msgspec.json.encode(answer))

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_port, heard
        finally:
            server.shutdown()
            serving.join()


def test_a_tenant_is_named_as_in_the_topology(tmp_path: Path) -> None:
    described = world(tmp_path)
    assert namespace_of(described, "harbour", shared=False) == "harbour"
    assert namespace_of(described, "anonymous", shared=False) == ""
    assert namespace_of(described, "one", shared=True) == "both"
    with pytest.raises(ConfigError, match="no tenant 'harbor'; did you mean 'harbour'"):
        namespace_of(described, "harbor", shared=False)
    with pytest.raises(ConfigError, match=r"one shares its namespace with two.*--shared"):
        namespace_of(described, "one", shared=False)


def test_every_router_is_asked_and_what_it_tells_is_said(tmp_path: Path) -> None:
    told = RegionPurged(
        batches=1, requests=2, nodes=(NodePurged(node="home-1", cached_blocks=3, disk_blocks=4),)
    )
    with router(told) as (port, heard):
        said = purge(world(tmp_path, port), "harbour")
    assert heard == ["harbour"]
    assert said.exit_code == 0, said.output
    assert "region home: 1 batches deleted, 2 requests ended" in said.stdout
    assert "node home-1: 3 cached blocks forgotten, 0 blocks of memory" in said.stdout
    assert "4 of the disk tier" in said.stdout
    assert said.stderr == ""


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (None, "left: region home: http://127.0.0.1:"),
        (
            RegionPurged(batches=0, requests=0),
            "left: region home: not joined, so not asked: home",
        ),
        (
            RegionPurged(
                batches=0, requests=0, nodes=(NodePurged(node="home-1", error="it was lost"),)
            ),
            "left: node home-1: it was lost",
        ),
    ],
)
def test_what_may_be_left_is_said_and_the_status_is_1(
    tmp_path: Path, answer: RegionPurged | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = FilesPurged(slabs=(), in_use=0, batches=0)
    monkeypatch.setattr("deploy.purge.in_folder", lambda *_, **__: nothing)
    with router(answer) as (port, _):
        said = purge(world(tmp_path, port), "harbour")
    assert said.exit_code == 1
    assert left in said.stderr


def test_of_several_routers_a_silent_one_is_left(tmp_path: Path) -> None:
    told = RegionPurged(batches=0, requests=0, nodes=(NodePurged(node="home-1"),))
    with router(told) as (port, _):
        described = world(tmp_path, port)
        away = '[[regions]]\nname = "away"\nhttp = "127.0.0.1:1"\n'
        away += '[[regions.nodes]]\nname = "away-1"\nrole = "combined"\nmodel = "m"\n'
        described.path.write_text(described.path.read_text() + away, encoding="utf-8")
        said = purge(described, "harbour")
    assert said.exit_code == 1
    assert said.stderr.startswith("left: region away: http://127.0.0.1:1: ")


def test_files_are_purged_where_nothing_runs(tmp_path: Path) -> None:
    described = world(tmp_path)
    secret = described.secret("tiers")
    path = described.state / "kept" / slab_name("home-1", 0, SHAPE)
    slab = open_slab(path, Keyring(secret), SHAPE, BYTES, "node home-1")
    slab.write(0, *chain(1, "harbour", secret)[0])
    slab.close()
    said = purge(described, "harbour")
    assert said.exit_code == 0, said.output
    assert f"{path}: 1 blocks, and the key of all that was there" in said.stdout
    assert Keyring(secret).tag("harbour") not in path.read_bytes()
