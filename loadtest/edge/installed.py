"""What `pip install skerry` leaves on the disk: the plain extra, which runs an edge."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")
OUR_PACKAGES = ("core", "edge", "deploy", "regional", "loadtest", "kernels")


def size_mb(project: Path) -> float:
    """Files of all distributions that the plain extra needs, and our own sources."""
    with (project / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    total = sum(_bytes(name) for name in _closure(wanted))
    ours = (path for package in OUR_PACKAGES for path in (project / package).rglob("*.py"))
    return (total + sum(path.stat().st_size for path in ours)) / 1e6


def _closure(wanted: list[str]) -> set[str]:
    names: set[str] = set()
    left = [name for one in wanted if (name := _needed(one))]
    while left:
        name = left.pop()
        if name in names:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        names.add(name)
        left += [other for one in needs if (other := _needed(one))]
    return names


def _needed(requirement: str) -> str | None:
    """The distribution that a line of requirements names; None for what only an extra needs."""
    line, _, marker = requirement.partition(";")
    match = _NAME.match(line.strip())
    if match is None or "extra" in marker:
        return None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _bytes(name: str) -> int:
    return sum(path.stat().st_size for path in _files(name))


def _files(name: str) -> Iterator[Path]:
    for file in metadata.files(name) or ():
        path = Path(str(file.locate()))
        if path.is_file() and path.suffix != ".pyc":
            yield path
