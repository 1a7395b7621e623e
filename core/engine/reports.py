"""What a scheduler has to say, collected between two looks."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.engine.messages import GivenBack, PrefillProgress, Reply, SequenceFailed, TokenOutput
from core.engine.plan import SequenceId
from core.errors import RequestError


@dataclass(slots=True)
class Counters:
    """Since the start of the rank. Prompt tokens that are computed again after a preemption are
    neither computed nor cached once more."""

    generated: int = 0
    computed_prompt: int = 0
    cached_prompt: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Reports:
    """In order of happening."""

    replies: list[Reply] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    given_back: list[GivenBack] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)

    def reply(self, sequence: SequenceId, outcome: Reply | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self.fail(sequence, outcome)
        else:
            self.replies.append(outcome)

    def fail(self, sequence: SequenceId, error: RequestError) -> None:
        self.replies.append(SequenceFailed(sequence, error.code, error.message))
