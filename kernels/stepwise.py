"""Decoder layers operation by operation: the reference, and the loop of every backend whose layers
are not one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kernels.gated import silu_mul
from kernels.kv_write import write_kv, write_latents
from kernels.latent_attention import expanded_attention, expands, latent_attention
from kernels.layers import ExpertsMlp, GatedMlp, HeadAttention, LatentAttention, Layer, Shape
from kernels.paged_attention import PagedRows, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import angles, rotary
from kernels.routing import route


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of a step are in their sequences: `positions` [tokens] int64, and the cos
    and sin [tokens, rotary dim / 2] of their angles."""

    positions: Tensor
    cos: Tensor
    sin: Tensor


class TorchLayers:
    """`kernels.layers.Layers`: any device, any dtype. Another backend gives its own operations."""

    def __init__(self, layers: Sequence[Layer], shape: Shape) -> None:
        self._layers = tuple(layers)
        self._shape = shape

    def __call__(
        self, residual: Tensor, positions: Tensor, groups: Sequence[PagedRows], kv: Sequence[Tensor]
    ) -> Tensor:
        shape = self._shape
        places = Places(positions, *angles(positions, shape.inverse_frequencies))
        update: Tensor | None = None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            if update is None:
                x = self._norm(residual, layer.attention_norm, shape.norm_eps)
            else:
                x = self._add_norm(update, residual, layer.attention_norm, shape.norm_eps)
            mixed = self._attention(x, layer.attention, layer_kv, groups[layer.group], places)
            update = self._reduced(layer.attention.output(mixed))
            x = self._add_norm(update, residual, layer.mlp_norm, shape.norm_eps)
            update = self._reduced(self._mlp(x, layer.mlp))
        return residual if update is None else residual + update

    def _reduced(self, update: Tensor) -> Tensor:
        reduce = self._shape.reduce
        return update if reduce is None else reduce(update)

    def _attention(
        self,
        x: Tensor,
        attention: HeadAttention | LatentAttention,
        kv: Tensor,
        rows: PagedRows,
        places: Places,
    ) -> Tensor:
        """[tokens, heads · value dim], before the output product."""
        if isinstance(attention, LatentAttention):
            return self._latent(x, attention, kv, rows, places)
        shape = self._shape
        qkv = attention.qkv(x).view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        return self._attend(qkv, kv, rows, places, attention)

    def _latent(
        self, x: Tensor, attention: LatentAttention, kv: Tensor, rows: PagedRows, places: Places
    ) -> Tensor:
        tokens = x.shape[0]
        heads, nope, rank = attention.key_up.shape
        if attention.query_down is not None and attention.query_norm is not None:
            x_query = self._norm(attention.query_down(x), attention.query_norm, attention.norm_eps)
        else:
            x_query = x
        queries = attention.query_up(x_query).view(tokens, heads, -1)
        down = attention.kv_down(x)
        kept = self._norm(down[:, :rank], attention.kv_norm, attention.norm_eps)
        turned, key = self._turned(queries[:, :, nope:], down[:, None, rank:], places)
        if attention.rotary_scale != 1:
            turned = turned * attention.rotary_scale
        self._keep_latents(torch.cat((kept, key[:, 0]), -1), kv[:, 0, 0], rows)
        given = queries[:, :, :nope], turned
        return self._mixed(given, attention, kv[:, 0, 0], rows).view(tokens, -1)

    def _mixed(
        self,
        given: tuple[Tensor, Tensor],
        attention: LatentAttention,
        pool: Tensor,
        rows: PagedRows,
    ) -> Tensor:
        """Queries of heads [tokens, heads, nope] and their rotated parts → [tokens, heads, value];
        rows in the form that takes less."""
        plain, turned = given
        out = plain.new_empty((*plain.shape[:2], attention.value_up.shape[1]))
        first_row = first = 0
        for expanded, run in groupby(self._expanded(rows, attention, turned.shape[-1])):
            last_row = first_row + len(list(run))
            part = rows
            if last_row - first_row < len(rows.lengths):
                part = rows.part(first_row, last_row)
            own = slice(first, first + sum(part.lengths))
            mix = self._mix_expanded if expanded else self._mix_absorbed
            out[own] = mix((plain[own], turned[own]), attention, pool, part)
            first_row, first = last_row, own.stop
        return out

    @staticmethod
    def _expanded(rows: PagedRows, attention: LatentAttention, rope: int) -> list[bool]:
        """Which rows are long enough for keys and values of their own heads."""
        key_up, value = attention.key_up, attention.value_up.shape[1]
        return [
            row >= rows.decode and expands(length, start + length, key_up, value, rope)
            for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True))
        ]

    def _mix_absorbed(
        self,
        given: tuple[Tensor, Tensor],
        attention: LatentAttention,
        pool: Tensor,
        rows: PagedRows,
    ) -> Tensor:
        """The key's up-projection is applied to the query: q · (W c) = (Wᵀ q) · c."""
        plain, turned = given
        absorbed = torch.matmul(plain.transpose(0, 1), attention.key_up).transpose(0, 1)
        queries = torch.cat((absorbed, turned), -1)
        rank = attention.key_up.shape[2]
        mixed = self._attend_latents(queries, pool, rows, attention.scale, rank)
        values = torch.matmul(mixed.transpose(0, 1), attention.value_up.transpose(1, 2))
        return values.transpose(0, 1)

    def _mix_expanded(
        self,
        given: tuple[Tensor, Tensor],
        attention: LatentAttention,
        pool: Tensor,
        rows: PagedRows,
    ) -> Tensor:
        return expanded_attention(
            torch.cat(given, -1), pool, rows, attention.scale, attention.key_up, attention.value_up
        )

    def _mlp(self, x: Tensor, mlp: GatedMlp | ExpertsMlp) -> Tensor:
        if isinstance(mlp, GatedMlp):
            return mlp.down(self._gated(mlp.gate_up(x)))
        logits = torch.nn.functional.linear(x.float(), mlp.router)
        update = mlp.experts(x, *route(logits, mlp.correction, mlp.routing))
        return update if mlp.shared is None else update + self._mlp(x, mlp.shared)

    # What a backend has of its own.

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def _add_norm(self, update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(update, residual, weight, eps)

    def _gated(self, x: Tensor) -> Tensor:
        return silu_mul(x)

    def _turned(self, queries: Tensor, key: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Both [tokens, heads, rotary dim], rotated; the given ones may be overwritten."""
        return rotary(queries, places.cos, places.sin), rotary(key, places.cos, places.sin)

    def _attend(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, places: Places, attention: HeadAttention
    ) -> Tensor:
        """[tokens, heads, dim] of all kinds → [tokens, heads · dim]; `qkv` may be overwritten."""
        shape = self._shape
        return attend(qkv, kv, rows, places, attention, scale=shape.scale, eps=shape.norm_eps)

    def _keep_latents(self, latents: Tensor, pool: Tensor, rows: PagedRows) -> None:
        """latents [tokens, rank + rope] into `pool` [blocks, block_tokens, rank + rope]."""
        write_latents(latents, pool, rows.slots)

    def _attend_latents(
        self, queries: Tensor, pool: Tensor, rows: PagedRows, scale: float, rank: int
    ) -> Tensor:
        """queries [tokens, heads, rank + rope], absorbed → [tokens, heads, rank]."""
        return latent_attention(queries, pool, rows, scale, rank)


def attend(
    qkv: Tensor,
    kv: Tensor,
    rows: PagedRows,
    places: Places,
    attention: HeadAttention,
    *,
    scale: float,
    eps: float,
) -> Tensor:
    """qkv [tokens, heads + 2·kv_heads, dim]: norm and rotate q and k, keep k and v, attend.

    Returns [tokens, heads · dim].
    """
    tokens, total, dim = qkv.shape
    kv_heads = kv.shape[2]
    heads = total - 2 * kv_heads
    queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    if attention.query_norm is not None and attention.key_norm is not None:
        queries = rms_norm(queries, attention.query_norm, eps)
        keys = rms_norm(keys, attention.key_norm, eps)
    turned = rotary(keys, places.cos, places.sin)
    write_kv(turned, qkv[:, heads + kv_heads :], kv, rows.slots)
    rotated = rotary(queries, places.cos, places.sin)
    mixed = paged_attention(rotated, kv, rows, scale, attention.window)
    return mixed.view(tokens, heads * dim)
