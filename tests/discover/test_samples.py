"""Test that every recorded sample (tests/data/topo, with sources) becomes the machine on which it was recorded."""

from pathlib import Path

import pytest

from meshkit.config.cluster import Cluster
from meshkit.discover import read_recorded, to_cluster
from meshkit.discover.nvidia_smi import parse_matrices
from meshkit.errors import ConfigError
from meshkit.verbs.topo.topo import examine

DATA = Path(__file__).parents[1] / "data/topo"
NVLINK8 = {"hosts": 1, "gpus_per_host": 8, "nvlink_domain_size": 8, "scale_up": "nvlink"}

# Each sample maps to a cluster and to evidence: a part of a warning where more than the file's own devices tells the
# GPU or how GPUs are connected, and None where the file says it all. NIC keys stand where the file, or the machine that
# it names, has them.
XML = {
    "aws-ofi-nccl/topology_g5.48xl-topo.xml": (
        {"gpu": "a10g", "gpus_per_host": 8, "scale_up": "pcie", "nvlink_domain_size": 8},
        "these are known for AWS g5.48xlarge: eight A10G without NVLink",
    ),
    "aws-ofi-nccl/topology_p4d-24xl-topo.xml": (
        NVLINK8 | {"gpu": "a100_40gb", "nic": "efa_100", "nics_per_host": 4},
        # GPUs and ports are known by their PCI ids.
        "does not say scale_up = nvlink; these are known for AWS p4d.24xlarge",
    ),
    "aws-ofi-nccl/topology_p4de-24xl-topo.xml": (
        NVLINK8 | {"gpu": "a100_80gb", "nic": "efa_100", "nics_per_host": 4},
        "does not say scale_up = nvlink; these are known for AWS p4de.24xlarge",
    ),
    "azhpc-images/topology_ndv2-topo.xml": (
        NVLINK8 | {"gpu": "v100_32gb", "nic": "ib_edr", "nics_per_host": 1},
        "does not say gpu = v100_32gb, nic = ib_edr, scale_up = nvlink; these are known for Azure ND40rs v2",
    ),
    "azhpc-images/topology_ndv4-topo.xml": (
        NVLINK8 | {"gpu": "a100_40gb", "nic": "ib_hdr", "nics_per_host": 8},
        "does not say gpu = a100_40gb, nic = ib_hdr, scale_up = nvlink; these are known for Azure ND A100 v4",
    ),
    "azhpc-images/topology_ndv5-topo.xml": (
        NVLINK8 | {"gpu": "h100_sxm", "nic": "ib_ndr", "nics_per_host": 8},
        "does not say gpu = h100_sxm, nic = ib_ndr, scale_up = nvlink; these are known for Azure ND H100 v5",
    ),
    "azhpc-images/topology_ncv4-topo.xml": (
        {
            "gpu": "a100_80gb",
            "gpus_per_host": 4,
            "scale_up": "pcie",
            "nic": "tcp_100",
            "nics_per_host": 1,
            "gpudirect_rdma": False,
        },
        "NVIDIA A100 80GB PCIe is the PCIe card",  # The cards are known by their PCI ids.
    ),
    "azhpc-images/topology_ncv4-graph.xml": (
        {"gpu": "a100_80gb", "gpus_per_host": 4, "scale_up": "pcie"},
        "does not say gpu = a100_80gb; these are known for Azure NC A100 v4",
    ),
}
# Each file and line of its matrix maps to the same pair.
TEXT = {
    ("ml-engineering_network_topo.txt", 21): (
        {"gpu": "rtx_pro_6000", "gpus_per_host": 2, "scale_up": "pcie"},
        "the kind of the GPUs is unknown; from no NVLink between them, rtx_pro_6000 is assumed (rtx_6000_ada, a10g",
    ),
    ("ml-engineering_network_topo.txt", 51): (
        NVLINK8 | {"gpu": "a100_80gb"},
        "only the text above names the GPUs, A100; from their 12 NVLinks, a100_80gb is assumed (a100_40gb",
    ),
    ("ml-engineering_network_topo.txt", 66): (
        NVLINK8 | {"gpu": "h100_sxm"},
        "only the text above names the GPUs, H100; from their 18 NVLinks, h100_sxm is assumed.",
    ),
    ("ml-engineering_perf_topo.txt", 8): (
        NVLINK8 | {"gpu": "h100_sxm"},
        "the kind of the GPUs is unknown; from their 18 NVLinks, h100_sxm is assumed (h200, b200,",
    ),
    ("stelline_asus-esc8000a-e12.txt", 2): (
        {"gpu": "rtx_6000_ada", "gpus_per_host": 4, "scale_up": "pcie"},
        "the text around the matrix calls the GPUs NVIDIA RTX 6000 Ada Generation",
    ),
    ("stelline_puget-threadripper-pro-wrx90.txt", 2): (
        {"gpu": "rtx_6000_ada", "gpus_per_host": 2, "scale_up": "pcie"},
        "the text around the matrix calls the GPUs NVIDIA RTX 6000 Ada Generation",
    ),
}


