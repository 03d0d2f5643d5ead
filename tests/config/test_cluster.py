"""Test clusters: the shipped ones, files, tables, the numbering of GPUs, links, and the errors of invalid ones."""

from __future__ import annotations

import pytest

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.errors import ConfigError

SHIPPED = [
    *("dgx1_p100", "dgx1_v100", "dgx2", "dgx_a100", "dgx_h100", "superpod_h100_nvlink256", "hgx_h200", "dgx_b200"),
    *("gb200_nvl72", "cloud_h100_roce", "cloud_h100_tcp", "workstation_2xrtx", "cpu8"),
]


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
    # A rack has 18 hosts; 64 of its 72 GPUs are those of the first 16.
    assert [cluster.host_of(i) for i in (0, 3, 4, 63, 64, 127)] == [0, 0, 1, 15, 18, 33]
    assert [cluster.domain_of(i) for i in (0, 63, 64, 127)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("cluster", "hosts", "gpus"),
    [
        ({"name": "gb200_nvl72", "hosts": 72, "gpus_used_per_domain": 64}, 64, 4),
        ({"name": "gb200_nvl72", "hosts": 72}, 72, 4),
        ({"name": "gb200_nvl72", "hosts": 36, "gpus_used_per_domain": 66}, 34, 4),  # 2 of the last host of each rack
        ({"name": "gb200_nvl72", "gpus_used_per_domain": 2}, 1, 2),
        ({"name": "dgx_h100", "hosts": 4, "gpus_used_per_domain": 6}, 4, 6),
        ({"gpu": "h100_pcie", "gpus_per_host": 4, "nvlink_domain_size": 2, "hosts": 2, "nic": "ib_ndr"}, 2, 4),
    ],
)
def test_the_hosts_that_a_job_uses(cluster, hosts, gpus):
    cluster = Cluster.load(cluster)
    assert (cluster.hosts_used, cluster.gpus_used_per_host) == (hosts, gpus)
    assert len({int(cluster.host_of(i)) for i in range(cluster.num_gpus)}) == hosts


def test_gpu_numbering_when_a_host_has_several_domains():
    cluster = Cluster.load(
        {"gpu": "h100_pcie", "gpus_per_host": 4, "nvlink_domain_size": 2, "hosts": 2, "nic": "ib_ndr"}
    )
    assert cluster.num_nvlink_domains == 4
    assert [cluster.host_of(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_cpu_devices_need_not_name_the_one_fabric_they_have():
    cluster = Cluster.load({"gpu": "cpu", "gpus_per_host": 8})
    assert cluster == Cluster.load({"gpu": "cpu", "gpus_per_host": 8, "scale_up": "shared_memory"})


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
        ({"name": "dgx_h100", "nvlink_domain_size": 5}, "neither whole hosts nor an equal part"),
        ({"name": "dgx_h100", "hosts": 3, "nvlink_domain_size": 16}, "24 GPUs do not fill whole NVLink domains of 16"),
        ({"name": "dgx_h100", "gpus_used_per_domain": 9}, "but a domain has 8"),
        ({"name": "dgx_h100", "nvlink_taper": float("nan")}, "is not a finite number"),
        ({"name": "dgx_h100", "gpu": "h10_sxm"}, "no GPU 'h10_sxm'.(.|\n)*try 'h100_sxm'"),
        ({"name": "dgx_h100", "nic": "ib_nrd"}, "no NIC 'ib_nrd'.(.|\n)*try 'ib_ndr'"),
        ({"name": "dgx_h100", "nvlink_switch": False, "nvlink_domain_size": 16, "hosts": 2}, "cannot span hosts of 8"),
        ({"name": "dgx2", "nvlink_switch": False}, "6 NVLinks cannot reach the 15 other GPUs"),
        ({"name": "dgx1_p100", "nvlink_switch": True}, "no switch supports NVLink 1 of GPU 'p100'"),
        ({"name": "dgx1_p100", "nvlink_domain_size": 16, "hosts": 2}, "a domain of 16 GPUs would need"),
        ({"name": "workstation_2xrtx", "nvlink_switch": True}, "but the scale-up fabric is 'pcie'"),
        ({"name": "dgx_h100", "cpu_link": "c2c"}, "the catalog has no CPU link 'c2c'"),
        ({"name": "dgx_h100", "cpu_link": "c2c_gh200"}, "GPU 'h100_sxm' has no link 'c2c_gh200'"),
        ({"name": "dgx_h100", "cpu_link": "power9_nvlink2_6gpu", "gpu": "p100"}, "GPU 'p100' has no link"),
        ({"name": "dgx_h100", "calibration": "missing.toml"}, "no calibration file '(.*/)?missing.toml'"),
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


def test_a_file_that_leads_back_to_itself_is_refused(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('file = "ours.toml"\n')
    with pytest.raises(ConfigError, match="a cluster file names itself") as caught:
        Cluster.load(path)
    assert caught.value.at == f'{path}:1: file = "ours.toml"'


@pytest.mark.parametrize("path", ["configs/clusters/dgx_h100_pair.toml", "configs/clusters/pcie_workstation.toml"])
def test_the_example_cluster_files_load(path, pytestconfig):
    assert Cluster.load(pytestconfig.rootpath / path).num_gpus >= 4


def test_a_relative_calibration_is_relative_to_its_file(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "dgx_h100"\ncalibration = "bench.toml"\n')
    (tmp_path / "bench.toml").touch()
    assert Cluster.load(path).calibration == str(tmp_path / "bench.toml")


def test_a_missing_calibration_is_refused_where_it_is_named_unless_it_is_replaced(tmp_path):
    path, other = tmp_path / "ours.toml", tmp_path / "other.toml"
    path.write_text('name = "dgx_h100"\ncalibration = "bench.toml"\n')
    with pytest.raises(ConfigError, match="there is no calibration file") as caught:
        Cluster.load(path)
    assert caught.value.at == f'{path}:2: calibration = "bench.toml"'
    other.touch()
    assert Cluster.load(path, calibration=str(other)).calibration == str(other)
