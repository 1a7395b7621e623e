"""All kernels in bf16 compile for a Hopper GPU, which need not be there (the interpreter cannot
run bf16), into code that keeps to its registers, its shared memory and wide accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is there for Linux on x86-64 only")

SHARED = 227 << 10
"""Bytes a program may take on compute capability 9.0."""
MOVERS = ("_copy", "_norm", "_rotate", "_silu_mul", "_write")


def test_bf16_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_all", "90"],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = defaultdict(list)
    for line in done.stdout.splitlines():
        kernel = json.loads(line)
        kernels[kernel["name"]].append(kernel)
        assert kernel["stack"] == 0, f"registers spill: {line}"
        assert kernel["shared"] <= SHARED, line
    products = {"_decode", "_prefill", "_latent", "_grouped"}
    assert kernels.keys() == {*products, "_reduce", "_draw", *MOVERS}
    assert all(kernel["wide"] for name in MOVERS for kernel in kernels[name])
    assert all(kernel["wgmma"] and kernel["async"] for kernel in kernels["_prefill"])
    assert all(kernel["mma"] and kernel["async"] for kernel in kernels["_decode"])
    wide, narrow = kernels["_latent"]
    assert wide["wgmma"]
    assert narrow["mma"]
