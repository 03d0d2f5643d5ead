"""Draw measured and predicted times of collectives as SVG: one panel for each collective, time against size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.nccl_sweeps.rows import Row

_WIDTH, _HEIGHT, _PANEL, _LEFT, _TOP, _ROW = 900, 24, (390, 250), 56, 44, 330
_COLORS = ("#1f5fa8", "#b5541c", "#2e7d4f", "#7a4fa3", "#8a6d00", "#a8326b")
_TITLE = "Microseconds against bytes: measured (dots), predicted (lines)"
_STYLE = 'font-family="sans-serif" font-size="11" fill="#222"'
_MOST = len(_COLORS)  # The systems of a panel: those with the most rows.
_LEAST_ROWS = 5  # The least rows of a system that is drawn.
_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
_SLACK = 0.3  # The margin above and below, in powers of ten.


def draw(rows: Sequence[Row]) -> str:
    """Return the figure: dots are measured, lines predicted; each collective has the systems with the most sizes."""
    kinds: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        if not row.forced.algorithms()[0]:
            kinds.setdefault(row.collective, {}).setdefault(row.system, {})[row.payload_bytes] = row
    panels = []
    for kind, systems in sorted(kinds.items()):
        longest = sorted(systems.items(), key=lambda item: -len(item[1]))[:_MOST]
        if drawn := [(name, by_size) for name, by_size in longest if len(by_size) >= _LEAST_ROWS]:
            panels.append((kind, drawn))
    height = _TOP + _ROW * -(-len(panels) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" {_STYLE}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<title>{_TITLE}</title><text x="{_LEFT}" y="{_HEIGHT}" font-size="14">{_TITLE}</text>',
    ]
    for i, (kind, systems) in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT + (i % 2) * 440},{_TOP + (i // 2) * _ROW})">')
        parts += [*_panel(kind, systems), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(kind: str, systems: Sequence[tuple[str, dict[int, Row]]]) -> Iterator[str]:
    """Yield the panel of one collective."""
    width, height = _PANEL[0] - 20, _PANEL[1]
    every = [row for _, by_size in systems for row in by_size.values()]
    left, right = (math.log2(f(row.payload_bytes for row in every)) for f in (min, max))
    times = [math.log10(seconds * 1e6) for row in every for seconds in (row.measured_s, row.predicted_s())]
    low, high = min(times) - _SLACK, max(times) + _SLACK

    def x(size: float) -> float:
        return (math.log2(size) - left) / max(1.0, right - left) * width

    def y(seconds: float) -> float:
        return height - (math.log10(seconds * 1e6) - low) / (high - low) * height

    yield f'<text x="0" y="-4" font-size="12">{escape(kind)}</text>'
    yield f'<rect width="{width}" height="{height}" fill="none" stroke="#bbb"/>'
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = y(10.0**power * 1e-6)
        yield f'<line x1="0" x2="{width}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eee"/>'
        yield f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{10**power:g}</text>'
    for power in range(math.ceil(left / 5) * 5, int(right) + 1, 5):
        shift, unit = next(found for found in _UNITS if power >= found[0])
        name = f"{2**power >> shift} {unit}"
        yield f'<text x="{x(2.0**power):.1f}" y="{height + 14}" text-anchor="middle">{name}</text>'
    for i, (color, (name, by_size)) in enumerate(zip(_COLORS, systems, strict=False)):
        ordered = [by_size[size] for size in sorted(by_size)]
        points = " ".join(f"{x(row.payload_bytes):.1f},{y(row.predicted_s()):.1f}" for row in ordered)
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        yield from (
            f'<circle cx="{x(row.payload_bytes):.1f}" cy="{y(row.measured_s):.1f}" r="2.2" fill="{color}"/>'
            for row in ordered
        )
        yield f'<text x="8" y="{14 + 13 * i}" fill="{color}" font-size="10">{escape(name[:62])}</text>'
