"""`python -m core.engine.limits MODEL`: what this machine can do at best, and what a model asks.

One line of JSON: rates of reading and copying memory, the rate of bf16 products, and for the model
the bytes that its weights take here, the bytes that one token needs at small batch, and its
arithmetic. Figures of the engine are held against these.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from core.engine.messages import RankConfig
from core.engine.runner_torch import TorchRunner
from core.models.decoder import Decoder
from core.models.weights import WeightSource, open_weights

_MEMORY_BYTES = 256 << 20
"""Far more than any cache holds."""
_SECONDS = 0.4


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    read_bytes_per_s: float
    copy_bytes_per_s: float
    """Read and written bytes together."""
    bf16_flop_per_s: float
    stored_bytes: int
    """Of the weights as the file holds them: what a token reads at batch 1."""
    dense_bytes: int
    """Of the same weights in bf16: what a step reads at larger batches."""
    resident_bytes: int
    """Of all tensors that the engine keeps for the weights."""
    body_flop: float
    """Arithmetic of one token in all layers, without attention to earlier tokens."""
    head_flop: float
    attention_flop: float
    """Of one token for each earlier token that it looks at."""


def measure(path: Path, *, threads: int, native: bool) -> Limits:
    """Raises ConfigError."""
    kept = resident_bytes(path, threads=threads, native=native)
    torch.set_num_threads(threads)
    source = open_weights(path)
    config = source.config
    body = sum(size for name, size in sizes(source) if "layers." in name)
    active = active_numbers(source)
    head = config.vocab_size * config.hidden
    stored = sum(source.read(name).data.numel() for name in source.names)
    source.close()
    return Limits(
        read_bytes_per_s=_read_rate(),
        copy_bytes_per_s=_copy_rate(),
        bf16_flop_per_s=max(_product_rate(512, config.hidden, 2 * config.intermediate),
                            _product_rate(1024, 1024, 1024)),
        stored_bytes=stored,
        dense_bytes=2 * (body + head),
        resident_bytes=kept,
        body_flop=2.0 * active,
        head_flop=2.0 * head,
        attention_flop=4.0 * config.layers * config.heads * config.head_dim,
    )  # fmt: skip


def active_numbers(source: WeightSource) -> int:
    """Numbers of the layers that one token meets: of a mixture only the experts it is sent to."""
    moe, found = source.config.moe, 0
    for name, size in sizes(source):
        if ".experts." in name and moe is not None:
            found += size * moe.chosen // moe.count
        elif "layers." in name:
            found += size
    return found


def sizes(source: WeightSource) -> Iterator[tuple[str, int]]:
    """Numbers of each tensor."""
    for name in source.names:
        stored = source.read(name)
        yield name, stored.data.shape[0] * stored.columns


def resident_bytes(path: Path, *, threads: int, native: bool) -> int:
    """Bytes of the tensors that a rank keeps for the weights of this model."""
    config = RankConfig(
        node="limits", socket_fd=-1, source=str(path), kv_blocks=64, threads=threads
    )
    runner = TorchRunner(config, native=native)
    try:
        runner.load(lambda stage, fraction: None)
        decoder = next(item for item in reachable(runner) if isinstance(item, Decoder))
        weights = (decoder.embedding, decoder.layers, decoder.norm, decoder.head)
        return sum(storages(weights).values())
    finally:
        runner.close()


def storages(root: object) -> dict[int, int]:
    """Bytes of all tensor memory that can be reached from `root`, by address: each once."""
    found: dict[int, int] = {}
    for item in reachable(root):
        if isinstance(item, Tensor):
            memory = item.untyped_storage()
            found[memory.data_ptr()] = max(memory.nbytes(), found.get(memory.data_ptr(), 0))
    return found


def reachable(root: object) -> Iterator[object]:
    """`root`, what it holds, and what that holds, through containers and our own classes."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif type(item).__module__.startswith(("core.", "kernels.")):
            waiting += vars(item).values() if hasattr(item, "__dict__") else ()
            for kind in type(item).__mro__:
                slots = getattr(kind, "__slots__", ())
                names = (slots,) if isinstance(slots, str) else slots
                waiting += [getattr(item, name) for name in names if hasattr(item, name)]


def _read_rate() -> float:
    source = torch.ones(_MEMORY_BYTES // 4)
    return source.nbytes / _best(source.sum)


def _copy_rate() -> float:
    source = torch.ones(_MEMORY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


def _product_rate(rows: int, inner: int, columns: int) -> float:
    left = torch.ones(rows, inner, dtype=torch.bfloat16)
    right = torch.ones(columns, inner, dtype=torch.bfloat16)
    seconds = _best(lambda: torch.nn.functional.linear(left, right))
    return 2.0 * rows * inner * columns / seconds


def _best(step: Callable[[], object]) -> float:
    step()
    found = float("inf")
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        step()
        found = min(found, time.perf_counter() - began)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file or a folder of safetensors")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--native", choices=("on", "off"), default="on")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        limits = measure(options.model, threads=options.threads, native=options.native == "on")
    sys.stdout.buffer.write(msgspec.json.encode(limits) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
