"""State folders: one world each, a second one beside it, stale records ignored."""

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.state import (
    DEFAULT_EDGE,
    FOLDER,
    MARKS,
    claim,
    claim_any,
    first_edge,
    folder_name,
    found_from,
    running,
    running_folders,
)


def test_claimed_folder_is_refused_to_a_second_world(state: Path) -> None:
    with (
        claim(state),
        pytest.raises(ConfigError, match=f"process {os.getpid()}"),
        claim(state),
    ):
        pass


def test_claim_ends_with_the_block(state: Path) -> None:
    with claim(state) as first:
        assert first.run.is_dir()
    with claim(state) as second:
        assert second.logs.is_dir()


def test_claim_any_takes_the_next_folder_and_says_so(state: Path) -> None:
    said: list[str] = []
    with claim_any(state, "w", said.append) as first, claim_any(state, "w", said.append) as second:
        assert (first.path.name, second.path.name) == ("w", "w-2")
    assert said == [f"another w runs already: this one keeps its state in {state / 'w-2'}"]


def test_a_file_in_the_way_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as state folder"), claim(tmp_path / "w"):
        pass


def test_running_lists_live_worlds_only(state: Path) -> None:
    with claim_any(state, "w", print) as folder:
        folder.record({"ams": "http://127.0.0.1:1"}, {})
        (state / "dead").mkdir()
        (state / "dead" / "current.json").write_text(
            '{"pid": 999999999, "edges": {}, "regions": {}}'
        )
        (state / "odd").mkdir()
        (state / "odd" / "current.json").write_text("{")
        assert [world.edges for world in running(state)] == [{"ams": "http://127.0.0.1:1"}]
    assert list(running(state)) == []


def test_first_edge_is_that_of_the_world_that_runs(state: Path) -> None:
    assert first_edge(state) == DEFAULT_EDGE
    with claim_any(state, "w", print) as folder:
        folder.record({"ams": "http://127.0.0.1:1", "nyc": "http://127.0.0.1:2"}, {})
        assert first_edge(state) == "http://127.0.0.1:1"


def test_a_world_elsewhere_is_found_while_it_runs(state: Path, tmp_path: Path) -> None:
    outside, said = tmp_path / "far" / "w", list[str]()
    with claim(outside) as folder:
        folder.record({"ams": "http://127.0.0.1:1"}, {})
        with found_from(state, folder.path, said.append):
            assert list(running_folders(state)) == [outside]
            assert first_edge(state) == "http://127.0.0.1:1"
        assert running_folders(state) == {}
        (state / "elsewhere-old").symlink_to(tmp_path / "gone")  # of a launcher that was killed
        with found_from(state, folder.path, said.append):
            assert len(list(state.glob("elsewhere-*"))) == 1
    with claim_any(state, "w", print) as here:
        here.record({"nyc": "http://127.0.0.1:2"}, {})
        with found_from(state, here.path, said.append):
            assert list(running_folders(state)) == [state / "w"]
        assert list(running_folders(state)) == [state / "w"]
    assert said == []
    (tmp_path / "file").write_text("")
    with found_from(tmp_path / "file", outside, said.append):
        assert "--state" in said[0]


def test_a_world_is_found_from_a_folder_below_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`skerry worker deploy` is given in the Worker's own folder."""
    worker = tmp_path / "hello" / "src"
    worker.mkdir(parents=True)
    monkeypatch.chdir(worker)
    assert running_folders(FOLDER) == {}
    with claim_any(tmp_path / FOLDER, "w", print) as folder:
        folder.record({"ams": "http://127.0.0.1:1"}, {})
        assert list(running_folders(FOLDER)) == [tmp_path / FOLDER / "w"]
        with claim_any(FOLDER, "nearer", print) as nearer:
            nearer.record({"nyc": "http://127.0.0.1:2"}, {})
            assert first_edge() == "http://127.0.0.1:2"
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert running_folders(FOLDER) == {}, "a folder that belongs to somebody else"


def test_folder_names_are_plain() -> None:
    assert [folder_name(one) for one in ("two-regions", "a/../b c", "…")] == [
        "two-regions", "a-b-c", "world"
    ]  # fmt: skip


def test_only_run_folders_of_our_own_are_removed(state: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, state / "run-results", state / "run-20260101-120000-kept"):
        folder.mkdir(parents=True)
        (folder / "data").write_text("mine")
    (state / "run-20260101-120001").symlink_to(elsewhere)
    (state / "run-20260101-120002").write_text("a file")
    (state / "run-20260101-120003").mkdir()
    (state / "region.secret").write_text("s")
    with claim(state) as held:
        left = {path.name for path in state.glob("run-*")} - {held.run.name}
    assert left == {
        "run-results", "run-20260101-120000-kept", "run-20260101-120001", "run-20260101-120002"
    }  # fmt: skip
    assert (elsewhere / "data").read_text() == "mine"


def test_a_folder_of_somebody_else_is_refused_and_left_alone(state: Path) -> None:
    state.mkdir(exist_ok=True)
    (state / "thesis.txt").write_text("mine")
    (state / "logs").mkdir()
    with pytest.raises(ConfigError, match="neither empty nor a state folder") as said, claim(state):
        pass
    assert str(said.value).count("\n") == 0
    assert {path.name for path in state.iterdir()} == {"thesis.txt", "logs"}


def test_a_lock_of_somebody_else_is_not_overwritten(state: Path) -> None:
    state.mkdir(exist_ok=True)
    (state / "lock").write_text("their notes")
    with pytest.raises(ConfigError, match="is not Skerry's"), claim(state):
        pass
    assert (state / "lock").read_text() == "their notes"


@pytest.mark.parametrize("mark", [*MARKS, "own-keys.jsonl"])
def test_a_folder_with_a_mark_of_ours_is_taken(state: Path, mark: str) -> None:
    state.mkdir(exist_ok=True)
    (state / mark).write_text("")
    with claim(state, marks=["own-keys.jsonl"]) as held:
        assert held.path == state
