"""What is deployed: a Worker's modules and settings as one file that its digest names.

The command line makes it, hosts check it. Equal sources with equal settings give equal bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from core.errors import WorkerRefused

MAX_BYTES = 32 << 20
MAX_PART_BYTES, MAX_PATH_BYTES = 255, 1024
"""Of the names of files, which are what file systems have."""
VERSION_CHARS = 12
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Of a Worker: a label of a host name."""

Language = Literal["javascript", "python"]
ModuleKind = Literal["esm", "text", "data", "wasm", "python"]


class Module(msgspec.Struct, frozen=True):
    """One file of code; `name` is how others import it, relative to the first one."""

    name: str
    kind: ModuleKind
    body: bytes


class Kv(msgspec.Struct, frozen=True):
    binding: str
    id: str


class Service(msgspec.Struct, frozen=True):
    """`service`: the name of another Worker of the same tenant."""

    binding: str
    service: str


class Assets(msgspec.Struct, frozen=True, kw_only=True):
    """Static files; `settings` are JSON of `html_handling`, `not_found_handling`,
    `run_worker_first`."""

    binding: str | None = None
    settings: str = "{}"
    files: tuple[tuple[str, bytes], ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What wrangler's configuration came to. `vars` are JSON texts by name."""

    name: str
    language: Language = "javascript"
    compatibility_date: str
    compatibility_flags: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    vars: tuple[tuple[str, str], ...] = ()
    ai: str | None = None
    kv: tuple[Kv, ...] = ()
    services: tuple[Service, ...] = ()
    crons: tuple[str, ...] = ()
    turn_ms: int | None = None
    """How long it may hold its thread, where that is less than the world's limit."""
    workers_dev: bool = True
    """Callers reach it by its name; else by its routes alone, and Workers that are bound to it."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The first module is the entry. `source_map` is of the first module, in the form that bundlers
    write, without the sources' text."""

    settings: Settings
    modules: tuple[Module, ...]
    source_map: bytes = b""
    assets: Assets | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Bundle)


def pack(bundle: Bundle) -> bytes:
    return _encode(bundle)


def unpack(data: bytes) -> Bundle:
    """Raises WorkerRefused for what is no bundle, and for files that no folder could hold."""
    try:
        bundle = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WorkerRefused(f"this is no bundle of a Worker: {error}") from error
    if not bundle.modules:
        raise WorkerRefused("the bundle has no module")
    check_name(bundle.settings.name)
    _check_files([one.name for one in bundle.modules])
    _check_files([path for path, _ in bundle.assets.files] if bundle.assets else ())
    for name, value in bundle.settings.vars:
        try:
            msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise WorkerRefused(f"the variable {name[:100]!r} is no JSON: {error}") from error
    return bundle


def _check_files(names: Iterable[str]) -> None:
    seen: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    for name in names:
        path, shown = PurePosixPath(name), f"the bundle has a file {name[:100]!r}"
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise WorkerRefused(f"{shown}, which leaves its folder")
        longest = max(len(part.encode()) for part in path.parts)
        if longest > MAX_PART_BYTES or len(name.encode()) > MAX_PATH_BYTES:
            raise WorkerRefused(f"{shown}, whose name is too long")
        if path in seen or path in folders or not seen.isdisjoint(path.parents):
            raise WorkerRefused(f"{shown}, in the place of another")
        seen.add(path)
        folders.update(path.parents)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def version_of(digest: str) -> str:
    """What a person calls it."""
    return digest[:VERSION_CHARS]


def check_name(name: str) -> None:
    """Raises WorkerRefused."""
    if not NAME.fullmatch(name):
        raise WorkerRefused(
            f"{name[:100]!r} is no name of a Worker: small letters, digits and dashes, at most 63,"
            " with a letter or digit at both ends",
            param="name",
        )
