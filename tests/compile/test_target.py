"""Our target descriptions agree with OpenXLA's own in every field both have."""

import re
from pathlib import Path

import pytest

import meshkit as mk
from meshkit.compile.target import target_config, topology_name
from meshkit.config.catalog import gpu

SPECS = Path(__file__).parent.parent / "data" / "gpu_specs"
NUMBERS = [
    "threads_per_block_limit",
    "threads_per_warp",
    "threads_per_core_limit",
    "core_count",
    "fpus_per_core",
    "registers_per_core_limit",
    "registers_per_block_limit",
    "shared_memory_per_block",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
]


def field(text, name):
    found = re.search(rf"^\s*{name}: (\S+)$", text, re.MULTILINE)
    return found and found[1]


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("p100", "p100"),
        ("v100", "v100"),
        ("a100_40gb", "a100_sxm_40"),
        ("a100_80gb", "a100_sxm_80"),
        ("h100_sxm", "h100_sxm"),
        ("h100_pcie", "h100_pcie"),
        ("h200", "h200"),
        ("b200", "b200"),
        ("gb200", "gb200"),
        ("b300", "b300"),
        ("gb300", "gb300"),
        ("rtx_pro_6000", "rtx6000pro"),
    ],
)
def test_fields_agree_with_openxla(key, file):
    ours, theirs = target_config(gpu(key)), (SPECS / f"{file}.txtpb").read_text()
    differing = {n: (field(ours, n), field(theirs, n)) for n in NUMBERS if field(ours, n) != field(theirs, n)}
    assert differing == {}


def test_no_program_is_compiled_for_a_cpu():
    with pytest.raises(mk.ConfigError, match="'cpu' is no GPU"):
        target_config(gpu("cpu"))


@pytest.mark.parametrize(
    ("cluster", "hosts", "expected"),
    [("dgx_h100", 2, "1x2x8"), ("gb200_nvl72", 18, "1x18x4"), ("dgx_a100", 1, "1x1x8")],
)
def test_topology_splits_into_hosts(cluster, hosts, expected):
    assert topology_name(mk.Cluster.load(cluster, hosts=hosts)) == expected
