"""Draw the time of a collective against group size: `python -m benchmarks.host_cliff [--out FILE.svg]`.

The plot shows the cliff between one host and two. A fixed payload is sent over groups of DGX H100 GPUs: NVLink carries
it inside one host; across two or more hosts it passes each GPU's 400 Gb/s port.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import meshkit as mk

PAYLOAD_BYTES = 2**28
PER_HOST = 8
GROUPS = (2, 4, 8, 16, 32, 64, 128, 256)
KINDS = {"all-to-all": "#b5541c", "all-reduce": "#1f5fa8", "collective-permute": "#2e7d4f", "all-gather": "#7a4fa3"}
STYLE = 'font-family="sans-serif" font-size="12" fill="#222"'
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 62, 130, 46, 48


def times_ms(kind: str) -> list[float]:
    """Return the predicted milliseconds of one collective for each group size."""
    cluster = mk.Cluster.load("dgx_h100", hosts=max(GROUPS) // PER_HOST)
    return [
        1e3
        * mk.collective_time_s(
            kind,
            payload_bytes=PAYLOAD_BYTES,
            gpus_per_domain=min(n, PER_HOST),
            domains=-(-n // PER_HOST),
            cluster=cluster,
        )
        for n in GROUPS
    ]


def draw() -> str:
    """Return the plot as SVG."""
    curves = {kind: times_ms(kind) for kind in KINDS}
    top = 2.0 ** math.ceil(math.log2(max(map(max, curves.values()))))
    bottom = 2.0 ** math.floor(math.log2(min(map(min, curves.values()))))
    title = f"{PAYLOAD_BYTES >> 20} MiB over DGX H100 hosts: milliseconds against GPUs of the group"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {STYLE}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<title>{escape(title)}</title><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_grid(bottom, top),
    ]
    for (kind, values), y in zip(curves.items(), _label_heights(curves.values(), bottom, top), strict=True):
        points = " ".join(f"{_x(n):.1f},{_y(v, bottom, top):.1f}" for n, v in zip(GROUPS, values, strict=True))
        color = KINDS[kind]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{_x(n):.1f}" cy="{_y(v, bottom, top):.1f}" r="3" fill="{color}"/>'
            for n, v in zip(GROUPS, values, strict=True)
        ]
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y:.1f}" fill="{color}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(n: int) -> float:
    first, last = math.log2(GROUPS[0]), math.log2(GROUPS[-1])
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(n) - first) / (last - first)


def _y(value: float, bottom: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log2(value / bottom) / math.log2(top / bottom)


def _grid(bottom: float, top: float) -> Iterable[str]:
    """Yield the axes, their labels, and the border between one host and two."""
    for n in GROUPS:
        yield f'<text x="{_x(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{n}</text>'
    yield f'<text x="{_x(GROUPS[-1]):.1f}" y="{HEIGHT - 8}" text-anchor="end">GPUs of the group</text>'
    value = bottom
    while value <= top:
        y = _y(value, bottom, top)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222" opacity="0.15"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g} ms</text>'
        value *= 2
    x = (_x(PER_HOST) + _x(2 * PER_HOST)) / 2
    yield (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        'stroke="#222" stroke-dasharray="4 4" opacity="0.5"/>'
    )
    yield f'<text x="{x - 6:.1f}" y="{TOP + 14}" text-anchor="end">one host</text>'
    yield f'<text x="{x + 6:.1f}" y="{TOP + 14}">two and more</text>'


def _label_heights(curves: Iterable[Sequence[float]], bottom: float, top: float) -> list[float]:
    """Return the height of each curve's name: beside the curve's end, at least one text line from the next name."""
    ends = [_y(values[-1], bottom, top) + 4 for values in curves]
    free = -math.inf
    heights = dict.fromkeys(range(len(ends)), 0.0)
    for index in sorted(heights, key=lambda i: ends[i]):
        free = heights[index] = max(ends[index], free + 15)
    return list(heights.values())


def main() -> None:
    """Write the plot and print its numbers."""
    parser = argparse.ArgumentParser(description="Time of collectives over 2 to 256 H100, as a plot.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    out = parser.parse_args().out
    out.write_text(draw(), encoding="utf-8")
    print(f"{'GPUs':<20}" + "".join(f"{n:>8}" for n in GROUPS))
    for kind in KINDS:
        print(f"{kind:<20}" + "".join(f"{value:8.2f}" for value in times_ms(kind)))
    print(f"milliseconds; drawn in {out.name}")


if __name__ == "__main__":
    main()
