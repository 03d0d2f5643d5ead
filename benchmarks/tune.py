"""Search meshes for `llama3_70b` on 64 H100 and compare the winner with a published run.

    python -m benchmarks.tune [--out DIR]

The search covers 64 GPUs and also half and twice as many; an existing DIR resumes it. The script writes
`benchmarks/tune.md` and the picture `benchmarks/tune.svg`. The picture shows every variant by step time and memory,
with the Pareto front of each size. It also shows the unchanged experiment and the published run of the same model,
sequence length and global batch on as many GPUs. Set `MESHKIT_CACHE` to a folder that does not exist yet, so that the
times on the page are those of a first run.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console

from meshkit.search.candidate import Outcome
from meshkit.search.tune_report import RULE_WORDS, TuneReport, best_first, variants_table, what_text
from meshkit.search.tuner import REPORT_FILE, Sizes, parse_hosts, tune_experiment
from meshkit.units import GIB, format_seconds
from meshkit.verbs.tune.page import progress_bar

ROOT = Path(__file__).parent.parent
EXPERIMENT = ROOT / "configs" / "experiments" / "llama3_70b.toml"
SETTINGS = ("cluster.hosts=8", "mesh={ fsdp = { nvlink = 8, infiniband = 8 } }", "train.global_batch=128")
# NVIDIA/dgxc-benchmarking@741c886, llama3.1/README.md: the same model, sequence, batch and number of GPUs.
PUBLISHED = "NVIDIA DGXC NeMo, tensor 4 x pipeline 4 (interleaved, 5) x context 2 x data 2"
PUBLISHED_S = 14.66
HOSTS = (4, 8, 16)
SHOWN, SHOWN_OTHER = 15, 4  # Table rows of 64 GPUs, and of each other size.
COST_FILE = "cost.jsonl"  # One line for each run of this script on the same DIR.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 62, 24, 46, 48
STYLE = 'font-family="sans-serif" font-size="12" fill="#222"'


def write(report: TuneReport, sittings: Sequence[dict[str, float]]) -> str:
    """Return the page as Markdown.

    Args:
        report: the search.
        sittings: the cost of each run of this script that contributed to the search, as `main` records it.
    """
    winner = report.winner
    sizes = sorted({o.num_gpus for o in report.outcomes if o.num_gpus}, key=lambda n: (n != report.num_gpus, n))
    lines = [
        "# `llama3_70b` on 64 H100: the search beside a published run",
        "",
        f"`python -m benchmarks.tune`, jax {version('jax')}, jaxlib {version('jaxlib')}, no GPU. A step has 128",
        "sequences of 8,192 tokens in bf16, gradients reduced in fp32. All but the published number are predicted.",
        "",
        "| | step | |",
        "|---|---|---|",
        f"| the default mesh: fsdp over 64, remat full | {format_seconds(report.base.time_s)} | |",
    ]
    if winner is not None and winner.time_s is not None:
        lines.append(f"| the winner: {what_text(winner)} | {format_seconds(winner.time_s)} | |")
    lines += [
        f"| published: {PUBLISHED}, measured | {format_seconds(PUBLISHED_S)} | "
        + (f"the winner {winner.time_s / PUBLISHED_S - 1:+.1%} |" if winner and winner.time_s else "|"),
        "",
        *(f"- {text}" for text in report.why),
        "",
        *_offload_note(winner),
        f"The space has {report.space:,} variants. Ruled out: "
        + ", ".join(f"{p.count:,} ({RULE_WORDS.get(p.rule, p.rule)})" for p in report.pruned)
        + f". {report.compiled} were compiled, and {report.left:,} are left.",
    ]
    cpu, wall = (sum(s[key] for s in sittings) for key in ("cpu_s", "wall_s"))
    new = int(sum(s["compiled"] for s in sittings))
    if new:
        runs = "one run" if len(sittings) == 1 else f"{len(sittings)} runs"
        lines.append(
            f"Compiling {new} took {runs}: {wall / 60:.1f} minutes with {report.jobs} processes, {cpu / 60:.1f} CPU "
            f"minutes in all, {cpu / new:.1f} s each."
        )
    lines += ["", "![step time against memory](tune.svg)"]
    for gpus in sizes:
        best = best_first([o for o in report.outcomes if o.num_gpus == gpus])
        table = variants_table(report, best[: SHOWN if gpus == report.num_gpus else SHOWN_OTHER])
        heads = [column.header for column in table.columns]
        lines += ["", f"## {gpus} GPUs", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(map(str, row))} |" for row in table.rows]
    return "\n".join([*lines, ""])


def _offload_note(winner: Outcome | None) -> list[str]:
    """Return the caveats for a winner that moves activations over the host link, or no lines."""
    if winner is None or not winner.host_bytes:
        return []
    return [
        "The published step is measured, this one predicted. No published run of this model offloads activations. The",
        "copies are priced at the rate that a PCIe slot sustains, as if InfiniBand's traffic did not share the slot.",
        "",
    ]


def draw(report: TuneReport) -> str:
    """Return the plot of step time against memory as SVG."""
    found = [o for o in report.outcomes if o.time_s and o.peak_bytes]
    measured = PUBLISHED_S
    times = [*(o.time_s or 0.0 for o in found), measured]
    own = [o.time_s or 0.0 for o in found if o.num_gpus == report.num_gpus]
    low, high = 0.95 * min(times), min(max(times), 2.5 * min(own)) * 1.02
    most = 10 * (1 + int(max((o.peak_bytes or 0) / GIB for o in found) // 10))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / most

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(value, high) - low) / (high - low)

    sizes = sorted({o.num_gpus or 0 for o in found}, key=lambda n: (n != report.num_gpus, n))
    gpus = ", ".join(str(n) for n in sorted(sizes))
    title = f"{report.compiled} variants of {report.experiment} on {gpus} H100: seconds of a step, memory"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {STYLE}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><title>{escape(title)}</title>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_axes(x, y, most, low, high),
    ]
    for size in sizes:
        front = [report.outcomes[i] for i in report.pareto if report.outcomes[i].num_gpus == size]
        points = " ".join(f"{x((o.peak_bytes or 0) / GIB):.1f},{y(o.time_s or 0):.1f}" for o in front)
        parts.append(f'<polyline points="{points}" fill="none" stroke="#4c9f70"/>')
    parts += [_point(o, report, x, y, sizes.index(o.num_gpus or 0)) for o in found]
    parts += _legend(sizes)
    line = y(measured)
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}" stroke="#b5541c" '
        'stroke-dasharray="4 4"/>'
        f'<text x="{LEFT + 6}" y="{line + 14:.1f}" fill="#b5541c">published, measured {measured:g} s</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _legend(sizes: Sequence[int]) -> Iterator[str]:
    for index, gpus in enumerate(sizes):
        at_x = LEFT + 10 + 90 * index
        yield _mark(at_x, TOP - 12, index, "#3f7cac")
        yield f'<text x="{at_x + 8}" y="{TOP - 8}">{gpus} GPUs</text>'


def _mark(at_x: float, at_y: float, size: int, color: str) -> str:
    """Return the SVG of a circle for the experiment's own number of GPUs, or of a square or triangle for the others."""
    if size == 0:
        return f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.5" fill="{color}"/>'
    if size == 1:
        return f'<rect x="{at_x - 3.5:.1f}" y="{at_y - 3.5:.1f}" width="7" height="7" fill="{color}"/>'
    corners = f"{at_x - 4:.1f},{at_y + 3.5:.1f} {at_x + 4:.1f},{at_y + 3.5:.1f} {at_x:.1f},{at_y - 4.5:.1f}"
    return f'<polygon points="{corners}" fill="{color}"/>'


