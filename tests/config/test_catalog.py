"""Test that the catalog is complete, sourced and consistent, and that its figures equal those that vendors print.

Vendors print bandwidth as the sum of both directions and peaks with 2:4 sparsity. The figures in this file are theirs.
"""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from meshkit.config import catalog

GPUS = [
    *("cpu", "p100", "v100", "a100_40gb", "a100_80gb", "h100_sxm", "h100_pcie", "h800", "h200", "gh200"),
    *("b200", "gb200", "b300", "gb300", "rtx_pro_6000"),
]
NICS = [
    *("ib_edr", "ib_hdr100", "ib_hdr", "ib_ndr200", "ib_ndr", "ib_xdr"),
    *("roce_100", "roce_200", "roce_400", "roce_800", "tcp_10", "tcp_100", "tcp_200"),
]
SOURCED = ["gpus", "nics", "fabrics", "nvlink", "nvswitch", "cube_mesh", "cpu_links"]
SOURCED_ALONE = ["pcie_bytes_per_s", "host_memory_bytes_per_s", "kernels", "reserved", "failures"]


def test_a_gpu_that_is_like_another_differs_in_what_it_says_itself():
    text = resources.files("meshkit.config").joinpath("catalog.toml").read_text(encoding="utf-8")
    like = {key: row for key, row in tomllib.loads(text)["gpus"].items() if "like" in row}
    assert set(like) == {"h800", "v100_32gb"}
    for key, said in like.items():
        row, base = catalog.catalog()["gpus"][key], catalog.catalog()["gpus"][said["like"]]
        assert row.keys() == base.keys()
        assert {n for n in row if row[n] != base[n]} == said.keys() - {"like"}


def test_the_catalog_has_the_keys_of_the_contract():
    assert set(GPUS) <= set(catalog.gpu_keys())
    assert set(NICS) <= set(catalog.nic_keys())


def numbers(row, prefix=""):
    """Yield the dotted key of every number of a catalog row."""
    for key, value in row.items():
        if key == "sources":
            continue
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) or (isinstance(value, list) and value):
            yield prefix + key


def rows():
    tables = catalog.catalog()
    yield from ((f"{table}.{key}", row) for table in SOURCED for key, row in tables[table].items())
    yield from ((table, tables[table]) for table in SOURCED_ALONE)


def test_no_table_of_the_catalog_goes_unchecked():
    assert set(catalog.catalog()) == {*SOURCED, *SOURCED_ALONE, "sources"}


@pytest.mark.parametrize(("name", "row"), list(rows()))
def test_every_number_has_one_source(name, row):
    cited = [number for numbers_of in row["sources"].values() for number in numbers_of]
    assert sorted(cited) == sorted(numbers(row))
    assert set(row["sources"]) <= set(catalog.catalog()["sources"])


def test_every_source_is_used_and_dated():
    sources = catalog.catalog()["sources"]
    assert {source for _, row in rows() for source in row["sources"]} == set(sources)
    timeless = {"vendor_rate", "pcie"}  # Standards have no date.
    assert all(name in timeless or "20" in text for name, text in sources.items())


CARRIED = {
    "carried_ampere": "a100_80gb",
    "carried_hopper": "h100_sxm",
    "carried_blackwell": "b200",
    "carried_gb200": "gb200",
}


@pytest.mark.parametrize("key", catalog.gpu_keys())
def test_a_share_that_is_carried_over_is_the_one_it_is_carried_from(key):
    ours, h100 = catalog.gpu(key).achieved, catalog.gpu("h100_sxm").achieved
    for source, names in catalog.catalog()["gpus"][key]["sources"].items():
        for name in (n.removeprefix("achieved.") for n in names if n.startswith("achieved.")):
            if source in CARRIED:
                assert ours[name] == catalog.gpu(CARRIED[source]).achieved[name], name
            if source == "mamf_sustained":
                burst = name.replace("matmul", "burst")
                assert ours[name] == pytest.approx(ours[burst] * h100[name] / h100[burst], abs=0.0006)


@pytest.mark.parametrize("key", catalog.gpu_keys())
def test_the_numbers_of_a_gpu_agree_with_each_other(key):
    gpu = catalog.gpu(key)
    peaks = gpu.peak_flops
    assert all(0 < share <= 1 for share in gpu.achieved.values())
    if "fp8" in peaks:  # Each halving of the width doubles the dense rate; data sheets round to three digits.
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=2e-3)
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=2e-3)
    assert (gpu.nvlink_links == 0) == (gpu.nvlink_bytes_per_s == 0) == (gpu.nvlink_generation is None)
    assert ("nvlink" in gpu.achieved) == bool(gpu.nvlink_links)
    assert gpu.cpu_link in catalog.cpu_link_keys()


