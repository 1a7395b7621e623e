"""Every hash of the platform: the route key of prompt text, the block hashes of token ids.

**Route key** (edge, DESIGN §6). Text becomes records, records become blocks, blocks a chain of
keyed BLAKE2b-128 hashes. A block ends after 512 bytes (later blocks are larger: `BLOCK_GROWTH`) or
at the end of a record, so appending a message never changes an earlier block. The chain's root
holds the model, the tools in their given order, the tenant's namespace; its key is the fleet's
secret, so nobody outside can aim a prompt at a region. The release is not in it: a rollout must
not reshuffle the world.

**Block hash** (region). A chain of BLAKE2b-128 over blocks of 16 token ids, rooted in the model's
fingerprint (weights digest, KV dtype, rope, block size) and the namespace; equal across restarts
and on every node that holds the same model.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from core.types import BLOCK_TOKENS, GenerateRequest, Message, Tool

TEXT_BLOCK_BYTES = 512
BLOCK_GROWTH = ((32, TEXT_BLOCK_BYTES), (64, 2048), (128, 8192))
"""(up to this block, bytes in a block): the beginning of a prompt is cut finely, what follows in
larger pieces, so that a chain of 128 hashes covers half a megabyte."""
MAX_CHAIN = BLOCK_GROWTH[-1][0]
HASH_BYTES = 16
ID_BYTES = 8
"""Of a chain hash that travel: in a request's `route_chain`, in cache digests and hot counts."""
DEFAULT_ROUTE_DEPTH = 2

_ROUTE_PERSON = b"skerry-route-1"
_BLOCK_PERSON = b"skerry-block-1"
_BLOCK_BYTES = tuple(
    size
    for (start, _), (end, size) in zip(((0, 0), *BLOCK_GROWTH), BLOCK_GROWTH, strict=False)
    for _ in range(start, end)
)


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt as routing sees it: hashes of its beginnings, never its text.

    `hashes` is [root, after block 1, after block 2, …], at most `MAX_CHAIN` blocks; `ends[i]` are
    the bytes of text that `hashes[i]` covers, of `text_bytes` in all.
    """

    hashes: Sequence[bytes]
    ends: Sequence[int]
    text_bytes: int

    @property
    def blocks(self) -> int:
        return len(self.hashes) - 1

    def ids(self) -> list[bytes]:
        """The short form of each block's hash, the root left out."""
        return [one[:ID_BYTES] for one in self.hashes[1:]]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What the ring is asked for. `depth` blocks of the prompt's `blocks` are in `digest`."""

    digest: bytes
    depth: int
    blocks: int
    text_bytes: int
    hot: bool = False
    """All that the chain has of the prompt is hot: nothing tells it apart from the others."""


def key_of(
    chain: Chain, depth: int = DEFAULT_ROUTE_DEPTH, hot: Container[bytes] = frozenset()
) -> RouteKey:
    """The hash at `depth`, and one block deeper for as long as the block before is in `hot` (ids):
    a beginning that too many prompts share does not tell them apart."""
    last = chain.blocks
    taken = min(depth, last)
    while 0 < taken < last and chain.hashes[taken][:ID_BYTES] in hot:
        taken += 1
    return RouteKey(
        digest=chain.hashes[taken],
        depth=taken,
        blocks=last,
        text_bytes=chain.text_bytes,
        hot=0 < taken == last and chain.hashes[taken][:ID_BYTES] in hot,
    )


def route_key(
    request: GenerateRequest, *, fleet_key: bytes, depth: int = DEFAULT_ROUTE_DEPTH
) -> RouteKey:
    """The deepest block hash at or above `depth`; the root when the prompt is empty."""
    return key_of(prompt_chain(request, fleet_key=fleet_key), depth)


def route_chain(request: GenerateRequest, *, fleet_key: bytes) -> list[bytes]:
    """[root, after block 1, after block 2, …]."""
    return list(prompt_chain(request, fleet_key=fleet_key).hashes)


