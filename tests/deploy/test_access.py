"""Our own commands at worlds that want a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from core.config import World, load
from core.config_tenants import Access, Tenant
from core.errors import ConfigError
from core.keys import append_new, new_key
from deploy.access import headers_of, needs_key, own_key
from deploy.hints import curl, python
from deploy.keys import book_of, key_file

SHIPPED = Path(__file__).parents[2] / "deploy" / "topologies" / "two-regions.toml"


def world(state: Path, **changes: object) -> World:
    loaded = load(SHIPPED, state=state)
    return World(msgspec.structs.replace(loaded.topology, **changes), loaded.path, state)


@contextmanager
def door(of: World) -> Iterator[str]:
    """The URL of a page that opens to good keys, from the second time it is asked on."""
    asked: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            key = self.headers.get("authorization", "").removeprefix("Bearer ")
            good = len(asked) > 1 and book_of(of).check(key, time.time()) is not None
            self.send_response(200 if good else 401)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_which_worlds_want_a_key(tmp_path: Path) -> None:
    assert not needs_key(world(tmp_path))  # until-keys, and there is none
    assert needs_key(world(tmp_path, access=Access()))
    append_new(key_file(world(tmp_path)), [new_key("trial", now=1)[1]])
    assert needs_key(world(tmp_path))
    assert not needs_key(world(tmp_path, access=Access(anonymous="always")))
    key_file(world(tmp_path)).unlink()
    assert needs_key(world(tmp_path))  # as its edges do: a lost file opens nothing


def test_a_key_of_our_own_opens_and_is_gone_afterwards(tmp_path: Path) -> None:
    closed = world(tmp_path, access=Access())
    with door(closed) as url, own_key(closed, {"here": url}) as headers:
        key = headers["authorization"].removeprefix("Bearer ")
        found = book_of(closed).check(key, time.time())
        assert found is not None
        assert found.tenant == "harbour"
    assert book_of(closed).check(key, time.time()) is None


def test_no_key_where_none_is_needed_or_nobody_could_own_it(tmp_path: Path) -> None:
    with own_key(world(tmp_path), {"here": "http://127.0.0.1:9"}) as headers:
        assert headers == {}
    assert not key_file(world(tmp_path)).exists()
    nobody = world(tmp_path, access=Access(), tenants={"anonymous": Tenant()})
    with pytest.raises(ConfigError, match="no tenant"), own_key(nobody, {}):
        pass


def test_lines_to_copy_say_how_the_key_goes() -> None:
    assert "SKERRY_KEY" not in curl("http://e", "m") + python("http://e", "m")
    assert '-H "authorization: Bearer $SKERRY_KEY"' in curl("http://e", "m", key=True)
    assert 'api_key=os.environ["SKERRY_KEY"]' in python("http://e", "m", key=True)
    assert headers_of("k") == {"authorization": "Bearer k"}
    assert headers_of(None) == {}
