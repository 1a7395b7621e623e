"""State folders: one world each, a second one beside it, stale records ignored."""

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.state import DEFAULT_EDGE, claim, claim_any, first_edge, folder_name, running


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


def test_folder_names_are_plain() -> None:
    assert [folder_name(one) for one in ("two-regions", "a/../b c", "…")] == [
        "two-regions", "a-b-c", "world"
    ]  # fmt: skip
