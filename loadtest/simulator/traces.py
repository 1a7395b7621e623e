"""Public request traces as requests with chains. A trace has hashes of 512-token blocks, no text.

`chain_of` is the seam to the key code: it makes the `Chain` that the edge would make of the text,
out of ready hashes, with the same thinning of what lies deep in a prompt.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from core.prefix import HASH_BYTES, MAX_CHAIN, Chain

FOLDER = Path(__file__).parents[1] / "traces"
BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4
DENSE = 40
"""Trace blocks that stand one for one in a chain: 16 kB of text in small blocks, 64 kB in middle
ones (core.prefix.BLOCK_GROWTH) are that many. Deeper ones come by fours, as 8 kB of text do."""
TENANTS = 20
SHARED = (0, 1, 2, 4, 8, 16, 32)
"""Blocks of a tenant's own shared beginning, by tenant."""


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks` are chain hashes: equal ones have equal beginnings. `user`: one conversation."""

    at_s: float
    blocks: tuple[bytes, ...]
    tokens: int
    answer_tokens: int
    user: bytes
    chain: Chain

    def covered(self, blocks: int) -> int:
        """Tokens in the first `blocks` blocks."""
        return min(blocks * BLOCK_TOKENS, self.tokens)


class _Line(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def conversation() -> list[Request]:
    return [_request(one, _hashed(one.hash_ids)) for one in _lines("mooncake_conversation")]


def synthetic() -> list[Request]:
    return [_request(one, _hashed(one.hash_ids), at=0) for one in _lines("mooncake_synthetic")]


def tenant_mix(seed: int = 0) -> list[Request]:
    """The conversations, each given to one of 20 tenants whose prompts share 0 to 32 blocks; the
    seed deals the conversations out."""
    requests = []
    for one in _lines("mooncake_conversation"):
        ids = one.hash_ids
        blocks: list[bytes] = _hashed(ids)
        if len(ids) > 1:
            dealt = f"tenant {ids[1]}" + (f" of {seed}" if seed else "")
            tenant = int.from_bytes(block_hash(dealt)) % TENANTS
            shared = SHARED[tenant % len(SHARED)]
            own = [block_hash(f"shared {tenant} {place}") for place in range(shared)]
            blocks = [*own, *_hashed(ids[1:])]
        requests.append(_request(one, blocks, tokens=BLOCK_TOKENS * len(blocks)))
    return requests


def chain_of(blocks: Sequence[bytes], tokens: int) -> Chain:
    """The chain of a prompt of `tokens` tokens whose block hashes are ready."""
    places = [*range(min(DENSE, len(blocks))), *range(DENSE + 3, len(blocks), 4)][:MAX_CHAIN]
    return Chain(
        hashes=[bytes(HASH_BYTES), *(blocks[place] for place in places)],
        ends=[0, *(min((p + 1) * BLOCK_TOKENS, tokens) * BYTES_PER_TOKEN for p in places)],
        text_bytes=tokens * BYTES_PER_TOKEN,
    )


def infinite_hit(requests: Iterable[Request], since_s: float = 0.0, until_s: float = 1e18) -> float:
    """Share of prompt tokens that one cache without end would hold, of the requests in a span."""
    seen: set[bytes] = set()
    hit = total = 0
    for one in requests:
        if since_s <= one.at_s < until_s:
            held = next((i for i, b in enumerate(one.blocks) if b not in seen), len(one.blocks))
            hit += one.covered(held)
            total += one.tokens
        seen.update(one.blocks)
    return hit / total if total else 0.0


def _request(
    line: _Line, blocks: Sequence[bytes], *, tokens: int | None = None, at: int = 1
) -> Request:
    """`at`: the block that tells conversations apart."""
    count = line.input_length if tokens is None else tokens
    ids = line.hash_ids
    return Request(
        at_s=line.timestamp / 1000.0,
        blocks=tuple(blocks),
        tokens=count,
        answer_tokens=line.output_length,
        user=block_hash(f"user {ids[at] if len(ids) > at else ids[0]}"),
        chain=chain_of(blocks, count),
    )


def _hashed(ids: Iterable[int]) -> list[bytes]:
    return [block_hash(f"block {one}") for one in ids]


def block_hash(text: str) -> bytes:
    """A hash for a block that has a name instead of text."""
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def _lines(name: str) -> list[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rb") as lines:
        return [decoder.decode(line) for line in lines]
