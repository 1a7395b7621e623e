"""`skerry keys`: what it shows, what it never shows, what it refuses by name."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.keys import KeyBook, new_key, parse_lines
from deploy import where
from deploy.commands import app
from deploy.keys import listing
from deploy.state import claim, claim_any
from deploy.where import options_for, topology_file
from edge.workers.shelf import Card, Deployment, Shelf
from edge.workers.table import table_path

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


def closing(state: Path) -> str:
    """What the first key says, where one edge has a Worker of nobody named and one of trial."""
    shelf = Shelf(table_path(state, "nyc").parent)
    for name, tenant in (("hello", ANONYMOUS), ("mine", "trial")):
        card = Card(tenant=tenant, deployments=(Deployment("0" * 12, 1),))
        shelf.write(name, card)
    return keys(state, "create", "--tenant", "harbour").stderr


def test_the_first_key_tells_which_workers_act_for_nobody(tmp_path: Path) -> None:
    said = closing(tmp_path).splitlines()[-1]
    assert said.startswith("Workers that act for nobody now: hello;")
    assert "`skerry worker deploy --tenant harbour`" in said
    assert "mine" not in said
    assert "Workers" not in keys(tmp_path, "create", "--tenant", "harbour").stderr
    moved = keys(tmp_path, "export").stdout
    there = tmp_path / "there"
    Shelf(table_path(there, "ams").parent).write(
        "hi", Card(tenant=ANONYMOUS, deployments=(Deployment("0" * 12, 1),))
    )
    brought = keys(there, "import", "-", stdin=moved).stderr
    assert "need a key" in brought
    assert "act for nobody now: hi; `skerry worker deploy --tenant NAME`" in brought
    assert "need a key" not in keys(there, "import", "-", stdin=moved).stderr


def test_a_key_where_no_world_runs_is_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Shelf(table_path(Path(".skerry/two-regions"), "nyc").parent).write(
        "hi", Card(tenant=ANONYMOUS, deployments=(Deployment("0" * 12, 1),))
    )
    made = CliRunner().invoke(app, ["keys", "create", "--tenant", "harbour"])
    assert made.exit_code == 0
    assert "act for nobody now: hi;" in made.stderr
    assert "from now on" not in made.stderr
    assert (
        "no world runs here; the key is kept for the next `skerry up` in this folder "
        f"({tmp_path})" in made.stderr
    )
    assert book(tmp_path / ".skerry/two-regions").check(made.stdout.strip(), NOW) is not None
    with claim_any(Path(".skerry"), "two-regions", print) as state:
        state.record({"nyc": "http://127.0.0.1:1"}, {}, topology_file("two-regions"))
        made = CliRunner().invoke(app, ["keys", "create", "--tenant", "harbour"])
        assert "no world runs" not in made.stderr


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
        (("create", "--tenant", "anonymous"), "known: harbour, lighthouse, trial, visitor"),
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


def test_a_state_folder_alone_means_the_world_that_ran_there_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = topology_file("local").read_text(encoding="utf-8")
    with claim(tmp_path / "mine") as state:
        for name, tenant in (("topology.toml", "old"), ("topology-2.toml", "quay")):
            (state.run / name).write_text(shipped.replace(".harbour", f".{tenant}"), "utf-8")
            os.utime(state.run / name, (0, 0 if tenant == "old" else 1))
    assert make("quay", "--state", "mine").exit_code == 0
    assert "no tenant is named 'old'" in str(make("old", "--state", "mine").exception)
    listed = CliRunner().invoke(app, ["keys", "list", "--state", "mine"])
    assert "quay" in listed.stdout


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


def refused(words: str) -> str:
    """What a command says that does nothing."""
    error = CliRunner().invoke(app, words.split()).exception
    assert isinstance(error, ConfigError)
    return str(error)


@pytest.mark.parametrize(
    "words",
    [
        "worker list", "worker versions hello", "worker rollback hello", "worker tail hello",
        "worker delete hello", "worker secret list --name hello",
        "worker secret put K --name hello", "worker secret delete K --name hello", "worker dev",
        "worker deploy", "drain eu", "undrain eu", "weight eu 50",
    ],
)  # fmt: skip
def test_who_asks_a_world_wants_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(words) == "no world runs here; `skerry up` starts one"
    said = refused(f"{words} --state x")
    assert said == "no world runs on x; `skerry up --state x` starts one"


def test_a_world_that_is_named_may_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert where.running_world_meant("local", None).topology.name == "local"
    with claim_any(Path(".skerry"), "two-regions", print) as state:
        state.record({"nyc": "http://127.0.0.1:1"}, {}, topology_file("two-regions"))
        assert where.running_world_meant(None, None).state.name == "two-regions"
        assert where.running_world_meant(None, state.path).state == state.path


KEPT = ("keys list", "keys export", "usage", "purge harbour", "certs list", "certs rotate")


@pytest.mark.parametrize("words", KEPT)
def test_what_is_kept_is_said_of_which_world_where_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no world runs here, and the world 'two-regions' has no folder" in refused(words)
    assert not Path(".skerry").exists()
    begun = CliRunner().invoke(app, ["certs", "init"])
    line = "no world runs here: this is the world 'two-regions' in .skerry/two-regions\n"
    assert (begun.exit_code, begun.stderr) == (0, line)
    assert line in CliRunner().invoke(app, words.split()).stderr
    for option in (["-t", "two-regions"], ["--state", ".skerry/two-regions"]):
        assert line not in CliRunner().invoke(app, [*words.split(), *option]).stderr
    with claim_any(Path(".skerry"), "two-regions", print, ["certs"]) as state:
        state.record({}, {}, topology_file("two-regions"))
        assert line not in CliRunner().invoke(app, words.split()).stderr
