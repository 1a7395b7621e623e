"""What a front keeps of an attempt that decodes on its node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from core.engine.messages import SequenceSpec
from core.engine.plan import SequenceId
from regional.node.answer import Answer
from regional.node.pool import Pool
from regional.node.receiving import Reservation
from regional.node.seams import Outbox


@dataclass(slots=True)
class Answering:
    """One attempt that decodes here. `stage` is where a failure would have happened."""

    id: str
    outbox: Outbox
    pool: Pool
    answer: Answer
    specs: tuple[SequenceSpec, ...]
    """One for each choice."""
    deadline: asyncio.TimerHandle
    stage: str
    sequences: set[SequenceId]
    """Those of its choices that the rank knows and has not ended."""
    others_begun: bool = False
    """The choices after the first run: they share its prompt through the prefix cache, so they
    wait until its blocks are there."""
    bringing: asyncio.Task[None] | None = None
    """What is not to be computed is on its way; the rank hears of the attempt after that."""
    reservation: Reservation | None = None
    cached_tokens: int = 0
    ticket_given: bool = False
    start_wanted: bool = False
    """Start has come: generate as soon as the blocks are there."""