def _point(outcome: Outcome, report: TuneReport, x, y, size: int) -> str:
    color = "#3f7cac" if outcome.fits else "#d1495b"
    name = "" if outcome.settings else "as it is"
    if report.winner is not None and outcome.settings == report.winner.settings:
        color, name = "#4c9f70", "winner"
    at_x, at_y = x((outcome.peak_bytes or 0) / GIB), y(outcome.time_s or 0.0)
    label = f'<text x="{at_x + 6:.1f}" y="{at_y + 4:.1f}" fill="{color}">{name}</text>' if name else ""
    return _mark(at_x, at_y, size, color) + label


def _axes(x, y, most: int, low: float, high: float) -> Iterator[str]:
    for gib in range(0, most + 1, 10):
        yield f'<text x="{x(gib):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{gib}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">GiB of a GPU; red: does not fit</text>'
    for seconds in range(int(low) + 1, int(high) + 1, 2):
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(seconds):.1f}" y2="{y(seconds):.1f}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 8}" y="{y(seconds) + 4:.1f}" text-anchor="end">{seconds} s</text>'


def main() -> None:
    """Run or resume the search, and write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "tune70")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--hosts", type=parse_hosts, default=HOSTS, metavar="N,...")
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    budget, sizes, jobs = arguments.candidates, Sizes(arguments.hosts), arguments.jobs
    with progress_bar(Console(stderr=True)) as told:
        report = tune_experiment(
            EXPERIMENT, SETTINGS, out=arguments.out, budget=budget, jobs=jobs, sizes=sizes, progress=told
        )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cost = {
        "compiled": report.compiled - report.reused,
        "cpu_s": sum(u.ru_utime + u.ru_stime for u in used),
        "wall_s": time.perf_counter() - start,
    }
    with (arguments.out / COST_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(cost) + "\n")
    sittings = [json.loads(line) for line in (arguments.out / COST_FILE).read_text().splitlines()]
    arguments.page.write_text(write(report, sittings), encoding="utf-8")
    arguments.page.with_suffix(".svg").write_text(draw(report), encoding="utf-8")
    print(f"wrote {arguments.page.name} and its picture; the search is in {arguments.out / REPORT_FILE}")


if __name__ == "__main__":
    main()
