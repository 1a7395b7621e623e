"""The table in ARCHITECTURE.md is the machine's."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from core.kv.handoff import RECEIVING, SENDING, Event, Phase, SendPhase

PAGE = Path(__file__).parents[3] / "ARCHITECTURE.md"
HEADING = "## The hand-off, state by state"


def rows() -> list[list[str]]:
    _, _, after = PAGE.read_text("utf-8").partition(HEADING)
    section, _, _ = after.partition("\n## ")
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    assert cells[0] == ["half", "state", "event", "next", "who acts"]
    return cells[2:]


def of(half: str) -> dict[tuple[str, str], str]:
    return {(state, event): after for name, state, event, after, _ in rows() if name == half}


def plain(
    table: Iterable[tuple[tuple[StrEnum, StrEnum], StrEnum]],
) -> dict[tuple[str, str], str]:
    return {(state.value, event.value): after.value for (state, event), after in table}


def test_the_page_says_what_the_machine_does() -> None:
    assert of("receiver") == plain(RECEIVING.items())
    assert of("sender") == plain(SENDING.items())
    assert len(rows()) == len(RECEIVING) + len(SENDING), "a line twice"
    assert all(who for *_, who in rows())


def test_every_state_and_every_event_occurs() -> None:
    receiver = {state for (state, _), after in RECEIVING.items() for state in (state, after)}
    sender = {state for (state, _), after in SENDING.items() for state in (state, after)}
    assert receiver == set(Phase)
    assert sender == set(SendPhase)
    assert {event for _, event in (*RECEIVING, *SENDING)} == set(Event)
