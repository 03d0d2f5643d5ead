"""Test that each class of lint finding can be produced, that intended placements are silent, and the allow list."""

import tomllib
from dataclasses import replace

import pytest

import meshkit as mk
from meshkit.config.sections import AllowTable
from meshkit.linting.placements import Finding, Subject, apply_allow_list, lint, summarize_unmatched
from meshkit.sharding.constrain import Activation
from meshkit.sharding.resolve import Placed

MIB = 2**20
SPEC = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2}).resolve(
    mk.Cluster.load("dgx_h100", hosts=2)
)
LOGICAL = {"act_batch": ["data", "fsdp"], "embed": "fsdp", "mlp": "tensor", "act_mlp": "tensor"}
NAMES = {"up": ("embed", "mlp"), "norm": ("embed",)}


def kernel(path="up", shape=(1024, 4096), names=("embed", "mlp"), spec=(("fsdp",), ("tensor",)), rule="logical"):
    return Placed(path, shape, "float32", names, spec, rule)


def activation(*names, shape=(16, 128, 4096), spec=(("data", "fsdp"), (), ("tensor",)), dropped=()):
    return Activation(names or ("act_batch", "act_length", "act_mlp"), shape, "bfloat16", spec, dropped)


def subject(*, parameters=(), activations=None, logical=LOGICAL, spec=SPEC, **options):
    rules = {k: options.pop(k) for k in ("overrides", "compute", "gradients", "optimizer", "auto") if k in options}
    return Subject(
        parameters=(kernel(), *parameters),
        activations=(activation(),) if activations is None else activations,
        rules=mk.ShardingRules(logical, **rules),
        spec=spec,
        **options,
    )


def only(findings, code):
    assert [f.code for f in findings] == [code]
    return findings[0]


def test_a_sound_experiment_has_no_findings():
    assert lint(subject()) == []


def test_a_parameter_without_names_or_rules_is_unmatched_and_the_hint_is_toml_that_cuts_it():
    bare = kernel("adapter/w", (6, 4096), None, ((), ()), "none")
    found = only(lint(subject(parameters=[bare])), "unmatched_parameter")
    assert (found.severity, found.path) == ("warning", "adapter/w")
    assert "96.0 KiB" in found.message
    (override,) = tomllib.loads(found.hint.split("] below")[0] + "]")["override"]
    assert override == {"path": "adapter/w", "spec": ["replicated", "fsdp"]}  # 4 divides 4096, but not 6.


def test_many_parameters_without_rules_are_one_sum():
    bare = [kernel(f"layer{i}/w", (256, 256 + i), None, ((), ()), "none") for i in range(5)]
    s = subject(parameters=[*bare, kernel("count", (), None, (), "none")])
    found = only(summarize_unmatched(lint(s), s), "unmatched_parameter")
    assert (found.severity, found.path) == ("warning", "parameters")
    assert found.message.startswith("5 of 6 parameters have no dim names")
    assert "the largest is layer4/w [256, 260]" in found.message
    assert found.hint.startswith('[rules.auto] with axis = "fsdp"')
    few = subject(parameters=bare[:3])
    assert summarize_unmatched(lint(few), few) == lint(few)


def test_a_scalar_needs_no_rule():
    assert lint(subject(parameters=[kernel("temperature", (), None, (), "none")])) == []


def test_an_unmatched_parameter_is_a_note_where_nothing_is_cut():
    bare = kernel("w", (8, 8), None, ((), ()), "none")
    whole = Subject([bare], [activation(spec=(("data",), (), ()))], mk.ShardingRules({"act_batch": "data"}),
                    mk.MeshSpec.parse({"data": 8}))  # fmt: skip
    assert only(lint(whole), "unmatched_parameter").severity == "note"


@pytest.mark.parametrize(
    ("rules", "path"),
    [
        ({"logical": {**LOGICAL, "heads": "tensor"}}, "heads"),
        ({"overrides": [("**/router", ("fsdp",))]}, "**/router"),
        ({"compute": {"embd": "replicated"}}, "embd"),
        ({"optimizer": {"act_mlp": "replicated"}}, "act_mlp"),  # An activation has no optimizer state.
        ({"auto": {"axis": "fsdp"}}, "auto"),
    ],
)
def test_a_rule_that_never_fires(rules, path):
    assert only(lint(subject(**rules)), "rule_never_used").path == path


