"""Find the memory limit at which XLA begins to recompute: `python -m benchmarks.cliff [NAMES] [--out FILE.svg]`.

The script finds the memory cliff of each experiment as `meshkit plan --cliff` does and compiles with two smaller memory
pools beyond it. It prints a Markdown table and draws step time against pool size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment
from meshkit.report.schema import CliffPoint
from meshkit.search.cliff import cliff_text, compile_with_pool, find_cliff
from meshkit.sharding.mesh import use_no_accelerator

OUT = Path(__file__).parent.parent / "docs" / "assets" / "cliff.svg"
NAMES = ("llama3_8b", "mixtral_8x7b", "llama3_70b")
COLORS = ("#1f5fa8", "#b5541c", "#2e7d4f")
FURTHER = (0.94, 0.88)  # Further pool sizes, as shares of the program's peak.
# The range of the plot: the pool as a share of the peak, and the step relative to the step before the cliff.
LEFT, RIGHT, TOP, BOTTOM = 0.86, 1.08, 1.4, 0.98
STYLE = 'font-family="sans-serif" font-size="12" fill="#222"'


def compile_points(name: str) -> tuple[CliffPoint, ...]:
    """Return one point for each pool size, largest pool first, and print the experiment's rows of the table."""
    experiment = load(name)
    cliff = find_cliff(experiment, plan_experiment(experiment))
    first = cliff.points[0]
    further = [compile_with_pool(experiment, share * first.peak_bytes) for share in FURTHER]
    points = tuple(sorted((*cliff.points, *further), key=lambda p: -p.pool_bytes))
    for p in points:
        longer = f"{p.time_s / first.time_s - 1:+.1%}"
        sizes = " | ".join(f"{size / 2**30:.2f}" for size in (p.pool_bytes, p.peak_bytes, p.arena_bytes))
        again = f"{p.recomputed_kernels} | {p.recomputed_s:.3f} | {p.exposed_s:.3f}"
        print(f"| {name} | {sizes} | {p.time_s:.3f} | {longer} | {again} | {'yes' if p.fits else 'no'} |", flush=True)
    print(f"| | {cliff_text(cliff)} | | | | | | | | |")
    return points


def draw(programs: Mapping[str, Sequence[CliffPoint]]) -> str:
    """Return an SVG plot with one line for each program.

    The horizontal axis is the pool as a share of the program's peak; the vertical axis is the step relative to the step
    before the cliff.
    """
    width, height = 640, 340
    title = "Step time against the memory that XLA may take"

    def x(share: float) -> float:
        return 60 + (width - 200) * (min(share, RIGHT) - LEFT) / (RIGHT - LEFT)

    def y(longer: float) -> float:
        return 40 + (height - 90) * (TOP - min(longer, TOP)) / (TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {STYLE}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<title>{escape(title)}</title><text x="60" y="20" font-size="14">{escape(title)}</text>',
    ]
    for percent in (0, 10, 20, 30, 40):
        at = y(1 + percent / 100)
        parts.append(f'<line x1="60" x2="{x(RIGHT):.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#222" opacity="0.15"/>')
        parts.append(f'<text x="52" y="{at + 4:.1f}" text-anchor="end">+{percent} %</text>')
    for percent in (88, 92, 96, 100, 104):
        parts.append(f'<text x="{x(percent / 100):.1f}" y="{height - 32}" text-anchor="middle">{percent} %</text>')
    parts.append(f'<text x="{x(RIGHT):.1f}" y="{height - 10}" text-anchor="end">pool, of the program\'s peak</text>')
    for row, (name, points) in enumerate(programs.items()):
        color = COLORS[row % len(COLORS)]
        first = points[0]
        line = [(x(p.pool_bytes / first.peak_bytes), y(p.time_s / first.time_s)) for p in points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for p, (px, py) in list(zip(points, line))[1:]:  # A hollow circle marks a step that does not fit.
            fill = color if p.fits else "#fff"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{fill}" stroke="{color}"/>')
        parts.append(f'<text x="{x(RIGHT) + 10:.1f}" y="{60 + 18 * row}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Print the table and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="experiments of configs/experiments, or files")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    use_no_accelerator()
    print("| experiment | pool, GiB | peak, GiB | arena, GiB | step, s | | kernels twice | s | exposed, s | fits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    programs = {name: compile_points(name) for name in arguments.names}
    arguments.out.write_text(draw(programs), encoding="utf-8")


if __name__ == "__main__":
    main()
