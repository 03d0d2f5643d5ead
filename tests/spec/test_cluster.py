"""Clusters: the shipped ones, files, tables, numbering of GPUs, links, and what is refused."""

from __future__ import annotations

import tomllib

import pytest

from meshkit.errors import ConfigError
from meshkit.spec import catalog
from meshkit.spec.cluster import Cluster, shipped_clusters

GPUS = [
    *("cpu", "p100", "v100", "a100_40gb", "a100_80gb", "h100_sxm", "h100_pcie", "h200", "gh200"),
    *("b200", "gb200", "b300", "gb300", "rtx_pro_6000"),
]
NICS = [
    *("ib_edr", "ib_hdr100", "ib_hdr", "ib_ndr200", "ib_ndr", "ib_xdr"),
    *("roce_100", "roce_200", "roce_400", "roce_800", "tcp_10", "tcp_100", "tcp_200"),
]
SHIPPED = ["dgx_a100", "dgx_h100", "hgx_h200", "dgx_b200", "gb200_nvl72", "dgx1_v100", "cloud_h100_roce", "cpu8"]


def test_the_catalog_has_the_keys_of_the_contract():
    assert set(GPUS) <= set(catalog.gpu_keys())
    assert set(NICS) <= set(catalog.nic_keys())


def numbers(row, prefix=""):
    """Dotted keys of every number of a catalog row."""
    for key, value in row.items():
        if key == "sources":
            continue
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) or (isinstance(value, list) and value):
            yield prefix + key


@pytest.mark.parametrize("table", ["gpus", "nics", "fabrics"])
def test_every_number_of_the_catalog_has_one_source(table):
    sources = catalog.catalog()["sources"]
    for key, row in catalog.catalog()[table].items():
        cited = [number for numbers_of in row["sources"].values() for number in numbers_of]
        assert sorted(cited) == sorted(numbers(row)), key
        assert set(row["sources"]) <= set(sources), key


def test_every_source_is_used_and_dated():
    tables = catalog.catalog()
    rows = [row for name in ("gpus", "nics", "fabrics") for row in tables[name].values()] + [tables["pcie_bytes_per_s"]]
    used = {source for row in rows for source in row["sources"]}
    assert used == set(tables["sources"])
    timeless = {"vendor_rate", "pcie"}  # standards
    assert all(name in timeless or "20" in text for name, text in tables["sources"].items())


@pytest.mark.parametrize("key", GPUS)
def test_the_numbers_of_a_gpu_agree_with_each_other(key):
    gpu = catalog.gpu(key)
    peaks = gpu.peak_flops
    assert all(0 < share <= 1 for share in gpu.achieved.values())
    if "fp8" in peaks:  # each halving of the width doubles the dense rate; data sheets round to 3 digits
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=2e-3)
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=2e-3)
    assert (gpu.nvlink_links == 0) == (gpu.nvlink_bytes_per_s == 0) == (gpu.nvlink_generation is None)
    if gpu.nvlink_links:
        per_link = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}[gpu.nvlink_generation]
        assert gpu.nvlink_bytes_per_s == gpu.nvlink_links * per_link
        assert "nvlink" in gpu.achieved


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_clusters_load_and_round_trip(name):
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert cluster.num_gpus == cluster.hosts * cluster.gpus_per_host
    assert Cluster.load(cluster.to_dict()) == cluster
    assert cluster.link("nvlink").bytes_per_s > 0


def test_the_clusters_of_the_issue_are_shipped():
    assert set(SHIPPED) <= set(shipped_clusters())


def test_overrides():
    cluster = Cluster.load("dgx_h100", hosts=4, gpus_used_per_domain=6)
    assert (cluster.num_nvlink_domains, cluster.num_gpus) == (4, 24)
    assert Cluster.load({"name": "dgx_h100", "hosts": 4, "gpus_used_per_domain": 6}) == cluster
    assert Cluster.load(cluster.to_dict()) == cluster


def test_gpu_numbering_when_a_domain_spans_hosts():
    cluster = Cluster.load("gb200_nvl72", hosts=36, gpus_used_per_domain=64)
    assert (cluster.num_nvlink_domains, cluster.num_gpus) == (2, 128)
    # 64 of 72: the first 16 hosts of each rack of 18
    assert [cluster.host_of(i) for i in (0, 3, 4, 63, 64, 127)] == [0, 0, 1, 15, 18, 33]
    assert [cluster.domain_of(i) for i in (0, 63, 64, 127)] == [0, 0, 1, 1]


def test_gpu_numbering_when_a_host_has_several_domains():
    cluster = Cluster.load(
        {"gpu": "h100_pcie", "gpus_per_host": 4, "nvlink_domain_size": 2, "hosts": 2, "nic": "ib_ndr"}
    )
    assert cluster.num_nvlink_domains == 4
    assert [cluster.host_of(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "overrides", "link", "fabric", "bytes_per_s"),
    [
        ("dgx_h100", {}, "nvlink", "nvlink4_nvswitch", 450e9),
        ("dgx_h100", {}, "infiniband", "infiniband_ndr", 50e9),
        ("dgx_h100", {"nics_per_host": 4}, "infiniband", "infiniband_ndr", 25e9),
        ("dgx_h100", {"oversubscription": 2.0}, "infiniband", "infiniband_ndr", 25e9),
        ("dgx_h100", {"fabric": "roce"}, "infiniband", "roce_400", 50e9),
        ("dgx_h100", {"nic": "tcp_100"}, "infiniband", "tcp_100", 12.5e9),
        ("cloud_h100_roce", {}, "infiniband", "roce_400", 50e9),
        ("dgx1_v100", {}, "nvlink", "nvlink2_mesh", 150e9),
        ("dgx1_v100", {"scale_up": "pcie"}, "nvlink", "pcie3_p2p", 15.754e9),
        ("dgx_a100", {}, "nvlink", "nvlink3_nvswitch", 300e9),
        ("gb200_nvl72", {}, "nvlink", "nvlink5_nvswitch", 900e9),
        ("cpu8", {}, "nvlink", "shared_memory", 2e9),
        ("cpu8", {"nvlink_domain_size": 4}, "infiniband", "shared_memory", 2e9),
    ],
)
def test_links(name, overrides, link, fabric, bytes_per_s):
    found = Cluster.load(name, **overrides).link(link)
    assert (found.name, found.fabric, found.bytes_per_s) == (link, fabric, bytes_per_s)


