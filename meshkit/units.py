"""Every unit conversion and number format. All values inside meshkit are SI (s, bytes, FLOP)."""

from __future__ import annotations

import math

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_DECIMAL = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
_ROUNDS_UP = 0.9995  # From this fraction of a unit on, three digits round up to one unit.


def format_bytes(n: float | None) -> str:
    """Return binary bytes with three significant digits: `1.50 GiB`; `-` for unknown."""
    if n is None:
        return "-"
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n) >= size * _ROUNDS_UP:
            return f"{_digits(n / size)} {unit}"
    return f"{n:.0f} B"


def format_seconds(t: float | None) -> str:
    """Return a duration with three significant digits in s, ms or us; longer durations as `3h 12m`."""
    if t is None:
        return "-"
    if abs(t) >= 3600:
        return f"{int(t // 3600)}h {int(t % 3600 // 60):02d}m"
    if abs(t) >= 120:
        return f"{int(t // 60)}m {int(t % 60):02d}s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if abs(t) >= size * _ROUNDS_UP:
            return f"{_digits(t / size)} {unit}"
    return "0 s"


def format_rate(bytes_per_s: float | None) -> str:
    """Return decimal bytes per second, as vendors and nccl-tests print them: `361 GB/s`."""
    return "-" if bytes_per_s is None else f"{format_count(bytes_per_s)}B/s"


def format_flops(flops: float | None) -> str:
    """Return floating-point operations: `4.00 PFLOP`."""
    if flops is None:
        return "-"
    if abs(flops) >= 1e15 * _ROUNDS_UP:
        return f"{_digits(flops / 1e15)} PFLOP"
    return f"{format_count(flops)}FLOP"


def format_count(n: float | None) -> str:
    """Return a number with a decimal suffix, or with a trailing space if it needs none: `8.03 G`, `512 `."""
    if n is None:
        return "-"
    for size, unit in _DECIMAL:
        if abs(n) >= size * _ROUNDS_UP:
            return f"{_digits(n / size)} {unit}"
    return f"{_digits(n) if n != int(n) else int(n)} "


def format_percent(share: float | None) -> str:
    """Return a share of one as a percentage with one decimal: `18.2 %`."""
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def _digits(x: float) -> str:
    if x == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(x))))
    x = float(f"{x:.9g}")  # Sums of floats in any order print the same text.
    return f"{x:.{min(decimals, 2)}f}"