def test_a_mistyped_rule_names_the_one_that_was_meant():
    found = [f for f in lint(subject(logical={**LOGICAL, "embedd": "fsdp"})) if f.code == "rule_never_used"]
    assert found[0].hint == "'embed' in its place, or removing embedd from [rules.logical]"


def test_a_preset_may_name_what_the_model_has_not():
    rules = mk.ShardingRules.preset("fsdp_tensor")
    assert lint(Subject((kernel(),), (activation(),), rules, SPEC, written={})) == []
    zero = mk.ShardingRules({**LOGICAL}, compute={"vocab": "replicated"})
    assert lint(Subject((kernel(),), (activation(),), zero, SPEC, written={"preset": "zero1"})) == []


@pytest.mark.parametrize(
    ("rules", "path", "says"),
    [
        ({"overrides": [("**", ("fsdp", "tensor")), ("up", ("fsdp", None))]}, "up", "'**', which comes first"),
        ({"overrides": [("up", ("fsdp", None)), ("up", ("fsdp", "tensor"))]}, "up", "never applies"),
        ({"compute": {"embed": "fsdp"}}, "embed", "repeats [rules.logical]"),
        ({"optimizer": {"mlp": "tensor"}}, "mlp", "repeats [rules.logical]"),
    ],
)
def test_a_rule_said_twice(rules, path, says):
    found = only(lint(subject(**rules)), "duplicate_rule")
    assert found.path == path
    assert says in found.message


def test_gradients_may_repeat_a_rule_since_that_says_when_to_reduce():
    assert lint(subject(gradients={"embed": "fsdp"})) == []


def test_a_dim_that_does_not_divide_states_what_padding_costs():
    """A dim that does not divide stays whole, and the finding says what padding would cost.

    With 6 heads over 4, each GPU holds all 6; padded to 8 it would hold 2, and 2/8 of the array would be padding. Of 16
    x 128 x 6 x 64 bf16 = 1.5 MiB over 2 (data), a head is 128 KiB, so 2 more heads over 4 GPUs cost 64 KiB.
    """
    logical = {"act_batch": "data", "embed": "fsdp", "mlp": "tensor", "act_mlp": "tensor", "act_heads": "fsdp"}
    uneven = activation(
        "act_batch", None, "act_heads", None, shape=(16, 128, 6, 64), spec=(("data",), (), (), ()), dropped=("fsdp",)
    )
    (found,) = (f for f in lint(subject(logical=logical, activations=[activation(), uneven])) if f.path == "act_heads")
    assert found.code == "axis_left_out"
    assert "has size 6, which the 4 GPUs of mesh axis 'fsdp' do not divide" in found.message
    assert "padding to 8 would cost 64.0 KiB a GPU" in found.message


@pytest.mark.parametrize(
    ("mesh", "logical", "role"),
    [
        ({"fsdp": 8, "tensor": {"infiniband": 2}}, LOGICAL | {"act_batch": "fsdp"}, "tensor"),
        (
            {"fsdp": 8, "expert": {"infiniband": 2}},
            {"act_batch": ["fsdp", "expert"], "embed": "fsdp", "experts": "expert", "mlp": "replicated"},
            "expert",
        ),
    ],
)
def test_a_tensor_or_expert_axis_across_nvlink_domains(mesh, logical, role):
    spec = mk.MeshSpec.parse(mesh).resolve(mk.Cluster.load("dgx_h100", hosts=2))
    batch = tuple(a for a in ("fsdp", "expert") if a in logical["act_batch"])
    axes = ((), ()) if role == "expert" else ((), ("tensor",))
    weights = kernel("experts/up", (8, 1024, 64), ("experts", "embed", None), ((role,), ("fsdp",), ()))
    x = activation(spec=(batch, *axes))
    found = Subject([kernel(spec=(("fsdp",), axes[1])), *([weights] if role == "expert" else [])], [x],
                    mk.ShardingRules(logical), spec)  # fmt: skip
    crossing = only(lint(found), "axis_crosses_domain")
    assert crossing.path == role
    assert "crosses 2 NVLink domains of 8 GPUs" in crossing.message
    assert crossing.hint.startswith(f"[mesh] {role} = 2")


