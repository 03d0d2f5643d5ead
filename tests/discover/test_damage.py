"""Test that a damaged sample gives one clear error, and that random damage never raises another kind of exception."""

import contextlib
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshkit.config.cluster import Cluster
from meshkit.discover import check, record, to_cluster
from meshkit.discover.machine import replay
from meshkit.discover.nvidia_smi import parse_matrices, read_matrix
from meshkit.discover.topology_files import parse_topology
from meshkit.errors import ConfigError, MeshkitError, TraceError

DATA = Path(__file__).parents[1] / "data/topo"
P4D = (DATA / "aws-ofi-nccl/topology_p4d-24xl-topo.xml").read_text()
NCV4 = (DATA / "azhpc-images/topology_ncv4-topo.xml").read_text()
GRAPH = (DATA / "azhpc-images/topology_ncv4-graph.xml").read_text()
H100 = (DATA / "text/ml-engineering_perf_topo.txt").read_text()
ASUS = (DATA / "text/stelline_asus-esc8000a-e12.txt").read_text()

DOCTYPE = '<!DOCTYPE topology SYSTEM "hwloc.dtd">\n<topology version="2.0"/>'
BILLION = '<!DOCTYPE a [<!ENTITY b "cc"><!ENTITY d "&b;&b;">]>\n<system version="1"><cpu numaid="0">&d;</cpu></system>'
DEEP = '<system version="1"><cpu numaid="0">' + '<pci busid="0000:01:00.0">' * 80 + "</pci>" * 80 + "</cpu></system>"


def changed(text, old, new, count=-1):
    assert old in text
    return text.replace(old, new, count)


