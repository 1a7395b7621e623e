"""How a step's numbers come to the device: through pinned memory, without waiting for it.

Decode steps fill tensors that stay where they are, so that a graph finds them: one table of small
numbers, a row each, and the block tables. Tokens that are not known to the host yet are taken from
where the step that samples them leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine import batch
from core.engine.gpu.device import Device, Mark
from core.engine.plan import Row
from core.kv.geometry import KVGeometry
from core.models.decoder import ForwardBatch
from core.types import BLOCK_TOKENS
from kernels.paged_attention import PagedRows

GIVEN = -1
"""Source of a token that the host knows."""
_NO_ROW = -1
"""Start and slot of a row of padding: it sees nothing and writes nothing."""
_TOKEN, _SOURCE, _POSITION, _FIRST, _LENGTH, _START, _SLOTS = range(7)


class Staging:
    """Sends host tensors. `depth` of them may be on their way; the oldest is waited for."""

    def __init__(self, device: Device, depth: int = 32) -> None:
        self._device = device
        self._places: list[tuple[Tensor, Mark | None]] = [
            (device.pinned(0, torch.uint8), None) for _ in range(depth)
        ]
        self._next = 0

    def send(self, numbers: Tensor, into: Tensor | None = None) -> Tensor:
        """`numbers`, contiguous, on the device: new, or in `into` of as many elements."""
        place, sent = self._places[self._next]
        if sent is not None:
            sent.wait()
        if place.numel() < numbers.nbytes:
            place = self._device.pinned(max(numbers.nbytes, 4096), torch.uint8)
        held = place[: numbers.nbytes].view(numbers.dtype).view(numbers.shape)
        held.copy_(numbers)
        if into is None:
            into = torch.empty(numbers.shape, dtype=numbers.dtype, device=self._device.where)
        into.copy_(held, non_blocking=True)
        self._places[self._next] = (place, self._device.mark())
        self._next = (self._next + 1) % len(self._places)
        return into


class DecodeInputs:
    """Of steps of up to `most` rows with one token each, at positions below `context`. `drawn`:
    where tokens lie that the host does not know, flat."""

    def __init__(
        self, geometry: KVGeometry, most: int, context: int, drawn: Tensor, staging: Staging
    ) -> None:
        where, groups = drawn.device, len(geometry.groups)
        self._drawn = drawn
        self._staging = staging
        self._context = context
        self._numbers = torch.zeros((most, _SLOTS + groups), dtype=torch.int32, device=where)
        width = -(-context // BLOCK_TOKENS)
        self._tables = torch.zeros((groups, most, width), dtype=torch.int32, device=where)
        self._all = torch.arange(most, device=where)

    def fill(self, rows: Sequence[Row], sources: Sequence[int], size: int) -> None:
        """`sources`: of each row's token, a place in `drawn` or GIVEN; padded to `size` rows."""
        groups = len(self._tables)
        numbers: list[tuple[int, ...]] = []
        for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
            block, offset = divmod(row.start, BLOCK_TOKENS)
            slots = (table[block] * BLOCK_TOKENS + offset for table in row.block_tables)
            numbers.append((row.token_ids[0], source, row.start, index, 1, row.start, *slots))
        padding = (_NO_ROW,) * (1 + groups)
        numbers += [(0, GIVEN, 0, index, 1, *padding) for index in range(len(rows), size)]
        self._staging.send(torch.tensor(numbers, dtype=torch.int32), self._numbers[:size])
        if not rows:
            return
        longest = max(row.start for row in rows) // BLOCK_TOKENS + 1
        tables = [
            [(*row.block_tables[group][:longest],) + (0,) * (longest - len(row.block_tables[group]))
             for row in rows]
            for group in range(groups)
        ]  # fmt: skip
        sent = self._staging.send(torch.tensor(tables, dtype=torch.int32))
        self._tables[:, : len(rows), :longest].copy_(sent)

    def batch(self, size: int) -> ForwardBatch:
        """Made of what `fill` has left; to be captured."""
        numbers = self._numbers[:size]
        tokens = known(numbers[:, _TOKEN].long(), numbers[:, _SOURCE].long(), self._drawn)
        groups = tuple(
            PagedRows(
                starts=(self._context - 1,) * size,  # bounds what a graph may meet
                lengths=(1,) * size,
                decode=size,
                tables=tables[:size],
                slots=numbers[:, _SLOTS + group].long(),
                spans=numbers[:, _FIRST : _START + 1],
            )
            for group, tables in enumerate(self._tables)
        )
        return ForwardBatch(tokens, numbers[:, _POSITION].long(), groups, self._all[:size])


def mixed(
    rows: Sequence[Row], sources: Sequence[int], drawn: Tensor, staging: Staging
) -> ForwardBatch:
    """Rows of any length, as `batch.order` gives them; each source is of a row's first token."""
    built = batch.build(rows)
    tokens = staging.send(built.tokens)
    if any(source != GIVEN for source in sources):
        each = torch.full(built.tokens.shape, GIVEN)
        first = 0
        for row, source in zip(rows, sources, strict=True):
            each[first] = source
            first += len(row.token_ids)
        tokens = known(tokens, staging.send(each), drawn)
    spans = staging.send(built.groups[0].spans)
    groups = tuple(
        PagedRows(
            starts=group.starts,
            lengths=group.lengths,
            decode=group.decode,
            tables=staging.send(group.tables),
            slots=staging.send(group.slots),
            spans=spans,
        )
        for group in built.groups
    )
    return ForwardBatch(tokens, staging.send(built.positions), groups, staging.send(built.sampled))


def known(tokens: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """Tokens with those that were drawn on the device. One that was unsound is taken as 0: its
    sequence has ended by the time that anybody looks."""
    taken = drawn[sources.clamp(min=0)].clamp(min=0)
    return torch.where(sources >= 0, taken, tokens)
