"""B20, B23: every party struck at every step of a hand-off. Each answer is the greedy text or an
error with a name, and every block comes home. `make soak` plays all cells; here are as many as fit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from deploy.launcher import LocalWorld
from tests.world.campaign import Cell, Fault, Party, Place, Step, play
from tests.world.test_edge_faults import key_of

pytestmark = pytest.mark.world

AT_HOME = (
    Cell(Party.PREFILL, Fault.KILL, Step.RECEIVING),
    Cell(Party.PREFILL_RANK, Fault.KILL, Step.RESERVED),
    Cell(Party.PREFILL, Fault.STOP, Step.RESERVED),
    Cell(Party.ROUTER, Fault.STOP, Step.READY),
)
"""Nobody loses anything: what the region lacks it does itself."""

ABROAD = (
    Cell(Party.DECODE, Fault.KILL, Step.READY),
    Cell(Party.ROUTER, Fault.KILL, Step.RECEIVING),
    Cell(Party.EDGE, Fault.KILL, Step.RESERVED),
    Cell(Party.DECODE_RANK, Fault.KILL, Step.DECODING),
)
"""Who has text gets an error; who has none is answered by the other region."""


@pytest.fixture(scope="module")
def places(world: LocalWorld) -> tuple[Place, Place]:
    eu, us = (key_of(world.edges["ams"], region) for region in ("eu", "us"))
    return Place("eu", "ams", eu), Place("us", "nyc", us)


def check(world: LocalWorld, at: Place, cell: Cell) -> int:
    """How many of the two answers were broken: none that need not be."""
    calls = play(world, at, cell)
    whole = [one.check() for one in calls]
    errors = [one.answer.error for one in calls]
    for got, safe in zip(whole, spared(cell), strict=True):
        assert got or not safe, (cell, errors)
    return whole.count(False)


def spared(cell: Cell) -> tuple[bool, bool]:
    """Whether each of the two callers must get its whole answer. Who need not may have had all of
    it before the fault."""
    if cell.party in (Party.PREFILL, Party.PREFILL_RANK):
        return True, True
    if cell.fault is Fault.STOP and cell.party is not Party.DECODE:
        return True, True
    if cell.party is Party.EDGE:
        return False, False
    return False, cell.step is not Step.DECODING


def test_faults_that_a_region_heals_itself(world: LocalWorld, places: tuple[Place, Place]) -> None:
    def lot(number: int) -> None:
        for cell in AT_HOME[number::2]:
            check(world, places[number], cell)

    with ThreadPoolExecutor(2) as regions:
        list(regions.map(lot, (0, 1)))


def test_faults_that_only_another_region_heals(
    world: LocalWorld, places: tuple[Place, Place]
) -> None:
    broken = [check(world, places[number % 2], cell) for number, cell in enumerate(ABROAD)]
    assert sum(broken) > 0, "nothing was struck in the middle"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("party", Party)
def test_every_fault_at_every_step(
    world: LocalWorld, places: tuple[Place, Place], party: Party
) -> None:
    for number, (fault, step) in enumerate(product(Fault, Step)):
        check(world, places[number % 2], Cell(party, fault, step))
