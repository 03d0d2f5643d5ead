"""Plan every shipped model on every shipped cluster: `python -m benchmarks.matrix [--models ..] [--clusters ..]`.

Each plan has two layers of the model, with weights fully sharded over all GPUs of one NVLink domain. The script prints
a Markdown table of the predicted step, the share of it that is priced by memory traffic alone (custom calls of unknown
FLOP), and the errors. With `--out FILE` each row is appended to the file as soon as it is known, and pairs with a row
in the file are not planned again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.experiment import load
from meshkit.errors import MeshkitError
from meshkit.planning.planner import Plan, plan_experiment
from meshkit.predict.coverage import kernel_seconds_by_name

EXPERIMENTS = Path(__file__).parent.parent / "configs" / "experiments"
SMALL = ["model.layers=2", "train.sequence_length=2048", "train.accumulate=1"]
# Each model's experiment, and the settings that make it small.
MODELS: Mapping[str, tuple[str, Sequence[str]]] = {
    "llama3_8b": ("llama3_8b", SMALL),
    "llama3_70b": ("llama3_70b", SMALL),
    "mixtral_8x7b": ("mixtral_8x7b", SMALL),
    "vit_l16": ("vit_l16", ["model.layers=2"]),
    "linen": ("linen_cpu", []),
    "mlp": ("mlp", []),
    "deepseek_v3": ("deepseek_v3", [*SMALL, "model.dense_layers=1"]),
    "qwen3_235b": ("qwen3_235b", SMALL),
    "gpt_oss_120b": ("gpt_oss_120b", SMALL),
}
_EXPERTS = ["mesh={{fsdp={half},expert=2}}", 'rules.preset="fsdp_expert"']
# The mesh and the rules of models that are not simply sharded fully over one axis.
MESHES: Mapping[str, Sequence[str]] = dict.fromkeys(
    ("mixtral_8x7b", "deepseek_v3", "qwen3_235b", "gpt_oss_120b"), _EXPERTS
)
CLUSTERS = tuple(name for name in shipped_clusters() if not Cluster.load(name).is_cpu)


def plan_pair(model: str, cluster: str) -> Plan:
    """Return the plan of a small model on one NVLink domain of a cluster."""
    experiment, changes = MODELS[model]
    gpus, table = domain_of(cluster)
    overrides = [
        f"cluster={table}",
        *MESHES.get(model, ["mesh={{fsdp={gpus}}}", 'rules.preset="fsdp"']),
        f"train.global_batch={gpus * 2}",
        *changes,
        *(['train.precision="fp32"'] if (Cluster.load(cluster).gpu.compute_capability or (0, 0)) < (8, 0) else []),
    ]
    overrides = [o.format(gpus=gpus, half=gpus // 2) if o.startswith("mesh=") else o for o in overrides]
    return plan_experiment(load(EXPERIMENTS / f"{experiment}.toml", overrides))


def domain_of(cluster: str) -> tuple[int, str]:
    """Return the number of GPUs of one NVLink domain, and the `cluster` key that describes it.

    The number is at most 64, because the small models do not divide by more.
    """
    one = Cluster.load(cluster)
    hosts = one.hosts_per_domain
    if one.nvlink_domain_size > 64:
        return 64, f'{{name="{cluster}",hosts={hosts},gpus_used_per_domain=64}}'
    return Cluster.load(cluster, hosts=hosts).num_gpus, f'{{name="{cluster}",hosts={hosts}}}'


def row(model: str, cluster: str) -> str:
    """Return a line of the table."""
    try:
        plan = plan_pair(model, cluster)
    except MeshkitError as e:
        return f"| {model} | {cluster} | | | {e.message} |"
    codes = ", ".join(sorted({w.code for w in plan.report.warnings}))
    share = 100 * unpriced_share(plan)
    return f"| {model} | {cluster} | {1e3 * (plan.report.step.time_s or 0):.2f} | {share:.2f} | {codes} |"


def unpriced_share(plan: Plan) -> float:
    """Return the share of the step in kernels that are priced by their memory traffic alone."""
    seconds = kernel_seconds_by_name(plan.timeline)
    names = {i.name for i, _ in plan.schedule.walk() if i.cost and i.cost.priced_by == "bytes"}
    (step,) = plan.timeline.steps
    return sum(seconds.get(name, 0.0) for name in names) / (step.window[1] - step.window[0])


HEAD = "| model | cluster | step, ms | unpriced, % | warnings |\n|---|---|---|---|---|"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--out", type=Path, help="a file to which rows are appended")
    arguments = parser.parse_args()
    done = rows_of(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    print(HEAD)
    for pair in itertools.product(arguments.models, arguments.clusters):
        line = done.get(pair)
        if line is None:
            line = row(*pair)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")
        print(line, flush=True)


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """Return the rows of a table by (model, cluster)."""
    cells = {line: [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")}
    return {(names[1], names[2]): line for line, names in cells.items() if names[1] in MODELS}


if __name__ == "__main__":
    main()
