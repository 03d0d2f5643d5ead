"""Test operations that partition themselves, on absent GPUs: attention, scaled matmuls, and a user's own."""

import functools
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.errors import ProgramError
from meshkit.planning.planner import make_plan

pytestmark = pytest.mark.deviceless
MESH = {"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2}
CUT = PartitionSpec(("data", "fsdp"), None, "tensor", None)
SHAPE = (16, 512, 8, 128)


@functools.cache
def cluster(name="dgx_h100"):
    return mk.Cluster.load(name, hosts=2)


@functools.cache
def mesh(name="dgx_h100"):
    return mk.build_mesh(mk.MeshSpec.parse(MESH), cluster(name), devices=mk.describe_devices(cluster(name)))


def array(shape, spec, dtype=jnp.bfloat16, name="dgx_h100"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(name), spec))


def planned(step, *args, name="dgx_h100"):
    return make_plan(step, args, mesh=mesh(name), cluster=cluster(name))


def operations(plan):
    """Count what a GPU runs: each custom call by target and shape, each collective by axes, type and payload."""
    calls = Counter(
        (i.target, str(i.shape))
        for computation in plan.compiled.hlo.computations.values()
        for i in computation.order
        if i.opcode == "custom-call" and "fmha" in i.target
    )
    rows = {(r.axes, r.collective, r.dtype, r.count, r.payload_bytes) for r in plan.report.communication}
    return calls, rows


def attention(**options):
    return lambda *args, **more: jax.nn.dot_product_attention(*args, implementation="cudnn", **options, **more)


def gradients(fn, arguments=3):
    return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), tuple(range(arguments)))


