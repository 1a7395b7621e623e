from __future__ import annotations

from loadtest.bench import bounds
from loadtest.bench.bounds import Machine
from loadtest.bench.figures import OURS

MACHINE = Machine(
    read_bytes_per_s=20e9,
    copy_bytes_per_s=20e9,
    bf16_flop_per_s=100e9,
    stored_bytes=100_000_000,
    dense_bytes=200_000_000,
    resident_bytes=0,
    body_flop=1e8,
    head_flop=1e8,
    attention_flop=0.0,
)
REPORT = """# Samples: 100
#
   30  libpython3.11.so.1.0
   40  libtorch_cpu.so
   20  native-0123abcd.so
    6  [kernel.kallsyms]
    4  libm.so.6
"""


def test_shares_of_what_the_machine_can_do() -> None:
    lines = bounds.lines(MACHINE, {"decode 1": {OURS: [100.0]}, "decode 8": {}}, 0)
    assert len(lines) == 2
    # 100 steps a second read 10 GB and do 20 GFLOP
    assert "10.0 ms a step" in lines[1]
    assert "50 % of memory bandwidth if weights are read as stored" in lines[1]
    assert "100 % if in bf16" in lines[1]
    assert "20 % of bf16 arithmetic" in lines[1]


def test_kv_counts() -> None:
    plain = bounds.lines(MACHINE, {"decode 1": {OURS: [100.0]}}, 0)[1]
    with_kv = bounds.lines(MACHINE, {"decode 1": {OURS: [100.0]}}, 100_000_000 // 160)[1]
    assert "50 %" in plain
    assert "100 % of memory bandwidth if weights are read as stored" in with_kv


def test_profile_by_part() -> None:
    parts = bounds.profile(REPORT, "native-")
    assert parts == {
        "Python": 30, "torch": 40, "our kernels": 20, "the kernel": 6, "libc and libm": 4,
    }  # fmt: skip
    line = bounds.profile_line(parts, 10, 12.0)
    assert "torch 40 %, Python 30 %" in line
    assert "interpreter runs for 25 % of the time" in line
