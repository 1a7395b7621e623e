"""The slab file: what it gives back, what it refuses, what it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.kv.tiers import layout as lay
from core.kv.tiers.catalogue import Kept
from core.kv.tiers.entry import Entry
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.layout import Layout
from core.kv.tiers.shape import Shape
from core.kv.tiers.slab import Slab, open_slab, remove_foreign, slab_name
from tests.core.kv.tiers.made import FINGERPRINT, GEOMETRY, SECRET, SHAPE, chain

BYTES = 600_000
LAYOUT = Layout.within(BYTES, SHAPE.block_bytes, SHAPE.digest)


@contextmanager
def opened(
    path: Path, *, secret: bytes = SECRET, shape: Shape = SHAPE, most_bytes: int = BYTES
) -> Iterator[Slab]:
    slab = open_slab(path, Keyring(secret), shape, most_bytes, "node n1 (pid 7)")
    try:
        yield slab
    finally:
        slab.close()


def filled(path: Path, blocks: list[tuple[Entry, bytes]]) -> None:
    with opened(path) as slab:
        for slot, (entry, content) in enumerate(blocks):
            assert slab.write(slot, entry, content)


def test_a_block_is_there_after_a_restart_and_the_file_tells_nothing_of_it(tmp_path: Path) -> None:
    blocks = chain(3, "harbour")
    filled(tmp_path / "slab", blocks)
    with opened(tmp_path / "slab") as slab:
        found = slab.found()
        assert [one.entry for one in found.kept] == [entry for entry, _ in blocks]
        assert (found.foreign, found.damaged) == (0, 0)
        for slot, (entry, content) in enumerate(blocks):
            assert slab.read(slot, entry) == content
    raw = (tmp_path / "slab").read_bytes()
    for entry, content in blocks:
        tokens = b"".join(token.to_bytes(4, "little") for token in entry.token_ids)
        for secret in (content[:32], entry.digest, tokens, b"harbour"):
            assert secret not in raw
    assert len(raw) <= BYTES
    assert (tmp_path / "slab").stat().st_mode & 0o077 == 0


def test_equal_blocks_of_two_namespaces_look_different_and_open_with_their_own_key_only(
    tmp_path: Path,
) -> None:
    ((one, content),) = chain(1, "a")
    other = Entry(Keyring(SECRET).tag("b"), one.digest, one.parent, one.token_ids, one.groups,
                  one.check)  # fmt: skip
    with opened(tmp_path / "slab") as slab:
        slab.write(0, one, content)
        slab.write(1, other, content)
        assert slab.read(0, one) == slab.read(1, other) == content
        assert slab.read(0, other) is None
    raw = (tmp_path / "slab").read_bytes()
    spans = [raw[LAYOUT.content_at(slot) :][: len(content)] for slot in (0, 1)]
    assert spans[0] != spans[1]


def test_last_use_survives_a_restart(tmp_path: Path) -> None:
    blocks = chain(3)
    filled(tmp_path / "slab", blocks)
    with opened(tmp_path / "slab") as slab:
        slab.touch([Kept(0, blocks[0][0])])
    with opened(tmp_path / "slab") as slab:
        assert [one.slot for one in slab.found().kept] == [1, 2, 0]


@pytest.mark.parametrize("where", ["content", "head"])
@pytest.mark.parametrize("damage", ["flip", "cut", "other slot"])
def test_what_is_damaged_is_never_given_out(tmp_path: Path, where: str, damage: str) -> None:
    blocks = chain(3)
    filled(tmp_path / "slab", blocks)
    at, size = LAYOUT.content_at, SHAPE.block_bytes + lay.SEAL_BYTES
    if where == "head":
        at, size = LAYOUT.head_at, lay.HEAD_BYTES
    with (tmp_path / "slab").open("r+b") as file:
        if damage == "flip":
            file.seek(at(2) + 40)
            byte = file.read(1)
            file.seek(at(2) + 40)
            file.write(bytes([byte[0] ^ 1]))
        elif damage == "cut":
            file.truncate(at(2) + 60)
        else:
            file.seek(at(1))
            stolen = file.read(size)
            file.seek(at(2))
            file.write(stolen)
    with opened(tmp_path / "slab") as slab:
        found = slab.found()
        if where == "head":
            cut = damage == "cut"  # nothing of the head is read then, nor of any content
            assert [one.slot for one in found.kept] == [0, 1]
            assert found.damaged == (0 if cut else 1)
        assert slab.read(2, blocks[2][0]) is None
        if not (where == "head" and damage == "cut"):
            assert slab.read(0, blocks[0][0]) == blocks[0][1]


def test_an_older_content_under_a_newer_head_does_not_open(tmp_path: Path) -> None:
    """The machine died with the head on disk and the content not."""
    blocks = chain(2)
    filled(tmp_path / "slab", blocks[:1])
    with (tmp_path / "slab").open("rb") as file:
        file.seek(LAYOUT.content_at(0))
        older = file.read(SHAPE.block_bytes + lay.SEAL_BYTES)
    with opened(tmp_path / "slab") as slab:
        slab.write(0, *blocks[1])
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(LAYOUT.content_at(0))
        file.write(older)
    with opened(tmp_path / "slab") as slab:
        assert [one.entry for one in slab.found().kept] == [blocks[1][0]]
        assert slab.read(0, blocks[1][0]) is None


@pytest.mark.parametrize("other", ["secret", "model", "size", "version"])
def test_what_is_foreign_is_counted_and_begun_anew(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "slab", chain(3))
    shape, secret, most_bytes, counted = SHAPE, SECRET, BYTES, 3
    if other == "secret":
        secret = b"another secret"
    elif other == "model":
        shape = Shape.of(b"other", {0: GEOMETRY})
    elif other == "size":
        most_bytes = BYTES + 100_000
    else:
        monkeypatch.setattr(lay, "VERSION", 2)
        counted = 0  # how an older version counts is not known
    with opened(tmp_path / "slab", secret=secret, shape=shape, most_bytes=most_bytes) as slab:
        assert slab.found().kept == ()
        assert slab.found().foreign == counted
        entry, content = chain(1, secret=secret)[0]
        slab.write(0, entry, content)
        assert slab.read(0, entry) == content


def test_what_was_shredded_is_gone_and_the_key_with_it(tmp_path: Path) -> None:
    ours, theirs = chain(2, "harbour"), chain(2, "trial")
    filled(tmp_path / "slab", [*ours, *theirs])
    copy = (tmp_path / "slab").read_bytes()
    with opened(tmp_path / "slab") as slab:
        slab.shred(theirs[0][0].owner)
        assert slab.read(2, theirs[0][0]) is None
        assert slab.read(0, ours[0][0]) == ours[0][1]
    raw = (tmp_path / "slab").read_bytes()
    assert theirs[0][0].owner not in raw
    with (tmp_path / "slab").open("r+b") as file:  # the old heads back in place: no key opens them
        for slot in (2, 3):
            file.seek(LAYOUT.head_at(slot))
            file.write(copy[LAYOUT.head_at(slot) :][: lay.HEAD_BYTES])
    with opened(tmp_path / "slab") as slab:
        assert [one.entry for one in slab.found().kept] == [entry for entry, _ in ours]
        assert slab.found().foreign == 2


def test_namespaces_without_blocks_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lay, "SALTS", 2)
    with opened(tmp_path / "slab") as slab:
        for slot, name in enumerate("ab"):
            assert slab.write(slot, *chain(1, name)[0])
        assert not slab.write(2, *chain(1, "c")[0])
        slab.erase([0])
        assert slab.write(2, *chain(1, "c")[0])
        assert slab.read(1, chain(1, "b")[0][0]) is not None


def test_two_processes_on_one_file_hear_of_each_other(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "slab"),
        pytest.raises(ConfigError, match=r"in use by node n1 \(pid 7\)"),
    ):
        open_slab(tmp_path / "slab", Keyring(SECRET), SHAPE, BYTES, "node n2")
    with opened(tmp_path / "slab"):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"/file: File exists$"):
        open_slab(tmp_path / "file" / "slab", Keyring(SECRET), SHAPE, BYTES, "n")


def test_slabs_of_other_models_are_removed_and_counted_unless_they_are_in_use(
    tmp_path: Path,
) -> None:
    def path_of(model: bytes, node: str = "n1") -> Path:
        return tmp_path / slab_name(node, 0, Shape.of(model, {0: GEOMETRY}))

    def made(path: Path) -> None:
        with opened(path) as slab:
            slab.write(0, *chain(1)[0])

    for one in (path_of(b"old"), path_of(b"held"), path_of(b"old", "n2"), path_of(FINGERPRINT)):
        made(one)
    with opened(path_of(b"held")):
        assert remove_foreign(path_of(FINGERPRINT)) == 1
    left = {path_of(b"held"), path_of(b"old", "n2"), path_of(FINGERPRINT)}
    assert set(tmp_path.iterdir()) == left
    slab = open_slab(path_of(FINGERPRINT), Keyring(SECRET), SHAPE, BYTES, "n", foreign=1)
    assert (len(slab.found().kept), slab.found().foreign) == (1, 1)
    slab.close()


_WRITER = """
import itertools, sys
from pathlib import Path
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.slab import open_slab
from tests.core.kv.tiers.made import SECRET, SHAPE, chain
slab = open_slab(Path(sys.argv[1]), Keyring(SECRET), SHAPE, int(sys.argv[2]), "writer")
blocks = chain(64)
for number in itertools.count():
    slab.write(number % slab.count, *blocks[number % len(blocks)])
    if number == slab.count:
        print("full", flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_entries_only(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / "slab"), str(BYTES)],
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[4], env={**os.environ},
    )  # fmt: skip
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"full\n"
        writer.send_signal(signal.SIGKILL)
    known = dict(chain(64))
    with opened(tmp_path / "slab") as slab:
        found = slab.found()
        assert len(found.kept) >= slab.count - 1  # at most the one that it was writing
        assert (found.damaged, found.foreign) == (0, 0)
        for slot, entry in found.kept:
            assert slab.read(slot, entry) == known[entry]


def test_the_layout_stays_within_its_bytes_and_overlaps_nowhere() -> None:
    assert FINGERPRINT
    assert LAYOUT.slots > 20
    assert LAYOUT.head_at(LAYOUT.slots) <= LAYOUT.content_at(0)
    assert LAYOUT.content_at(1) - LAYOUT.content_at(0) >= SHAPE.block_bytes + lay.SEAL_BYTES
    assert LAYOUT.content_at(LAYOUT.slots) <= BYTES
    assert lay.HOLDER_AT >= lay.SUPER_BYTES
    assert lay.HOLDER_AT + lay.HOLDER_BYTES <= lay.PAGE
    assert Layout.within(10_000, SHAPE.block_bytes, SHAPE.digest).slots == 0