def assert_cluster(found, expected, **options):
    table = to_cluster(found, **options)
    assert {key: table.get(key) for key in expected} == expected
    cluster = Cluster.load(table)
    assert Cluster.load(cluster.to_dict()) == cluster


@pytest.mark.parametrize("name", XML)
def test_nccl_xml(name):
    expected, evidence = XML[name]
    (found,) = read_recorded(DATA / name, "xml")
    assert_cluster(found, expected)
    assert any(evidence in warning for warning in found.warnings)


@pytest.mark.parametrize(("name", "line"), TEXT)
def test_matrix(name, line):
    expected, evidence = TEXT[name, line]
    found = {
        int(t.source.rpartition(":")[2]) if ":" in t.source else 0: t
        for t in read_recorded(DATA / "text" / name, "matrix")
    }
    (found,) = [t for at, t in found.items() if at in (line, 0)]
    assert_cluster(found, expected)
    assert any(evidence in warning for warning in found.warnings)  # The assumption is reported.


@pytest.mark.parametrize("name", [f"text/{name}" for name, _ in TEXT] + list(XML))
def test_what_was_assumed_is_in_the_output_and_in_the_cluster_file(name, tmp_path):
    form = "xml" if name.endswith(".xml") else "matrix"
    first = read_recorded(DATA / name, form)[0]
    report = examine(
        **{form: DATA / name}, gpu="v100" if first.gpus[0].key is None else None, out=tmp_path / "mine.toml"
    )
    text = (tmp_path / "mine.toml").read_text()
    assert first.warnings
    for warning in first.warnings:
        assert warning in report.warnings
        assert f"# {' '.join(warning.split())}\n" in text
    assert Cluster.load(tmp_path / "mine.toml").gpu.key == report.cluster["gpu"]


def test_every_sample_is_read():
    files = {str(path.relative_to(DATA)) for path in DATA.rglob("*") if path.is_file()}
    texts = {f"text/{name}" for name, _ in TEXT}
    assert files == set(XML) | texts | {"SOURCES.txt"}


def test_two_cards_with_two_bridged_links_need_a_name():
    """Two links may be a bridge of Turing cards or a part of a V100's six, so nothing is guessed."""
    found = read_recorded(DATA / "text/ml-engineering_network_topo.txt", "matrix")[0]
    assert (found.scale_up, found.domains[0].gpus) == ("nvlink", ("gpu0", "gpu1"))
    with pytest.raises(ConfigError, match="the kind of the GPUs is unknown") as error:
        to_cluster(found)
    assert "--gpu" in (error.value.hint or "")
    assert_cluster(found, {"gpus_per_host": 2, "nvlink_domain_size": 2, "scale_up": "nvlink"}, gpu="v100")


