"""From samples to figures with a verdict: pure.

A sample is a rate (or a time) of one contestant in one round. A ratio is the median of the rounds'
own ratios: the two that are compared took turns within a round, so what slowed the machine down
slowed both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadtest.bench.timing import median

OURS = "skerry"
SPECULATING = "skerry, speculating"
Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Measure → contestant → one number a round, in the order of rounds."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`target` and `floor` may be above or below each other: below for what is to be small."""

    name: str
    value: float
    unit: str
    target: float
    floor: float
    about: str = ""

    @property
    def smaller_is_better(self) -> bool:
        return self.target < self.floor

    @property
    def verdict(self) -> str:
        if self._reaches(self.target):
            return "target met"
        return "floor met" if self._reaches(self.floor) else "BELOW THE FLOOR"

    @property
    def fails(self) -> bool:
        return not self._reaches(self.floor)

    def _reaches(self, mark: float) -> bool:
        return self.value <= mark if self.smaller_is_better else self.value >= mark


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a rival's, of one measure. `rival` None: whichever other contestant is best."""

    name: str
    measure: str
    rival: str | None
    target: float
    floor: float
    ours: str = OURS


@dataclass(frozen=True, slots=True)
class Absolute:
    name: str
    measure: str
    unit: str
    target: float
    floor: float


RATIOS = (
    Ratio("decode batch 1 / llama.cpp", "decode 1", "llama.cpp", 1.15, 0.9),
    Ratio("decode batch 1 / vLLM CPU", "decode 1", "vllm", 2.8, 2.2),
    Ratio("decode batch 8 / best peer", "decode 8", None, 1.3, 1.0),
    Ratio("decode batch 32 / best peer", "decode 32", None, 1.15, 0.95),
    Ratio("prefill 1,024 / best peer", "prefill 1024", None, 1.1, 0.85),
    Ratio("mixed requests, tokens a second / vLLM CPU", "mixed tokens/s", "vllm", 1.2, 1.0),
    Ratio("mixed requests, p99 time per token / vLLM CPU", "mixed p99 ms", "vllm", 0.8, 1.0),
    Ratio("repeat text, speculation on / off", "repeat", OURS, 1.5, 1.2, ours=SPECULATING),
)
ABSOLUTES = (
    Absolute("start to first token", "start", "s", 2.5, 5.0),
    Absolute("resident memory above weights and pool", "memory", "MB", 250.0, 400.0),
)


def figures(samples: Samples) -> tuple[list[Figure], list[str]]:
    """All figures that the samples allow, and the names of those that they do not."""
    found: list[Figure] = []
    missing: list[str] = []
    for ratio in RATIOS:
        figure = _ratio(ratio, samples.get(ratio.measure, {}))
        found += [figure] if figure else []
        missing += [] if figure else [ratio.name]
    for absolute in ABSOLUTES:
        numbers = samples.get(absolute.measure, {}).get(OURS, ())
        if not numbers:
            missing.append(absolute.name)
            continue
        value = median(numbers)
        found.append(Figure(absolute.name, value, absolute.unit, absolute.target, absolute.floor))
    return found, missing


def _ratio(spec: Ratio, by_name: Mapping[str, Sequence[float]]) -> Figure | None:
    ours = by_name.get(spec.ours, ())
    rival = spec.rival or best_peer(by_name)
    if rival is None or not ours or not by_name.get(rival):
        return None
    pairs = list(zip(ours, by_name[rival], strict=False))  # a peer may have dropped out
    value = median([mine / other for mine, other in pairs])
    about = f"{median(ours):.4g} against {median(by_name[rival]):.4g} of {rival}"
    return Figure(spec.name, value, "×", spec.target, spec.floor, about)


def best_peer(by_name: Mapping[str, Sequence[float]]) -> str | None:
    """The contestant with the highest median that is not ours."""
    peers = {
        name: median(numbers)
        for name, numbers in by_name.items()
        if numbers and name not in (OURS, SPECULATING)
    }
    return max(peers, key=lambda name: peers[name]) if peers else None


def rows(samples: Samples) -> Iterator[tuple[str, str, float, float, float]]:
    """(measure, contestant, median, least, most) of all samples."""
    for measure, by_name in samples.items():
        for name, numbers in by_name.items():
            if numbers:
                yield measure, name, median(numbers), min(numbers), max(numbers)
