"""`meshkit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, run_folder, say, stderr, stdout
from meshkit.errors import ConfigError, RunError
from meshkit.verbs.arguments import ExperimentArg, JsonOption, SetOption


def bench(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write bench.json, bench.html, calibration.toml."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="BYTES,...", help="Sizes to measure, in bytes; default 1 KiB, 4 KiB, ...")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure collectives on the attached devices.

    Measures over each mesh axis, checks every result, and writes a calibration file that plan reads. The columns are
    nccl-tests'. Started in several processes (MESHKIT_COORDINATOR, MESHKIT_NUM_PROCESSES, MESHKIT_PROCESS_ID), it
    measures over all of them, and process 0 writes.
    """
    from meshkit.config.experiment import load
    from meshkit.sharding.mesh import prepare_platform

    loaded = load(experiment, set_)
    loaded.train.check_runs(loaded.places)
    prepare_platform(loaded.cluster)
    from meshkit.distributed.join import is_first_process, keep_stdout
    from meshkit.verbs.bench.bench_report import render
    from meshkit.verbs.bench.bencher import bench as run_bench

    keep_stdout()
    report = run_bench(loaded, run_folder(out) if out else None, sizes=byte_sizes(sizes), console=stderr())
    if is_first_process():
        output(report.to_json()) if as_json else stdout().print(render(report, title=loaded.name))
    if report.wrong:
        raise RunError(f"{report.wrong} elements of results differ from numpy's.", hint="the rows with a #wrong count")
    if out is not None and is_first_process():
        say(f"wrote {out / 'bench.json'}, {out / 'bench.html'} and {out / 'calibration.toml'}")


def byte_sizes(text: str | None) -> list[int] | None:
    """Parse `1024,4096` into positive whole numbers; return None for None."""
    from meshkit.config.files import integer  # Imported here because this module imports pydantic.

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(integer(part) for part in parts):
        raise ConfigError(f"'{text}' is not a list of sizes in bytes.", at="--sizes", hint="--sizes 1024,65536,1048576")
    return [int(part) for part in parts]
