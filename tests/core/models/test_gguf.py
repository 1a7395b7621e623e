"""The GGUF container: what is read, and what damaged or hostile files end in."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from core.models.gguf import GGMLType, read_gguf
from tests import tiny_gguf

META: dict[str, tiny_gguf.Value] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.rope.freq_base": 0.5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "é", "", "▁x"],
    "tokenizer.ggml.token_type": [1, 3, 4, 6],
    "tokenizer.ggml.scores": [0.0, -1.5],
}
TENSORS: dict[str, tiny_gguf.RawTensor] = {
    "norm": ((3,), GGMLType.F32, struct.pack("<3f", 1, 2, 3)),
    "w": ((2, 64), GGMLType.Q8_0, bytes(range(136))),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_gguf.write_gguf(tmp_path / "m.gguf", META, TENSORS)


def test_metadata_keeps_types_and_values(file: Path) -> None:
    metadata = read_gguf(file).metadata
    assert dict(metadata) == {
        key: tuple(value) if isinstance(value, list) else value for key, value in META.items()
    }
    assert metadata["tokenizer.ggml.add_bos_token"] is True


def test_tensors_have_row_major_shapes_and_their_own_bytes(file: Path) -> None:
    read = read_gguf(file)
    assert read.tensors["w"].shape == (2, 64)
    assert read.tensors["w"].type is GGMLType.Q8_0
    for name, (_, _, raw) in TENSORS.items():
        assert bytes(read.data(name)) == raw
        assert read.tensors[name].offset % 32 == 0


def test_a_write_through_the_view_never_reaches_the_file(file: Path) -> None:
    before = file.read_bytes()
    view = read_gguf(file).data("w")
    view[0] = 99
    assert file.read_bytes() == before


def test_empty_file_folder_and_absent_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for path in (tmp_path / "empty", tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=path.name):
            read_gguf(path)


def test_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_gguf(path)


def test_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.gguf_bytes(META, version=9))
    with pytest.raises(ConfigError, match="version 9"):
        read_gguf(path)


@pytest.mark.parametrize("cut", range(5, 700, 7))
def test_every_truncation_is_a_config_error(tmp_path: Path, cut: int) -> None:
    whole = tiny_gguf.gguf_bytes(META, TENSORS)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[: min(cut, len(whole) - 30)])
    with pytest.raises(ConfigError, match="cut off"):
        read_gguf(path)


HUGE = struct.pack("<Q", 1 << 60)
HOSTILE = {
    "tensor count": b"GGUF" + struct.pack("<I", 3) + HUGE + struct.pack("<Q", 0),
    "value count": b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE,
    "key": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE,
    "text": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tiny_gguf.text("k") + b"\x08\0\0\0" + HUGE,
    "array": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + tiny_gguf.text("k")
    + struct.pack("<II", 9, 8)
    + HUGE,
}


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lengths_allocate_nothing(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(200))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="cut off or damaged"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


BAD_TENSORS = {
    "unknown type": (((32,), 99, b"\0" * 64), "unknown type 99"),
    "half a block": (((3, 33), GGMLType.Q4_0, b"\0" * 64), "not whole blocks of 32"),
    "past the end": (((1 << 40, 32), GGMLType.F32, b"\0" * 64), "cut off"),
    "too many dimensions": (((1, 1, 1, 1, 1), GGMLType.F32, b"\0" * 64), "5 dimensions"),
}


@pytest.mark.parametrize(("tensor", "says"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_named(tmp_path: Path, tensor: tiny_gguf.RawTensor, says: str) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", {}, {"blk.0": tensor})
    with pytest.raises(ConfigError, match=says):
        read_gguf(path)


def test_text_that_is_not_utf8_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.gguf_bytes({"k": "abc"}).replace(b"abc", b"\xff\xfe\xfd"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_gguf(path).metadata["k"]


@settings(deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 255)), max_size=8))
def test_damage_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    raw = bytearray(tiny_gguf.gguf_bytes(META, TENSORS))
    for at, byte in flips:
        raw[at % len(raw)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    try:
        read = read_gguf(path)
        sizes = [len(read.data(name)) for name in read.tensors]
        texts = dict(read.metadata)
    except ConfigError:
        return
    assert len(sizes) == len(read.tensors)
    assert len(texts) == len(read.metadata)