def test_a_host_of_cards_knows_their_sockets():
    (found,) = read_recorded(DATA / "aws-ofi-nccl/topology_g5.48xl-topo.xml", "xml")
    assert [gpu.numa for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert_cluster(found, {"gpu": "rtx_pro_6000", "scale_up": "pcie"}, gpu="rtx_pro_6000")


MATRIX2 = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-9\t0\nGPU1\tPHB\t X \t0-9\t0\n"


@pytest.mark.parametrize(
    ("text", "gpu", "name"),
    [
        (MATRIX2 + "\nGPU 0: NVIDIA A10G (UUID: GPU-1)\nGPU 1: NVIDIA A10G (UUID: GPU-2)\n", "a10g", "NVIDIA A10G"),
        (MATRIX2 + "\n Device 0: NVIDIA RTX 6000 Ada Generation\n", "rtx_6000_ada", "NVIDIA RTX 6000 Ada Generation"),
        (MATRIX2 + "\nGPU 0: NVIDIA L40S (UUID: GPU-1)\nGPU 1: NVIDIA L40S (UUID: GPU-2)\n", "l40s", "NVIDIA L40S"),
        (MATRIX2 + "\nGPU 0: NVIDIA A10G (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n", "rtx_pro_6000", None),
        # The catalog's H100 have NVLink, so the prose is not believed.
        ("Two H100 as they come\n" + MATRIX2, "rtx_pro_6000", None),
    ],
)
def test_names_in_the_text_around_a_matrix(text, gpu, name, tmp_path):
    (tmp_path / "topo.txt").write_text(text)
    (found,) = read_recorded(tmp_path / "topo.txt", "matrix")
    assert {g.name for g in found.gpus} == {name}
    assert_cluster(found, {"gpu": gpu, "scale_up": "pcie"})


def test_a_named_gpu_that_the_catalog_lacks_needs_a_key(tmp_path):
    (tmp_path / "topo.txt").write_text(MATRIX2 + "\nGPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n")
    (found,) = read_recorded(tmp_path / "topo.txt", "matrix")
    with pytest.raises(ConfigError, match="'NVIDIA GeForce RTX 4090' is not in the catalog"):
        to_cluster(found)


def test_gpus_are_beside_their_nics():
    (found,) = read_recorded(DATA / "aws-ofi-nccl/topology_p4d-24xl-topo.xml", "xml")
    near = {gpu.id: [nic.id for nic in found.nearest_nics(gpu.id)[1]] for gpu in found.gpus}
    assert near == {f"gpu{i}": [f"nic{i // 2}"] for i in range(8)}
    assert {found.nearest_nics(gpu.id)[0] for gpu in found.gpus} == {"PIX"}
    assert next(c for c in found.connections if {c.a, c.b} == {"gpu0", "nic2"}).kind == "SYS"


def test_numa_and_nics_of_a_matrix():
    (matrix,) = parse_matrices((DATA / "text/stelline_asus-esc8000a-e12.txt").read_text())
    assert matrix.nics == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert matrix.numa == {"GPU0": 0, "GPU1": 0, "GPU2": 1, "GPU3": 1}
    assert matrix.cells["GPU2", "mlx5_3"] == "NODE"


V100_CUBE = """
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSOC\tSOC\tSOC\tPIX\t0-19
GPU1\tNV1\t X \tNV2\tNV1\tSOC\tNV2\tSOC\tSOC\tPIX\t0-19
GPU2\tNV1\tNV2\t X \tNV2\tSOC\tSOC\tNV1\tSOC\tPHB\t0-19
GPU3\tNV2\tNV1\tNV2\t X \tSOC\tSOC\tSOC\tNV1\tPHB\t0-19
GPU4\tNV2\tSOC\tSOC\tSOC\t X \tNV1\tNV1\tNV2\tSOC\t20-39
GPU5\tSOC\tNV2\tSOC\tSOC\tNV1\t X \tNV2\tNV1\tSOC\t20-39
GPU6\tSOC\tSOC\tNV1\tSOC\tNV1\tNV2\t X \tNV2\tSOC\t20-39
GPU7\tSOC\tSOC\tSOC\tNV1\tNV2\tNV1\tNV2\t X \tSOC\t20-39
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSOC\tSOC\tSOC\tSOC\t X
"""


def test_the_cube_mesh_of_an_old_driver_is_one_domain_of_v100(tmp_path):
    (tmp_path / "topo.txt").write_text(V100_CUBE)
    (found,) = read_recorded(tmp_path / "topo.txt", "matrix")
    assert [gpu.active_nvlinks for gpu in found.gpus] == [6] * 8
    assert_cluster(found, NVLINK8 | {"gpu": "v100"})


def test_four_gpus_wired_directly_have_no_switch_and_behind_one_have(tmp_path):
    for cell, switch, gpu in (("NV4", None, "a100_80gb"), ("NV12", True, "a100_80gb"), ("NV6", None, "h100_sxm")):
        rows = ["\t".join([f"GPU{i}", *("X" if i == j else cell for j in range(4)), "0-9", "0"]) for i in range(4)]
        header = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity"
        (tmp_path / "topo.txt").write_text("\n".join([header, *rows]))
        (found,) = read_recorded(tmp_path / "topo.txt", "matrix")
        assert_cluster(found, {"gpu": gpu, "gpus_per_host": 4, "scale_up": "nvlink", "nvlink_switch": switch})


def test_a_dump_of_nccl_itself(tmp_path):
    slot = 'link_speed="32.0 GT/s PCIe" link_width="16"'
    gpu = (
        f'<pci busid="0000:{{0}}b:00.0" class="0x030200" vendor="0x10de" device="0x2330" {slot}>'
        '<gpu dev="{0}" sm="90" rank="{0}" gdr="1">'
        '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu></pci>'
    )
    nic = (
        f'<pci busid="0000:{{0}}c:00.0" class="0x020700" vendor="0x15b3" device="0x1021" {slot}><nic>'
        '<net name="mlx5_{0}" dev="{0}" latency="0.0" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/>'
        "</nic></pci>"
    )
    bridges = "".join(
        f'<pci busid="0000:{i}a:00.0" class="0x060400" {slot}>{gpu.format(i)}{nic.format(i)}</pci>' for i in range(8)
    )
    text = f'<system version="1"><cpu host_hash="0xabc" numaid="0" affinity="ff" arch="x86_64">{bridges}</cpu></system>'
    (tmp_path / "system.xml").write_text(text)
    (found,) = read_recorded(tmp_path / "system.xml", "xml")
    assert_cluster(found, NVLINK8 | {"gpu": "h100_sxm", "nic": "ib_ndr", "nics_per_host": 8, "gpudirect_rdma": True})
    assert next(c for c in found.connections if {c.a, c.b} == {"gpu0", "gpu7"}).path == "NV18"
    assert [nic.id for nic in found.nearest_nics("gpu3")[1]] == ["mlx5_3"]
    assert not found.warnings


@pytest.mark.parametrize(
    ("affinity", "numa"),
    [
        ("\t0-51,104-155\t0\t\tN/A", 0),  # The tool prints two tabs before the last N/A.
        ("\t0,2-17\t1\t\tN/A", 1),  # A control group has taken cores out.
        ("\t\t1\t\tN/A", 1),  # A control group has taken out all cores.
        ("\t\t\t\tN/A", None),
        ("\t0-51\t", None),
        ("\t0-51\tN/A\t\tN/A", None),
        ("\t0-51\t0-1\t\tN/A", 0),
        ("\t0-71\t0\t\t4", 0),  # The memory of a Grace GPU is a NUMA node of its own.
    ],
)
def test_affinity_columns(affinity, numa):
    header = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    rows = [f"GPU0\t X \tNV18\tPIX{affinity}", f"GPU1\tNV18\t X \tNODE{affinity}", "NIC0\tPIX\tNODE\t X \t\t\t"]
    (matrix,) = parse_matrices("\n".join([header, *rows, "", "NIC Legend:", "", "  NIC0: mlx5_bond_0"]))
    assert matrix.numa == {"GPU0": numa, "GPU1": numa}
    assert matrix.cells["GPU0", "mlx5_bond_0"] == "PIX"


def test_a_header_whose_leading_space_was_trimmed():
    (matrix,) = parse_matrices("GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS 0-9 0\nGPU1 SYS X 10-19 1\n")
    assert matrix.numa == {"GPU0": 0, "GPU1": 1}
