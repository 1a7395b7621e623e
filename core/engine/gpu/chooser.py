"""Who chooses the tokens of a step: the device without the host, the devices of all ranks with a
look at whether they are sure, or the host's sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.engine import sampler, sampler_split
from core.engine.allowed import Allowed
from core.engine.gpu.inputs import Staging
from core.engine.gpu.sampler import (
    UNSOUND,
    choose,
    choose_together,
    draw_together,
    numbers,
    plain,
    random_rows,
)
from core.engine.grammar import Filled
from core.engine.plan import Row, SampleSpec
from core.engine.process_groups import Groups
from core.engine.sampler import Sampled, greedy
from core.engine.sampler_split import Vocabulary
from core.engine.stepper import specs_of
from core.models.parallel import split
from kernels.draw import Draw

UNDECIDED = -2
"""In place of a token that takes more than the best candidates of each rank."""


class Chooser:
    """`draw` is for tokens that their best candidates do not decide, on a rank alone."""

    def __init__(self, vocab_size: int, groups: Groups, staging: Staging, draw: Draw) -> None:
        shards = split(vocab_size, groups.tensor.size)
        self._vocabulary = Vocabulary(shards, groups.tensor)
        self._on_host = Vocabulary(shards, groups.host)
        self._alone = groups.tensor.size == 1
        self._staging = staging
        self._draw = draw

    def needs_host(self, row: Row) -> bool:
        """Of what is drawn from a vocabulary that is spread over ranks, the host must see whether
        one exchange of candidates was enough."""
        return bool(row.drafts) or not all(
            plain(one) and (self._alone or greedy(one)) for one in row.specs
        )

    def ahead(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Ids on the device, for rows that do not need the host."""
        if not self._alone:
            return choose_together(logits, self._vocabulary)
        given, drawn = self._sent(specs_of(rows))
        return choose(logits, given, drawn, self._draw)

    def together(self, rows: Sequence[Row], logits: Tensor, filled: Filled) -> list[Sampled | None]:
        """What any rows get; None where logits are not finite."""
        specs = specs_of(rows)
        drawn = None
        if not any(row.drafts for row in rows) and all(map(plain, specs)):
            drawn = self._by_devices(specs, logits)
        return drawn or self._by_host(specs, logits.cpu(), filled.allowed)

    def _by_devices(
        self, specs: Sequence[SampleSpec], logits: Tensor
    ) -> list[Sampled | None] | None:
        """None: the candidates are too few to tell."""
        ids, decided = draw_together(logits, *self._sent(specs), self._vocabulary)
        tokens = torch.where(decided, ids, UNDECIDED).tolist()
        if UNDECIDED in tokens:
            return None
        return [None if token == UNSOUND else Sampled(token) for token in tokens]

    def _by_host(
        self, specs: Sequence[SampleSpec], logits: Tensor, allowed: Mapping[int, Allowed]
    ) -> list[Sampled | None]:
        if self._alone:
            return sampler.sample(logits, specs, allowed)
        return sampler_split.sample(logits, specs, self._on_host, allowed)

    def _sent(self, specs: Sequence[SampleSpec]) -> tuple[Tensor, Tensor]:
        return self._staging.send(numbers(specs)), self._staging.send(random_rows(specs))
