"""The tokens that may come at one place, as bits, and how a row of logits is held to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Scratch:
    """Memory for one row's limits; used by one thread, again and again, so that it stays near the
    processor: for a vocabulary of 49,152, a fifth of what new memory costs."""

    def __init__(self, vocab_size: int) -> None:
        self.numbers = np.full(vocab_size, -np.inf, dtype=np.float32)
        self.tensor = torch.from_numpy(self.numbers)


@dataclass(frozen=True, slots=True)
class Allowed:
    """`bits`: one for each token, the lowest of a byte first; what has none may not come."""

    bits: npt.NDArray[np.uint8]
    scratch: Scratch

    def hold(self, row: Tensor, first: int = 0) -> None:
        """Make impossible what may not come. `row`: logits of the ids from `first` on, fp32.

        The least of logit and limit (+inf or −inf) is what counts: cheaper than filling by a mask.
        """
        limits = self.scratch.numbers
        flags = np.unpackbits(self.bits, bitorder="little")[: len(limits)]
        known = limits[: len(flags)]
        np.subtract(flags, 0.5, out=known, dtype=np.float32)
        known *= np.inf
        held = self.scratch.tensor[first : first + len(row)].to(row.device)
        torch.minimum(row, held, out=row)

    def __contains__(self, token: int) -> bool:
        return (
            bool(self.bits[token >> 3] >> (token & 7) & 1) if token >> 3 < len(self.bits) else False
        )
