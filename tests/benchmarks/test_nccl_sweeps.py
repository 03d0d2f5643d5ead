"""Test the scoring of NCCL sweeps: names of systems, forced algorithms, the output file and faults of the input."""

import csv

import pytest

from benchmarks.nccl_sweeps.__main__ import DATA, OUT_COLUMNS, main
from benchmarks.nccl_sweeps.fit import by_hand_lines
from benchmarks.nccl_sweeps.rows import Forced, read_rows
from benchmarks.nccl_sweeps.systems import describe
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.predict import algorithms
from meshkit.predict.nccl import find_links, fitted_values, nccl_constants
from meshkit.predict.network import collective_time_s

MULTINODE = DATA / "nccl_sweeps_multinode.csv"
HEADER = "system,collective,algo,bytes,time_us,busbw_GBps,source"
GOOD = '"H100 x8, 1 node",all_reduce,default,16777216,123.0,238.6,me'


@pytest.fixture
def sweep(tmp_path):
    def write(*rows, header=HEADER):
        path = tmp_path / "sweep.csv"
        path.write_text("\n".join([header, *rows]) + "\n")
        return path

    return write


def scored(path, tmp_path):
    out = tmp_path / "scores.csv"
    code = main(["--rows", str(path), "--out", str(out)])
    with out.open(newline="") as file:
        return code, list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("system", "gpu", "shape"),
    [
        ("GB200 x16, 4 nodes over 2 NVL72 domains (MNNVL+RDMA)", "gb200", (8, 2)),
        ("GB200 x16 over 2 domains", "gb200", (8, 2)),
        ("GB300 x144, 2 racks", "gb300", (72, 2)),
        ("GB200 x192, 3 racks", "gb200", (64, 3)),
        ("GB200 x8, 2 nodes in different NVLink domains (RDMA, 4x400G a node)", "gb200", (4, 2)),
        ("GB200 x8, 2 nodes of one NVL72", "gb200", (8, 1)),
        ("GB200 x64, 16 nodes of one rack (NVL72)", "gb200", (64, 1)),
        ("GB200 x72, 1 rack (NVL72)", "gb200", (72, 1)),
        ("GB200 x72 over 2 NVL36 domains", "gb200", (36, 2)),
        ("H100 x256, 32 nodes, 4 racks", "h100_sxm", (8, 32)),
        ("H100 x16 over two domains", "h100_sxm", (8, 2)),
        ("L40S (PCIe) x4, 1 node", "l40s", (4, 1)),
        ("L40S (PCIe) x16, 2 nodes, 2x200G RoCE", "l40s", (8, 2)),
        ("RTX PRO 6000 server (PCIe) x8, 1 node", "rtx_pro_6000", (8, 1)),
        ("H100 PCIe x2, 1 node", "h100_pcie", (2, 1)),
        ("A100-PCIe 40GB x4, 1 node", "a100_40gb", (4, 1)),
        ("B300 server x16, 2 nodes", "b300", (8, 2)),
        ("GB300 x144 over 2 NVL72 domains", "gb300", (72, 2)),
        ("H100 x8, 2 nodes in different NVLink domains", "h100_sxm", (4, 2)),
    ],
)
def test_names_of_systems(system, gpu, shape):
    found, cluster, g, k = describe(system)
    assert (found, cluster.gpu.key, (g, k)) == (gpu, gpu, shape)
    assert cluster.scale_up == ("pcie" if "PCIe" in system else "nvlink")
    assert cluster.num_nvlink_domains == k


@pytest.mark.parametrize("key", [key for key in catalog.gpu_keys() if key != "cpu"])
def test_every_gpu_of_the_catalog_is_understood_by_key_and_by_name(key):
    for name in (key, catalog.gpu(key).name.replace("GH200 480GB", "GH200")):
        found, _, g, k = describe(f"{name} x2, 1 node" if key != "gh200" else f"{name} x2, 2 nodes")
        assert (found, g * k) == (key, 2), name


