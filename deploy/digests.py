"""The digest of a model's files, and whether they are what a topology says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from core.config import World
from core.errors import ConfigError
from core.models.source import resolve_source

PIECE = 8 << 20
CACHE = "digests.json"
Step = Callable[[int, int], None]
"""Told of bytes that were read, and of all there are."""


class _Known(msgspec.Struct, frozen=True):
    size: int
    changed_ns: int
    digest: str


def files_of(path: Path) -> list[Path]:
    """A GGUF file, or all of a folder but what is hidden, in the order of their names."""
    if path.is_file():
        return [path]
    inside = (file for file in path.rglob("*") if file.is_file())
    return sorted(
        file
        for file in inside
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def digest_of(path: Path, step: Step = lambda done, total: None) -> str:
    """`sha256:` and the SHA-256 of a file as `sha256sum` has it; of a folder, that of its files'
    lines in `sha256sum`'s form, with names as they are below the folder. Raises ConfigError."""
    files = files_of(path)
    try:
        total = sum(file.stat().st_size for file in files)
        hashes, done = [], 0
        for file in files:
            one = hashlib.sha256()
            for piece in _pieces(file):
                one.update(piece)
                done += len(piece)
                step(done, total)
            hashes.append(one.hexdigest())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if path.is_file():
        return f"sha256:{hashes[0]}"
    names = (file.relative_to(path).as_posix() for file in files)
    lines = "".join(f"{one}  {name}\n" for one, name in zip(hashes, names, strict=True))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def check_digests(world: World, say: Callable[[str], None]) -> None:
    """Whether each model with a digest has it. What was looked at is not looked at again while its
    sizes and times stay. Raises ConfigError."""
    cache = world.state / CACHE
    known = _read(cache)
    for name, model in world.topology.models.items():
        if model.digest is None:
            continue
        path = resolve_source(world.model_source(name))
        now = _stamp(path)
        seen = known.get(str(path))
        if seen is None or (seen.size, seen.changed_ns) != now:
            say(f"reading {now[0] / 1e6:,.0f} MB of {name} for its digest")
            seen = known[str(path)] = _Known(*now, digest_of(path))
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_bytes(msgspec.json.encode(known))
        if seen.digest != model.digest:
            raise ConfigError(
                f"{name}: {path} is not what the topology names: its digest is {seen.digest}, and "
                f"models.{name}.digest is {model.digest}"
            )


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            yield piece


def _stamp(path: Path) -> tuple[int, int]:
    """Bytes, and when something of it changed last: what writes a file may set the time of its
    contents back, but not this one."""
    try:
        stats = [file.stat() for file in files_of(path)]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return sum(one.st_size for one in stats), max((one.st_ctime_ns for one in stats), default=0)


def _read(cache: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}
