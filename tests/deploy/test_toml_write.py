"""parse(dump(topology)) == topology, for the shipped files and for any names and texts."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Topology, parse
from deploy.toml_write import dump

TOPOLOGIES = sorted((Path(__file__).parents[2] / "deploy" / "topologies").glob("*.toml"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_dump_of_a_shipped_topology_parses_back(path: Path) -> None:
    topology = parse(path.read_text(encoding="utf-8"))
    assert parse(dump(topology)) == topology


@given(
    name=TEXT,
    source=TEXT,
    alias=TEXT.filter(lambda text: text not in ("m", "other/é")),
    context=st.none() | st.integers(1, 2**40),
    ratio=st.floats(1, 1e300),
    trips=st.sets(st.sampled_from(["eu", "us"])),
    flag=st.booleans(),
)
def test_dump_of_any_values_parses_back(
    name: str,
    source: str,
    alias: str,
    context: int | None,
    ratio: float,
    trips: set[str],
    flag: bool,
) -> None:
    base = msgspec.convert(
        {
            "version": 1,
            "name": name,
            "models": {
                "m": {"source": source, "aliases": [alias], "scripted": {"repeat": flag}},
                "other/é": {"source": source} | ({"context": context} if context else {}),
            },
            "edges": [{"name": "here", "round_trip_ms": dict.fromkeys(trips, ratio)}],
            "regions": [
                {"name": "eu", "nodes": [{"name": "n", "role": "combined", "model": "m"}]},
                {"name": "us", "nodes": []},
            ],
            "routing": {"load_ratio": ratio, "expose_nodes": flag},
        },
        Topology,
    )
    assert parse(dump(base)) == base
