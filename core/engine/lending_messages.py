"""What a node front and its rank say of blocks that belong to no sequence that is computed.

::

    Import   → Reserved; the front fills the blocks; Adopt → they are in the prefix cache
    Hold     → Held (cached blocks stay locked while the front reads them) → Release

Abort ends either.
"""

from __future__ import annotations

import msgspec

from core.engine.plan import SequenceId


class Import(msgspec.Struct, frozen=True, kw_only=True, tag="import", tag_field="kind"):
    """Set aside what the prefix cache lacks of `token_ids`, which are whole blocks from a prompt's
    first token on; answered by Reserved or SequenceFailed. Nobody loses a block for it."""

    sequence: SequenceId
    token_ids: tuple[int, ...]
    namespace: str = ""
    priority: int = 0


class Adopt(msgspec.Struct, frozen=True, tag="adopt", tag_field="kind"):
    """The KV of an import's first `tokens` is in place and verified: cache it, free the rest."""

    sequence: SequenceId
    tokens: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold", tag_field="kind"):
    """Keep what the prefix cache has of `token_ids` (whole blocks) until Release; answered by Held
    or SequenceFailed."""

    sequence: SequenceId
    token_ids: tuple[int, ...]
    namespace: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held", tag_field="kind"):
    """`tokens` of what was to be held are cached; `blocks[group]` are their pool blocks, in order,
    0 where a window has passed."""

    sequence: SequenceId
    tokens: int
    blocks: tuple[tuple[int, ...], ...]
