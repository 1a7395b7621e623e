"""A namespace leaves a slab that no node has open."""

from __future__ import annotations

from pathlib import Path

from core.kv.tiers import layout as lay
from core.kv.tiers.files import SystemFile
from core.kv.tiers.keyring import TAG_BYTES, Keyring
from core.kv.tiers.slab import lock_file, records


def shred_file(path: Path, keyring: Keyring, namespace: str) -> int:
    """Erase the salt of its key, and the heads of its blocks: how many those were. Whatever of the
    contents is left cannot be opened by anybody. Raises OSError, and ConfigError where a node has
    the file open."""
    owner = keyring.tag(namespace)
    file = SystemFile(lock_file(path))
    try:
        layout = lay.layout_of(file.read(lay.SUPER_BYTES, 0))
        if layout is None:
            return 0
        blocks = 0
        for slot, record in records(file, layout):
            if record[:TAG_BYTES] == owner:
                file.write(bytes(lay.HEAD_BYTES), layout.head_at(slot))
                blocks += 1
        for number in range(lay.SALTS):
            if file.read(TAG_BYTES, layout.salt_at(number)) == owner:
                file.write(bytes(lay.SALT_RECORD), layout.salt_at(number))
        file.sync()
        return blocks
    finally:
        file.close()
