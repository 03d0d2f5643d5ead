"""Test NCCL Inspector's files, made in each format: rows, waiting, stragglers, and the warnings of what they lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshkit.cli import app
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError, TraceError
from meshkit.trace.inspector import FORMATS, Communicator, find_inspector_files, shape_on
from meshkit.verbs.profile.profiler import profile_inspector

HOSTS, GPUS, STEPS, LATE = 2, 4, 5, 2
MESSAGE, WAIT_US = 2**24, 30
CLUSTER = 'gpu = "h100_sxm"\nhosts = 2\ngpus_per_host = 4\nscale_up = "nvlink"\nnic = "ib_ndr"\nnics_per_host = 4\n'


def _header(communicator: str, rank: int, ranks: int, nodes: int) -> dict:
    return {"id": communicator, "rank": rank, "n_ranks": ranks, "nnodes": nodes}


def _operation(name: str, number: int, size: int, time_us: int, **more) -> dict:
    return {
        "coll_perf": {
            "coll": name,
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": time_us,
            "coll_timing_source": "kernel_gpu",
        }
        | more
    }


ONE = (1, MESSAGE // 2, 50)


def write(
    folder: Path,
    version: str = "v4.3",
    *,
    dropped: int = 0,
    gpus_per_process: int = 1,
    late: tuple[int, ...] = (LATE, LATE + GPUS),
    scatters: tuple[int, int, int] = ONE,
) -> list[Path]:
    """Write a job of 2 x 4 GPUs: all-reduces inside hosts, for which some GPUs are late, and reduce-scatters across.


    Args:
        scatters: how many a step, of how many bytes kept, and their microseconds.
    """
    each, kept, time_us = scatters
    folder.mkdir()
    for host in range(HOSTS):
        for first in range(0, GPUS, gpus_per_process):
            lines = []
            pid = 99 + host * GPUS + first  # As text, 99 sorts behind 100.
            metadata = {"inspector_output_format_version": version, "hostname": f"n{host}", "pid": pid}
            for gpu in range(first, first + gpus_per_process):
                waits = host in (i // GPUS for i in late) and host * GPUS + gpu not in late
                inside = [_operation("AllReduce", n, MESSAGE, 100 + waits * WAIT_US) for n in range(2 * STEPS)]
                across = [_operation("ReduceScatter", n, kept, time_us) for n in range(each * STEPS)]
                for header, operations in (
                    (_header(f"0xa{host}", gpu, GPUS, 1), inside),
                    (_header(f"0xb{gpu}", host, HOSTS, HOSTS), across),
                ):
                    context = {"header": header, "metadata": metadata}
                    stats = {"coll_records": len(operations), "coll_dropped_since_last_dump": dropped}
                    lines.append({**context, "dump_stats": stats | {"p2p_records": 0}})
                    lines += operations if version == "v4.3" else [context | o for o in operations]
            (folder / f"n{host}-pid{pid}.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return find_inspector_files(folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return Cluster.load(str(tmp_path / "cluster.toml"))


@pytest.mark.parametrize("version", FORMATS)
def test_rows_are_means_a_gpu_in_every_format(tmp_path: Path, version: str) -> None:
    report = profile_inspector(write(tmp_path / "seen", version))
    inside, across = report.communication
    assert (inside.collective, inside.group_size, inside.num_groups, inside.count) == ("all-reduce", 4, 2, 2 * STEPS)
    assert inside.payload_bytes == 2 * STEPS * MESSAGE
    assert inside.wire_bytes == pytest.approx(2 * STEPS * MESSAGE * 2 * 3 / 4)
    assert inside.busy_s == pytest.approx(2 * STEPS * (100 + WAIT_US * 3 / 4) * 1e-6)
    assert inside.transfer_s == pytest.approx(2 * STEPS * 100e-6)
    assert inside.wait_s == pytest.approx(2 * STEPS * WAIT_US * 3 / 4 * 1e-6)
    assert inside.bus_bandwidth_bytes_per_s == pytest.approx(MESSAGE * 1.5 / 100e-6)
    # NCCL counts what each rank keeps; the payload is what goes in, as everywhere in a report.
    assert (across.collective, across.payload_bytes) == ("reduce-scatter", STEPS * MESSAGE)
    assert across.wait_s == 0
    assert report.window.devices == HOSTS * GPUS
    assert report.quality
    assert report.quality.events == 8 * 3 * STEPS
    assert report.step.compute_s is report.step.exposed_s is report.step.overlapped_s is None
    assert {w.code for w in report.warnings} == {"inspector", "no_mesh", "no_steps"}


def test_steps_and_the_late_gpu(tmp_path: Path) -> None:
    files = write(tmp_path / "seen")
    records = [{"step": i, "step_time_s": 0.5 + 0.1 * (i == 3)} for i in range(STEPS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    report = profile_inspector(files)
    assert (report.window.steps, report.step.time_s) == (STEPS, 0.5)
    assert report.communication[0].count == 2
    assert report.stragglers is not None
    worst = report.stragglers.devices[:2]
    assert {(d.device, d.host) for d in worst} == {(2, "n0"), (6, "n1")}
    assert worst[0].caused_wait_s == pytest.approx(2 * 3 * WAIT_US * 1e-6)
    assert worst[0].waited_s == 0
    assert worst[0].delay_s == pytest.approx(2 * WAIT_US * 1e-6)
    assert worst[0].last_share == pytest.approx(2 / 3)
    assert all(d.caused_wait_s == 0 for d in report.stragglers.devices[2:])


def steps_of(files: list[Path], time_s: float) -> list[Path]:
    """Return the files, with a metrics.jsonl of steps of this length beside their folder."""
    records = [{"step": i, "step_time_s": time_s} for i in range(STEPS)]
    (files[0].parent.parent / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return files


MESH = MeshSpec.parse({"data": {"infiniband": 2}, "tensor": 4})
AT_MOST = "Communication takes at most {} % of the step of {}. It is unknown how much of it is overlapped by compute. "


def test_what_is_shown_has_no_empty_bars(tmp_path: Path) -> None:
    steps_of(write(tmp_path / "seen"), 1e-3)
    done = CliRunner().invoke(app, ["profile", str(tmp_path / "seen"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Communication takes at most ")
    assert "step time" not in done.stdout
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.json", "report.html"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "in collectives, overlapped or not" in page
    assert "<h2>Step time" not in page
    assert "exposed communication" not in page


@pytest.mark.parametrize("version", FORMATS)
def test_the_verdict_names_the_late_rank_in_every_format(tmp_path: Path, version: str) -> None:
    report = profile_inspector(steps_of(write(tmp_path / "seen", version, late=(6,)), 1.25e-3))
    # The share is (2 x (100 us + 30 us x 3/4 of half of the hosts) + 50 us) of 1.25 ms.
    assert report.verdict == (
        AT_MOST.format("21.8", "1.25 ms") + "81.7 % of it is the all-reduce in groups of 4. Nothing stands out in it."
    )
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.step_s) == ("waiting_for_peers", "note", None)
    assert finding.seconds == pytest.approx(2 * WAIT_US * 3 / 8 * 1e-6)
    assert "100.0 % of it for GPU 6 (process 6 on n1)" in finding.message
    shorter = profile_inspector(steps_of(find_inspector_files(tmp_path / "seen"), 4e-4))
    assert shorter.findings[0].severity == "warning"
    assert shorter.verdict
    assert shorter.verdict.endswith(shorter.findings[0].message)


def test_the_verdict_of_steps_that_nobody_knows(tmp_path: Path) -> None:
    report = profile_inspector(write(tmp_path / "seen", dropped=5))
    assert report.verdict
    assert report.verdict.startswith(
        "Communication took 1.48 ms of a GPU's time (80 dropped operations are not counted). The step time is unknown"
    )
    assert " a step" not in report.findings[0].message


@pytest.mark.parametrize(
    ("scatters", "code", "told"),
    [
        (
            (1, 2**24, 2000),
            "slow_link",
            "of NCCL's speed at its size, 32.0 MiB on infiniband_ndr: 8.39 GB/s instead of the network",
        ),
        (
            (40, 2**14, 12),
            "small_collectives",
            "40 times a step the reduce-scatter over data moves 32.0 KiB on average",
        ),
        (ONE, None, "Nothing stands out in it."),
    ],
)
def test_links_and_small_messages(tmp_path: Path, cluster: Cluster, scatters, code, told) -> None:
    files = steps_of(write(tmp_path / "seen", late=(), scatters=scatters), 3e-3)
    report = profile_inspector(files, mesh=MESH, cluster=cluster)
    assert [f.code for f in report.findings] == ([code] if code else [])
    assert report.verdict
    assert told in report.verdict.replace("The reduce", "the reduce")
    assert all(f.evidence and f.hint and f.step_s is None for f in report.findings)
    # Without places no link is known; many small messages are seen beside the best rate of the others.
    assert [f.code for f in profile_inspector(files).findings] == ([code] if code == "small_collectives" else [])


def test_axes_and_links_by_the_shape_of_communicators(tmp_path: Path, cluster: Cluster) -> None:
    report = profile_inspector(write(tmp_path / "seen", gpus_per_process=4), mesh=MESH, cluster=cluster)
    inside, across = report.communication
    assert (inside.axes, inside.link, inside.wire_bytes_infiniband) == (("tensor",), "nvlink", 0)
    assert (across.axes, across.link, across.gpus_per_domain) == (("data",), "infiniband", 1)
    assert across.wire_bytes_infiniband == across.wire_bytes
    assert inside.bus_bandwidth_peak_bytes_per_s
    assert report.stragglers is None  # The files do not tell the four GPUs of a process apart.
    # Several axes have one shape, so no axis is named.
    alike = MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 2, "tensor": 2})
    placement = alike.placement(cluster)
    assert shape_on(placement, Communicator(2, 1)) is None
    together = shape_on(placement, Communicator(4, 1))
    assert together
    assert together.axes == ("fsdp", "tensor")
    with pytest.raises(ConfigError, match="are both needed"):
        profile_inspector(find_inspector_files(tmp_path / "seen"), mesh=MESH)


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    files = write(tmp_path / "seen", dropped=5)
    with files[0].open("a") as file:  # A kill cut the file short, and another has a payload that no header precedes.
        file.write('{"coll_perf": {"coll": "AllRed')
    files[1].unlink()
    report = profile_inspector(find_inspector_files(tmp_path / "seen"))
    said = {w.code: w.message for w in report.warnings}
    assert "70 operations" in said["dropped_events"]
    assert "lower bounds" in said["dropped_events"]
    assert said["unread_lines"].startswith("1 lines")
    assert "waiting_unknown" in said
    assert report.communication[0].wait_s is None
    assert report.communication[0].bus_bandwidth_bytes_per_s is None


def test_another_format_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path / "seen", "v5.0")
    with pytest.raises(TraceError, match=r"format 'v5\.0', but meshkit reads v4\.0 to v4\.3"):
        profile_inspector(files)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"coll_perf": 3, "header": 4, "metadata": 5}',
        '{"coll_perf": {"coll": "AllReduce", "coll_sn": -1, "coll_msg_size_bytes": 1e400, "coll_exec_time_us": 2}}',
        '{"header": {"id": "0x1", "rank": 9, "n_ranks": 2, "nnodes": 1}, "coll_perf": {"coll": "AllReduce"}}',
        '{"dump_stats": [], "header": null}',
        (
            '{"header": {"id": "0x1", "rank": 4611686018427387903, "n_ranks": 4611686018427387904, "nnodes": 1}, '
            '"metadata": {"inspector_output_format_version": "v4.3"}, "coll_perf": {"coll": "AllReduce", "coll_sn": 0, '
            '"coll_msg_size_bytes": 1, "coll_exec_time_us": 2}}'
        ),
        "[" * 100_000,
    ],
)
def test_damaged_lines_are_no_crash(tmp_path: Path, line: str) -> None:
    files = write(tmp_path / "seen")
    (tmp_path / "seen" / "n9-pid9.log").write_text('{"dump_stats": {}}\n' + line + "\n")
    found = find_inspector_files(tmp_path / "seen")
    assert len(found) == len(files) + 1
    assert profile_inspector(found).communication[0].count == 2 * STEPS


def test_nothing_inside(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("INFO starting\n")
    assert find_inspector_files(tmp_path) == []
    (tmp_path / "b.log").write_text('{"dump_stats": {}}\n')
    with pytest.raises(TraceError, match="no collective"):
        profile_inspector(find_inspector_files(tmp_path))