def prompt_chain(request: GenerateRequest, *, fleet_key: bytes) -> Chain:
    """The chain of a request's prompt. Costs one pass over the first half megabyte."""
    key = fleet_key[:64]
    root = _framed((b"namespace", request.namespace.encode()), (b"model", request.model.encode()))
    hashes, ends, covered, total = [_route_hash(key, root)], [0], 0, 0
    for record in records(request):
        size, start = len(record), 0
        total += size
        while start < size and len(hashes) <= MAX_CHAIN:
            end = start + _BLOCK_BYTES[len(hashes) - 1]
            mark = b"\x01" if end >= size else b"\x00"
            hashes.append(_route_hash(key, hashes[-1] + mark + record[start:end]))
            covered += min(end, size) - start
            ends.append(covered)
            start = end
    return Chain(hashes, ends, total)


def records(request: GenerateRequest) -> Iterator[bytes]:
    """Canonical text of the prompt, one record per tool, message, raw prompt or token list.

    The free text comes last and without its length: two prompts that begin alike must share
    their first blocks. Where a record ends is told to the hash, not written into the bytes.
    """
    if isinstance(request.prompt, str):
        yield _framed((b"kind", b"prompt")) + request.prompt.encode()
    elif request.prompt is not None:
        ids = request.prompt
        yield _framed((b"kind", b"ids")) + struct.pack(f">{len(ids)}I", *ids)
    for tool in request.tools:
        yield _framed(*_tool_head(tool)) + tool.parameters.encode()
    for message in request.messages:
        yield _framed(*_message_head(message)) + (message.content or "").encode()


def affinity_key(affinity: str, *, fleet_key: bytes, namespace: str = "") -> bytes:
    """The ring key of a caller's own affinity id, which replaces the text chain."""
    text = _framed((b"namespace", namespace.encode()), (b"affinity", affinity.encode()))
    return _route_hash(fleet_key[:64], text)


def _tool_head(tool: Tool) -> Iterator[tuple[bytes, bytes]]:
    yield b"tool", tool.name.encode()
    yield b"description", tool.description.encode()


def _message_head(message: Message) -> Iterator[tuple[bytes, bytes]]:
    yield b"role", message.role.encode()
    if message.name is not None:
        yield b"name", message.name.encode()
    if message.tool_call_id is not None:
        yield b"answers", message.tool_call_id.encode()
    for call in message.tool_calls:
        yield b"call", call.name.encode()
        yield b"arguments", call.arguments.encode()


def _framed(*fields: tuple[bytes, bytes]) -> bytes:
    """Fields with their lengths, so that no two different lists give the same bytes."""
    return b"".join(
        struct.pack(">HI", len(name), len(value)) + name + value for name, value in fields
    )


def _route_hash(key: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES, key=key, person=_ROUTE_PERSON).digest()


def block_root(fingerprint: bytes, namespace: str) -> bytes:
    """The start of every chain of one model and namespace."""
    return blake2b(
        _framed((b"fingerprint", fingerprint), (b"namespace", namespace.encode())),
        digest_size=HASH_BYTES,
        person=_BLOCK_PERSON,
    ).digest()


def next_block_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The hash of the block of `token_ids` (exactly 16) after `parent`."""
    ids = tuple(token_ids)
    data = parent + struct.pack(f"<{len(ids)}I", *ids)
    return blake2b(data, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


def block_hashes(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """One hash per full block of `token_ids`; a partial last block has none. The same as
    `next_block_hash` over and over, in half of the time: a long prompt has thousands of blocks."""
    whole = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    packed = struct.pack(f"<{whole}I", *token_ids[:whole])
    empty = blake2b(digest_size=HASH_BYTES, person=_BLOCK_PERSON)
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(packed), 4 * BLOCK_TOKENS):
        block = empty.copy()
        block.update(parent)
        block.update(packed[start : start + 4 * BLOCK_TOKENS])
        parent = block.digest()
        hashes.append(parent)
    return hashes
