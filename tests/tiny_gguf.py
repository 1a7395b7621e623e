"""Writer of small GGUF files: metadata and raw tensors, for tests of what reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
RawTensor = tuple[Sequence[int], int, bytes]
"""Shape in torch's order, type number of the container, bytes."""

_BOOL, _I32, _U32, _F32, _STRING, _ARRAY = 7, 5, 4, 6, 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Value) -> bytes:
    """Type and value, as a key is followed by."""
    if isinstance(item, str | bool | int | float):
        kind, raw = _scalar(item)
        return struct.pack("<I", kind) + raw
    parts = [_scalar(entry) for entry in item]
    kind = parts[0][0] if parts else _I32
    kind = _I32 if kind == _U32 else kind
    return struct.pack("<IIQ", _ARRAY, kind, len(parts)) + b"".join(raw for _, raw in parts)


def gguf_bytes(
    metadata: Mapping[str, Value],
    tensors: Mapping[str, RawTensor] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        sizes = list(reversed(shape))
        head += text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, RawTensor] | None = None
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def _scalar(item: str | bool | int | float) -> tuple[int, bytes]:
    if isinstance(item, str):
        return _STRING, text(item)
    if isinstance(item, bool):
        return _BOOL, struct.pack("<?", item)
    if isinstance(item, int):
        return _U32, struct.pack("<I", item)
    return _F32, struct.pack("<f", item)
