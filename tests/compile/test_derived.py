"""Test the XLA options derived from a step: what its loop gathers, over which links, and from what size on they pay."""

from pathlib import Path

import pytest

import meshkit as mk
from meshkit.compile.choices import (
    LoopTraffic,
    derive_options,
    described_memory_bytes,
    loop_traffic,
    memory_option,
    message_bytes,
    options_for,
)
from meshkit.config.experiment import load
from meshkit.config.sections import TrainTable
from meshkit.planning.resolved import make_train_step
from meshkit.predict.assumptions import assumptions_for
from meshkit.predict.network import collective_time_s
from meshkit.sharding.mesh import build_mesh, describe_devices

EXPERIMENTS = Path(__file__).parent.parent.parent / "configs" / "experiments"
MIB = 2**20
# This is the number of weights in a Llama 3 8B layer: hidden 4096, MLP 14336, 32 heads and 8 KV heads of 128.
LAYER_8B = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
PIPELINED = {"xla_gpu_pipeline_all_gather", "xla_gpu_pipeline_reduce_scatter", "xla_gpu_pipeline_all_reduce"}
BUFFERED = {"xla_gpu_enable_while_loop_double_buffering"}
MEMORY = {"xla_gpu_memory_limit_slop_factor"}
COMBINED = {f"xla_gpu_{k}_combine_threshold_bytes" for k in ("all_gather", "reduce_scatter", "all_reduce")}


def made(*overrides, experiment="llama3_8b"):
    found = load(EXPERIMENTS / f"{experiment}.toml", ["train.sequence_length=512", *overrides])
    mesh = build_mesh(found.mesh, found.cluster, devices=describe_devices(found.cluster))
    return make_train_step(found, mesh), found.cluster, found.placement


def traffic_of(*overrides):
    program, _, placement = made(*overrides)
    return loop_traffic(program, placement)


FSDP = ["mesh={fsdp={nvlink=8,infiniband=2}}", 'rules.preset="fsdp"', "model.layers=2"]


def test_a_loop_gathers_the_weights_of_a_layer_in_the_compute_precision():
    traffic = traffic_of(*FSDP)
    assert traffic == LoopTraffic(("fsdp",), 2 * LAYER_8B, gpus_per_domain=8, domains=2)


def test_matmuls_in_fp8_are_those_of_cublas():
    for precision, expected in (("fp8", [False]), ("bf16", [])):
        options = derive_options(*made(*FSDP, f"train.precision={precision}"))
        assert [o.value for o in options if o.name == "xla_gpu_enable_triton_gemm"] == expected


def test_what_tensor_parallelism_cuts_stays_cut():
    """tensor = 2 shards every matrix; the two norms (2 x 4096) stay whole."""
    traffic = traffic_of("model.layers=2")
    assert traffic is not None
    assert traffic.gathered_bytes == 2 * ((LAYER_8B - 2 * 4096) / 2 + 2 * 4096)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (['rules.preset="zero1"'], "weights are whole for compute"),
        (["train.accumulate=2", "train.global_batch=32"], "weights are gathered once a step, outside of the loop"),
        (
            ['rules.preset="fsdp_tensor_sequence"', "mesh={fsdp={nvlink=4,infiniband=2},tensor=2}"],
            "activations gathered",
        ),
    ],
    ids=["zero1", "accumulate", "sequence"],
)
def test_no_options_where_nothing_is_gathered_or_others_would_wait(overrides, why):
    assert {o.name for o in derive_options(*made(*FSDP, *overrides))} == MEMORY, why


@pytest.mark.parametrize("tensor", [[], ['rules.preset="fsdp_tensor"', "mesh={fsdp={nvlink=4,infiniband=2},tensor=2}"]])
def test_a_sharded_loop_is_pipelined_buffered_and_combined(tensor):
    """The options are the same beside the all-reduces of tensor parallelism."""
    options = derive_options(*made(*FSDP, *tensor))
    assert {o.name for o in options} == PIPELINED | BUFFERED | COMBINED | MEMORY
    assert all(o.why for o in options)