def test_what_leads_out_of_a_host():
    def port(system):
        cluster = describe(system)[1]
        return cluster.nic and (cluster.nic.key, cluster.nics_per_host)

    assert port("B300 x16, 2 nodes") == ("ib_xdr", 8)
    assert port("B200 x16, 2 nodes, 8x400G RoCE (Google A4)") == ("roce_400", 8)
    assert port("H100 x16, 2 nodes, 8x200G GPUDirect-TCPXO (Google A3 Mega)") == ("tcpxo_200", 8)
    assert port("GB300 x8, 2 nodes in different NVLink domains (4x400G a node)") == ("ib_ndr", 4)
    assert port("A100 x16, 2 nodes, HDR InfiniBand") == ("ib_hdr", 8)
    assert port("H100 x64, 8 nodes, 8 x 400 Gb/s InfiniBand") == port("H100 x64, 8 nodes, 8x50GB/s") == ("ib_ndr", 8)
    assert describe("H100 x16, 2 nodes, RoCE")[1].link("infiniband").fabric == "roce_400"


@pytest.mark.parametrize(
    ("system", "why"),
    [
        ("TPU v5 x8, 1 node", "no GPU of the catalog"),
        ("L40 x8, 1 node", "no GPU of the catalog"),
        ("GB200 rack (heading says x8)", "no number of GPUs"),
        ("B200 x8, 0 nodes", "8 GPUs on 0 hosts"),
        ("H100 x9, 2 nodes", "9 GPUs do not divide by 2 hosts"),
        ("H100 x16, 1 node", "16 GPUs do not fit on 1 x 8"),
        ("GB200 x64, 16 nodes over 3 domains", "64 GPUs do not divide by 3 NVLink domains"),
        ("GB200 x144, 1 rack", "144 GPUs do not fit in an NVLink domain of 72"),
        ("H100 x16, 2 nodes over 4 domains", "2 hosts are 2 NVLink domains, not 4"),
        ("L40S (PCIe) x16, 2 nodes", "no port in the name"),
        ("H100 x16, 2 nodes, 8x300G", "no 300 Gb/s port"),
        ("GB200 x8 in different NVLink domains", "no number of nodes"),
    ],
)
def test_names_that_say_too_little_or_what_cannot_be(system, why):
    with pytest.raises(ValueError, match=why):
        describe(system)


@pytest.mark.parametrize(
    ("algo", "forced"),
    [
        ("", Forced()),
        ("default, NCCL 2.28.7 FasTrak", Forced(nccl="2.28.7")),
        ("default (NCCL table 2.23)", Forced(nccl="2.23")),
        ("default, NCCL 2.12.12", Forced(nccl="2.18")),
        ("NVLS for large (default algo)", Forced()),
        ("NVLS enabled, algorithm auto, NCCL 2.29.7", Forced(nccl="2.29.7")),
        ("CollNet enabled without SHARP hardware, auto", Forced()),
        ("ring of neighbours, NVLS and SHARP off", Forced(nvls=False)),
        ("default, NCCL_NVLS_ENABLE=0", Forced(nvls=False)),
        ("Ring (NCCL_ALGO)", Forced(("ring",))),
        ("NCCL_ALGO=Ring NCCL_PROTO=LL128", Forced(("ring",), "ll128")),
        ("NCCL_ALGO=^NVLS", Forced(("ring", "tree"), nvls=False)),
        ("Tree", Forced(("tree",))),
        ("NVLSTree (NCCL_ALGO)", Forced(("nvls tree",))),
        ("NVLS or NVLSTree", Forced(("nvls",))),
        ("CollnetDirect (SHARP), NCCL 2.28.9", Forced(("collnet",), nccl="2.28.9")),
        ("NCCL symmetric memory", Forced(("symmetric",))),
        ("PAT", Forced(("pat",))),
        ("copy engine", Forced(("copy engine",))),
        ("CE, symmetric memory, NCCL 2.28.9", Forced(("copy engine",), nccl="2.28.9")),
        ("a word of the lab", Forced(unread=True)),
    ],
)
def test_what_a_row_says_of_its_algorithm(algo, forced):
    assert Forced.of(algo) == forced


