"""Reader of the GGUF container: metadata and where each tensor lies. No torch, no dequantising.

The file is mapped, its head is walked once, and values are decoded when somebody asks: a
vocabulary of 49,152 strings costs a walk over its lengths until it is read. Every length is checked
against what is left of the file before it is used, so a hostile file ends in a `ConfigError`
instead of a large allocation. Nothing here knows what a key or a tensor means.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from core.errors import ConfigError

GGUFValue = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGMLType(IntEnum):
    """How a tensor's numbers are stored; the values are the container's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39

    @property
    def block_elements(self) -> int:
        """Numbers that share one block; a row is a whole number of blocks."""
        return _LAYOUT[self][0]

    @property
    def block_bytes(self) -> int:
        return _LAYOUT[self][1]


_LAYOUT: Mapping[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4), GGMLType.F16: (1, 2), GGMLType.BF16: (1, 2), GGMLType.F64: (1, 8),
    GGMLType.I8: (1, 1), GGMLType.I16: (1, 2), GGMLType.I32: (1, 4), GGMLType.I64: (1, 8),
    GGMLType.Q4_0: (32, 18), GGMLType.Q4_1: (32, 20), GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24), GGMLType.Q8_0: (32, 34), GGMLType.Q8_1: (32, 40),
    GGMLType.IQ4_NL: (32, 18), GGMLType.MXFP4: (32, 17),
    GGMLType.Q2_K: (256, 84), GGMLType.Q3_K: (256, 110), GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176), GGMLType.Q6_K: (256, 210), GGMLType.Q8_K: (256, 292),
    GGMLType.IQ1_S: (256, 50), GGMLType.IQ1_M: (256, 56), GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74), GGMLType.IQ2_S: (256, 82), GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ3_S: (256, 110), GGMLType.IQ4_XS: (256, 136), GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is row-major as in torch (the container counts the other way);
    `offset` is from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A mapped file. It stays mapped until `close`, which views of `data` must not outlive."""

    path: Path
    version: int
    metadata: Mapping[str, GGUFValue]
    """Decoded anew at each access: keep what you need of a large array."""
    tensors: Mapping[str, GGUFTensor]
    mapping: mmap.mmap

    def data(self, name: str) -> memoryview:
        """The raw bytes of a tensor, without a copy.

        The view is of a private mapping: it counts as writable, which spares torch a warning, but
        a write never reaches the file.
        """
        tensor = self.tensors[name]
        return memoryview(self.mapping)[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        self.mapping.close()


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and walk its head. Raises ConfigError for what is cut off, foreign or unknown."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            if head != _MAGIC:
                raise ConfigError(f"{path} is not a GGUF file")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _read(path, mapping)
    except BaseException:
        mapping.close()
        raise


def _read(path: Path, mapping: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(path, mapping, len(_MAGIC))
    version = cursor.u32()
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise ConfigError(f"{path}: GGUF version {version} is not supported; {known} are")
    tensor_count, value_count = cursor.u64(), cursor.u64()
    cursor.expect(tensor_count, 24)
    cursor.expect(value_count, 13)
    entries: dict[str, _Entry] = {}
    for _ in range(value_count):
        key = cursor.name()
        entries[key] = cursor.skip_value(key)
    metadata = _Metadata(path, mapping, entries)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(f"{path}: alignment {alignment!r} is not a power of two")
    relative = [cursor.tensor() for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in relative:
        offset = start + tensor.offset
        if tensor.name in tensors:
            raise ConfigError(f"{path}: tensor {tensor.name!r} is there twice")
        if tensor.offset % alignment:
            raise ConfigError(f"{path}: tensor {tensor.name!r} is not aligned")
        if offset + tensor.nbytes > len(mapping):
            raise ConfigError(
                f"{path} is cut off: tensor {tensor.name!r} ends at byte "
                f"{offset + tensor.nbytes}, the file at {len(mapping)}"
            )
        tensors[tensor.name] = GGUFTensor(
            tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes
        )
    return GGUFFile(path, version, metadata, tensors, mapping)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value not yet decoded. `count` None: not an array."""

    kind: int
    at: int
    count: int | None