def test_an_unknown_link():
    with pytest.raises(ConfigError, match="there is no link 'ici'"):
        Cluster.load("cpu8").link("ici")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dgx_h10", r"no shipped cluster \"dgx_h10\".(.|\n)*try 'dgx_h100'"),
        ({"name": "dgx_h100", "host": 2}, "unknown key 'host' in (.|\n)*try 'hosts'"),
        ({"name": "dgx_h100", "hosts": True}, "must be an integer, not the boolean true"),
        ({"name": "dgx_h100", "hosts": 0}, "greater than 0, not 0"),
        ({"name": "dgx_h100", "hosts": 2**40}, "at most 2147483648"),
        ({"name": "dgx_h100", "nvlink_domain_size": 5}, "neither whole hosts nor a whole part"),
        ({"name": "dgx_h100", "hosts": 3, "nvlink_domain_size": 16}, "24 do not make whole NVLink domains of 16"),
        ({"name": "dgx_h100", "gpus_used_per_domain": 9}, "but a domain has 8"),
        ({"name": "dgx_h100", "nvlink_taper": float("nan")}, "is not a finite number"),
        ({"name": "dgx_h100", "gpu": "h10_sxm"}, "no GPU 'h10_sxm'.(.|\n)*try 'h100_sxm'"),
        ({"name": "dgx_h100", "nic": "ib_nrd"}, "no NIC 'ib_nrd'.(.|\n)*try 'ib_ndr'"),
        ({"name": "dgx_h100", "scale_up": "shared_memory"}, "cannot be 'shared_memory'"),
        ({"name": "cpu8", "scale_up": "nvlink"}, "cannot be 'nvlink'"),
        ({"gpu": "rtx_pro_6000", "gpus_per_host": 8}, "has no NVLink"),
        ({"gpu": "h100_sxm", "gpus_per_host": 8, "hosts": 2}, "2 hosts with no 'nic'"),
        ({"gpu": "h100_sxm", "gpus_per_host": 8, "nics_per_host": 8}, "cluster.nics_per_host is given, but no 'nic'"),
        ({"gpu": "h100_sxm"}, "has no 'gpus_per_host'"),
        ({"name": "dgx_h100", "file": "x.toml"}, "either a 'name' or a 'file'"),
        ({"file": "missing.toml"}, "no cluster file 'missing.toml'"),
        (3, "must be a name, a path or a table"),
    ],
)
def test_what_is_refused(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Cluster.load(source)
    assert caught.value.at
    assert caught.value.hint


def test_a_file_that_extends_a_shipped_cluster(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "dgx_h100"\nhosts = 4\nprice_per_gpu_hour = 2.5\n')
    cluster = Cluster.load(path, price_per_gpu_hour=3.0)
    assert (cluster.name, cluster.hosts, cluster.price_per_gpu_hour) == ("ours", 4, 3.0)
    assert Cluster.load(cluster.to_dict()) == cluster


def test_a_file_named_like_a_shipped_cluster_keeps_its_own_keys(tmp_path):
    path = tmp_path / "dgx_h100.toml"
    path.write_text('gpu = "h100_sxm"\ngpus_per_host = 8\n')
    cluster = Cluster.load(path)
    assert cluster.name == "dgx_h100.toml"
    assert cluster.nic is None
    assert Cluster.load({key: value for key, value in cluster.to_dict().items() if value is not None}) == cluster


def test_an_error_in_a_cluster_file_names_that_file_and_line(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('# ours\nname = "dgx_h100"\nhosts = "four"\n')
    with pytest.raises(ConfigError, match=r"cluster.hosts must be an integer") as caught:
        Cluster.load(path)
    assert caught.value.at == f'{path}:3: hosts = "four"'


@pytest.mark.parametrize("path", ["configs/clusters/dgx_h100_pair.toml", "configs/clusters/pcie_workstation.toml"])
def test_the_example_cluster_files_load(path, pytestconfig):
    assert Cluster.load(pytestconfig.rootpath / path).num_gpus >= 4


def test_a_relative_calibration_is_relative_to_its_file(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "dgx_h100"\ncalibration = "bench.json"\n')
    assert Cluster.load(path).calibration == str(tmp_path / "bench.json")


def test_to_dict_has_every_key_of_a_cluster_file():
    from meshkit.spec.tables import ClusterTable

    assert set(Cluster.load("cpu8").to_dict()) == set(ClusterTable.model_fields)


def test_the_catalog_is_plain_toml():
    from importlib import resources

    assert tomllib.loads(resources.files("meshkit.spec").joinpath("catalog.toml").read_text()) == catalog.catalog()
