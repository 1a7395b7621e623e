"""What a front keeps of an attempt that decodes on its node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from core.engine.messages import SequenceSpec
from core.engine.plan import SequenceId
from core.telemetry import Value
from regional.node.answer import Answer
from regional.node.notes import Notes
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
    notes: Notes
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

    def tell(self, outcome: str, *, now: float) -> None:
        """It is over here: its line and its spans."""
        done = self.answer.standing(now)
        usage, timings = done.usage, done.timings
        first_s = self.answer.first_s
        # Before its first token nobody knows what will have been computed; what was found is known.
        cached = self.cached_tokens if first_s is None else usage.cached_tokens
        facts: dict[str, int | str] = {
            "stage": self.stage,
            "prompt": usage.prompt_tokens,
            "cached": cached,
            "completion": usage.completion_tokens,
            "queue_ms": int(timings.queue_s * 1000),
            "prefill_ms": int(timings.prefill_s * 1000),
            "decode_ms": int(timings.decode_s * 1000),
            "transfer_ms": int(timings.transfer_s * 1000),
            "kv_bytes": timings.kv_bytes,
        }
        more: dict[str, Value] = {}
        if self.notes.traced:
            more = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": self.answer.reasons,
            }
            if first_s is not None:
                more["gen_ai.response.time_to_first_chunk"] = first_s
        self.notes.outcome = outcome
        self.notes.close(facts, more)
