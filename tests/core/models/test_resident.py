"""Weights that are kept are in memory when their reading ends."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from core.models.resident import bring_in

SIZE = 16 << 20


def resident(path: Path) -> int:
    """Bytes of `path` that this process has mapped and in memory."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(":")
        if " " in head:
            inside = line.endswith(str(path))
        elif inside and head == "Rss":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages come as they are touched")
@pytest.mark.parametrize("part", ["all", "rows", "columns"])
def test_the_pages_under_a_view_are_there_before_it_is_used(tmp_path: Path, part: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(mapped, dtype=torch.uint8).view(512, -1)
    view = {"all": whole, "rows": whole[256:], "columns": whole[:, 64:128]}[part]
    assert resident(path) == 0
    bring_in(view)
    assert resident(path) >= (SIZE // 2 if part == "rows" else SIZE - 8192)
    if part == "rows":
        assert resident(path) <= SIZE // 2 + (4 << 20)  # a large page may reach over the edge
    assert view[0, :4].tolist() == ([64, 65, 66, 67] if part == "columns" else [0, 1, 2, 3])


def test_nothing_and_little_are_nothing_to_ask_for() -> None:
    bring_in(torch.empty(0, dtype=torch.uint8))
    small = torch.arange(16, dtype=torch.uint8)
    bring_in(small)
    assert small.tolist() == list(range(16))