def test_a_forced_algorithm_is_priced_as_itself(sweep, tmp_path):
    """On 8 H100 GPUs NCCL itself chooses NVLS at 16 MiB; forced ring and tree are slower."""
    algos = ["default", "Ring", "Tree", "NVLS", "NCCL_PROTO=LL128", "Ring, NVLS off"]
    rows = [f'"H100 x8, 1 node",all_reduce,"{algo}",16777216,123.0,,me' for algo in algos]
    _, found = scored(sweep(*rows), tmp_path)
    predicted = dict(zip(algos, (float(row["predicted_us"]) for row in found), strict=True))
    cluster = Cluster.load("dgx_h100")
    links = find_links(cluster, 8, 1)
    priced = [algorithms.priced("all-reduce", e, 2**24, links) for e in algorithms.expected("all-reduce", links)]
    of = {p.name: p.time_s * 1e6 for p in priced}
    assert predicted["default"] == predicted["NVLS"] == pytest.approx(of["nvls"], abs=1e-3)
    assert predicted["Ring"] == predicted["Ring, NVLS off"] > predicted["default"]
    assert predicted["Ring"] == pytest.approx(of["ring ll128"], abs=1e-3)
    assert predicted["Tree"] in [pytest.approx(of[f"tree {protocol}"], abs=1e-3) for protocol in ("ll128", "simple")]
    assert predicted["NCCL_PROTO=LL128"] == pytest.approx(min(of["ring ll128"], of["tree ll128"]), abs=1e-3)


@pytest.mark.parametrize(
    ("collective", "kind", "bus"),
    [
        ("all_reduce", "all-reduce", 2 * 7 / 8),
        ("all_gather_perf", "all-gather", 7 / 8),
        ("ReduceScatter", "reduce-scatter", 7 / 8),
        ("alltoall", "all-to-all", 7 / 8),
        ("sendrecv", "collective-permute", 1.0),
    ],
)
def test_every_collective_of_nccl_tests(sweep, tmp_path, collective, kind, bus):
    busbw = bus * 2**26 / 400e-6 / 1e9
    code, found = scored(sweep(f'"H100 x8, 1 node",{collective},default,{2**26},400,{busbw:.2f},me'), tmp_path)
    expected = collective_time_s(
        kind, payload_bytes=2**26, gpus_per_domain=8, cluster=Cluster.load("dgx_h100"), launch="nccl-tests"
    )
    assert code == 0
    assert found[0]["note"] == ""
    assert float(found[0]["predicted_us"]) == pytest.approx(expected * 1e6, abs=1e-3)


def test_a_file_of_many_systems(tmp_path, capsys):
    """Every row comes out in order, priced or with a reason, and each system that is not understood is named once."""
    code, found = scored(MULTINODE, tmp_path)
    with MULTINODE.open(newline="") as file:
        given = list(csv.DictReader(file))
    assert code == 0
    assert tuple(found[0]) == OUT_COLUMNS
    assert [(r["system"], r["bytes"], r["measured_us"]) for r in found] == [
        (r["system"], r["bytes"], r["time_us"]) for r in given
    ]
    blank = [row for row in found if not row["predicted_us"]]
    assert all(row["note"] for row in blank)
    assert len(found) - len(blank) == 133 - 2  # The heading of two rows contradicts itself.
    assert capsys.readouterr().err.count("not priced") == 1


