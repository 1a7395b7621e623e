"""The Triton kernels against what the card can do: `make bench-kernels`.

Ceilings are measured in the same run: a copy of 1 GiB (bytes read and written a second) and a bf16
product of 8192³. A kernel's share is the time that its bytes or its FLOPs, whichever takes longer,
would need at the ceiling, over the time it took (median of single launches, CUDA events; all touch
far more than the cache holds). First each kernel must agree with its reference in bf16.

Writes build/bench/bench-kernels.json; `--results FILE` adds a section for kernels/RESULTS.md.
Exit 1 when a floor is missed or a kernel is wrong, 0 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.bench_triton_cases import BUILDERS, FULL, SMALL, Builder, Case

COMMAND = "make bench-kernels"
AGREEMENT = 1e-2
"""Most ‖ours − reference‖ / ‖reference‖ in bf16, the reference computed in fp32."""
Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and FLOPs a second."""

    copy: float
    matmul: float


@dataclass(frozen=True, slots=True)
class Measured:
    case: Case
    seconds: float
    error: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/bench-kernels.json"))
    parser.add_argument("--results", type=Path, help="append a section in Markdown to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        say("bench-kernels: no CUDA device here, nothing was measured")
        return 0
    device = torch.device("cuda")
    say(f"{torch.cuda.get_device_name(device)}; kernels compile on first use")
    before = ceilings(device, cuda_timer)
    found = list(measure(BUILDERS, device, torch.bfloat16, cuda_timer))
    after = ceilings(device, cuda_timer)
    limits = Ceilings(max(before.copy, after.copy), max(before.matmul, after.matmul))
    lines = table(found, limits)
    for line in lines:
        say(line)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = report(found, limits, torch.cuda.get_device_name(device))
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.results is not None:
        head = f"\n## {torch.cuda.get_device_name(device)}, {time.strftime('%Y-%m-%d')}\n"
        with options.results.open("a", encoding="utf-8") as file:
            file.write("\n".join([head, f"`{COMMAND}`, {versions()}", "", *lines, ""]))
    return 0 if all(holds(one, limits) for one in found) else 1


def measure(
    builders: Sequence[Builder], device: torch.device, dtype: torch.dtype, timer: Timer
) -> Iterator[Measured]:
    """Each kernel on small sizes for agreement, then on full ones for time."""
    for build in builders:
        small = build(SMALL, device, dtype)
        wanted = small.expected().double()
        error = float((small.run().double() - wanted).norm() / wanted.norm())
        case = build(FULL, device, dtype)
        yield Measured(case, timer(case.run), error)


def ceilings(device: torch.device, timer: Timer) -> Ceilings:
    return Ceilings(_copy_rate(device, timer), _matmul_rate(device, timer))


def _copy_rate(device: torch.device, timer: Timer) -> float:
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer(lambda: target.copy_(source))


def _matmul_rate(device: torch.device, timer: Timer) -> float:
    left, right = torch.randn(2, 8192, 8192, device=device).to(torch.bfloat16)
    return 2 * 8192**3 / timer(lambda: left @ right)


def cuda_timer(run: Callable[[], object]) -> float:
    """Median of 25 launches after 5, in seconds. Nothing waits in between, so that the device is
    behind the host and a launch's own cost on the host does not count."""
    for _ in range(5):
        run()
    marks = [(_mark(), _mark()) for _ in range(25)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    taken: list[float] = [begin.elapsed_time(end) for begin, end in marks]
    return statistics.median(taken) / 1e3


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def share(one: Measured, limits: Ceilings) -> float:
    """Of the nearer bound."""
    return max(one.case.bytes / limits.copy, one.case.flops / limits.matmul) / one.seconds


def holds(one: Measured, limits: Ceilings) -> bool:
    return one.error <= AGREEMENT and share(one, limits) >= (one.case.floor or 0.0)


def bound(case: Case, limits: Ceilings) -> str:
    return "copy" if case.bytes / limits.copy >= case.flops / limits.matmul else "matmul"


def table(found: Sequence[Measured], limits: Ceilings) -> list[str]:
    """Markdown."""
    lines = [
        f"Ceilings: copy {limits.copy / 1e9:.0f} GB/s, bf16 matmul {limits.matmul / 1e12:.0f}"
        " TFLOP/s.",
        "",
        "| kernel | µs | MB | GFLOP | bound | share | target | floor | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        case = one.case
        goals = " | ".join("–" if goal is None else f"{goal:.0%}" for goal in case.goals)
        lines.append(
            f"| {case.name} | {one.seconds * 1e6:.0f} | {case.bytes / 1e6:.0f} |"
            f" {case.flops / 1e9:.0f} | {bound(case, limits)} | {share(one, limits):.0%} |"
            f" {goals} | {one.error:.1e} |"
        )
    return lines


def report(found: Sequence[Measured], limits: Ceilings, card: str) -> dict[str, object]:
    figures = [
        {
            "name": one.case.name,
            "value": round(share(one, limits), 4),
            "unit": f"share of measured {bound(one.case, limits)} rate",
            "target": one.case.target,
            "floor": one.case.floor,
        }
        for one in found
    ]
    figures += [
        {"name": name, "value": value, "unit": unit, "target": None, "floor": None}
        for name, value, unit in (
            ("copy bandwidth", limits.copy / 1e9, "GB/s"),
            ("bf16 matmul", limits.matmul / 1e12, "TFLOP/s"),
        )
    ]
    machine = f"{card}, {platform.machine()}"
    return {"command": COMMAND, "machine": machine, "versions": versions(), "figures": figures}


def versions() -> str:
    import triton

    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
