"""Test which way XLA takes a ragged all-to-all: the table, known faults, and prices against measurements."""

from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.errors import ConfigError
from meshkit.hlo.module import read_schedule
from meshkit.hlo.schedule import Collective
from meshkit.linting.ways import apart_axes, is_part
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.nccl import model_constant
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import Pricer
from meshkit.predict.ways import Problem, Way, WayChoice, ways, ways_table
from tests.config.debug_options import fields_of_debug_options
from tests.hlo_text import parse_hlo

PAGE = Path(__file__).parents[2] / "meshkit" / "predict" / "ways.md"
RELEASES = ("0.11.2", "0.12.0.1")
PRICES = {"one-shot", "device kernel", "send"}  # These algorithms price the ways.
H100, GB200 = Cluster.load("dgx_h100", hosts=2), Cluster.load("gb200_nvl72", hosts=18)
EXCHANGE = Collective(
    "r", "r", "ragged-all-to-all", ("expert",), True, "nvlink", None, "bf16", 8, 1, 8, 2**26, slices=32
)


def of(n, g, **changes):
    return replace(EXCHANGE, group_size=n, gpus_per_domain=g, **changes)


def test_every_row_of_the_table_is_whole_and_cites_its_source():
    assert {way.price for way in ways().values()} == PRICES
    for way in ways().values():
        assert all((way.what, way.needs, ".cc:" in way.source)), way.name
    for row in ways_table()["problem"]:
        problem = Problem(**row)
        assert set(problem.ways) <= ways().keys()
        assert all((problem.says, problem.hint, problem.source)), problem
    assert {f.name for f in fields(Way)} >= set(ways_table()["way"][0])


def test_xla_has_the_options_of_the_table():
    assert ways_table()["options"].keys() <= fields_of_debug_options().keys()


