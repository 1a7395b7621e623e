"""A kept block: what it is, and where in its chain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """`owner` is the keyring's tag of the namespace. `parent` is the hash of the block before it,
    the chain's root for the first. `groups` has the bit of each KV group whose part is there;
    `check` is the xxh3-64 of the content."""

    owner: bytes
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    groups: int
    check: int
