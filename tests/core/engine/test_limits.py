from __future__ import annotations

from dataclasses import dataclass

import torch

from core.engine.drive import resident
from core.engine.limits import storages

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
