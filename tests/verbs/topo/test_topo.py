"""Test `meshkit topo`: it reads, checks, writes and draws machines."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from meshkit.config.cluster import Cluster
from meshkit.discover import FixtureProbe, LiveProbe, record
from meshkit.errors import ConfigError, TraceError
from meshkit.verbs.topo.topo import TopoReport, examine, render

DATA = Path(__file__).parents[2] / "data/topo"
P4D = DATA / "aws-ofi-nccl/topology_p4d-24xl-topo.xml"
NDV5 = DATA / "azhpc-images/topology_ndv5-topo.xml"
TEXTS = DATA / "text/ml-engineering_network_topo.txt"
ASUS = DATA / "text/stelline_asus-esc8000a-e12.txt"
ARGUMENTS = [{"xml": P4D}, {"xml": NDV5}, {"matrix": TEXTS}, {"matrix": ASUS}]


@pytest.fixture
def no_gpu(monkeypatch):
    """Make any machine look as if it had no driver."""
    monkeypatch.setattr(LiveProbe, "nvml", lambda self: "no NVIDIA driver")
    monkeypatch.setattr(LiveProbe, "run_command", lambda self, *command: None)


def drawn(report):
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(render(report))
    return out.getvalue()


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: next(iter(a.values())).stem)
def test_json_has_every_key_and_reads_back(arguments):
    report = examine(**arguments)
    value = json.loads(report.to_json())
    assert value["schema"] == "meshkit.topo/1"
    assert set(value) == {field.alias or name for name, field in TopoReport.model_fields.items()}
    assert TopoReport.model_validate_json(report.to_json()) == report
    assert set(TopoReport.model_json_schema(mode="serialization")["required"]) == set(value)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: next(iter(a.values())).stem)
def test_the_drawing_fits_80_columns(arguments):
    text = drawn(examine(**arguments, check=Cluster.load("dgx_h100")))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "dgx_h100" in text


def test_the_picture_shows_which_nic_is_near_which_gpu():
    text = drawn(examine(xml=P4D))
    assert "├── NUMA 0\n│   ├── gpu0  gpu1 ─PIX─ nic0 100 Gb/s RoCE\n" in text
    assert "    └── gpu6  gpu7 ─PIX─ nic3 100 Gb/s RoCE\n" in text


def test_a_machine_without_a_gpu_says_so_in_one_line(no_gpu):
    report = examine()
    assert drawn(report) == "No NVIDIA GPU: no NVIDIA driver.\n"
    assert (report.gpus, report.cluster, report.findings) == ((), None, ())


def test_a_machine_without_a_gpu_is_not_the_declared_one(no_gpu, tmp_path):
    assert [f.code for f in examine(check=Cluster.load("dgx_h100")).findings] == ["gpu_count"]
    assert examine(check=Cluster.load("cpu8")).findings == ()
    with pytest.raises(ConfigError, match="no GPU to describe"):
        examine(out=tmp_path / "cluster.toml")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu_can_be_recorded_and_replayed(no_gpu, tmp_path):
    assert examine(record=tmp_path / "b").recorded == str(tmp_path / "b")
    assert examine(bundle=tmp_path / "b").nothing_here == "no NVIDIA driver"


def test_a_cluster_file_loads_with_its_notes(tmp_path):
    report = examine(xml=NDV5, out=tmp_path / "mine.toml")
    assert report.shipped == "dgx_h100"
    assert "the file does not say gpu = h100_sxm" in (tmp_path / "mine.toml").read_text()
    cluster = Cluster.load(tmp_path / "mine.toml", hosts=4)
    assert (cluster.name, cluster.hosts, cluster.num_gpus) == ("mine", 4, 32)
    with pytest.raises(ConfigError, match="never overwrites"):
        examine(xml=NDV5, out=tmp_path / "mine.toml")


def test_check_says_what_differs():
    report = examine(xml=P4D, check=Cluster.load("dgx_h100"))
    assert [f.code for f in report.findings] == ["gpu_kind", "nic_count", "nic_kind"]
    assert examine(xml=NDV5, check=Cluster.load("dgx_h100")).findings == ()


def test_further_machines_of_a_file_are_listed():
    report = examine(matrix=TEXTS)
    assert report.cluster is None  # Two cards with two links each may be of several kinds.
    assert [other.num_gpus for other in report.others] == [2, 8, 8]
    assert report.others[2].cluster["gpu"] == "h100_sxm"
    assert examine(matrix=TEXTS, gpu="v100").cluster["gpu"] == "v100"


def test_gpu_must_be_of_the_catalog(tmp_path):
    with pytest.raises(ConfigError, match="the catalog has no GPU 'h1000'"):
        examine(xml=NDV5, gpu="h1000", out=tmp_path / "c.toml")


@pytest.mark.parametrize(
    "arguments",
    [{"xml": P4D, "matrix": ASUS}, {"bundle": DATA, "xml": P4D}, {"xml": P4D, "record": DATA / "new"}],
)
def test_one_machine_at_a_time(arguments):
    with pytest.raises(ConfigError, match="only one machine can be described"):
        examine(**arguments)


def test_files_that_are_missing_or_something_else():
    with pytest.raises(ConfigError, match="no such topology"):
        examine(xml=DATA / "none.xml")
    with pytest.raises(ConfigError, match="is a folder"):
        examine(matrix=DATA)
    with pytest.raises(TraceError, match=r"no bundle\.json"):
        examine(bundle=DATA)


def test_a_bundle_of_cards_is_drawn(tmp_path):
    gpus = [
        {"index": i, "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "bus": f"0000:0{i}:00.0"} for i in (1, 2)
    ]
    record(tmp_path / "b", FixtureProbe(nvml={"gpus": gpus}))
    report = examine(bundle=tmp_path / "b", gpu="rtx_pro_6000")
    assert report.cluster == {
        "gpu": "rtx_pro_6000",
        "hosts": 1,
        "gpus_per_host": 2,
        "scale_up": "pcie",
        "nvlink_domain_size": 2,
    }
    assert "2 x NVIDIA RTX PRO 6000" in drawn(report)


def test_names_that_look_like_markup_or_escapes_are_only_text(tmp_path):
    gpus = [{"index": 0, "name": "[/red]\x1b[31m card", "bus": "0000:01:00.0"}]
    files = {f"/sys/class/infiniband/{name}/ports/1/state": "4: ACTIVE" for name in ("mlx5_0", "[bold]", "\x1b[0m")}
    record(tmp_path / "b", FixtureProbe(nvml={"gpus": gpus}, files=files))
    text = drawn(examine(bundle=tmp_path / "b"))
    assert "[/red] [31m card" in text
    assert "\x1b" not in text
    assert "[bold]" not in text
