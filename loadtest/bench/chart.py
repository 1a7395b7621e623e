"""A picture of rates: a panel for each measure, a bar for each contestant. Plain SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _PANEL, _GAP, _BAR, _STEP, _LEFT, _TOP = 860, 250, 30, 16, 24, 20, 64
_PER_ROW = 3
_OURS = "#0f766e"
_OTHERS = ("#94a3b8", "#b6a58c", "#a78bfa", "#cbd5e1")
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#334155}"
    ".title{font-size:16px;font-weight:600}.measure{font-weight:600}.note{fill:#64748b}"
    "@media(prefers-color-scheme:dark){text{fill:#e2e8f0}.note{fill:#94a3b8}}"
)


def svg(title: str, note: str, panels: Sequence[tuple[str, Mapping[str, float]]], ours: str) -> str:
    """Bars of a panel are to the scale of its largest; `ours` has the same colour everywhere."""
    names = [name for _, bars in panels for name in bars if name != ours]
    colours = {ours: _OURS} | {
        name: _OTHERS[index % len(_OTHERS)] for index, name in enumerate(dict.fromkeys(names))
    }
    tallest = max((len(bars) for _, bars in panels), default=0)
    height_of_row = 40 + tallest * _STEP
    rows = -(-len(panels) // _PER_ROW)
    height = _TOP + rows * height_of_row + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>',
        f'<text class="note" x="{_LEFT}" y="45">{escape(note)}</text>',
    ]
    for index, (measure, bars) in enumerate(panels):
        x = _LEFT + (index % _PER_ROW) * (_PANEL + _GAP)
        y = _TOP + (index // _PER_ROW) * height_of_row
        parts += _panel(x, y, measure, bars, colours)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    x: int, y: int, measure: str, bars: Mapping[str, float], colours: Mapping[str, str]
) -> list[str]:
    parts = [f'<text class="measure" x="{x}" y="{y + 16}">{escape(measure)}</text>']
    largest = max(bars.values(), default=0.0)
    label, room = 88, _PANEL - 88 - 52
    for number, (name, value) in enumerate(bars.items()):
        top = y + 26 + number * _STEP
        width = room * value / largest if largest > 0 else 0.0
        end = x + label + width + 6
        parts += [
            f'<text x="{x}" y="{top + 12}">{escape(name)}</text>',
            f'<rect x="{x + label}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2" '
            f'fill="{colours[name]}"/>',
            f'<text x="{end:.1f}" y="{top + 12}">{value:,.0f}</text>',
        ]
    return parts
