"""Our table in Locust's HTML report: kinds, edges and regions with goodput and cached share, which
Locust has no columns for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadtest.users.answers import Answer, Slo, errors, table, verdict

OVERLAP = (
    "Locust's own rows overlap: each answer is in up to twelve of them (total, first token, per"
    " token and within SLO, each by kind, edge and region), and its row Aggregated counts it as"
    " often; the table by kind, edge and region counts it once."
)
"""Below our tables, where Locust's stand beside them."""

_BODY_END = "</body>"
_STYLE = "font-family:Roboto,Arial,sans-serif;max-width:1200px;margin:0 auto;padding:0 24px 48px"
_CELL = "padding:4px 12px;border-bottom:1px solid #8884;text-align:"


def section(answers: Sequence[Answer], slo: Slo, seconds: float) -> str:
    """As HTML."""
    head, *rows = table(answers, slo, seconds)
    _, words = verdict(answers, slo)
    failed = "".join(f"<li>{count} × {escape(name)}</li>" for name, count in errors(answers))
    return (
        f'<section style="{_STYLE}"><h2>By kind, edge and region</h2>'
        f'<table style="border-collapse:collapse">{_line("th", head)}'
        f"{''.join(_line('td', row) for row in rows)}</table>"
        f"<p>{escape(words)}</p><p>{escape(OVERLAP)}</p>"
        f"{f'<h3>Errors</h3><ul>{failed}</ul>' if failed else ''}</section>"
    )


def with_section(page: str, added: str) -> str:
    """`page` with `added` at its end."""
    before, end, after = page.rpartition(_BODY_END)
    return f"{before}{added}{end}{after}" if end else page + added


def _line(tag: str, cells: Sequence[str]) -> str:
    shown = (
        f'<{tag} style="{_CELL}{"right" if place else "left"}">{escape(cell)}</{tag}>'
        for place, cell in enumerate(cells)
    )
    return f"<tr>{''.join(shown)}</tr>"
