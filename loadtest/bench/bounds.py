"""What holds each figure back: bytes and arithmetic of what was measured, against the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadtest.bench.figures import OURS, Samples
from loadtest.bench.timing import median
from loadtest.bench.workload import DECODED, PREFILL, PROMPT

_PARTS = {
    "Python": ("libpython", "python"),
    "torch": ("libtorch", "libc10", "_C."),
    "OpenMP": ("libgomp", "libiomp"),
    "the kernel": ("[kernel", "[guest.kernel"),
    "libc and libm": ("libc.", "libc-", "libm.", "libm-", "ld-linux", "[vdso"),
}


class Machine(msgspec.Struct, frozen=True):
    """What `python -m core.engine.limits` says."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    bf16_flop_per_s: float
    stored_bytes: int
    dense_bytes: int
    resident_bytes: int
    body_flop: float
    head_flop: float
    attention_flop: float


def lines(machine: Machine, samples: Samples, kv_token_bytes: int) -> list[str]:
    """One for each rate of ours that was measured."""
    found = [
        f"machine: reads {machine.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"copies {machine.copy_bytes_per_s / 1e9:.1f} GB/s (read + written), "
        f"bf16 products {machine.bf16_flop_per_s / 1e9:,.0f} GFLOP/s"
    ]
    context = PROMPT + DECODED / 2
    for size in (1, 8, 32):
        rate = _ours(samples, f"decode {size}")
        if rate is None:
            continue
        steps = rate / size
        kv = size * context * kv_token_bytes
        flop = machine.body_flop + machine.head_flop + context * machine.attention_flop
        found.append(
            f"decode batch {size}: {1e3 / steps:.1f} ms a step; "
            f"{_share((machine.stored_bytes + kv) * steps, machine.read_bytes_per_s)} of memory "
            f"bandwidth if weights are read as stored, "
            f"{_share((machine.dense_bytes + kv) * steps, machine.read_bytes_per_s)} if in bf16; "
            f"{_share(flop * rate, machine.bf16_flop_per_s)} of bf16 arithmetic"
        )
    rate = _ours(samples, "prefill 1024")
    if rate is not None:
        flop = machine.body_flop + PREFILL / 2 * machine.attention_flop
        found.append(
            f"prefill: {flop * rate / 1e9:,.0f} GFLOP/s, "
            f"{_share(flop * rate, machine.bf16_flop_per_s)} of bf16 arithmetic"
        )
    return found


def _ours(samples: Samples, measure: str) -> float | None:
    numbers = samples.get(measure, {}).get(OURS, ())
    return median(numbers) if numbers else None


def _share(used: float, there: float) -> str:
    return f"{100 * used / there:.0f} %"


# ------------------------------------------------------------------ where a step's time goes


def profile(report: str, native: str) -> Mapping[str, int]:
    """Samples by part, of `perf report --sort dso -F sample,dso`. `native`: a part of the name of
    our compiled kernels' library."""
    found: dict[str, int] = {}
    for line in report.splitlines():
        words = line.split()
        if len(words) < 2 or not words[0].isdecimal():
            continue
        part = _part(words[1], native)
        found[part] = found.get(part, 0) + int(words[0])
    return found


def _part(library: str, native: str) -> str:
    if native in library:
        return "our kernels"
    for part, starts in _PARTS.items():
        if library.startswith(starts):
            return part
    return "else"


def profile_line(parts: Mapping[str, int], per_second: int, seconds: float) -> str:
    """Shares of CPU time, and Python's share of the time that passed: it runs on one core."""
    total = sum(parts.values())
    ordered: Sequence[tuple[str, int]] = sorted(parts.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {_share(count, total)}" for name, count in ordered)
    python = parts.get("Python", 0) / per_second
    return (
        f"decode batch 1, CPU time: {shares}; "
        f"the interpreter runs for {_share(python, seconds)} of the time that passes"
    )
