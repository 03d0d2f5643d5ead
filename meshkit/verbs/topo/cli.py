"""`meshkit topo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, stdout
from meshkit.errors import ConditionError, ConfigError
from meshkit.verbs.arguments import JsonOption


def topo(
    action: Annotated[
        str | None,
        typer.Argument(metavar="[record]", help="record: write a bundle to --out, without names and serials."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Cluster file to write, or the bundle of record.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(metavar="PATH", help="Replay a recorded bundle.")] = None,
    xml: Annotated[Path | None, typer.Option(metavar="FILE", help="Read NCCL's topology XML instead.")] = None,
    matrix: Annotated[Path | None, typer.Option(metavar="FILE", help="Read `nvidia-smi topo -m` instead.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="KEY", help="Catalog key of the GPUs, if none is found.")] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="EXPERIMENT", help="Compare with this file's cluster; exit with 3 if they differ."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe this machine: GPUs, NVLink, NICs, PCIe.

    Shows tables and a picture; with --out, writes a cluster file. On a machine without a GPU, it reports that.
    """
    from meshkit.config.experiment import load_any
    from meshkit.verbs.topo.topo import examine, render

    if action not in (None, "record"):
        raise ConfigError(f"`topo` has no action '{action}'.", hint="meshkit topo record --out DIR")
    if action == "record" and out is None:
        raise ConfigError("`topo record` needs a place for the bundle.", hint="meshkit topo record --out DIR")
    declared = load_any(check).cluster if check else None
    recording = out if action == "record" else None
    cluster_file = None if action == "record" else out
    report = examine(bundle=bundle, check=declared, out=cluster_file, record=recording, xml=xml, matrix=matrix, gpu=gpu)
    if as_json:
        output(report.to_json())
    else:
        stdout().print(render(report))
    if report.findings:
        raise ConditionError(f"the machine differs from the cluster of {check} in {len(report.findings)} places.")
