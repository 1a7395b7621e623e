"""The part of a decoder that one rank of a plan computes.

Made beside the model: its builder reads from a source that shows this rank's rows and columns, and
what was whole there is joined here. Attention and MLP give partial sums, added up once after each;
of the embedding each rank gives the rows it has; the head gives the logits of its own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core.models.builder import read_embedding, read_head, read_layer, read_norm, read_shape
from core.models.collectives import Alone, Group
from core.models.config import ModelConfig
from core.models.decoder import ForwardBatch
from core.models.parallel import Shard, shard
from core.models.reader import Reader
from core.models.shard import ShardedSource
from core.models.spread_experts import SpreadExperts
from core.models.weights import WeightSource
from core.parallel import Plan
from kernels.layers import ExpertsMlp, Layer
from kernels.linear import Embedding, Linear
from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Ends:
    """What only the first stage or only the last one has."""

    embedding: Embedding | None = None
    norm: Tensor | None = None
    head: Linear | None = None


class Stage:
    """`config`: the whole model's. Every rank of `tensor` makes the same calls."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        shard: Shard,
        ops: Ops,
        layers: Sequence[Layer],
        ends: Ends,
        source: ShardedSource,
        tensor: Group,
    ) -> None:
        self.config = config
        self.shard = shard
        self.ops = ops
        self.layers = tuple(layers)
        self._ends = ends
        self._tensor = tensor
        shape = read_shape(Reader(source, ops))
        if tensor.size > 1:
            shape = replace(shape, reduce=tensor.sum)
        self._run = ops.layers(self.layers, shape)

    def forward(
        self, batch: ForwardBatch, kv: Sequence[Tensor], hidden: Tensor | None = None
    ) -> Tensor:
        """Logits [sampled, own ids] fp32 on the last stage, else what the next stage takes: hidden
        states [tokens, hidden]. `hidden` is what the stage before gave; it may be overwritten.

        `kv` is of the shard's layers, see `Decoder.forward`.
        """
        residual = self._embedded(batch.tokens) if hidden is None else hidden
        residual = self._run(residual, batch.positions, batch.groups, kv)
        norm, head = self._ends.norm, self._ends.head
        if norm is None or head is None:
            return residual
        x = self.ops.rms_norm(residual[batch.sampled], norm, self.config.norm_eps)
        return head(x).float()

    def empty(self, tokens: int) -> Tensor:
        """Memory for hidden states [tokens, hidden], as one stage gives them to the next."""
        like = self.layers[0].mlp_norm
        return like.new_empty((tokens, self.config.hidden))

    def idle(self) -> None:
        """Take part in a step of the other ranks that share experts, without a token."""
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertsMlp) and isinstance(layer.mlp.experts, SpreadExperts):
                layer.mlp.experts.idle(layer.mlp_norm.dtype, layer.mlp_norm.device)

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedding, ids = self._ends.embedding, self.shard.vocabulary
        assert embedding is not None, "a later stage is given hidden states"
        if self._tensor.size == 1:
            return embedding(tokens)
        own = tokens - ids.start
        elsewhere = (own < 0) | (own >= len(ids))
        rows = embedding(own.masked_fill(elsewhere, 0))
        return self._tensor.sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))


def build_stage(
    source: WeightSource,
    shard: Shard,
    *,
    ops: Ops,
    tensor: Group,
    experts: Group,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Stage:
    """Read what `shard` keeps, and nothing else. The source may be closed afterwards. Raises
    ConfigError."""
    own = ShardedSource(source, shard)
    reader = Reader(own, ops)
    embedding = head = norm = None
    if shard.embeds:
        embedding, head = read_embedding(reader)
    if shard.predicts:
        norm = read_norm(reader)
        head = head or read_head(reader)
    layers = []
    for count, index in enumerate(shard.layers, start=1):
        layer = read_layer(reader, index, shard.experts if experts.size > 1 else None)
        layers.append(_spread(layer, source.config, experts, tensor))
        progress(count / (len(shard.layers) + 1))
    ends = Ends(embedding, norm, head if shard.predicts else None)
    return Stage(
        config=source.config,
        shard=shard,
        ops=ops,
        layers=layers,
        ends=ends,
        source=own,
        tensor=tensor,
    )


def whole_stage(
    source: WeightSource, ops: Ops, progress: Callable[[float], None] = lambda fraction: None
) -> Stage:
    """All of a model, on one rank."""
    own = shard(Plan(), 0, source.config)
    return build_stage(source, own, ops=ops, tensor=Alone(), experts=Alone(), progress=progress)


def _spread(layer: Layer, config: ModelConfig, experts: Group, tensor: Group) -> Layer:
    """The same layer; of a mixture that is spread over ranks, with the way to them in between."""
    mlp = layer.mlp
    if not isinstance(mlp, ExpertsMlp) or experts.size == 1 or config.moe is None:
        return layer
    spread = SpreadExperts(
        mlp.experts,
        count=config.moe.count,
        chosen=config.moe.chosen,
        hidden=config.hidden,
        group=experts,
        tensor=tensor,
    )
    return replace(layer, mlp=replace(mlp, experts=spread))