def test_the_tables_keep_sources_places_and_sizes_apart(sweep, capsys):
    more = [
        '"H100 x16, 2 nodes",all_gather,default,1048576,100,9.83,them@1:x',
        '"L40S (PCIe) x2, 1 node",all_reduce,default,8192,20,0.41,me',
        '"TPU v5 x8",all_reduce,default,1024,20,,me',
        '"H100 x8, 1 node",all_reduce,default,1024,20,0.09,me',
        '"H100 x8, 1 node",all_reduce,SHARP,1024,20,0.09,me',
    ]
    assert main(["--rows", str(sweep(GOOD, *more)), "--table"]) == 0
    printed = capsys.readouterr()
    assert "6 rows, 4 priced, 1 of them below 8 KiB" in printed.out
    by_class = printed.out.split("By class\n")[1].split("By class, all")[0]
    (line,) = read_rows(sweep(GOOD))
    cell = f"{abs(line.error):.1%}, {abs(line.error):.1%}, {line.error:+.1%} (1)"
    assert f"| me | inside a host |  |  | {cell} |" in by_class
    assert "| them | between hosts |  | " in by_class
    assert "| me | inside a PCIe host | " in by_class
    assert "| me | all-reduce | inside a host |" in printed.out
    assert "| the model has no collnet for all-reduce inside a domain | 1 | H100 x8, 1 node |" in printed.out
    assert "not priced: 'TPU v5 x8': no GPU of the catalog in the name" in printed.err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD.replace("123.0", "0.1230")], "16777216 bytes in 0.123 us are 1.364e+05 GB/s, and busbw_GBps says 238.6"),
        ([GOOD.replace("238.6", "1908.8")], "a unit is off"),
        ([GOOD.replace("16777216", "16384")], "a unit is off"),
        (
            [GOOD.replace("123.0,238.6", "0.1230,")],
            "all-reduce of 16777216 bytes on 'H100 x8, 1 node' takes 0.001 times what",
        ),
        ([GOOD.replace("123.0,238.6", "123000,")], "times what its links need: a unit is off"),
        (
            # These bytes are in MiB.
            [f'"H100 x8, 1 node",all_reduce,x,{mib},{100 + 2 * mib},,me' for mib in (1, 16, 256)],
            "all-reduce of 256 bytes on 'H100 x8, 1 node' takes",
        ),
        ([GOOD.replace("123.0", "-123.0")], "time_us is '-123.0' of 'H100 x8, 1 node', and must be a number above 0"),
        ([GOOD.replace("123.0", "0")], "time_us is '0'"),
        ([GOOD.replace("123.0", "nan")], "time_us is 'nan'"),
        ([GOOD.replace("16777216", "16M")], "bytes is '16M'"),
        ([GOOD.replace("16777216", "1.5").replace("238.6", "")], "1.5 is no whole number of bytes"),
        ([GOOD.replace("238.6", "N/A")], "busbw_GBps is 'N/A'"),
        ([GOOD + ",more"], "another number of cells"),
        (['"TPU v5 x8, 1 node",all_reduce,x,1024,5,1,me'], "none of the 1 rows could be priced: no GPU of the catalog"),
        ([], "has no rows"),
    ],
)
def test_bad_rows_get_one_message(sweep, capsys, rows, message):
    path = sweep(*rows)
    assert main(["--rows", str(path), "--table"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "try " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER.replace("time_us", "time_ms"), "column 'time_ms' is not a column of a sweep"),
        (HEADER + ",source", "column 'source' is twice"),
        ("system,collective,bytes", "there is no column 'time_us'"),
    ],
)
def test_a_header_that_is_not_a_sweeps(sweep, capsys, header, message):
    assert main(["--rows", str(sweep(GOOD, header=header)), "--table"]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_or_written(sweep, tmp_path, capsys):
    assert main(["--rows", str(tmp_path / "none.csv"), "--table"]) == 2
    assert "none.csv' cannot be read as CSV" in capsys.readouterr().err
    assert main(["--rows", str(sweep(GOOD)), "--out", str(tmp_path / "no" / "out.csv")]) == 2
    assert "out.csv' cannot be written" in capsys.readouterr().err


def test_a_bus_bandwidth_of_other_gpus_than_the_name_says_is_not_scored(sweep, tmp_path):
    """A bus bandwidth of 1.97 x bytes / time belongs to an all-reduce of 64 GPUs."""
    _, found = scored(sweep(GOOD, GOOD.replace("238.6", "268.7")), tmp_path)
    assert found[0]["predicted_us"]
    assert not found[1]["predicted_us"]
    assert found[1]["note"] == "busbw_GBps is 1.97 x bytes / time, and all-reduce of 8 GPUs has 1.75"


def test_columns_that_may_be_left_out(sweep):
    (line,) = read_rows(sweep('"H100 x8, 1 node",all_reduce,16777216,123.0', header="system,collective,bytes,time_us"))
    assert line.source == "sweep"
    assert line.error == pytest.approx(0, abs=0.1)


def test_the_page_has_every_number_that_is_fitted_or_set_by_hand():
    text = (DATA.parents[1] / "benchmarks" / "nccl_sweeps" / "README.md").read_text()
    assert "\n".join(by_hand_lines()) in text
    for name, value in fitted_values().items():
        row = nccl_constants()["fitted"][name.partition(".")[0]]
        assert f"| {name} | {value:.4g} | {row['unit']} | {row['what']} | {row['fit']} |" in text