# Each row says what is wrong, and holds the damaged text and a part of the one message.
XML = {
    "cut in the middle": (P4D[: len(P4D) // 2], "not XML"),
    "empty": ("", "not XML: no element found"),
    "not XML": ("GPU0 GPU1", "not XML"),
    "a file of hwloc": (DOCTYPE, "has a DOCTYPE or an entity"),
    "entities": (BILLION, "has a DOCTYPE or an entity"),
    "too deep": (DEEP, "more than 64 deep"),
    "another document": ("<html><body/></html>", "<html> is not a NCCL topology"),
    "no machine": ('<system version="1"></system>', "no <cpu>"),
    "a bus address": (changed(P4D, "0000:10:1c.0", "somewhere"), 'busid="somewhere"'),
    "two GPUs at one address": (
        changed(P4D, "0000:10:1d.0", "0000:10:1c.0"),
        "two GPUs have the PCI address",
    ),
    "a NUMA node": (changed(P4D, 'numaid="1"', 'numaid="one"'), 'numaid="one"'),
    "a NUMA node twice": (changed(P4D, 'numaid="1"', 'numaid="0"'), "NUMA node 0 appears twice"),
    "a lane rate": (changed(P4D, "8 GT/s", "9 GT/s"), 'link_speed="9 GT/s"'),
    "a width": (changed(P4D, 'link_width="16"', 'link_width="wide"'), 'link_width="wide"'),
    "a link count": (changed(NCV4, 'count="12"', 'count="-12"'), 'count="-12"'),
    "a port rate": (changed(NCV4, 'speed="100000"', 'speed="fast"'), 'speed="fast"'),
    "channels that differ": (changed(GRAPH, '<gpu dev="3"/>', "", 1), "do not name the same GPUs"),
    "a path between GPUs": (changed(GRAPH, '"SYS"', '"FAR"'), 'typeintra="FAR"'),
}
TEXT = {
    "no matrix": ("nvidia-smi: command not found\n", "no matrix"),
    "a fused header": (changed(ASUS, "GPU1    GPU2", "GPU1GPU2", 1), "'GPU1GPU2' is not a column"),
    "a fused cell": (
        changed(ASUS, "NODE    NODE    SYS     SYS     0-31", "NODENODE    SYS     SYS     0-31", 1),
        "NODENODE",
    ),
    "a cell that is no cell": (changed(H100, "NV18", "NVLINK", 1), "'NVLINK' in row GPU0, column GPU1"),
    "an affinity that is none": (changed(H100, "0-51,104-155", "0-51;104", 1), "is not an affinity"),
    "a missing cell": (changed(H100, "GPU3    NV18    NV18    NV18     X", "GPU3    NV18    NV18     X"), "row GPU3"),
    "a missing row": (changed(H100, "\nGPU7", "\n\nGPU7"), "8 columns and 7 rows; GPU7 has no row"),
    "a row twice": (changed(H100, "\nGPU7", "\nGPU6"), "row GPU6 appears twice"),
    "one-way": (changed(H100, "X      NV18", "X      SYS ", 1), "but GPU1 reaches GPU0 by NV18"),
    "a GPU that is not itself": (changed(H100, "GPU0     X ", "GPU0    NV18"), "GPU0 reaches itself by 'NV18'"),
    "a stranger": (changed(H100, "\nGPU7", "\nGPU9"), "row 'GPU9' is not one of the columns"),
    "too many cells": (changed(H100, "0-51,104-155    0\n", "0-51,104-155    0   1\n", 1), "more cells than"),
}


def one_message(error):
    assert error.message
    assert "\n" not in error.message
    assert error.at
    assert error.hint


READERS = {
    "topo.xml": (XML, lambda text, at: parse_topology(text.encode(), at=at)),
    "topo.txt": (TEXT, parse_matrices),
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, (cases, _) in READERS.items() for name in cases])
def test_damaged_files(file, name):
    cases, read = READERS[file]
    text, words = cases[name]
    with pytest.raises(TraceError) as caught:
        read(text, at=file)
    assert words in caught.value.message
    one_message(caught.value)


def tar(members, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return buffer.getvalue()


@pytest.fixture
def bundle(hgx, tmp_path):
    record(tmp_path / "bundle", hgx.probe())
    return tmp_path / "bundle"


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


BUNDLES = {
    "no bundle.json": (lambda b: (b / "bundle.json").unlink(), "no bundle.json"),
    "no nvml.json": (lambda b: (b / "nvml.json").unlink(), "no nvml.json"),
    "another schema": (lambda b: (b / "bundle.json").write_text('{"schema": "other/1"}'), "schema is not"),
    "not JSON": (lambda b: (b / "files.json").write_text("{"), "not JSON"),
    "not an object": (lambda b: (b / "files.json").write_text("[]"), "not a JSON object"),
    "not text": (lambda b: (b / "files.json").write_text('{"/a": 1}'), "'/a' is not text"),
    "not UTF-8": (lambda b: (b / "commands.json").write_bytes(b'{"a": "\xff"}'), "not UTF-8"),
    "nested": (lambda b: (b / "nvml.json").write_text("[" * 100_000), "nested too deeply"),
    "a GPU twice": (lambda b: edit(b / "nvml.json", lambda v: v["gpus"][1].update(index=0)), "name a GPU twice"),
    "a width": (lambda b: edit(b / "nvml.json", lambda v: v["gpus"][0]["pcie"].update(width="x")), "gpus.0.pcie.width"),
    "a uuid": (
        lambda b: edit(b / "nvml.json", lambda v: v["gpus"][0]["fabric"].update(cluster_uuid="z")),
        "gpus.0.fabric.cluster_uuid",
    ),
    "too large": (lambda b: (b / "nvml.json").write_bytes(b" " * (4 * 2**20 + 1)), "larger than 4 MiB"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_damaged_bundle(name, bundle):
    damage, words = BUNDLES[name]
    damage(bundle)
    with pytest.raises(TraceError) as caught:
        replay(bundle)
    assert words in caught.value.message
    one_message(caught.value)


def test_damaged_tar(bundle, tmp_path):
    members = {path.name: path.read_bytes() for path in bundle.iterdir()}
    good = tar(members, "w:gz")
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(good)
    assert len(replay(path).gpus) == 8
    for data in (good[: len(good) // 2], b"not a tar", gzip.compress(b"x" * 2000), tar({"other.json": b"{}"})):
        path.write_bytes(data)
        with pytest.raises(TraceError) as caught:
            replay(path)
        one_message(caught.value)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"nvml.json": b" " * (4 * 2**20 + 1)}, r"nvml\.json in the bundle is larger than 4 MiB"),
        ({f"{i}": b"" for i in range(40_001)}, "the bundle has more than 40,000 members"),
    ],
)
def test_a_tar_beyond_a_limit_is_refused_by_that_limit(members, message, tmp_path):
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(tar(members, "w:gz"))
    with pytest.raises(TraceError, match=message):
        replay(path)


def test_a_tar_of_the_most_members_is_read(bundle, tmp_path):
    members = {path.name: path.read_bytes() for path in bundle.iterdir()}
    members |= {f"{i}": b"" for i in range(40_000 - len(members))}
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(tar(members, "w:gz"))
    assert len(replay(path).gpus) == 8


def test_a_tar_that_unpacks_to_gibibytes_is_refused(tmp_path):
    info = tarfile.TarInfo("nvml.json")
    info.size = 2**32
    (tmp_path / "b.tar").write_bytes(info.tobuf() + b"\0" * 4096)
    with pytest.raises(TraceError, match="larger than 64 MiB"):
        replay(tmp_path / "b.tar")


def test_a_path_that_is_not_there():
    with pytest.raises(ConfigError, match="no such bundle"):
        replay(Path("/does/not/exist"))


SPECIAL = ["-1", "99999999999999999999", "NV99", "\t", "\n", "<", '"', "&#0;", "٣", "nan", "\x00"]


def damaged(data, text):
    """Return the text after one to three random edits: a piece cut, doubled, or replaced."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        end = min(len(text), start + data.draw(st.integers(0, 60)))
        new = data.draw(
            st.one_of(
                st.just(""),
                st.just(text[start:end] * 2),
                st.text(max_size=12),
                st.sampled_from(SPECIAL),
            )
        )
        text = text[:start] + new + text[end:]
    return text


def survives(read):
    """Check that reading, and all that follows from it, succeeds or raises a MeshkitError."""
    with contextlib.suppress(MeshkitError):
        for found in read():
            check(found, Cluster.load("dgx_h100"))
            table = to_cluster(found)
            Cluster.load(table)


FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(data=st.data(), name=st.sampled_from(["p4d-24xl", "ncv4", "graph"]))
def test_random_damage_to_xml(data, name):
    text = {"p4d-24xl": P4D, "ncv4": NCV4, "graph": GRAPH}[name]
    raw = damaged(data, text).encode("utf-8", errors="replace")
    survives(lambda: [parse_topology(raw, at=f"{name}.xml")])


@FEW
@given(data=st.data(), text=st.sampled_from([H100, ASUS]))
def test_random_damage_to_a_matrix(data, text):
    survives(lambda: [read_matrix(m, "topo.txt") for m in parse_matrices(damaged(data, text))])


@settings(FEW, max_examples=60)
@given(data=st.data(), name=st.sampled_from(["nvml.json", "files.json", "commands.json"]))
def test_random_damage_to_a_bundle(data, name, tmp_path_factory, hgx):
    folder = tmp_path_factory.mktemp("bundle") / "b"
    record(folder, hgx.probe())
    (folder / name).write_text(damaged(data, (folder / name).read_text()), encoding="utf-8", errors="replace")
    survives(lambda: [replay(folder)])


@FEW
@given(st.binary(max_size=400))
def test_random_bytes(raw):
    survives(lambda: [parse_topology(raw, at="x.xml")])
    survives(lambda: [read_matrix(m, "x") for m in parse_matrices(raw.decode("latin-1"))])


@settings(FEW, max_examples=60)
@given(raw=st.binary(max_size=1500))
def test_random_tar(raw, tmp_path_factory):
    path = tmp_path_factory.mktemp("tar") / "b.tar"
    path.write_bytes(raw)
    survives(lambda: [replay(path)])
