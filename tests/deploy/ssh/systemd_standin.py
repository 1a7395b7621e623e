"""Plays `systemctl` and `journalctl` of a host without systemd: units are read from their files,
and their processes are real. Standard library only; it is on a host's PATH under both names.

What it keeps to, as systemd does: units count as they were at the last daemon-reload; `restart`
stops and starts, `reload` runs ExecReload; a process that fails is started again, but not after
an exit status of RestartPreventExitStatus; SIGTERM goes to the first process, and what is left
after TimeoutStopSec is killed with its group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HOME = Path(os.environ["HOME"])
UNITS = HOME / ".config" / "systemd" / "user"
RUN = HOME / ".standin"
LOADED = RUN / "loaded"
Settings = dict[str, list[str]]
STOPPED = {
    "ActiveState": "inactive", "MainPID": "0", "NRestarts": "0", "Result": "success",
    "ExecMainStatus": "0",
}  # fmt: skip


def main() -> int:
    called, *words = (word for word in sys.argv[1:] if word != "--user")
    RUN.mkdir(exist_ok=True)
    if called == "journalctl":
        return journal(words)
    verb, *rest = words
    if verb == "keep":
        return Keeper(rest[0]).run()
    now = "--now" in rest
    options = [word for word in rest if word.startswith("--")]
    services = [word for word in rest if not word.startswith("--")]
    with (RUN / "calls").open("a", encoding="utf-8") as calls:
        calls.write(" ".join(words) + "\n")
    if verb == "show":
        return show(options, services)
    if verb == "daemon-reload":
        return reload_units()
    if verb in ("stop", "restart"):
        ask_to_stop(services)  # all at once
    verbs = {"start": start, "stop": stop, "restart": restart, "reload": reload}
    for service in services:
        if verb in ("enable", "disable"):
            mark = RUN / f"{service}.enabled"
            mark.touch() if verb == "enable" else mark.unlink(missing_ok=True)
            if not now:
                continue
        code = {**verbs, "enable": start, "disable": stop}[verb](service)
        if code:
            sys.stderr.write(f"Job for {service} failed. See `journalctl -u {service}`.\n")
            return code
    return 0


def show(options: list[str], services: list[str]) -> int:
    (names,) = (one.partition("=")[2] for one in options if one.startswith("--property="))
    values = {**STOPPED, "Version": "252 (stand-in)"}
    if services:
        values |= state_of(services[0])
    for name in names.split(","):
        print(values[name] if "--value" in options else f"{name}={values[name]}")
    return 0


def reload_units() -> int:
    LOADED.mkdir(exist_ok=True)
    there = {path.name: path.read_text(encoding="utf-8") for path in UNITS.glob("*.service")}
    for path in LOADED.iterdir():
        if path.name not in there:
            path.unlink()
    for name, text in there.items():
        (LOADED / name).write_text(text, encoding="utf-8")
    return 0


def start(service: str) -> int:
    if state_of(service)["ActiveState"] in ("active", "activating"):
        return 0
    if not (LOADED / service).exists():
        sys.stderr.write(f"Unit {service} not found.\n")
        return 5
    write_state(service, {**STOPPED, "ActiveState": "activating"})
    log = (RUN / f"{service}.keeper").open("ab")
    keeper = subprocess.Popen(
        [sys.executable, "-SE", __file__, "systemctl", "keep", service],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    (RUN / f"{service}.pid").write_text(str(keeper.pid), encoding="ascii")
    until(lambda: state_of(service)["MainPID"] != "0" or keeper.poll() is not None)
    return 0


def ask_to_stop(services: list[str]) -> None:
    for path in (RUN / f"{service}.pid" for service in services):
        if path.exists():
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text(encoding="ascii")), signal.SIGTERM)


def stop(service: str) -> int:
    path = RUN / f"{service}.pid"
    if path.exists():
        pid = int(path.read_text(encoding="ascii"))
        ask_to_stop([service])
        until(lambda: not alive(pid))
        path.unlink()
    write_state(service, STOPPED)
    return 0


def restart(service: str) -> int:
    return stop(service) or start(service)


def reload(service: str) -> int:
    unit = read(service)
    with (RUN / f"{service}.log").open("ab") as log:
        done = subprocess.run(
            command(unit, "ExecReload"), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=unit["WorkingDirectory"][0], env=environment(unit), check=False,
        )  # fmt: skip
    return done.returncode


def journal(words: list[str]) -> int:
    service = words[words.index("--unit") + 1]
    count = int(words[words.index("--lines") + 1])
    path = RUN / f"{service}.log"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    print("\n".join(lines[-count:]))
    return 0


class Keeper:
    """Be the manager of one unit, until it is stopped or stays down."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.stopping = False
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    def stop(self, number: int, frame: object) -> None:
        if self.stopping:
            return  # a second SIGTERM would mean at once
        self.stopping = True
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self.stop)
        while not self.stopping and self.once():
            self.restarts += 1
            time.sleep(float(read(self.service)["RestartSec"][0]))
        return 0

    def once(self) -> bool:
        """Whether it is to be started again."""
        unit = read(self.service)
        with (RUN / f"{self.service}.log").open("ab") as log:
            child = self.child = subprocess.Popen(
                command(unit, "ExecStart"), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=unit["WorkingDirectory"][0], env=environment(unit),
            )  # fmt: skip
        self.told("active", MainPID=str(child.pid))
        if self.stopping:
            child.terminate()
        code = self.ended(child, float(unit["TimeoutStopSec"][0]))
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = str(abs(code))
        if self.stopping or code == 0:
            self.told("inactive", ExecMainStatus=status)
            return False
        stays = status in unit["RestartPreventExitStatus"][0].split()
        how = {"ExecMainStatus": status, "Result": "exit-code", "NRestarts": str(self.restarts + 1)}
        self.told("failed" if stays else "activating", **how)
        return not stays

    def ended(self, child: subprocess.Popen[bytes], limit_s: float) -> int:
        end = None
        while True:
            try:
                return child.wait(0.2)
            except subprocess.TimeoutExpired:
                if self.stopping:
                    end = end or time.monotonic() + limit_s
                    if time.monotonic() > end:
                        child.kill()

    def told(self, active: str, **more: str) -> None:
        state = {**STOPPED, "ActiveState": active, "NRestarts": str(self.restarts), **more}
        write_state(self.service, state)


def read(service: str) -> Settings:
    """Its settings, but for the sections that systemd leaves to others."""
    found: Settings = {}
    ours = True
    for line in (LOADED / service).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            ours = not line.startswith("[X-")
        elif "=" in line and ours and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def command(unit: Settings, key: str) -> list[str]:
    words = shlex.split(unit[key][0])
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def environment(unit: Settings) -> dict[str, str]:
    """systemd gives little; nothing of a login's."""
    found = {"HOME": str(HOME), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    for line in unit.get("Environment", []):
        for word in shlex.split(line):
            key, _, value = word.partition("=")
            found[key] = value.replace("%%", "%")
    for path in unit.get("EnvironmentFile", []):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            found[key] = shlex.split(value)[0]
    return found


def state_of(service: str) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((RUN / f"{service}.json").read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return STOPPED


def write_state(service: str, state: dict[str, str]) -> None:
    fresh = RUN / f"{service}.json.{os.getpid()}"
    fresh.write_text(json.dumps(state), encoding="utf-8")
    fresh.replace(RUN / f"{service}.json")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(what) -> None:  # type: ignore[no-untyped-def]  # a function without arguments
    while not what():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