POINTERS = {"xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl": False}
DEVICE = {"xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True}
SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": "true"}
FALLBACK = {"xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True}
NO_KERNEL = {"xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": False}


@pytest.mark.parametrize(
    ("cluster", "n", "g", "options", "way"),
    [
        ("dgx_h100", 8, 8, {}, "one-shot"),
        ("gb200_nvl72", 64, 64, {}, "one-shot"),
        ("dgx_h100", 1, 1, {}, "copy"),
        ("dgx_h100", 16, 8, {}, "refused"),
        ("dgx_h100", 16, 8, FALLBACK, "sends"),
        ("dgx_h100", 16, 8, FALLBACK | {"xla_gpu_ragged_all_to_all_mode": "SYMMETRIC"}, "puts"),
        ("dgx_h100", 8, 8, POINTERS, "one-shot by pointers"),
        ("gb200_nvl72", 8, 8, POINTERS, "refused"),  # Two hosts mean two processes.
        ("dgx_h100", 8, 8, NO_KERNEL, "refused"),
        ("dgx_h100", 8, 8, DEVICE, "one-shot"),  # The option does nothing in private memory.
        ("dgx_h100", 16, 8, DEVICE | SYMMETRIC, "device kernel"),
        ("workstation_2xrtx", 2, 2, {}, "one-shot by pointers"),
        ("dgx1_v100", 8, 8, {}, "refused"),  # Four of its GPUs have no NVLink to each other.
    ],
)
def test_the_way_follows_the_group_the_machine_and_the_options(cluster, n, g, options, way):
    assert WayChoice(options).way(of(n, g), Cluster.load(cluster)).name == way


@pytest.mark.parametrize(
    ("n", "jaxlib", "severities"),
    [
        (4, "0.11.2", []),
        (8, "0.12.0.1", ["warning"]),  # The group is on two hosts of the rack.
        (32, "0.11.2", ["warning"]),
        (64, "0.11.2", ["error", "warning"]),
        (64, "0.12.0.1", ["warning"]),
        (64, "0.12.0.dev20260901", ["warning"]),
    ],
)
def test_what_is_known_to_go_wrong_on_a_rack(n, jaxlib, severities):
    choice, c = WayChoice({}, jaxlib), of(n, n)
    found = choice.problems(choice.way(c, GB200), c, GB200)
    assert [p.severity for p in found] == severities
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in p.says for p in found if p.severity == "error")


def cell(cluster, n, jaxlib):
    """Return the page's text for an expert axis: its way, and the problems that end a run."""
    g = min(n, cluster.gpus_used_per_domain)
    choice, c = WayChoice({}, jaxlib), of(g, g)
    way = choice.way(c, cluster)
    errors = [p for p in choice.problems(way, c, cluster) if p.severity == "error"]
    said = way.name + (f": ends the run above {errors[0].above}" if errors and errors[0].above else "")
    return f"in parts over domains, inside {said}" if n > g else said


def test_the_page_has_the_table_of_ways():
    text = PAGE.read_text()
    for way in ways().values():
        assert f"| {way.name} | {way.what} | {way.needs} | {way.source} |" in text
    shown = (("dgx_h100", (8, 16)), ("gb200_nvl72", (4, 32, 64, 72, 144)), ("superpod_h100_nvlink256", (8, 256)))
    for name, sizes in (*shown, ("dgx1_v100", (8,)), ("workstation_2xrtx", (2,))):
        cluster = Cluster.load(name)
        for n in sizes:
            cells = [cell(cluster, n, jaxlib) for jaxlib in RELEASES]
            host, domain = cluster.gpus_per_host, cluster.gpus_used_per_domain
            assert f"| {name} ({host} a host, {domain} a domain) | {n} | {' | '.join(cells)} |" in text, (name, n)


def seconds(payload, n, cluster=GB200, domains=1, **how):
    how |= {"payload_bytes": payload, "gpus_per_domain": n, "domains": domains, "cluster": cluster}
    return collective_time_s("ragged-all-to-all", **how)


@pytest.mark.parametrize(
    ("n", "payload", "slices", "algorithm", "measured", "off"),
    [
        (64, 3.21e9, 1, "one-shot", 24.2e-3, 0.05),  # This row and the next are fitted.
        (64, 3.21e9, 64, "one-shot", 7.56e-3, 0.05),
        (64, 3.2e9, 1, "device kernel", 9.12e-3, 0.05),  # This row is fitted.
        (64, 3.2e9, 3, "device kernel", 12.74e-3, 0.05),
        (64, 3.2e9, 30, "device kernel", 22.74e-3, 0.05),
        (64, 3.2e9, 120, "device kernel", 22.59e-3, 0.05),
        (8, 1e9, 1, "one-shot", 1e9 / 17.6e9, 0.1),  # 8 B200 had 16.42 GiB/s with an older kernel (xla#33386).
    ],
)
def test_prices_are_what_was_measured(n, payload, slices, algorithm, measured, off):
    assert seconds(payload, n, slices=slices, algorithm=algorithm) == pytest.approx(measured, rel=off)


def test_slices_fill_the_one_shot_kernel_until_the_link_is_full():
    few = model_constant("xla_launch_s") + 2 * model_constant("one_shot_s") + model_constant("kernel_gap_s")
    assert seconds(2**26, 8, slices=1) == pytest.approx(few + 2**26 / (8 * model_constant("ragged_block_bytes_per_s")))
    assert seconds(2**26, 8, slices=32) == pytest.approx(seconds(2**26, 8))
    assert seconds(2**26, 8, slices=32) < seconds(2**26, 8, slices=2) / 5


def test_sends_pay_for_every_slice_and_for_the_host():
    one, many = (seconds(2**26, 8, H100, domains=2, slices=n, algorithm="send") for n in (1, 33))
    assert many - one == pytest.approx(16 * 32 * model_constant("ragged_slice_s"))
    plain = collective_time_s("all-to-all", payload_bytes=2**26, gpus_per_domain=8, domains=2, cluster=H100)
    assert one - plain == pytest.approx(2 * model_constant("host_wait_s") + 16 * model_constant("ragged_slice_s"))


def test_what_cannot_be_is_an_error():
    with pytest.raises(ConfigError, match="the model has no one-shot for ragged-all-to-all between domains"):
        seconds(1, 8, H100, domains=2, algorithm="one-shot")
    with pytest.raises(ConfigError, match="of -1 slices is not possible"):
        seconds(1, 8, H100, slices=-1)


def test_the_busiest_gpu_sets_the_pace_up_to_its_buffer():
    """Twice the rows take twice as long on the wire; a buffer with room for 1.5 times them takes no more than that."""

    def wire_s(imbalance, **changes):
        return (
            Pricer(H100, Assumptions(imbalance=imbalance)).ragged_price(of(8, 8, **changes), ways()["one-shot"]).wire_s
        )

    assert wire_s(2.0, room=8.0) == pytest.approx(2 * wire_s(1.0, room=8.0))
    assert wire_s(2.0, room=1.5) == pytest.approx(1.5 * wire_s(1.0))
    assert wire_s(2.0, room=8.0, axes_complete=False) == wire_s(1.0)  # Its payload is the whole buffer.


HLO = """
HloModule m, is_scheduled=true, num_partitions=16
ENTRY %main (a: bf16[16,64], b: bf16[24,64], o: s64[16]) -> bf16[24,64] {
  %a = bf16[16,64] parameter(0)
  %b = bf16[24,64] parameter(1)
  %o = s64[16] parameter(2)
  %x = bf16[24,64] ragged-all-to-all(%a, %b, %o, %o, %o, %o), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, channel_id=1
  %g = bf16[32,64] all-gather(%a), dimensions={0}, replica_groups={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}, channel_id=2, use_global_device_ids=true
  ROOT %y = bf16[24,64] ragged-all-to-all(%a, %x, %o, %o, %o, %o), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7},{8},{9},{10},{11},{12},{13},{14},{15}}, channel_id=3
}
"""  # noqa: E501


def test_slices_room_and_what_was_taken_apart_are_read_from_the_program():
    placement = Placement.from_shape(("expert",), (16,), gpus_per_domain=8)
    schedule = read_schedule(parse_hlo(HLO), placement)
    part, gather, copy = [i.collective for i, _ in schedule.walk() if i.collective is not None]
    assert (part.slices, part.room, part.axes_complete) == (2, 1.5, False)
    assert (copy.slices, copy.group_size, copy.axes) == (16, 1, ())
    apart = apart_axes(iter((part, gather, copy)))
    assert apart == {("expert",)}
    assert is_part(gather, apart)
    assert not is_part(replace(gather, source="jit(step)/attention"), apart)
    way = WayChoice().way(copy, H100)
    assert way.name == "copy"
    blocks_s = 16 * 64 * 2 / (16 * model_constant("ragged_block_bytes_per_s"))
    launch = model_constant("xla_launch_s") + 2 * model_constant("one_shot_s") + model_constant("kernel_gap_s")
    assert Pricer(H100, Assumptions()).ragged_price(copy, way).seconds == pytest.approx(launch + blocks_s)


def test_a_plans_options_choose_the_way():
    assert assumptions_for(DEVICE | SYMMETRIC).ragged.way(of(8, 8), H100).name == "device kernel"
    assert Assumptions().ragged.way(of(8, 8), H100).name == "one-shot"


@pytest.mark.parametrize(("n", "slices"), list(product((8, 64), (1, 32))))
def test_no_way_moves_rows_faster_than_the_links(n, slices):
    """In each way (n - 1) / n of the payload leave a GPU; the rest is latency and the link's share that is reached."""
    floor = 2**30 * (n - 1) / n / GB200.link("nvlink", gpus=n).bytes_per_s
    assert all(seconds(2**30, n, slices=slices, algorithm=way) > floor for way in PRICES)
