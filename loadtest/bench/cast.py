"""Who takes part: starts every contestant that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import peers as peers_
from loadtest.bench.figures import OURS, SPECULATING
from loadtest.bench.llama import Llama
from loadtest.bench.peers import Peers
from loadtest.bench.workers import ContestantFailed, Worker

Say = Callable[[str], None]
_HERE = Path(__file__).parent
_VLLM_START_S, _START_S, _EXPORT_S = 600.0, 120.0, 120.0
_KV_GIB = "2"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants share. `step_tokens`: the budget of one step, ours and vLLM's."""

    project: Path
    model: Path
    build: Path
    threads: int
    native: bool
    step_tokens: int
    say: Say

    @property
    def logs(self) -> Path:
        folder = self.build / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def ours(setting: Setting, *, speculation: bool, log: str) -> Worker:
    """A fresh process of our engine. Raises ContestantFailed."""
    command = [
        sys.executable, "-m", "core.engine.drive", str(setting.model),
        "--threads", str(setting.threads),
        "--step-tokens", str(setting.step_tokens),
        "--native", "on" if setting.native else "off",
        "--speculation", "on" if speculation else "off",
    ]  # fmt: skip
    return Worker(
        command, env=os.environ, cwd=setting.project, log=setting.logs / log, start_s=_START_S
    )


def start_all(setting: Setting, found: Peers) -> tuple[dict[str, Worker], Llama | None]:
    """Each starts alone, with the others at rest. Raises ContestantFailed for ours; a peer that
    does not start is said and left out."""
    workers: dict[str, Worker] = {}
    try:
        for name, speculation in ((OURS, False), (SPECULATING, True)):
            log = f"{name.replace(', ', '-')}.log"
            workers[name] = ours(setting, speculation=speculation, log=log)
            _came_up(setting, name, workers[name])
        _start_peers(setting, found, workers)
    except BaseException:
        for worker in workers.values():
            worker.close()
        raise
    llama = None
    if found.llama_bin is not None:
        env = peers_.quiet_environment(os.environ, setting.threads)
        llama = Llama(found.llama_bin, setting.model, threads=setting.threads, env=env)
    return workers, llama


def _start_peers(setting: Setting, found: Peers, workers: dict[str, Worker]) -> None:
    present = {"vllm", "transformers"} - set(found.missing())
    if not present:
        return
    folder = setting.build / "model-bf16"
    if not _export(setting, folder):
        return
    env = peers_.quiet_environment(os.environ, setting.threads)
    commands: Mapping[str, tuple[list[str], Mapping[str, str], float]] = {
        "transformers": (
            [str(_HERE / "transformers_worker.py"), str(folder), str(setting.threads)],
            env,
            _START_S,
        ),
        "vllm": (
            [str(_HERE / "vllm_worker.py"), str(folder), str(setting.step_tokens), _KV_GIB],
            peers_.vllm_environment(
                found, os.environ, setting.threads, setting.build / "vllm-cache"
            ),
            _VLLM_START_S,
        ),
    }
    for name in sorted(present):
        arguments, environment, limit_s = commands[name]
        setting.say(f"  {name} starts (up to {limit_s:.0f} s) …")
        try:
            workers[name] = Worker(
                [str(found.python), *arguments], env=environment, cwd=setting.build,
                log=setting.logs / f"{name}.log", start_s=limit_s,
            )  # fmt: skip
        except ContestantFailed as error:
            setting.say(f"  {name} does not start and is left out: {error}")
            continue
        _came_up(setting, name, workers[name])


def _came_up(setting: Setting, name: str, worker: Worker) -> None:
    worker.rest()
    setting.say(f"  {name}: up in {worker.started.ready_s:.1f} s, process {worker.started.pid}")


def _export(setting: Setting, folder: Path) -> bool:
    """The same weights for peers that cannot read GGUF; made once for a model."""
    done = folder / "source"
    stat = setting.model.stat()
    identity = f"{setting.model} {stat.st_size} {stat.st_mtime_ns}"
    if done.is_file() and done.read_text(encoding="utf-8") == identity:
        return True
    setting.say(f"  writing the model as bf16 safetensors to {folder} …")
    command = [sys.executable, "-m", "core.engine.export", str(setting.model), str(folder)]
    try:
        subprocess.run(command, cwd=setting.project, check=True, timeout=_EXPORT_S)
    except (OSError, subprocess.SubprocessError) as error:
        setting.say(f"  vllm and transformers are left out: {error}")
        return False
    done.write_text(identity, encoding="utf-8")
    return True