def of_lengths(fn):
    return lambda q, k, v, lengths: fn(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


LENGTHS = (array((16,), PartitionSpec(("data", "fsdp")), jnp.int32),)
PACKED = tuple(array((16, n), PartitionSpec(("data", "fsdp")), jnp.int32) for n in (4, 5))
BIAS = (array((16, 8, 512, 512), PartitionSpec(("data", "fsdp"), "tensor")),)


def packed(q, k, v, lengths, offsets):
    more = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    return fused.dot_product_attention(q, k, v, mask_type=fused.MaskType.PADDING_CAUSAL, **more)


def modified(q, k, v):
    return fused.dot_product_attention(q, k, v, score_mod=lambda scores: 30 * jnp.tanh(scores / 30))


def in_eight_bits(q, k, v):
    scales = dict.fromkeys(fused.fp8_params_keys, jnp.ones((1, 1, 1, 1), jnp.float32))
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
    return fused.dot_product_attention(q, k, v, fp8_params=scales, use_fp8=True)[0]


@pytest.mark.parametrize(
    ("fn", "more", "bounds"),
    [
        (attention(is_causal=True), (), {}),
        (lambda q, k, v, bias: attention()(q, k, v, bias), BIAS, {}),
        (of_lengths(attention()), LENGTHS, {"padded_attention": "(512 tokens)"}),
        (attention(is_causal=True, local_window_size=(128, 0)), (), {}),
        (packed, PACKED, {"packed_attention": "(at most 4 sequences in 512 tokens)"}),
        (modified, (), {}),
        (in_eight_bits, (), {}),
    ],
    ids=["causal", "bias", "lengths", "window", "packed", "score_mod", "fp8"],
)
def test_attention_is_that_of_a_shard_map_with_the_same_specs(fn, more, bounds):
    """Where lengths are arguments, the plan says that its price is an upper bound, and for which lengths."""
    args = (*(array(SHAPE, CUT) for _ in range(3)), *more)
    specs = tuple(a.sharding.spec for a in args)
    inside = jax.shard_map(fn, mesh=mesh(), in_specs=specs, out_specs=CUT, check_vma=False)
    plan = planned(gradients(fn), *args)
    assert operations(plan) == operations(planned(gradients(inside), *args))
    said = {w.code: w.message for w in plan.report.warnings if "attention" in w.code}
    assert said.keys() == bounds.keys()
    assert all("an upper bound" in said[code] and lengths in said[code] for code, lengths in bounds.items())


def test_a_cut_that_attention_cannot_have_is_refused_with_its_line():
    cut = PartitionSpec(("data", "fsdp"), "tensor", None, None)
    with pytest.raises(ProgramError, match=r"attention_fwd.*Sharding on sequence dim .*at .*test_partitioned\.py:\d+"):
        planned(attention(is_causal=True), *(array(SHAPE, cut) for _ in range(3)))


def block_scaled(name):
    """Return the plan of a block-scaled projection and its gradients: 4 x 1024 tokens and half of the columns."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    x, w = (
        array((32, 1024, 1024), PartitionSpec(("data", "fsdp")), name=name),
        array((1024, 2048), PartitionSpec(None, "tensor"), name=name),
    )

    def step(x, w):
        dims = (((2,), (0,)), ((), ()))
        product = jax.nn.scaled_dot_general(x, w, dims, preferred_element_type=jnp.bfloat16, configs=[config] * 3)
        return jnp.square(product.astype(jnp.float32)).sum()

    return planned(jax.grad(step, (0, 1)), x, w, name=name)


def test_scaled_matmuls_are_partitioned_and_priced_on_a_gpu_that_has_them():
    """The forward pass and both gradients are cuDNN's MXFP8 calls of 2 m n k FLOP each."""
    plan = block_scaled("dgx_b200")
    calls = [i for i, _ in plan.schedule.walk() if i.cost and "mxfp8" in i.cost.matmul_flops]
    assert [i.opcode for i in calls] == ["custom-call"] * 3
    assert [i.cost.matmul_flops for i in calls if i.cost] == [{"mxfp8": 2.0 * (4 * 1024) * 1024 * (2048 // 2)}] * 3
    assert not {"opaque_custom_call", "precision"} & {w.code for w in plan.report.warnings}


def test_scaled_matmuls_inside_a_shard_map_are_priced_too():
    """Inside a shard_map the call goes to XLA as it is, and nothing partitions itself."""
    rows, f8, e8 = PartitionSpec(None, ("data", "fsdp", "tensor")), jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    fn = jax.shard_map(jax.nn.scaled_matmul, mesh=mesh("dgx_b200"), in_specs=(rows,) * 4, out_specs=rows)
    shapes = ((2048, 1024), f8), ((2048, 1024), f8), ((2048, 32), e8), ((2048, 32), e8)
    plan = planned(fn, *(array((1, *shape), rows, dtype, "dgx_b200") for shape, dtype in shapes), name="dgx_b200")
    assert [i.cost.matmul_flops for i, _ in plan.schedule.walk() if i.cost and i.cost.matmuls] == [
        {"mxfp8": 2.0 * 128 * 128 * 1024}
    ]


def test_scaled_matmuls_that_xla_dequantizes_are_named():
    warnings = {w.code: w.message for w in block_scaled("dgx_h100").report.warnings}
    assert "100% of the FLOP of block-scaled matmuls run in bf16 or fp32: NVIDIA H100" in warnings["precision"]


def test_a_scaled_dot_over_several_gpus_names_what_to_use():
    f8, e8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    dims = (((1,), (1,)), ((), ()))

    def multiplied(a, b, x, y):
        return jax.lax.scaled_dot(a, b, lhs_scale=x, rhs_scale=y, dimension_numbers=dims)

    args = [array((128, k), PartitionSpec("fsdp"), dtype) for k, dtype in ((64, f8), (64, f8), (2, e8), (2, e8))]
    with pytest.raises(ProgramError, match=r"(?s)StableHLO.*try jax\.nn\.scaled_matmul"):
        planned(multiplied, *args)


def own(scale, kept=None):
    """Return an operation that a user partitions himself: its rows stay sharded and its columns are whole."""

    @custom_partitioning
    def softmax(x):
        return jax.nn.softmax(x * scale, axis=-1)

    def partition(mesh, arg_shapes, result_shape):
        assert kept is None
        spec = PartitionSpec(arg_shapes[0].sharding.spec[0], None)
        cut = NamedSharding(mesh, spec)
        return mesh, lambda x: jax.nn.softmax(x * scale, axis=-1), cut, (cut,)

    softmax.def_partition(partition, sharding_rule="i j -> i j", need_replication_factors=("j",))
    return lambda x: softmax(x)


def test_a_users_own_operation_is_cut_as_its_callback_says():
    rows = array((64, 1024), PartitionSpec("fsdp", None), jnp.float32)
    columns = array((64, 1024), PartitionSpec("fsdp", "tensor"), jnp.float32)
    assert not planned(own(2.0), rows).report.communication
    (row,) = planned(own(2.0), columns).report.communication
    assert (row.axes, row.collective, row.payload_bytes) == (("tensor",), "all-gather", 16 * 1024 * 4)
    assert "test_partitioned.py" in (row.ops[0].line or "")


def test_a_callback_that_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(ProgramError, match=r"callback of softmax at .*test_partitioned\.py:\d+ cannot be sent"):
        planned(own(2.0, lock), array((64, 1024), PartitionSpec("fsdp"), jnp.float32))
