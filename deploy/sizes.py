"""What set-up fetches and leaves behind: the one place for these figures. Standard library only.

In MB, measured with the pinned versions on Linux x86-64. README quotes `FETCH_MB` and `ENV_MB`.
"""

from __future__ import annotations

TOOLS_MB, MODEL_MB, NODE_MB = 3, 93, 46
TORCH_MB, TORCH_CUDA_MB = 200, 2740
TEST_MB = 385
"""For the tests on top; of it 198 MB are Triton and 46 Mooncake's transfer engine, both fetched on
Linux x86-64 alone, 53 Playwright and 22 Kubernetes' schemas."""

EDGE_PROCESS_MB, ROUTER_PROCESS_MB, NODE_PROCESS_MB = 70, 92, 450
"""Resident memory of each process of a world on the bundled model; a node's with one rank."""
HOST_PROCESS_MB = 45
"""Beside an edge that takes Workers; a Worker's own process has 60."""
RANK_PROCESS_MB = 320
"""Of each further rank of a node."""

FETCH_MB = TOOLS_MB + MODEL_MB + NODE_MB + TORCH_MB
"""Downloads of `make demo` with a CPU build of torch."""

ENV_MB = 1190
"""`.venv` on disk after `make demo`, with a CPU build of torch."""
ENV_TEST_MB = 2880
"""The same after `make test`; of it 720 MB are Triton, 146 Mooncake."""
ENV_CUDA_MB = 9000
"""`.venv` with a CUDA build."""