def test_experts_over_two_levels_are_a_note_that_names_the_hierarchical_dispatch():
    spec = mk.MeshSpec.parse({"outer": {"infiniband": 2}, "expert": 8}).resolve(mk.Cluster.load("dgx_h100", hosts=2))
    axes = ("outer", "expert")
    rules = mk.ShardingRules({"act_batch": axes, "experts": axes, "act_experts": axes})
    weights = kernel("experts/up", (16, 1024, 64), ("experts", "embed", None), (axes, (), ()))
    (found,) = lint(Subject([weights], [activation(spec=(axes, (), ()))], rules, spec))
    assert (found.code, found.severity, found.path) == ("axis_crosses_domain", "note", "outer")
    assert found.hint.startswith("hierarchical_dispatch = true in [model], if not set")


def test_an_fsdp_axis_may_cross_domains_and_cut_mlp():
    spec = mk.MeshSpec.parse({"fsdp": {"nvlink": 8, "infiniband": 2}}).resolve(mk.Cluster.load("dgx_h100", hosts=2))
    whole = activation(spec=(("fsdp",), (), ()))
    rules = mk.ShardingRules({"act_batch": "fsdp", "mlp": "fsdp"})
    assert lint(Subject([kernel(spec=((), ("fsdp",)))], [whole], rules, spec)) == []


def test_a_large_parameter_left_whole_names_the_bytes_and_an_axis_that_divides():
    """[1024, 4096] fp32 is 16 MiB, and a quarter would do."""
    whole = kernel("head", names=(None, None), spec=((), ()))
    found = only(lint(subject(parameters=[whole])), "replicated_parameter")
    assert found.message == (
        "head [1024, 4096] is replicated on every GPU: 16.0 MiB each, of which 12.0 MiB are wasted; mesh axis "
        "'fsdp' (4) "
        "divides dim 1"
    )
    assert 'spec = ["replicated", "fsdp"]' in found.hint


def test_a_parameter_that_misses_the_axis_of_the_batch_is_found_though_another_cuts_it():
    half = kernel("head", names=(None, "mlp"), spec=((), ("tensor",)))
    found = only(lint(subject(parameters=[half])), "replicated_parameter")
    assert (
        "is not sharded over 'fsdp', which shards others: 8.00 MiB each, of which 6.00 MiB are wasted" in found.message
    )


def test_norms_and_plain_data_parallelism_are_meant():
    norm = kernel("norm", (128, 1024), (None, None), ((), ()))  # The norm is 512 KiB.
    assert lint(subject(parameters=[norm])) == []
    data = mk.MeshSpec.parse({"data": 8})
    rules = mk.ShardingRules({"act_batch": "data"})
    assert lint(Subject([kernel(spec=((), ()))], [activation(spec=(("data",), (), ()))], rules, data)) == []


def test_an_idle_axis():
    logical = {"act_batch": ["data"], "mlp": "tensor", "act_mlp": "tensor", "embed": "replicated"}
    x = activation(spec=(("data",), (), ("tensor",)))
    whole = Subject([kernel(spec=((), ("tensor",)))], [x], mk.ShardingRules(logical), SPEC)
    found = only(lint(whole), "idle_axis")
    assert found.path == "fsdp"
    assert found.hint == '[rules.logical] act_batch = ["data", "fsdp"], or another preset'


def test_the_axis_of_local_sgd_is_not_idle():
    whole = Subject(
        [kernel(spec=((), ()))],
        [activation(spec=((), (), ()))],
        mk.ShardingRules({"act_batch": "data"}),
        mk.MeshSpec.parse({"data": 8}),
        deferred=frozenset({"data"}),
    )
    assert lint(whole) == []


