"""Verdicts on a rolling deploy and on a cold model: what passes them, and each way not to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec.structs import replace as altered

from loadtest.users.answers import Answer
from loadtest.users.cold import room_for
from loadtest.users.verdicts import Cold, Deployed, cold_model, rolling_deploy
from tests.loadtest.users.test_answers import but

OLD = {"edge ams": "[1]", "router eu": "e1", "node eu-1": "7"}
NEW = {"edge ams": "[2]", "router eu": "e2", "node eu-1": "8"}
STREAMED = [but(at_s=float(n), ttft_s=1.5 if 40 <= n < 70 else 0.5) for n in range(100)]


def _rolled(answers: list[Answer], after: dict[str, str] = NEW) -> list[bool]:
    deployed = Deployed(began_s=40.0, ended_s=70.0, before=OLD, after=after)
    return [check.good for check in rolling_deploy(answers, deployed, 100.0)]


def test_a_deploy_that_nobody_noticed() -> None:
    assert _rolled(STREAMED) == [True] * 5


def _slow(begin: float, end: float) -> Callable[[Answer], Answer]:
    return lambda one: altered(one, ttft_s=9.0) if begin <= one.at_s < end else one


@pytest.mark.parametrize(
    ("answers", "fails"),
    [
        ([*STREAMED, but(at_s=50.0, error="503 region_unavailable", ttft_s=None)], 0),
        ([*STREAMED, but(at_s=50.0, error="cut")], 1),
        ([one for one in STREAMED if not 40 <= one.at_s < 70], 2),
        (list(map(_slow(40, 70), STREAMED)), 3),
        (list(map(_slow(70, 100), STREAMED)), 4),
    ],
)
def test_a_deploy_that_was_noticed(answers: list[Answer], fails: int) -> None:
    assert not _rolled(answers)[fails]


def test_a_process_that_was_not_replaced_is_named() -> None:
    deployed = Deployed(40.0, 70.0, OLD, {**NEW, "node eu-1": "7"})
    check = rolling_deploy(STREAMED, deployed, 100.0)[2]
    assert not check.good
    assert check.what.startswith("2 processes of 3")
    assert check.what.endswith("not node eu-1")


FIRST = but(at_s=1.0, ttft_s=3.4, region="home")
WAITED = but(at_s=1.5, ttft_s=14.0, comments=1)
REFUSED = but(at_s=1.2, error="429 no_capacity", ttft_s=None, retry_after_s=3.0)
WARM = but(at_s=1.0, ttft_s=0.4, region="far")
GOOD = Cold(
    few=[but(at_s=2.0, region="home"), FIRST],
    crowd=[but(at_s=1.0, ttft_s=4.0), WAITED, REFUSED],
    beside_warm=[WARM, altered(WARM, at_s=2.0), but(at_s=9.0, region="home")],
    start_s=3.0, room=2, cold="home", warm="far",
)  # fmt: skip


def _cold(**changed: object) -> list[bool]:
    return [check.good for check in cold_model(replace(GOOD, **changed))]  # type: ignore[arg-type]


def test_the_crowd_is_as_large_as_the_machine_is_quick() -> None:
    assert room_for([but(total_s=0.5)] * 3) == 24
    assert room_for([but(total_s=0.01)]) == 60
    assert room_for([but(total_s=9.0), but(total_s=0.1, error="cut")]) == 12
    assert room_for([]) == 12


def test_a_cold_model_that_comes_up() -> None:
    assert _cold() == [True] * 5


@pytest.mark.parametrize(
    ("fails", "changed"),
    [
        (0, {"few": [FIRST, but(at_s=1.1, error="503 region_unavailable")]}),
        (1, {"few": [altered(FIRST, ttft_s=4.1)]}),
        (1, {"few": []}),
        (2, {"crowd": [WAITED, WAITED]}),
        (2, {"crowd": [WAITED, WAITED, altered(REFUSED, retry_after_s=None)]}),
        (2, {"crowd": [WAITED, WAITED, REFUSED, but(error="cut")]}),
        (2, {"crowd": [WAITED, REFUSED, REFUSED]}),
        (3, {"crowd": [WAITED, altered(WAITED, comments=0), REFUSED]}),
        (3, {"crowd": [but(ttft_s=4.0), but(ttft_s=4.0), REFUSED]}),
        (4, {"beside_warm": [WARM, altered(WARM, region="home", ttft_s=3.5)]}),
        (4, {"beside_warm": [altered(WARM, error="cut")]}),
        (4, {"beside_warm": []}),
    ],
)
def test_a_cold_model_that_does_not(fails: int, changed: dict[str, object]) -> None:
    assert not _cold(**changed)[fails]
