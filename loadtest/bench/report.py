"""What a run leaves behind: the JSON that checks read, a table for people, and the raw samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadtest.bench.figures import Figure, Samples
from loadtest.bench.timing import median

UNITS = {
    "decode 1": "decode, batch 1, tok/s",
    "decode 8": "decode, batch 8, tok/s",
    "decode 32": "decode, batch 32, tok/s",
    "prefill 1024": "prefill of 1,024, tok/s",
    "mixed tokens/s": "mixed requests, tok/s",
    "mixed p99 ms": "mixed requests, p99 time per token, ms",
    "repeat": "repeat text, batch 1, tok/s",
    "start": "start to first token, s",
    "memory": "resident above weights and pool, MB",
}


class _Line(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str
    target: float
    floor: float


class _Report(msgspec.Struct, frozen=True):
    command: str
    machine: str
    versions: Mapping[str, str]
    figures: Sequence[_Line]


class _Raw(msgspec.Struct, frozen=True):
    command: str
    machine: str
    versions: Mapping[str, str]
    samples: Samples
    bounds: Sequence[str]


def as_json(
    command: str, machine: str, versions: Mapping[str, str], figures: Sequence[Figure]
) -> bytes:
    lines = [
        _Line(figure.name, round(figure.value, 4), figure.unit, figure.target, figure.floor)
        for figure in figures
    ]
    report = _Report(command, machine, versions, lines)
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def raw_json(
    command: str,
    machine: str,
    versions: Mapping[str, str],
    samples: Samples,
    bounds: Sequence[str],
) -> bytes:
    return msgspec.json.encode(_Raw(command, machine, versions, samples, bounds)) + b"\n"


def markdown(
    command: str,
    machine: str,
    versions: Mapping[str, str],
    figures: Sequence[Figure],
    samples: Samples,
) -> str:
    """Figures, then medians of every contestant side by side."""
    out = ["| figure | measured | target | floor | |", "|---|---|---|---|---|"]
    for figure in figures:
        sign = "≤" if figure.smaller_is_better else "≥"
        out.append(
            f"| {figure.name} | **{_number(figure.value)} {figure.unit}**"
            f"{f' ({figure.about})' if figure.about else ''} | {sign} {figure.target:g} "
            f"| {sign} {figure.floor:g} | {figure.verdict} |"
        )
    names = list(dict.fromkeys(name for by_name in samples.values() for name in by_name))
    if names:
        out += ["", f"| medians | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for measure, by_name in samples.items():
        cells = [_number(median(by_name[n])) if by_name.get(n) else "–" for n in names]
        out.append(f"| {UNITS.get(measure, measure)} | {' | '.join(cells)} |")
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*out, "", f"`{command}` on {machine}; {said}.", ""])


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