class _Cursor:
    """Walks a mapped file; every step is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self.at = at

    def expect(self, count: int, each: int) -> None:
        """Raise unless `count` things of at least `each` bytes can follow."""
        if count * each > self._end - self.at:
            raise ConfigError(
                f"{self._path} is cut off or damaged: at byte {self.at} it announces more than "
                f"the {self._end - self.at} bytes that are left"
            )

    def u32(self) -> int:
        self.expect(1, 4)
        value: int = _U32.unpack_from(self._data, self.at)[0]
        self.at += 4
        return value

    def u64(self) -> int:
        self.expect(1, 8)
        value: int = _U64.unpack_from(self._data, self.at)[0]
        self.at += 8
        return value

    def name(self) -> str:
        length = self.u64()
        self.expect(length, 1)
        if length > _MAX_NAME_BYTES:
            raise ConfigError(f"{self._path} is damaged: a name of {length} bytes")
        raw = self._data[self.at : self.at + length]
        self.at += length
        return _text(self._path, raw)

    def skip_value(self, key: str) -> _Entry:
        kind = self.u32()
        if kind != _ARRAY:
            entry = _Entry(kind, self.at, None)
            self._skip(key, kind, 1)
            return entry
        kind, count = self.u32(), self.u64()
        entry = _Entry(kind, self.at, count)
        self._skip(key, kind, count)
        return entry

    def _skip(self, key: str, kind: int, count: int) -> None:
        if kind == _STRING:
            self.expect(count, 8)
            self.at = self._skip_strings(count)
        elif kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            self.expect(count, size)
            self.at += count * size
        else:
            raise ConfigError(f"{self._path}: {key!r} has values of the unknown type {kind}")

    def _skip_strings(self, count: int) -> int:
        at, end, data, length_at = self.at, self._end, self._data, _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + length_at(data, at)[0]
        if at > end:
            raise ConfigError(f"{self._path} is cut off or damaged: a text runs past its end")
        return at

    def tensor(self) -> GGUFTensor:
        """The next tensor; its offset is still relative to the data part."""
        name = self.name()
        dimensions = self.u32()
        if dimensions > _MAX_DIMENSIONS:
            raise ConfigError(f"{self._path}: tensor {name!r} has {dimensions} dimensions")
        sizes = tuple(self.u64() for _ in range(dimensions))
        number, offset = self.u32(), self.u64()
        try:
            kind = GGMLType(number)
        except ValueError as error:
            raise ConfigError(
                f"{self._path}: tensor {name!r} has the unknown type {number}"
            ) from error
        row = sizes[0] if sizes else 1
        if row % kind.block_elements:
            raise ConfigError(
                f"{self._path}: rows of {row} in tensor {name!r} are not whole blocks of "
                f"{kind.block_elements} ({kind.name})"
            )
        nbytes = math.prod(sizes) // kind.block_elements * kind.block_bytes
        return GGUFTensor(name, sizes[::-1], kind, offset, nbytes)


class _Metadata(Mapping[str, GGUFValue]):
    def __init__(self, path: Path, data: mmap.mmap, entries: Mapping[str, _Entry]) -> None:
        self._path = path
        self._data = data
        self._entries = entries

    def __getitem__(self, key: str) -> GGUFValue:
        entry = self._entries[key]
        if entry.kind == _STRING:
            texts = self._strings(entry)
            return texts if entry.count is not None else texts[0]
        count = 1 if entry.count is None else entry.count
        values = struct.unpack_from(f"<{count}{_SCALARS[entry.kind]}", self._data, entry.at)
        value: GGUFValue = values if entry.count is not None else values[0]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _strings(self, entry: _Entry) -> tuple[str, ...]:
        at, data, length_at = entry.at, self._data, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(1 if entry.count is None else entry.count):
                start = at + 8
                at = start + length_at(data, at)[0]
                found.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path} is damaged: a text is not UTF-8") from error
        return tuple(found)


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: a name is not UTF-8") from error
