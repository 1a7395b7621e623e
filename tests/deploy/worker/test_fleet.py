"""All edges or none: what is asked of each, whoever fails at which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from deploy.commands import app
from deploy.worker.fleet import Admin, Fleet, FleetError
from edge.workers.admin_pages import Activate, EdgePage, Row, Rows, Staged

PAGE = EdgePage(edge="e", url="http://e", version="1", domain="localhost", languages=())


@dataclass
class Edge:
    """An admin interface in memory. `fails`: method and last part of the path that it refuses."""

    name: str
    version: str = "v1"
    fails: tuple[str, str] = ("", "")
    down: bool = False
    has: tuple[str, ...] = ("w",)
    lost: str = ""  # the method after which it answers no more
    served: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # of the deployments that it was asked about

    def admin(self) -> Admin:
        return Admin(self.name, f"http://{self.name}", httpx.Client(transport=self._transport()))

    def _transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("refused")
        path = request.url.path.removeprefix("/admin/v1")
        if path == "/edge":
            return httpx.Response(200, content=msgspec.json.encode(PAGE))
        if path == "/workers":
            rows = [Row(name=name, tenant="t", version="v1", at=0) for name in self.has]
            return httpx.Response(200, content=msgspec.json.encode(Rows(rows)))
        what = (request.method, path.removeprefix("/workers/w") or "/all")
        self.asked.append(what)
        if self.lost == request.method and what[1].split("/")[1] == "active":
            self.down = True
            raise httpx.ReadError("cut")
        if self.fails == (request.method, what[1].split("/")[1]):
            return httpx.Response(400, json={"error": {"message": "no such luck"}})
        if what[1].split("/")[1] == "active":
            body = request.content and msgspec.json.decode(request.content, type=Activate).id
            self.ids.append(str(body or request.url.params["id"]))
            if request.method == "DELETE" and not self.served:
                return httpx.Response(404, json={"error": {"message": "not served"}})
            self.served = request.method == "POST"
        if "staged" in path and request.method != "DELETE":
            return httpx.Response(200, content=msgspec.json.encode(Staged(self.version)))
        return httpx.Response(204)


Act = Callable[[Fleet], str]
ACTS: list[Act] = [
    lambda fleet: fleet.deploy("w", b"bundle", tenant="t"),
    lambda fleet: fleet.rollback("w", None),
]


def short(edge: Edge) -> list[tuple[str, str]]:
    return [(method, path.split("/")[1]) for method, path in edge.asked]


@pytest.mark.parametrize("act", ACTS)
def test_all_stage_before_one_changes_over(act: Act) -> None:
    edges = [Edge("a"), Edge("b")]
    assert act(Fleet([one.admin() for one in edges])) == "v1"
    for edge in edges:
        assert [part for _, part in short(edge)] == ["staged", "active"]


@pytest.mark.parametrize("act", ACTS)
def test_an_edge_that_is_down_is_named_before_anything_is_asked(act: Act) -> None:
    edges = [Edge("a"), Edge("b", down=True), Edge("c", down=True)]
    with pytest.raises(FleetError, match=r"'b' does not answer.*'c' does not.*Nothing was changed"):
        act(Fleet([one.admin() for one in edges]))
    assert edges[0].asked == []


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_one_that_refuses_the_version_leaves_the_others_as_they_were(act: Act, method: str) -> None:
    edges = [Edge("a"), Edge("b", fails=(method, "staged"))]
    staging = "PUT" if act is ACTS[0] else "POST"
    if method != staging:
        assert act(Fleet([one.admin() for one in edges])) == "v1"
        return
    with pytest.raises(FleetError, match=r"'b' refused: no such luck\. Nothing was changed"):
        act(Fleet([one.admin() for one in edges]))
    assert short(edges[0]) == [(staging, "staged"), ("DELETE", "staged")]


@pytest.mark.parametrize("act", ACTS)
def test_one_that_fails_to_change_over_takes_the_others_back(act: Act) -> None:
    edges = [Edge("a"), Edge("b", fails=("POST", "active")), Edge("c")]
    with pytest.raises(FleetError, match="no such luck"):
        act(Fleet([one.admin() for one in edges]))
    assert short(edges[0])[1:] == [("POST", "active"), ("DELETE", "active")]
    assert short(edges[1])[1:] == [("POST", "active"), ("DELETE", "active"), ("DELETE", "staged")]
    assert short(edges[2])[1:] == [("DELETE", "staged")]
    (mine,) = {id_ for edge in edges for id_ in edge.ids}
    assert len(mine) == 16, "the deployment is told from any other of the same version"


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("lost", ["POST", "DELETE"])
def test_an_edge_that_cannot_be_taken_back_is_named(act: Act, lost: str) -> None:
    """Cut off as it changed over, or as it was told to go back: which version it serves is open."""
    edges = [Edge("a"), Edge("b", lost=lost), Edge("c", fails=("POST", "active"))]
    with pytest.raises(FleetError, match=r"may serve the new version: b\.") as told:
        act(Fleet([one.admin() for one in edges]))
    assert "Nothing was changed" not in str(told.value)
    assert short(edges[0])[-1] == ("DELETE", "active")


def test_edges_that_differ_want_a_version_to_be_named() -> None:
    edges = [Edge("a"), Edge("b", version="v2")]
    with pytest.raises(FleetError, match="a: v1, b: v2"):
        Fleet([one.admin() for one in edges]).rollback("w", None)
    assert all(part != "active" for edge in edges for _, part in short(edge))


def test_a_worker_that_only_some_edges_have_is_deleted_there() -> None:
    edges = [Edge("a", has=()), Edge("b"), Edge("c", has=("v", "w"))]
    Fleet([one.admin() for one in edges]).delete("w")
    assert [one.asked for one in edges] == [[], [("DELETE", "/all")], [("DELETE", "/all")]]


def test_an_unknown_worker_has_the_nearest_before_anybody_is_asked_to_delete() -> None:
    edges = [Edge("a", has=("hello", "w")), Edge("b", has=("hello",))]
    fleet = Fleet([one.admin() for one in edges])
    with pytest.raises(FleetError, match=r"no Worker is named 'helo'; did you mean 'hello'\?"):
        fleet.delete("helo")
    with pytest.raises(FleetError, match=r"no Worker is named 'xyz'; there are: hello, w$"):
        fleet.delete("xyz")
    assert not any(one.asked for one in edges)
    edges[1].down = True
    with pytest.raises(FleetError, match="'b' does not answer"):
        fleet.homes("helo")


@pytest.mark.parametrize("words", ["delete helo", "secret put KEY --name helo"])
def test_nobody_is_asked_about_a_worker_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("asked before it was looked up")

    @contextmanager
    def fleet_of(_: object) -> Iterator[Fleet]:
        yield Fleet([Edge("a", has=("hello",)).admin()])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.worker.act.fleet_of", fleet_of)
    monkeypatch.setattr("typer.confirm", asked)
    monkeypatch.setattr("typer.prompt", asked)
    monkeypatch.setattr("deploy.worker.commands.is_terminal", lambda: True)
    said = CliRunner().invoke(app, ["worker", *words.split(), "-t", "two-regions"])
    assert isinstance(said.exception, FleetError)
    assert "did you mean 'hello'?" in str(said.exception)
