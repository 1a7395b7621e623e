"""Workers that go from one edge's shelf to another's: whole or not at all, and told without what is
secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.config import World, parse
from deploy.where import SHIPPED
from deploy.worker.fleet import Admin
from deploy.worker.shelves import clear, fill, fill_empty, rows_of, served_by, shelved, told
from edge.workers.admin_pages import Row, Rows
from edge.workers.shelf import Card, Deployment, Shelf

TWO = parse((SHIPPED / "two-regions.toml").read_text(encoding="utf-8"))
NYC, AMS = TWO.edges
SECRET = "nobody-is-to-see-this"


def shelf(state: Path, edge: str) -> Shelf:
    return Shelf(state / "workers" / edge)


def put(state: Path, edge: str, name: str, *bodies: bytes, secrets: bool = False) -> Card:
    """A Worker of so many versions, the last of them served."""
    there = shelf(state, edge)
    made = tuple(Deployment(there.put(name, body), 7, id="x") for body in bodies)
    card = Card(tenant="t", deployments=made, secrets={"KEY": SECRET} if secrets else {})
    there.write(name, card)
    return card


def test_each_comes_with_its_versions_and_secrets(tmp_path: Path) -> None:
    said: list[str] = []
    card = put(tmp_path, "nyc", "chat", b"one", b"two", secrets=True)
    put(tmp_path, "nyc", "apt", b"three")
    put(tmp_path, "sfo", "stale", b"of an earlier life")
    fill(tmp_path, "sfo", ["sfo", "nyc"], {"chat", "apt"}, said.append)
    there = shelf(tmp_path, "sfo")
    assert there.names() == ["apt", "chat"]
    assert there.card("chat") == card
    assert there.take("chat", card.active or "") == b"two"
    assert there.versions("chat") == shelf(tmp_path, "nyc").versions("chat")
    assert said == [
        f"  apt {there.versions('apt')[0]}, as edge nyc has it",
        f"  chat {card.active} with its secrets (1), as edge nyc has it",
    ]
    assert SECRET not in "".join(said)
    for path in (tmp_path / "workers" / "sfo").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_one_that_is_damaged_comes_from_another_edge_or_not_at_all(tmp_path: Path) -> None:
    said: list[str] = []
    for edge in ("nyc", "ams"):
        put(tmp_path, edge, "chat", b"one", b"two")
        put(tmp_path, edge, "apt", b"three", secrets=True)
    for edge, name in (("nyc", "chat"), ("nyc", "apt"), ("ams", "apt")):
        version = shelf(tmp_path, edge).versions(name)[0]
        (tmp_path / "workers" / edge / name / f"{version}.bundle").write_bytes(b"spoilt")
    fill(tmp_path, "sfo", ["nyc", "ams"], {"apt", "chat", "gone"}, said.append)
    assert shelf(tmp_path, "sfo").names() == ["chat"]
    assert not (tmp_path / "workers" / "sfo" / "apt").exists(), "nor a secret of it"
    assert said[0].startswith("  apt could not be copied: ")
    assert said[0].endswith("is damaged: its digest is another; deploy it again for edge sfo")
    assert said[1].endswith("as edge ams has it")
    assert said[2].startswith("  gone could not be copied: no edge serves it any more")


def test_an_edge_without_an_admin_address_serves_nothing(tmp_path: Path) -> None:
    put(tmp_path, "nyc", "chat", b"of an earlier life")
    with_, without = (replace(NYC, admin=one) for one in ("127.0.0.1:7", None))
    assert list(shelved(tmp_path, [with_])) == ["chat"]
    assert shelved(tmp_path, [without]) == {}


def test_who_answers_something_else_is_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admin, "ask", lambda *_: b"<html>")
    assert rows_of(World(TWO, tmp_path / "topology.toml", tmp_path), NYC) is None


def test_what_is_only_kept_is_not_served(tmp_path: Path) -> None:
    shelf(tmp_path, "nyc").write("idle", Card(tenant="t"))
    put(tmp_path, "nyc", "chat", b"one")
    (tmp_path / "workers" / "nyc" / "spoilt").mkdir()
    (tmp_path / "workers" / "nyc" / "spoilt" / "card.json").write_text("{")
    assert list(served_by(tmp_path, "nyc")) == ["chat"]
    first = shelved(tmp_path, TWO.edges)
    put(tmp_path, "ams", "chat", b"two")
    put(tmp_path, "ams", "apt", b"three")
    both = shelved(tmp_path, TWO.edges)
    assert [set(one) for one in (first, both)] == [{"chat"}, {"chat", "apt"}]
    assert both["chat"] == first["chat"], "as the first edge has it"
    assert served_by(tmp_path, "sfo") == {}
    assert not (tmp_path / "workers" / "sfo").exists(), "looking makes nothing"


def test_an_edge_with_an_empty_shelf_has_the_others_workers_when_a_world_starts(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    world = World(TWO, tmp_path / "topology.toml", tmp_path)
    fill_empty(world, said.append)
    assert said == []
    put(tmp_path, NYC.name, "chat", b"one")
    fill_empty(world, said.append)
    assert shelf(tmp_path, AMS.name).names() == ["chat"]
    assert said[0] == "edge ams has no Workers:"
    said.clear()
    put(tmp_path, NYC.name, "apt", b"three")
    fill_empty(world, said.append)
    assert said == [], "one that has some is left alone"
    clear(tmp_path, AMS.name)
    edges = (NYC, replace(AMS, admin=None))
    fill_empty(World(replace(TWO, edges=edges), world.path, tmp_path), said.append)
    assert shelf(tmp_path, AMS.name).names() == [], "it could not serve any"


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([Row(name="chat", tenant="t", version="v1", at=1)], "is served"),
        ([Row(name="chat", tenant="t", version="v0", at=1)], "is not served there"),
        ([], "is not served there"),
    ],
)
def test_what_an_edge_serves_is_told(rows: list[Row], word: str) -> None:
    card = Card(tenant="t", deployments=(Deployment("v1", 1),))
    (line,) = told({"chat": card}, Rows(rows))
    assert line.startswith(f"chat v1 {word}")
