"""Which topologies a running world can go on with, and at which addresses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from core.config import Topology
from core.types import Role
from deploy.rollout.fit import losses, misfits, settled, with_those_of
from tests.deploy.rollout.test_plan import TWO, region, topology


def test_addresses_that_were_asked_for_are_those_that_were_found() -> None:
    asked = topology(replace(TWO.regions[0], http="127.0.0.1:0"), TWO.regions[1])
    running = topology(replace(TWO.regions[0], http="127.0.0.1:777"), TWO.regions[1])
    moved = replace(
        running, edges=(replace(running.edges[0], listen="127.0.0.1:9"), asked.edges[1])
    )
    assert settled(asked, asked, moved) == moved
    other = replace(asked, edges=(replace(asked.edges[0], listen="127.0.0.1:5"), asked.edges[1]))
    assert settled(other, asked, moved).edges[0].listen == "127.0.0.1:5"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            replace(TWO, edges=(replace(TWO.edges[0], listen="127.0.0.1:9"), TWO.edges[1])),
            "listen of 'ams' cannot change while it runs: it is '127.0.0.1:3'",
        ),
        (
            topology(replace(TWO.regions[0], grpc="127.0.0.1:9"), TWO.regions[1]),
            "grpc of 'eu' cannot change",
        ),
        (replace(TWO, secrets=replace(TWO.secrets, region="env:X")), "secrets cannot change"),
        (replace(TWO, name="pier"), "this is the topology of 'pier', and 'skerry' runs"),
    ],
)
def test_what_does_not_fit(after: Topology, words: str) -> None:
    (found,) = misfits(TWO, after)
    assert words in found.what


def test_the_same_fits_and_less_of_it() -> None:
    assert list(misfits(TWO, TWO)) == []
    assert list(misfits(TWO, replace(TWO, edges=TWO.edges[:1], regions=TWO.regions[:1]))) == []


@pytest.mark.parametrize("role", [None, Role.PREFILL])
def test_a_model_that_nobody_would_serve_any_more(role: Role | None) -> None:
    alone = region("asia", ("a", Role.COMBINED), model="other")
    was = topology(*TWO.regions, alone)
    left = () if role is None else (region("asia", ("a", role), model="other"),)
    after = topology(*TWO.regions, *left)
    (found,) = misfits(was, after)
    assert (found.path, found.what[:43]) == (
        ("models", "other"), "no region would serve 'other' any more: tak",
    )  # fmt: skip
    assert list(misfits(was, replace(after, models={"m": after.models["m"]}))) == []


def test_what_is_kept_of_a_file_and_what_was_found_for_it() -> None:
    running = topology(replace(TWO.regions[0], http="127.0.0.1:777"))
    assert with_those_of(TWO, running).regions == (running.regions[0], TWO.regions[1])
    assert with_those_of(running, TWO).regions == TWO.regions[:1]


def test_an_edge_keeps_the_models_that_regions_serve() -> None:
    was = topology(TWO.regions[0], region("us", ("a", Role.COMBINED), model="other"))
    less = replace(TWO, models={"m": TWO.models["m"]})
    ran = {"ams": was, "nyc": less, "eu": was, "us": was}
    (found,) = losses("ams", ran, less)
    for word in ("'other'", "region us", "edge ams", "skerry deploy us", "skerry models remove"):
        assert word in found.what
    assert list(losses("nyc", ran, less)) == [], "its callers do not have it now"
    assert list(losses("us", ran, less)) == [], "no edge"
    assert list(losses("ams", {**ran, "us": less}, less)) == [], "the region is done"
    assert list(losses("ams", ran, was)) == []
