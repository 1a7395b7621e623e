"""`skerry keys`: what it shows, what it never shows, what it refuses by name."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.errors import ConfigError
from core.keys import KeyBook, new_key, parse_lines
from deploy.commands import app
from deploy.keys import listing
from deploy.state import claim_any
from deploy.where import options_for, topology_file

NOW = 1_796_040_000.0


def keys(state: Path, *words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["keys", *words, "--state", str(state)], input=stdin)


def book(state: Path) -> KeyBook:
    return KeyBook(parse_lines((state / "keys.jsonl").read_bytes())[0])


def test_a_key_is_shown_once(tmp_path: Path) -> None:
    made = keys(tmp_path, "create", "--tenant", "harbour", "--label", "laptop", "--days", "2")
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert re.fullmatch(r"sk-skerry-[a-z2-7]{12}-[a-z2-7]{52}", key)
    assert "callers of this world need a key" in made.stderr
    found = book(tmp_path).check(key, time.time())
    assert found is not None
    assert (found.tenant, found.label) == ("harbour", "laptop")
    assert book(tmp_path).check(key, time.time() + 3 * 86_400) is None
    for words in (("list",), ("export",)):
        assert key not in keys(tmp_path, *words).output
        assert found.id in keys(tmp_path, *words).stdout
    again = keys(tmp_path, "create", "--tenant", "harbour")
    assert "need a key" not in again.stderr


def test_revoke_and_list(tmp_path: Path) -> None:
    made = keys(tmp_path, "create", "--tenant", "harbour").stdout.strip()
    name = made[10:22]
    said = keys(tmp_path, "revoke", name)
    assert (said.exit_code, said.stderr) == (0, f"key {name} is revoked\n")
    assert "before" in keys(tmp_path, "revoke", made).stderr  # the whole key names it too
    assert book(tmp_path).check(made, time.time()) is None
    assert re.search(f"{name} +harbour +revoked", keys(tmp_path, "list").stdout)


def test_states_in_a_list() -> None:
    good, old = (new_key("a", now=0, expires=e)[1] for e in (None, 5))
    lines = list(listing(KeyBook([good, old]), NOW))
    assert sorted(line.split()[2] for line in lines[1:]) == ["expired", "good"]


def test_from_one_machine_to_another(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first, second = (keys(here, "create", "--tenant", "harbour").stdout.strip() for _ in range(2))
    moved = keys(here, "export").stdout
    assert "2 keys and 0 revocations" in keys(there, "import", "-", stdin=moved).stderr
    assert "0 keys and 0 revocations" in keys(there, "import", "-", stdin=moved).stderr
    keys(here, "revoke", first[10:22])
    moved = keys(here, "export").stdout
    assert "0 keys and 1 revocations" in keys(there, "import", "-", stdin=moved).stderr
    assert book(there).check(first, NOW) is None
    assert book(there).check(second, NOW) is not None
    before = (there / "keys.jsonl").read_bytes()
    torn = keys(there, "import", "-", stdin=moved + '{"kind": "created"')
    assert isinstance(torn.exception, ConfigError)
    assert (there / "keys.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("create", "--tenant", "harbor"), "no tenant is named 'harbor'; did you mean 'harbour'?"),
        (("create", "--tenant", "anonymous"), "known: harbour, lighthouse, trial"),
        (("revoke", "nothing"), "no key has the ID 'nothing'; `skerry keys list` shows them"),
        (("import", "/no/such/file"), "cannot be read"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    said = keys(tmp_path, *words)
    assert isinstance(said.exception, ConfigError)
    assert complaint in str(said.exception)
    assert not (tmp_path / "keys.jsonl").exists()


def make(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", "create", "--tenant", *words])


def test_without_options_the_running_world_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / ".skerry"
    shipped = topology_file("local").read_text(encoding="utf-8").replace(".harbour", ".quay")
    with claim_any(root, "local", print) as local:
        (local.run / "topology.toml").write_text(shipped, encoding="utf-8")
        local.record({}, {})
        made = make("quay")
        assert "for the world 'local' in .skerry/local;" in made.stderr
        assert [one.tenant for one in book(local.path).created()] == ["quay"]
        assert make("quay", "--state", ".skerry/local").exit_code == 0
        with claim_any(root, "other", print) as other:
            other.record({}, {})
            several = str(make("quay").exception)
        assert "--state .skerry/local or --state .skerry/other" in several
        assert "'two-regions' in .skerry/two-regions" in make("harbour", "-t", "two-regions").stderr
    assert "'two-regions' in .skerry/two-regions" in make("harbour").stderr


@pytest.mark.parametrize("shipped", ["local", "sharded", "five-regions", "two-regions"])
def test_every_shipped_world_has_somebody_to_own_a_key(tmp_path: Path, shipped: str) -> None:
    assert keys(tmp_path, "create", "--tenant", "harbour", "-t", shipped).exit_code == 0


def test_options_that_lead_to_a_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usual = Path(".skerry/two-regions")
    assert options_for(topology_file("two-regions"), "two-regions", usual) == ""
    assert options_for(topology_file("local"), "local", Path(".skerry/local-2").resolve()) == (
        " -t local --state .skerry/local-2"
    )
    assert options_for(Path("my world.toml"), "two-regions", usual) == " -t 'my world.toml'"
