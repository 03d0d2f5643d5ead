"""Find the best mesh for each model and number of GPUs: `python -m benchmarks.meshes --out FILE`.

The script plans each model on DGX H100 hosts, with one sequence of 8,192 tokens a GPU and step, for every mesh of a
short list. For each mesh it tries three levels of recomputation, least first, and stops at the first that fits. It
prints the table of docs/guides/which-mesh.md. FILE (JSON lines) keeps every plan, so that a second run resumes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshkit.config.experiment import Experiment, load
from meshkit.config.toml import inline
from meshkit.planning.planner import plan_experiment
from meshkit.units import GIB, format_percent, format_seconds

MODELS = {"8B": "llama3_8b", "13B": "llama2_13b", "34B": "codellama_34b", "70B": "llama3_70b"}
HOSTS = (1, 8, 64)
LENGTH = 8192
REMATS: tuple[Any, ...] = ("none", ["gate", "up"], "full")
WORDS = {"none": "none", '["gate", "up"]': "all but `gate`, `up`", '"full"': "full"}


def meshes(hosts: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the meshes that a reader would try: the name, the preset of rules, and the axes."""
    across = {"infiniband": hosts} if hosts > 1 else None
    yield "fsdp over all", "fsdp", {"fsdp": {"nvlink": 8, **(across or {})}}
    if across:
        yield "data across hosts, fsdp inside (`hsdp`)", "hsdp", {"data": across, "fsdp": 8}
        yield "fsdp across hosts, tensor 8 inside", "fsdp_tensor_sequence", {"fsdp": across, "tensor": 8}
    else:
        yield "fsdp 4, tensor 2", "fsdp_tensor_sequence", {"fsdp": 4, "tensor": 2}


def experiment(preset: str, hosts: int, rules: str, mesh: dict[str, Any], remat: Any) -> Experiment:
    """Return an experiment loaded from a file that has only the keys that the table varies."""
    lines = [
        f'cluster = {{ name = "dgx_h100", hosts = {hosts} }}',
        f'model = {{ class = "models.llama:Llama", preset = "{preset}" }}',
        f'rules = {{ preset = "{rules}" }}',
        "[mesh]",
        *(f"{axis} = {inline(size)}" for axis, size in mesh.items()),
        "[train]",
        f"global_batch = {hosts * 8}",
        f"sequence_length = {LENGTH}",
        f"remat = {json.dumps(remat)}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.toml")
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return load(file)


def plan_all(path: Path) -> list[dict[str, Any]]:
    """Return a record for each plan; plans that are in the file already are not repeated."""
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    known = {json.dumps(r["key"]): r for r in done}
    for model, preset in MODELS.items():
        for hosts in HOSTS:
            for name, rules, mesh in meshes(hosts):
                for remat in REMATS:
                    key = [model, hosts, name, remat]
                    if (record := known.get(json.dumps(key))) is None:
                        report = plan_experiment(experiment(preset, hosts, rules, mesh, remat)).report
                        step, memory = report.step, report.memory
                        record = {
                            "key": key, "fits": memory.fits, "time_s": step.time_s, "mfu": step.mfu,
                            "exposed_s": step.exposed_s, "peak_bytes": memory.peak_bytes,
                        }  # fmt: skip
                        with path.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(record) + "\n")
                        known[json.dumps(key)] = record
                    if record["fits"]:
                        break
    return list(known.values())


def table(records: list[dict[str, Any]]) -> str:
    """Return a row for each model and size: the fastest mesh that fits, and the step times of the others."""
    lines = ["| model | GPUs | mesh | `remat` | step | MFU | exposed | memory | the others |", "|" + "---|" * 9]
    for model in MODELS:
        for hosts in HOSTS:
            found = [r for r in records if r["key"][:2] == [model, hosts]]
            names = list(dict.fromkeys(r["key"][2] for r in found))
            fits = sorted((r for r in found if r["fits"]), key=lambda r: r["time_s"])
            unfit = [n for n in names if n not in {r["key"][2] for r in fits}]
            others = [f"{r['key'][2]}: {format_seconds(r['time_s'])}" for r in fits[1:]]
            others += [f"{n}: does not fit" for n in unfit]
            if not fits:
                lines.append(f"| {model} | {hosts * 8} | none of these fits | | | | | | {'; '.join(others)} |")
                continue
            best = fits[0]
            cells = [
                model,
                hosts * 8,
                best["key"][2],
                WORDS.get(json.dumps(best["key"][3]), best["key"][3]),
                format_seconds(best["time_s"]),
                format_percent(best["mfu"]),
                format_seconds(best["exposed_s"]),
                f"{best['peak_bytes'] / GIB:.1f} GiB",
                "; ".join(others),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, one for each plan")
    print(table(plan_all(parser.parse_args().out)))
