"""Reader of the safetensors container: 8 bytes of length, a JSON header, then raw tensors.

Files are mapped copy-on-write and never written; an index file spreads tensors over several.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError

_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where one tensor lies. `dtype` is the container's own name for it, such as BF16."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFolder:
    """All tensors of a folder. Raises ConfigError for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        tensors: dict[str, SafeTensor] = {}
        for path in _files(folder):
            tensors |= self._map(path)
        self.tensors: Mapping[str, SafeTensor] = tensors

    def close(self) -> None:
        """Drop the maps; those that a tensor still looks into go with that tensor."""
        self.tensors = {}
        self._views.clear()
        self._maps.clear()

    def _map(self, path: Path) -> dict[str, SafeTensor]:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be mapped: {error}") from error
        view = memoryview(mapped)
        self._maps.append(mapped)
        self._views.append(view)
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > min(_HEADER_LIMIT, len(view) - 8):
            raise ConfigError(f"{path}: not a safetensors file, or cut short")
        try:
            header = json.loads(bytes(view[8 : 8 + length]))
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _Entry])
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: damaged header: {error}") from error
        body = view[8 + length :]
        found = {}
        for name, entry in entries.items():
            start, end = entry.data_offsets
            if not 0 <= start <= end <= len(body):
                raise ConfigError(f"{path}: tensor {name} lies outside the file")
            found[name] = SafeTensor(entry.dtype, entry.shape, body[start:end])
        return found


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: damaged: {error!r}") from error
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: has no *.safetensors file")
    return files
