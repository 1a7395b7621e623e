from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from core.engine.drive import resident
from core.engine.limits import active_numbers, sizes, storages
from core.models.weights import open_weights
from tests.core.models.families import QWEN3, QWEN3_MOE, family_folder

SMAPS = """\
7f00-7f10 rw-s 00000000 00:01 12 /memfd:skerry-kv (deleted)
Rss:                 100 kB
Pss:                 999 kB
7f20-7f30 r-xp 00000000 08:01 13 /usr/lib/libtorch_cpu.so
Rss:                  40 kB
7f40-7f50 rw-p 00000000 00:00 0
Rss:                   2 kB
VmFlags: rd wr mr mw me ac
"""


@dataclass(frozen=True, slots=True)
class _Layer:
    weight: torch.Tensor
    view: torch.Tensor


_Layer.__module__ = "core.test"  # only our own classes are looked into


def test_tensor_memory_counts_once() -> None:
    weight = torch.zeros(10, dtype=torch.float32)
    layer = _Layer(weight, weight[2:])
    other = torch.zeros(3, dtype=torch.bfloat16)
    found = storages({"layers": [layer, layer], "other": (other,)})
    assert sorted(found.values()) == [6, 40]


def test_shared_memory_is_told_apart() -> None:
    assert resident(SMAPS) == {"rss": 142 * 1024, "pool": 100 * 1024}


def test_a_token_meets_the_experts_it_is_sent_to(tmp_path: Path) -> None:
    dense = open_weights(family_folder(tmp_path / "dense", QWEN3))
    mixed = open_weights(family_folder(tmp_path / "mixed", QWEN3_MOE))
    outside = 2 * 320 * 64 + 64  # embedding, head and last norm
    assert active_numbers(dense) == sum(size for _, size in sizes(dense)) - outside
    gated, routed = 3 * 64 * 96, 8 * 64 + 3 * (3 * 64 * 32)  # two layers of three are mixtures
    assert active_numbers(mixed) == active_numbers(dense) + 2 * (routed - gated)
    dense.close()
    mixed.close()
