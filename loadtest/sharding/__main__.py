"""`python -m loadtest.sharding`: what splitting the bundled model over processes costs.

Bytes that ranks send each other, against the least possible; a pipeline's time, against its
schedule's; reading weights, against a bare read of the same files. Takes one to two minutes; needs
two cores that have nothing else to do. Exit status: 0, 1 when a figure is below its floor, 2 when
the engine could not be measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from core.models.config import ModelConfig
from core.models.numbers import read_config
from loadtest.bench import chart, probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, NOT_MEASURED, PROJECT, bundled_model, say
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.bench.workers import ContestantFailed, Shared, Worker
from loadtest.bench.workload import Request
from loadtest.sharding import least, raw_read, traffic
from loadtest.sharding.least import Shape, Span

_START_S, _PLAY_S, _EXPORT_S = 120.0, 300.0, 120.0
ITEM_BYTES = 4
"""Hidden states of the native CPU kernels are fp32."""
WARM_UP = tuple(range(40000, 40020))


@dataclass(frozen=True, slots=True)
class Setting:
    model: Path
    build: Path
    dtype: str
    rounds: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sent:
    """`wire`: on the sockets, plans and framing included; None where the system does not say."""

    counted: int
    wire: int | None
    least: int
    tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    setting = parse(arguments)
    setting.build.mkdir(parents=True, exist_ok=True)
    say(f"machine: {probe.describe()}; model {setting.model}, {setting.dtype}")
    try:
        tp, pp = tensor_parallel(setting), pipeline(setting)
        loads = loading(setting)
    except ContestantFailed as error:
        say(f"the engine could not be measured: {error}")
        return NOT_MEASURED
    found = [*traffic_figures(tp, pp[0]), *pipeline_figures(pp[1], setting), *load_figures(loads)]
    return write(found, setting)


def tensor_parallel(setting: Setting) -> Sent:
    """Three ranks that share each layer, eight sequences."""
    prompts = [tuple(range(100 + 40 * n, 228 + 40 * n)) for n in range(8)]
    with engine(setting, setting.model, "--tp", "3") as worker:
        play(worker, [WARM_UP], 2)  # counters are told with the first step
        before = worker.shared(), traffic.sent_bytes(worker.started.pids)
        tokens, drawn = play(worker, prompts, setting.tokens)
        after = worker.shared(), traffic.sent_bytes(worker.started.pids)
    shape = shape_of(setting)
    return Sent(
        counted=after[0].sent_bytes - before[0].sent_bytes,
        wire=None if after[1] is None or before[1] is None else after[1] - before[1],
        least=least.tensor_parallel(shape, 3, tokens, drawn),
        tokens=tokens,
    )


def pipeline(setting: Setting) -> tuple[Sent, list[Span]]:
    """Two stages that write 32 answers, as many as a node takes unless it is told otherwise: as
    many micro-batches in flight as stages."""
    prompts = [tuple(range(100 + 20 * n, 116 + 20 * n)) for n in range(32)]
    spans: list[Span] = []
    with engine(setting, setting.model, "--pp", "2") as worker:
        play(worker, [WARM_UP], 2)
        first = worker.shared(), traffic.sent_bytes(worker.started.pids)
        last, tokens = first, 0
        for number in range(setting.rounds):
            fresh = [tuple(1000 * (number + 1) + token for token in one) for one in prompts]
            before = last[0]
            tokens += play(worker, fresh, 2 * setting.tokens)[0]
            last = worker.shared(), traffic.sent_bytes(worker.started.pids)
            spans.append(least.span(reading(before), reading(last[0])))
    shape = shape_of(setting)
    return Sent(
        counted=last[0].sent_bytes - first[0].sent_bytes,
        wire=None if last[1] is None or first[1] is None else last[1] - first[1],
        least=least.pipeline(shape, 2, tokens),
        tokens=tokens,
    ), spans


def loading(setting: Setting) -> list[float]:
    """Rates of reading the weights over those of a bare read, cold both, turn about."""
    folder = exported(setting)
    files = raw_read.weight_files(folder)
    ratios: list[float] = []
    for number in range(max(3, setting.rounds)):
        raw_read.evict(files)
        bare = raw_read.seconds(files)
        raw_read.evict(files)
        split = ("--tp", "3") if number % 2 else ("--pp", "2")
        with engine(setting, folder, *split) as worker:
            ours = worker.started.weights_s
        ratios.append(bare / ours)
        say(f"  weights, {' '.join(split)}: {ours:.2f} s; a bare read {bare:.2f} s")
    return ratios


@contextmanager
def engine(setting: Setting, model: Path, *plan: str) -> Iterator[Worker]:
    """Ranks of a plan, without speculation. Raises ContestantFailed."""
    command = [
        sys.executable, "-m", "core.engine.drive", str(model), "--dtype", setting.dtype,
        "--speculation", "off", *plan,
    ]  # fmt: skip
    worker = Worker(
        command, env=os.environ, cwd=PROJECT, log=setting.build / "sharding.log", start_s=_START_S,
        end_s=20.0,
    )  # fmt: skip
    try:
        yield worker
    finally:
        worker.close()


def play(worker: Worker, prompts: Sequence[Sequence[int]], answer: int) -> tuple[int, int]:
    """All at once; how many tokens were computed for them, and how many drawn. An answer's last
    token is drawn and not computed."""
    requests = [Request(0.0, tuple(prompt), answer) for prompt in prompts]
    times = worker.play(requests, _PLAY_S)
    drawn = sum(map(len, times))
    return sum(map(len, prompts)) + drawn - len(prompts), drawn


def reading(shared: Shared) -> tuple[tuple[float, ...], float]:
    return shared.stage_seconds, shared.pipeline_bubble


def shape_of(setting: Setting) -> Shape:
    config: ModelConfig = read_config(setting.model)
    return Shape(config.layers, config.hidden, ITEM_BYTES)


def traffic_figures(tp: Sent, pp: Sent) -> Iterator[Figure]:
    """Of hidden states and candidates, and of all that is on the wire: plans and framing too."""
    for name, sent in (("tensor parallel, 3 ranks", tp), ("pipeline, 2 stages", pp)):
        about = f"least {sent.least / sent.tokens:,.0f} bytes a token"
        ratio = sent.counted / sent.least
        yield Figure(f"bytes communicated / least, {name}", ratio, "×", 1.02, 1.1, about)
        if sent.wire is None:
            say(f"  {name}: what is on the wire is not known (needs ss)")
            continue
        ratio = sent.wire / sent.least
        yield Figure(f"all bytes on the wire / least, {name}", ratio, "×", 1.02, 1.1)


def pipeline_figures(spans: Sequence[Span], setting: Setting) -> Iterator[Figure]:
    steps = 4 * setting.tokens
    stretch = median([one.stretch(steps) for one in spans])
    yield Figure("pipeline time / its schedule's ideal", stretch, "×", 1.1, 1.25)
    yield Figure("slowest stage / mean", median([one.imbalance for one in spans]), "×", 1.1, 1.2)


def load_figures(ratios: Sequence[float]) -> Iterator[Figure]:
    yield Figure("weight loading / raw read", median(ratios), "×", 0.8, 0.6)


def exported(setting: Setting) -> Path:
    """The model as safetensors in a folder of our own: a file that another process has mapped
    cannot be evicted."""
    folder = setting.build / "sharding-model"
    if not raw_read.weight_files(folder):
        command = [sys.executable, "-m", "core.engine.export", str(setting.model), str(folder)]
        try:
            subprocess.run(command, cwd=PROJECT, check=True, timeout=_EXPORT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise ContestantFailed(f"the model could not be exported: {error}") from error
    return folder


def write(found: Sequence[Figure], setting: Setting) -> int:
    command = "make bench-sharding" + (
        f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    )
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    machine = probe.describe()
    files = {
        setting.build / "sharding.json": report.as_json(command, machine, versions, found),
        setting.build / "sharding.svg": drawing(found, machine).encode(),
    }
    for path, data in files.items():
        path.write_bytes(data)
    say("\n" + report.markdown(command, machine, versions, found, {}))
    say("written: " + ", ".join(os.path.relpath(path) for path in files))
    return BELOW_FLOOR if any(figure.fails for figure in found) else 0


def drawing(found: Sequence[Figure], machine: str) -> str:
    panels = [
        (one.name, {"measured": one.value, "target": one.target, "floor": one.floor})
        for one in found
    ]
    return chart.svg("A model on several processes, in ratios", machine, panels, "measured")


def parse(arguments: Sequence[str] | None) -> Setting:
    parser = argparse.ArgumentParser(prog="make bench-sharding", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, less work")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    options = parser.parse_args(arguments)
    return Setting(
        model=options.model or bundled_model(),
        build=PROJECT / "build" / "bench",
        dtype=options.dtype,
        rounds=1 if options.quick else 3,
        tokens=24 if options.quick else 64,
    )


if __name__ == "__main__":
    raise SystemExit(main())
