"""What a node front and its rank say to each other when a namespace is to leave no trace.

::

    Purge → Purged; the front overwrites the blocks → Scrubbed
"""

from __future__ import annotations

import msgspec


class Purge(msgspec.Struct, frozen=True, tag="purge", tag_field="kind"):
    """Let nothing of a namespace be left: answered by Purged, once none of its sequences holds a
    block any more. The front has aborted them before."""

    namespace: str


class Scrubbed(msgspec.Struct, frozen=True, tag="scrubbed", tag_field="kind"):
    """The blocks of a Purged have been overwritten in the shared memory."""

    namespace: str


class Purged(msgspec.Struct, frozen=True, kw_only=True, tag="purged", tag_field="kind"):
    """The prefix cache has forgotten `cached_blocks` of a namespace; `blocks[group]` had content of
    it and stay out of use until Scrubbed."""

    namespace: str
    cached_blocks: int
    blocks: tuple[tuple[int, ...], ...]
