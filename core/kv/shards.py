"""The KV memory of one pool, spread over the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.layout import Rectangle, Run, gather, rectangle
from core.kv.ticket import Endpoint, Offer, PieceKey
from core.kv.transports.base import BlockMemory, Piece, Span


class PoolMemory:
    """`ranks` are those that this process can reach, by number; each has all blocks of the pool,
    with its own layers and heads."""

    def __init__(self, ranks: Mapping[int, BlockMemory]) -> None:
        self.ranks = dict(sorted(ranks.items()))

    def block(self, rank: int, group: int, block: int) -> memoryview:
        return self.ranks[rank].block(group, block)

    def piece(self, key: PieceKey, block: int, runs: tuple[Run, ...]) -> Piece:
        """The pool's block `block` as a receiver wants it: `runs` are those of its endpoint."""
        return Piece(
            key=key,
            parts=self.parts(key.group, block, runs),
            spans=tuple(
                Span(run.rank, self.ranks[run.rank].start(key.group, block) + run.offset, run.size)
                for run in runs
            ),
        )

    def parts(self, group: int, block: int, runs: tuple[Run, ...]) -> tuple[memoryview, ...]:
        """Views of what `runs_for` named, of one block."""
        return tuple(
            self.ranks[run.rank].block(group, block)[run.offset : run.offset + run.size]
            for run in runs
        )

    def runs_for(self, endpoint: Endpoint) -> tuple[Run, ...]:
        """Where the bytes of a peer's block lie here. Raises TransferFailed when its KV has another
        shape than ours, or needs what no rank here holds."""
        held = self.held(endpoint.group)
        wanted = Rectangle(
            endpoint.first_layer, endpoint.layers, endpoint.first_head, endpoint.heads
        )
        like = next(iter(held.values()), None)
        size = wanted.layers * wanted.heads * like.parts * like.slab_bytes if like else -1
        if like is None or endpoint.dtype != like.dtype or endpoint.block_bytes != size:
            raise TransferFailed("the receiver's KV has another shape than ours")
        return gather(wanted, held)

    @property
    def forgets(self) -> bool:
        """Is there a group that keeps a window only?"""
        return any(
            group.window is not None
            for memory in self.ranks.values()
            for group in memory.geometry.groups[1:]
        )

    @property
    def geometries(self) -> dict[int, KVGeometry]:
        return {rank: memory.geometry for rank, memory in self.ranks.items()}

    def held(self, group: int) -> dict[int, KVGroup]:
        """What each rank holds of a group; a stage may have none of its layers."""
        return {
            rank: memory.geometry.groups[group]
            for rank, memory in self.ranks.items()
            if group < len(memory.geometry.groups) and memory.geometry.groups[group].layers
        }


def endpoints(
    geometries: Mapping[int, KVGeometry],
    address: str,
    fill: Sequence[Mapping[int, int]],
    offers: tuple[Offer, ...] = (),
) -> Iterator[Endpoint]:
    """What each rank wants of each group, to be sent to `address` or by another of `offers`. `fill`
    is that of a `Reserved`."""
    for index, blocks in enumerate(fill):
        for rank, geometry in sorted(geometries.items()):
            held = geometry.groups[index]
            if not held.layers:
                continue
            part = rectangle(held)
            yield Endpoint(
                rank=rank,
                address=address,
                group=index,
                first_layer=part.first_layer,
                layers=part.layers,
                first_head=part.first_head,
                heads=part.heads,
                dtype=held.dtype,
                block_bytes=held.block_bytes,
                blocks=tuple(sorted(blocks)),
                offers=offers,
            )
