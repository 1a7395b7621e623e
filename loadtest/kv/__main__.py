"""`python -m loadtest.kv`: how KV travels, each figure beside a peer or a limit of the same run.

Shared memory against one memcpy; TCP against a raw loopback socket and against Mooncake's; what of
a hand-off nobody waits for; the first request after a restart with the disk tier. Takes three to
four minutes; needs two cores that have nothing else to do. Exit status: 0, 1 when a figure is below
its floor, 2 when something could not be measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from loadtest.bench import chart, probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, NOT_MEASURED, PROJECT, bundled_model, say
from loadtest.bench.figures import Figure
from loadtest.edge.cast import NotStarted
from loadtest.kv import exposed, restart, transfers

PARTS = ("transfers", "exposed", "restart")
MOONCAKE_PACKAGE = "mooncake-transfer-engine-non-cuda"


@dataclass(frozen=True, slots=True)
class Setting:
    parts: tuple[str, ...]
    quick: bool
    build: Path


def main(arguments: Sequence[str] | None = None) -> int:
    setting = parse(arguments)
    setting.build.mkdir(parents=True, exist_ok=True)
    say(f"machine: {probe.describe()}")
    found: list[Figure] = []
    samples: dict[str, dict[str, list[float]]] = {}
    missing: list[str] = []
    if "transfers" in setting.parts:
        rates = transfers.measure(3 if setting.quick else 7, say=say)
        samples["256 MiB, GB/s"] = rates.rates
        found += transfers.figures(rates)
        missing += [f"{name}: {why}" for name, why in rates.missing.items()]
    if "exposed" in setting.parts:
        found += exposed.figures(bundled_model(), quick=setting.quick)
    if "restart" in setting.parts:
        try:
            found += restart.figures(quick=setting.quick)
        except NotStarted as error:
            missing.append(f"restart: {error}")
    for line in missing:
        say(f"not measured: {line}")
    write(found, samples, setting)
    if any(figure.fails for figure in found):
        return BELOW_FLOOR
    return NOT_MEASURED if missing else 0


def write(
    found: Sequence[Figure], samples: dict[str, dict[str, list[float]]], setting: Setting
) -> None:
    command = "make bench-kv" + (
        f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    )
    versions = {"python": platform.python_version()}
    try:
        versions["mooncake"] = metadata.version(MOONCAKE_PACKAGE)
    except metadata.PackageNotFoundError:
        say("Mooncake's package is not installed")
    machine = probe.describe()
    files = {
        setting.build / "kv.json": report.as_json(command, machine, versions, found),
        setting.build / "kv.raw.json": report.raw_json(command, machine, versions, samples, []),
        setting.build / "kv.svg": drawing(found, machine).encode(),
    }
    for path, data in files.items():
        path.write_bytes(data)
    say("\n" + report.markdown(command, machine, versions, found, samples))
    say("written: " + ", ".join(os.path.relpath(path) for path in files))


def drawing(found: Sequence[Figure], machine: str) -> str:
    panels = [
        (one.name, {"measured": one.value, "target": one.target, "floor": one.floor})
        for one in found
    ]
    return chart.svg("How KV travels, in ratios", machine, panels, "measured")


def parse(arguments: Sequence[str] | None) -> Setting:
    parser = argparse.ArgumentParser(prog="make bench-kv", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part, may be repeated")
    options = parser.parse_args(arguments)
    return Setting(
        parts=tuple(options.only or PARTS),
        quick=options.quick,
        build=PROJECT / "build" / "bench",
    )


if __name__ == "__main__":
    raise SystemExit(main())
