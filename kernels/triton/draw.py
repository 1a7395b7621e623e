"""The draw of a token when the best candidates do not decide it: see `kernels.draw`.

One program a row; where the row is decided already it ends at once, so a step that needs no search
pays a launch. A place in the order is found by the 32 bits of its value, from the highest: how many
candidates are at or above a bound, and with which mass, says on which side it lies. Equals of that
value are told apart by their ids. Nothing is sorted or written but the answer.

Bytes of a search: 3 · 34 passes over the row, which the second-level cache holds. FLOPs: an
exponential in double for each number of a pass. Either way one multiprocessor's work: some
milliseconds for 128k tokens, now and then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


def draw(logits: Tensor, given: Tensor, wanted: Tensor, ids: Tensor) -> None:
    """See `kernels.draw.draw_by_sorting`; nothing is asked of the host."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or not (given.is_contiguous() and wanted.is_contiguous()):
        raise ValueError("rows of logits and what is given with them must be contiguous")
    if rows:
        _draw[(rows,)](
            logits, given, wanted, ids, vocabulary, logits.stride(0), TILE=TILE, num_warps=8
        )


@triton.jit
def _above(row, vocabulary, best, temperature, bound, TILE: tl.constexpr):
    """How many candidates have a key of `bound` or more, and their mass."""
    count = tl.zeros((TILE,), dtype=tl.float64)
    mass = tl.zeros((TILE,), dtype=tl.float64)
    for at in range(0, vocabulary, TILE):
        place = at + tl.arange(0, TILE)
        value = tl.load(row + place, mask=place < vocabulary, other=float("-inf"))
        inside = (_key(value) >= bound) & (place < vocabulary)
        weight = tl.exp((value.to(tl.float64) - best) / temperature)
        count += tl.where(inside, 1.0, 0.0)
        mass += tl.where(inside, weight, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _key(value):
    """int64 in the order of values; −0 counts as 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, -2147483649 - bits)


@triton.jit
def _heavier(row, vocabulary, best, temperature, weight, TILE: tl.constexpr):
    """How many candidates weigh at least `weight`."""
    count = tl.zeros((TILE,), dtype=tl.float64)
    for at in range(0, vocabulary, TILE):
        place = at + tl.arange(0, TILE)
        value = tl.load(row + place, mask=place < vocabulary, other=float("-inf"))
        own = tl.exp((value.to(tl.float64) - best) / temperature)
        count += tl.where((own >= weight) & (place < vocabulary), 1.0, 0.0)
    return tl.sum(count, 0)


@triton.jit
def _best(row, vocabulary, TILE: tl.constexpr):
    best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for at in range(0, vocabulary, TILE):
        place = at + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(row + place, mask=place < vocabulary, other=float("-inf")))
    return tl.max(best, 0).to(tl.float64)


@triton.jit
def _find(row, vocabulary, best, temperature, count, mass, above, TILE: tl.constexpr):
    """The first place up to which there are `count` candidates, or `mass` of them, or more than
    `above`; else the last. Its key, which of that key's equals it is (from 1), how many candidates
    there are up to it and their mass."""
    bound = -2147483648 + 0 * vocabulary.to(tl.int64)
    step = 2147483648 + 0 * bound
    before = 0.0 * best
    lighter = 0.0 * best
    equals = 0.0 * best
    heavy = 0.0 * best
    for turn in range(34):  # 32 bits, then what is above the bound, then what is from it on
        ahead = tl.where(turn < 32, step, tl.where(turn == 32, 1, 0))
        there, weighed = _above(row, vocabulary, best, temperature, bound + ahead, TILE)
        reached = (there >= count) | (weighed >= mass) | (weighed > above)
        bound = tl.where((turn < 32) & reached, bound + step, bound)
        step = step // 2
        equals = there - before
        heavy = weighed - lighter
        before = tl.where(turn < 33, there, before)
        lighter = tl.where(turn < 33, weighed, lighter)
    one = tl.where(equals > 0, heavy / tl.where(equals > 0, equals, 1.0), 0.0)
    safe = tl.where(one > 0, one, 1.0)
    wanted = tl.minimum(count - before, tl.ceil((mass - lighter) / safe))
    wanted = tl.minimum(wanted, tl.floor((above - lighter) / safe) + 1.0)
    wanted = tl.where(one > 0, wanted, tl.minimum(count - before, equals))
    wanted = tl.maximum(tl.minimum(wanted, equals), 1.0)
    return bound, wanted, before + wanted, lighter + wanted * one


@triton.jit
def _equal(row, vocabulary, key, wanted, TILE: tl.constexpr):
    """The id of the `wanted`-th candidate of this key, from 1."""
    seen = 0.0 * wanted
    found = 0 * key
    for at in range(0, vocabulary, TILE):
        place = at + tl.arange(0, TILE)
        value = tl.load(row + place, mask=place < vocabulary, other=float("-inf"))
        same = tl.where((_key(value) == key) & (place < vocabulary), 1, 0)
        upto = seen + tl.cumsum(same, 0)
        found += tl.sum(tl.where((same == 1) & (upto == wanted), place, 0), 0)
        seen += tl.sum(same, 0)
    return found


@triton.jit
def _draw(logits, given, wanted, ids, vocabulary, row_stride, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + index) == 0:
        return
    row = logits + index * row_stride
    temperature = tl.load(given + index * 5)
    top_k = tl.load(given + index * 5 + 1)
    top_p = tl.load(given + index * 5 + 2)
    min_p = tl.load(given + index * 5 + 3)
    point = tl.load(given + index * 5 + 4)
    best = _best(row, vocabulary, TILE)
    kept = _heavier(row, vocabulary, best, temperature, min_p, TILE)
    never = float("inf") + 0.0 * kept
    count = tl.where(top_k > 0, tl.minimum(kept, top_k), kept)
    mass = never
    above = never
    key = tl.program_id(0).to(tl.int64) * 0
    which = 0.0 * kept
    limit = never
    reached = 0.0 * kept
    for turn in range(3):  # what top-k leaves, what the nucleus leaves of that, the draw
        at, equal, upto, weighed = _find(
            row, vocabulary, best, temperature, count, mass, above, TILE
        )
        taken = (turn == 0) | ((turn == 1) & (top_p < 1.0) & (upto < limit))
        taken = taken | ((turn == 2) & (upto <= limit))
        key = tl.where(taken, at, key)
        which = tl.where(taken, equal, which)
        limit = tl.where(taken, upto, limit)
        reached = tl.where(taken, weighed, reached)
        count = never
        mass = tl.where(turn == 0, top_p * reached, never)
        above = tl.where(turn == 0, never, point * reached)
    tl.store(ids + index, _equal(row, vocabulary, key, which, TILE))