@pytest.mark.parametrize(
    ("key", "links", "printed_gb_per_s"),
    [
        ("p100", 4, 160),
        ("v100", 6, 300),
        ("a100_40gb", 12, 600),
        ("a100_80gb", 12, 600),
        ("h100_sxm", 18, 900),
        ("h800", 8, 400),
        ("h100_pcie", 12, 600),
        ("h200", 18, 900),
        ("gh200", 18, 900),
        ("b200", 18, 1800),
        ("gb200", 18, 1800),
        ("b300", 18, 1800),
        ("gb300", 18, 1800),
    ],
)
def test_nvlink_is_half_of_the_bidirectional_figure(key, links, printed_gb_per_s):
    gpu = catalog.gpu(key)
    assert gpu.nvlink_links == links
    assert 2 * gpu.nvlink_bytes_per_s == printed_gb_per_s * 1e9


@pytest.mark.parametrize(("generation", "printed_gb_per_s"), [(1, 40), (2, 50), (3, 50), (4, 50), (5, 100)])
def test_one_nvlink_is_half_of_the_bidirectional_figure(generation, printed_gb_per_s):
    assert 2 * catalog.nvlink_bytes_per_s(generation) == printed_gb_per_s * 1e9


@pytest.mark.parametrize(("generation", "printed_gb_per_s"), [(3, 32), (4, 64), (5, 128), (6, 256)])
def test_a_pcie_slot_is_half_of_the_bidirectional_figure(generation, printed_gb_per_s):
    """Printed figures leave out the 128b/130b coding of generations 3 to 5, which takes 1.5 %."""
    assert 2 * catalog.pcie_bytes_per_s(generation) == pytest.approx(printed_gb_per_s * 1e9, rel=0.016)
    assert catalog.pcie_bytes_per_s(generation, lanes=8) == catalog.pcie_bytes_per_s(generation) / 2


@pytest.mark.parametrize(
    ("nvswitch", "nvlink_generation", "printed_tb_per_s", "multicast"),
    [(1, 2, 0.9, False), (2, 3, 1.8, False), (3, 4, 3.2, True), (4, 5, 7.2, True)],
)
def test_a_switch_is_its_ports(nvswitch, nvlink_generation, printed_tb_per_s, multicast):
    """NVIDIA prints the sum of both directions over all ports of a chip."""
    found = catalog.nvswitch(nvlink_generation)
    assert (found["generation"], found["multicast"]) == (nvswitch, multicast)
    both_ways = 2 * found["ports"] * catalog.nvlink_bytes_per_s(nvlink_generation)
    assert both_ways == pytest.approx(printed_tb_per_s * 1e12)


def test_the_switches_of_a_rack_of_72_are_full():
    """18 chips (9 trays of 2) carry 72 GPUs x 18 links; NVIDIA prints 130 TB/s, the sum of both directions."""
    gpu, ports = catalog.gpu("gb200"), catalog.nvswitch(5)["ports"]
    assert 72 * gpu.nvlink_links == 18 * ports
    assert 72 * 2 * gpu.nvlink_bytes_per_s == pytest.approx(130e12, rel=0.01)
    assert catalog.nvswitch(1) is None  # P100 is older than the first switch.


@pytest.mark.parametrize(("generation", "gpu"), [(1, "p100"), (2, "v100")])
def test_a_cube_mesh_uses_every_link_once(generation, gpu):
    table = catalog.cube_mesh(generation)
    assert [sum(row) for row in table] == [catalog.gpu(gpu).nvlink_links] * 8
    assert all(table[a][b] == table[b][a] for a in range(8) for b in range(8))
    assert all(table[a][a] == 0 for a in range(8))
    assert all(table[a][b] for half in (range(4), range(4, 8)) for a in half for b in half if a != b)


