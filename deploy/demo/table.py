"""The demo's results as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deploy.client import Trace
from deploy.demo.rounds import Result


def results_table(results: Sequence[Result]) -> Table:
    """Fits 80 columns; what needs room takes two lines."""
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("", "edge", "region", "prefill\n→ decode"):
        table.add_column(head, no_wrap=True)
    for head in ("prompt\ntokens", "of them\ncached", "TTFT", "tok/s", "KV\nmoved"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why this region,\nwhy those nodes", no_wrap=True)
    for result in results:
        answer, trace = result.answer, result.answer.trace
        table.add_row(
            result.round.number,
            trace.edge,
            trace.region,
            _nodes(trace),
            str(answer.prompt_tokens),
            str(answer.cached_tokens),
            f"{answer.first_s:.2f} s",
            f"{answer.tokens_per_s:.0f}",
            size(trace.kv_bytes),
            "\n".join(filter(None, (trace.reason, trace.node_reason))),
        )
    return table


def _nodes(trace: Trace) -> str:
    """One name when one node read and answered."""
    decode = trace.decode or "?"
    return decode if trace.prefill in (None, decode) else f"{trace.prefill}\n→ {decode}"


def size(count: int) -> str:
    """Bytes for a reader: 0, 512 B, 33.4 MB."""
    if count < 1000:
        return f"{count} B" if count else "0"
    if count < 1_000_000:
        return f"{count / 1000:.1f} kB"
    return f"{count / 1_000_000:.1f} MB"