@pytest.mark.parametrize(("domains", "hosts"), [(1, 1), (2, 2), (64, 64)])
def test_the_threshold_is_the_smallest_size_with_most_of_the_bandwidth(domains, hosts):
    cluster = mk.Cluster.load("dgx_h100", hosts=hosts)
    traffic = LoopTraffic(("fsdp",), 2**34, gpus_per_domain=8, domains=domains)
    size = message_bytes("all-gather", traffic, cluster)

    def seconds(size):
        return collective_time_s("all-gather", payload_bytes=size, gpus_per_domain=8, domains=domains, cluster=cluster)

    full = 2**32 / (seconds(2**33) - seconds(2**32))
    assert size / seconds(size) >= 0.9 * full
    assert size == 30 * MIB or size / 2 / seconds(size / 2) < 0.9 * full


def test_more_gpus_need_larger_messages_but_none_beyond_a_layer():
    layer = 2.0 * LAYER_8B
    sizes = [
        message_bytes("all-gather", LoopTraffic(("fsdp",), layer, 8, hosts), mk.Cluster.load("dgx_h100", hosts=hosts))
        for hosts in (1, 8, 64, 512)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert sizes[-1] < 2 * layer


def test_a_reduce_scatters_limit_is_of_what_it_leaves_on_a_gpu():
    cluster = mk.Cluster.load("dgx_h100", hosts=8)
    traffic = LoopTraffic(("fsdp",), 2**34, 8, 8)
    values = {o.name: o.value for o in options_for(traffic, cluster)}
    whole = message_bytes("reduce-scatter", traffic, cluster)
    assert values["xla_gpu_reduce_scatter_combine_threshold_bytes"] == whole // 64


@pytest.mark.parametrize("fraction", [0.92, 0.8, 0.5])
def test_xla_may_use_what_the_client_may_take(fraction):
    """A step that fits has no limit; any other keeps to the client's pool, of which XLA takes 0.8 of the memory."""
    option, cluster = memory_option(fraction), mk.Cluster.load("dgx_h100")
    assert option.value == 10_000
    assert option.tight is not None
    assert option.tight[0] == 100
    assert not option.costs_memory
    described = described_memory_bytes({option.name: 100}, cluster, fraction)
    assert 0.8 * described == pytest.approx(fraction * cluster.gpu.memory_bytes, abs=1)


def test_without_a_client_xla_keeps_within_the_clients_pool():
    """XLA stays within the pool at any percentage; a limit out of reach leaves the GPU's memory as it is."""
    name, cluster = memory_option(0.92).name, mk.Cluster.load("dgx_h100")
    pool = described_memory_bytes({}, cluster, 0.5)
    assert 0.8 * pool == pytest.approx(0.5 * cluster.gpu.memory_bytes, abs=1)
    assert described_memory_bytes({name: 50}, cluster, 0.5) == pool
    assert described_memory_bytes({name: 10_000}, cluster, 0.5) == cluster.gpu.memory_bytes


def test_xla_need_not_make_room_for_what_waits_in_host_memory():
    """XLA counts host memory as the GPU's, so the limit is 100 times 80 % of an H100, more than any machine has."""
    option = memory_option(0.92, offloads=True)
    assert (option.value, option.tight) == (10_000, None)
    for remat in ("offload", "offload_dots", {"offload": ["gate"]}):
        assert TrainTable(global_batch=1, remat=remat).offloads
    for remat in ("none", "full", ("gate",)):
        assert not TrainTable(global_batch=1, remat=remat).offloads


def test_copies_to_host_memory_stay_out_of_cuda_graphs():
    """In CUDA graphs the copies wait in line with kernels; a plan with XLA's own list prices them so."""
    found = {o.name: o.value for o in derive_options(*made("model.layers=2", "train.remat=offload"))}
    assert not assumptions_for(found).graphed_copies
    assert "xla_gpu_enable_command_buffer" not in {o.name for o in derive_options(*made("model.layers=2"))}
    assert assumptions_for({}).graphed_copies
    assert assumptions_for({"xla_gpu_enable_command_buffer": "FUSION,DYNAMIC_SLICE_FUSION"}).graphed_copies


def test_a_step_can_have_somebody_elses_options_alone():
    assert derive_options(*made("model.layers=2", "train.derived_options=false")) == ()


def test_a_cpu_has_none():
    assert derive_options(*made(experiment="llama_debug_cpu")) == ()
