"""Predictions beside measurements as an SVG: each family a strip of errors, and all rows on one log-log square."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from benchmarks.published.replay import Prediction

INK, MUTED, GRID = "#222", "#666", "#ddd"
FULL, PART = "#1f5fa8", "#b5541c"
FONT = 'font-family="sans-serif" font-size="12"'
ROW, TOP, LEFT, STRIP, SIDE, GAP = 30, 78, 176, 430, 330, 150
MARGIN = 12
LIMIT = 0.5  # of the strips; what is beyond is drawn at the edge with an arrow
ASKED = 0.12


def draw(found: Iterable[Prediction]) -> str:
    """The picture of all rows with an error."""
    rows = [p for p in found if p.error is not None]
    families = sorted({p.family for p in rows}, key=lambda f: _median([p for p in rows if p.family == f]))
    height = TOP + max(len(families) * ROW, SIDE) + 56
    width = LEFT + STRIP + GAP + SIDE + 40
    parts = [
        _opening(width, height),
        _box(0, 0, width, height, 'fill="#fff"'),
        _text(MARGIN, 24, "Step times of published runs, predicted without a GPU", size=15, weight="bold"),
        *_legend(MARGIN, 46),
        *_strips(rows, families),
        *_square(rows, LEFT + STRIP + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _median(rows: Sequence[Prediction]) -> float:
    return statistics.median(abs(p.error or 0) for p in rows)


def _legend(x: float, y: float) -> list[str]:
    return [
        f'<circle cx="{x + 5}" cy="{y - 4}" r="4" fill="{FULL}" fill-opacity="0.55"/>',
        _text(x + 15, y, "source states the whole configuration"),
        f'<circle cx="{x + 265}" cy="{y - 4}" r="4" fill="none" stroke="{PART}" stroke-width="1.5"/>',
        _text(x + 275, y, "part of it is assumed"),
        _box(x + 415, y - 10, 14, 11, f'fill="{FULL}" fill-opacity="0.1"'),
        _text(x + 434, y, f"within {ASKED:.0%}"),
    ]


def _strips(rows: Sequence[Prediction], families: Sequence[str]) -> list[str]:
    bottom = TOP + ROW * len(families)

    def x(error: float) -> float:
        return LEFT + STRIP * (max(-LIMIT, min(LIMIT, error)) + LIMIT) / (2 * LIMIT)

    out = [
        _box(x(-ASKED), TOP, x(ASKED) - x(-ASKED), bottom - TOP, f'fill="{FULL}" fill-opacity="0.1"'),
    ]
    for tick in range(-50, 51, 25):
        place = x(tick / 100)
        out.append(f'<line x1="{place}" y1="{TOP}" x2="{place}" y2="{bottom}" stroke="{GRID if tick else MUTED}"/>')
        out.append(_text(place, bottom + 16, f"{tick:+d} %" if tick else "0", anchor="middle", fill=MUTED))
    out.append(_text(x(0), bottom + 34, "predicted over measured, less one", anchor="middle", fill=MUTED))
    out.append(_text(LEFT + STRIP + 8, TOP - 8, "median |error|, rows", fill=MUTED))
    for index, family in enumerate(families):
        members = [p for p in rows if p.family == family]
        y = TOP + ROW * (index + 0.5)
        out.append(_text(LEFT - 8, y + 4, family, anchor="end"))
        out.append(_text(LEFT + STRIP + 8, y + 4, f"{_median(members):.1%}, {len(members)}"))
        for place, p in enumerate(sorted(members, key=lambda p: p.error or 0)):
            jitter = (place % 3 - 1) * 5 if len(members) > 6 else 0
            out.append(_dot(x(p.error or 0), y + jitter, p))
    return out


def _square(rows: Sequence[Prediction], left: float) -> list[str]:
    times = [t for p in rows for t in (p.measured_s, p.predicted_s) if t]
    if not times:
        return []
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def scale(seconds: float) -> float:
        return SIDE * (math.log10(seconds) - low) / (high - low)

    bottom = TOP + SIDE
    out = [f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="{GRID}"/>']
    out.append(f'<line x1="{left}" y1="{bottom}" x2="{left + SIDE}" y2="{TOP}" stroke="{MUTED}"/>')
    for power in range(low, high + 1):
        at, name = scale(10.0**power), f"{10.0**power:g}"
        out.append(f'<line x1="{left + at}" y1="{TOP}" x2="{left + at}" y2="{bottom}" stroke="{GRID}"/>')
        out.append(f'<line x1="{left}" y1="{bottom - at}" x2="{left + SIDE}" y2="{bottom - at}" stroke="{GRID}"/>')
        out.append(_text(left + at, bottom + 16, name, anchor="middle", fill=MUTED))
        out.append(_text(left - 6, bottom - at + 4, name, anchor="end", fill=MUTED))
    out.append(_text(left + SIDE / 2, bottom + 34, "measured step, s", anchor="middle", fill=MUTED))
    out.append(_text(left, TOP - 8, "predicted step, s", fill=MUTED))
    return out + [_dot(left + scale(p.measured_s or 1), bottom - scale(p.predicted_s or 1), p) for p in rows]


def _opening(width: float, height: float) -> str:
    box, name = f"0 0 {width} {height}", "Predicted and measured step times of published runs"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{name}" {FONT} fill="{INK}">'
    )


def _box(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'


def _dot(x: float, y: float, p: Prediction) -> str:
    look = f'fill="{FULL}" fill-opacity="0.55"' if p.configured else f'fill="none" stroke="{PART}" stroke-width="1.5"'
    title = f"<title>{escape(p.id)}: {p.predicted_s:.4g} s predicted, {p.measured_s:.4g} s measured</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}>{title}</circle>'


def _text(x: float, y: float, text: str, *, anchor="start", fill=INK, size=12, weight="normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
