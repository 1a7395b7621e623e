"""A prompt's blocks as tiers look for them, and how much of what was found can be used. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.kv.tiers.catalogue import Kept, Wanted
from core.prefix import block_root, next_block_hash
from core.types import BLOCK_TOKENS


def wanted_blocks(fingerprint: bytes, namespace: str, token_ids: Sequence[int]) -> list[Wanted]:
    """One for each full block of `token_ids`."""
    parent = block_root(fingerprint, namespace)
    found: list[Wanted] = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ids = tuple(token_ids[start : start + BLOCK_TOKENS])
        digest = next_block_hash(parent, ids)
        found.append(Wanted(digest, parent, ids))
        parent = digest
    return found


def first_seen(blocks: int, window: int | None) -> int:
    """The first block that the token after `blocks` full ones sees in a KV group."""
    if window is None:
        return 0
    return max(0, blocks * BLOCK_TOKENS - window + 1) // BLOCK_TOKENS


def usable(found: Sequence[Kept], windows: Mapping[int, int | None]) -> int:
    """How many of `found`, which follow what the pool has, can be brought in: all groups must have
    what the token after them sees. `windows` is that of each group."""
    count = len(found)
    while count and not all(
        kept.entry.groups >> group & 1
        for group, window in windows.items()
        for kept in found[_seen_from(count, window) : count]
    ):
        count -= 1
    return count


def _seen_from(count: int, window: int | None) -> int:
    """As `first_seen`, counted from the first of `count` blocks wherever it lies."""
    if window is None:
        return 0
    return max(0, count - -(-(window - 1) // BLOCK_TOKENS))