@pytest.mark.parametrize(
    ("key", "gpus", "printed_pflops"),
    [
        ("a100_80gb", 1, {"tf32": 0.312, "bf16": 0.624, "fp16": 0.624}),
        ("h100_sxm", 1, {"tf32": 0.989, "bf16": 1.979, "fp16": 1.979, "fp8": 3.958}),
        ("h100_pcie", 1, {"tf32": 0.756, "bf16": 1.513, "fp16": 1.513, "fp8": 3.026}),
        ("rtx_6000_ada", 1, {"fp8": 1.457}),
        ("l40s", 1, {"tf32": 0.366, "bf16": 0.733, "fp16": 0.733, "fp8": 1.466}),
        ("h200", 1, {"tf32": 0.989, "bf16": 1.979, "fp16": 1.979, "fp8": 3.958}),
        ("gh200", 1, {"tf32": 0.989, "bf16": 1.979, "fp8": 3.958}),
        ("b200", 8, {"tf32": 18, "bf16": 36, "fp16": 36, "fp8": 72}),
        ("b300", 8, {"tf32": 18, "bf16": 36, "fp8": 72}),
        ("gb200", 72, {"tf32": 180, "bf16": 360, "fp8": 720}),
        ("gb300", 72, {"tf32": 180, "bf16": 360, "fp8": 720}),
    ],
)
def test_peaks_are_half_of_the_sparse_figure(key, gpus, printed_pflops):
    """The vendor prints the figure for this number of GPUs, with sparsity, to 3 or 4 digits."""
    peaks = catalog.gpu(key).peak_flops
    for precision, printed in printed_pflops.items():
        assert 2 * gpus * peaks[precision] == pytest.approx(printed * 1e15, rel=2e-3), precision


@pytest.mark.parametrize(
    ("key", "printed_tflops"),
    [
        ("p100", {"fp32": 10.6, "fp16": 21.2}),
        ("v100", {"fp32": 15.7, "fp16": 125}),
        ("a100_80gb", {"fp32": 19.5, "bf16": 312}),
        ("h100_sxm", {"fp32": 67}),
        ("h100_pcie", {"fp32": 51}),
        ("b200", {"fp32": 75}),
        ("gb200", {"fp32": 80}),
        ("rtx_pro_6000", {"fp32": 125}),
        ("a10g", {"fp32": 35, "bf16": 70, "fp16": 70}),
        ("rtx_6000_ada", {"fp32": 91.1}),
        ("l40s", {"fp32": 91.6}),
    ],
)
def test_peaks_that_are_printed_dense(key, printed_tflops):
    for precision, printed in printed_tflops.items():
        assert catalog.gpu(key).peak_flops[precision] == pytest.approx(printed * 1e12, rel=2e-3), precision


@pytest.mark.parametrize("key", catalog.nic_keys())
def test_a_port_fits_its_slot(key):
    nic = catalog.nic(key)
    assert nic.bytes_per_s <= catalog.pcie_bytes_per_s(nic.pcie_generation, nic.pcie_lanes)
    assert nic.fabric in ("infiniband", "roce", "ethernet")
    assert 0 < nic.achieved <= 1
    assert nic.latency_small_s <= nic.latency_s


@pytest.mark.parametrize(
    ("key", "gigabits"),
    [("ib_edr", 100), ("ib_hdr100", 100), ("ib_hdr", 200), ("ib_ndr200", 200), ("ib_ndr", 400), ("ib_xdr", 800)]
    + [(f"{kind}_{g}", g) for kind in ("roce", "tcp") for g in (100, 200, 400)]
    + [
        ("efa_100", 100),
        ("efa_400", 400),
        ("tcp_10", 10),
        ("tcp_25", 25),
        ("iwarp_25", 25),
        ("iwarp_100", 100),
        ("ipoib_edr", 100),
        ("ipoib_ndr", 400),
    ],
)
def test_a_port_is_its_gigabits(key, gigabits):
    assert catalog.nic(key).bytes_per_s * 8 == gigabits * 1e9


@pytest.mark.parametrize(
    ("key", "superchip_gpus"),
    [("c2c_gh200", 1), ("c2c_gb200", 2)],
)
def test_c2c_is_half_of_the_bidirectional_figure(key, superchip_gpus):
    """A superchip has 900 GB/s, the sum of both directions."""
    link = catalog.cpu_link(key, pcie_generation=5, gpus_per_host=4)
    assert 2 * superchip_gpus * link.bytes_per_s == 900e9
    assert link.nvlinks == 0


@pytest.mark.parametrize(
    ("key", "gpu", "printed_gb_per_s"),
    [("power8_nvlink1", "p100", 80), ("power9_nvlink2", "v100", 150), ("power9_nvlink2_6gpu", "v100", 100)],
)
def test_nvlink_to_a_power_cpu_is_its_links(key, gpu, printed_gb_per_s):
    """IBM prints the sum of both directions between the CPU and one GPU."""
    link = catalog.cpu_link(key, pcie_generation=3, gpus_per_host=4)
    assert 2 * link.bytes_per_s == printed_gb_per_s * 1e9
    assert link.bytes_per_s == link.nvlinks * catalog.nvlink_bytes_per_s(catalog.gpu(gpu).nvlink_generation)
