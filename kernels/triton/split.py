"""Attention split along the context: how many parts, and the reduction over them.

Part i of a row leaves o_i = acc_i / l_i and e_i = m_i + log2 l_i; the row is Σ 2^(e_i − E)·o_i with
E = log2 Σ 2^(e_i) (flash-decoding, Dao et al. 2023). A part without tokens leaves e_i = −∞, and
its o_i is neither written nor read.

Bytes: rows · heads · parts · (dim + 1) · 4, written and read; below 1 % of the KV from 256 tokens
a part on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PER_PROCESSOR = 8
"""Programs wanted on each multiprocessor: several at a time, and a short last wave."""
LEAST_TOKENS = 256
"""A shorter part costs more in its reduction than it gains."""


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of `device`; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def parts(programs: int, longest: int, device: torch.device) -> int:
    """Parts for `programs` (rows times heads) that each walk up to `longest` tokens."""
    wanted = -(-processors(device) * PER_PROCESSOR // max(programs, 1))
    return max(1, min(wanted, -(-longest // LEAST_TOKENS)))


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch of one launch, in fp32: sums [rows, heads, parts, dim], logs [rows, heads, parts]."""

    sums: Tensor
    logs: Tensor

    @classmethod
    def planned(cls, out: Tensor, programs: int, longest: int, splits: int | None) -> Partials:
        """For `out` [rows, heads, dim], of which `programs` a row walk up to `longest` tokens each;
        in `splits` parts, None: as many as keep the device busy."""
        rows, heads, dim = out.shape
        count = splits or parts(rows * programs, longest, out.device)
        sums = torch.empty((rows, heads, count, dim), dtype=torch.float32, device=out.device)
        return cls(sums, torch.empty((rows, heads, count), dtype=torch.float32, device=out.device))

    @property
    def count(self) -> int:
        return self.logs.shape[2]

    def reduce(self, out: Tensor) -> None:
        """Into `out` [rows, heads, dim]; a row without any token becomes zeros."""
        rows, heads, count, dim = self.sums.shape
        _reduce[(rows, heads)](
            self.sums,
            self.logs,
            out,
            count,
            out.stride(0),
            out.stride(1),
            DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            PARTS_PAD=triton.next_power_of_2(count),
            num_warps=4,
        )


@triton.jit
def store_part(
    acc,
    peak,
    total,
    sums,
    logs,
    row,
    heads,
    all_heads,
    present,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Leave acc [H, DIM_PAD], peak and total [H] of `heads` [H] as this program's part."""
    part = tl.program_id(2)
    count = tl.num_programs(2)
    dims = tl.arange(0, DIM_PAD)
    place = (row.to(tl.int64) * all_heads + heads) * count + part
    empty = total == 0.0
    whole = tl.where(empty, 1.0, total)
    log = tl.where(empty, float("-inf"), peak + tl.log2(whole))
    tl.store(logs + place, log, mask=present)
    wanted = (present & (total != 0.0))[:, None] & (dims < DIM)[None, :]
    tl.store(sums + place[:, None] * DIM + dims[None, :], acc / whole[:, None], mask=wanted)


@triton.jit(do_not_specialize=["count"])
def _reduce(
    sums,
    logs,
    out,
    count,
    out_row,
    out_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = (row * tl.num_programs(1) + head) * count
    index = tl.arange(0, PARTS_PAD)
    dims = tl.arange(0, DIM_PAD)
    log = tl.load(logs + place + index, mask=index < count, other=float("-inf"))
    peak = tl.max(log, 0)
    share = tl.exp2(log - tl.where(peak == float("-inf"), 0.0, peak))
    part = tl.load(
        sums + (place + index)[:, None] * DIM + dims[None, :],
        mask=(log != float("-inf"))[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(share, 0)
    mixed = tl.sum(part * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row * out_row + head * out_head + dims,
        mixed.to(out.dtype.element_ty),
        mask=dims < DIM,
    )