def test_an_axis_of_the_batch_that_cuts_no_activation_is_the_models_to_use():
    x = activation(spec=(("fsdp",), (), ("tensor",)), shape=(4, 128, 4096))
    found = [f for f in lint(subject(activations=[x])) if f.code == "idle_axis"]
    assert [f.path for f in found] == ["data"]
    assert found[0].hint == 'meshkit.constrain(x, "act_batch", ...) in the model, and a batch that the axis divides'


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (((), ()), "rules that also shard the parameters over 'data' x 'fsdp' x 'tensor', or [optimizer] memory"),
        ((("data", "fsdp"), ("tensor",)), "more GPUs, or [optimizer] memory"),
    ],
)
def test_a_state_larger_than_the_memory_is_an_error(spec, hint):
    def found(state_bytes):
        whole = subject(activations=[activation()], state_bytes=state_bytes, pool_bytes=64 * MIB)
        whole = replace(whole, parameters=(kernel(spec=spec),))
        return [f for f in lint(whole) if f.severity == "error"]

    assert found(64 * MIB) == []
    (too_large,) = found(96 * MIB)
    assert too_large.code == "state_too_large"
    assert "take 96.0 MiB on each GPU, more than the 64.0 MiB" in too_large.message
    assert too_large.hint.startswith(hint)


def test_the_propagation_trap_is_a_warning_where_the_batchs_axis_also_cuts_parameters():
    found = only(lint(subject(activations=[])), "unconstrained_activations")
    assert found.severity == "warning"
    assert "constrains no activation" in found.message
    partly = activation(spec=((), (), ("tensor",)))
    found = [f for f in lint(subject(activations=[partly])) if f.code == "unconstrained_activations"]
    assert "none of its activations over the batch" in found[0].message


def test_the_trap_is_a_note_where_parameters_are_whole():
    whole = Subject(
        [kernel(spec=((), ()))], [], mk.ShardingRules({"act_batch": "data"}), mk.MeshSpec.parse({"data": 8})
    )
    assert only(lint(whole), "unconstrained_activations").severity == "note"


def test_axes_that_the_step_cuts_itself_are_not_the_models_to_constrain():
    # This is the activation as one replica of the deferred axes sees it.
    inside = activation(spec=((), (), ("tensor",)))
    assert lint(subject(activations=[inside], deferred=frozenset({"data", "fsdp"}))) == []


FINDINGS = [
    Finding(code="idle_axis", severity="warning", path="fsdp", message="idle"),
    Finding(
        code="unexplained_collective", severity="warning", path="collective/all-gather/fsdp+tensor", message="moved"
    ),
]


@pytest.mark.parametrize(
    ("code", "path", "silenced"),
    [
        ("idle_axis", "**", ["idle_axis"]),
        ("idle_axis", "fsdp", ["idle_axis"]),
        ("idle_axis", "tensor", []),
        ("unexplained_collective", "collective/*/fsdp+tensor", ["unexplained_collective"]),
        ("unexplained_collective", "collective/*", []),
        ("unexplained_collective", "collective/**", ["unexplained_collective"]),
    ],
)
def test_the_allow_list_silences_by_code_and_path(code, path, silenced):
    kept, allowed = apply_allow_list(FINDINGS, [AllowTable(code=code, path=path, reason="measured")])
    assert [f.code for f in allowed] == silenced
    assert all(f.allowed and f.reason == "measured" for f in allowed)
    assert [f.code for f in kept if f.code == "unused_allow"] == ([] if silenced else ["unused_allow"])


def test_an_entry_that_silences_nothing_is_a_note_unless_nobody_looked():
    idle = [AllowTable(code="involuntary_rematerialization", reason="known")]
    kept, _ = apply_allow_list([], idle)
    assert (kept[0].code, kept[0].severity) == ("unused_allow", "note")
    assert apply_allow_list([], idle, unchecked=["involuntary_rematerialization"]) == ([], [])


def test_errors_cannot_be_allowed_and_come_first():
    error = Finding(code="any", severity="error", path="x", message="broken")
    kept, allowed = apply_allow_list([*FINDINGS, error], [AllowTable(code="any", reason="no")])
    assert kept[0] == error
    assert allowed == []
