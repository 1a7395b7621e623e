"""The least that ranks have to send each other, and the least time that a pipeline needs: pure."""

from __future__ import annotations

from dataclasses import dataclass

_CANDIDATE_BYTES = 8
"""A value and a token id: what a rank must say of a drawn row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a dense model. `item_bytes`: of one number of a hidden state."""

    layers: int
    hidden: int
    item_bytes: int

    @property
    def state_bytes(self) -> int:
        return self.hidden * self.item_bytes


def tensor_parallel(shape: Shape, ranks: int, tokens: int, drawn: int) -> int:
    """Bytes for `tokens` computed tokens, of which `drawn` are followed by a sampled one, over all
    ranks: two sums a layer, each of which sends 2 (n−1) copies of a hidden state at the least; its
    embedding from the rank that has it to the others; a candidate from each rank but one."""
    sums = 2 * shape.layers * 2 * (ranks - 1) * shape.state_bytes
    embedding = (ranks - 1) * shape.state_bytes
    return tokens * (sums + embedding) + drawn * (ranks - 1) * _CANDIDATE_BYTES


def pipeline(shape: Shape, stages: int, tokens: int) -> int:
    """Each token's hidden state crosses from stage to stage."""
    return tokens * (stages - 1) * shape.state_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """What the stages of a pipeline did: seconds of computing in each, and seconds during which
    there was work."""

    stages: tuple[float, ...]
    active_s: float

    @property
    def imbalance(self) -> float:
        """The slowest stage against the mean."""
        return max(self.stages) * len(self.stages) / sum(self.stages)

    def stretch(self, steps: int) -> float:
        """The time taken against the schedule's ideal: equal stages that never wait, but for the
        steps in which the pipeline fills and empties."""
        stages = len(self.stages)
        ideal = sum(self.stages) / stages * (steps + stages - 1) / steps
        return self.active_s / ideal


def span(before: tuple[tuple[float, ...], float], after: tuple[tuple[float, ...], float]) -> Span:
    """Between two readings of (seconds of each stage, share of their time spent in bubbles)."""
    busy = tuple(b - a for a, b in zip(before[0] or (0.0,) * len(after[0]), after[0], strict=True))
    return Span(busy, _active(*after) - _active(*before))


def _active(stages: tuple[float, ...], bubble: float) -> float:
    return sum(stages) / len(stages) / (1 - bubble) if stages else 0.0
