"""Test how a program is compiled, with a function in place of XLA's compiler process."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile import program
from meshkit.compile.attached import compile_for_gpus
from meshkit.compile.options import CompileChoices, Option
from meshkit.config.mesh import Placement
from meshkit.errors import ConfigError, ProgramError

GIB = 2**30
H100S = mk.Cluster.load("dgx_h100", hosts=1)
PLACEMENT = Placement.from_shape(("data",), (8,))
COSTLY = Option("xla_costly", True, "it hides something", costs_memory=True)
CHEAP = Option("xla_cheap", True, "it is free")
LIMIT = Option("xla_limit", 10_000, "it fits", tight=(115, "it does not"))


def taken(options):
    """Return the bytes that the pretended program needs: 30 GiB, more without a limit and with the costly option."""
    return (30 + 60 * ("xla_costly" in options) + 30 * (options.get("xla_limit") == 10_000)) * GIB


def choices(derived=(), pool_bytes=75 * GIB, options=None):
    return CompileChoices(options or {}, derived, pool_bytes / H100S.gpu.memory_bytes)


@pytest.fixture
def timeouts():
    """Return the list that records how many seconds each compile was allowed."""
    return []


@pytest.fixture
def compiled(monkeypatch, tmp_path, timeouts):
    """Return a function that compiles for H100s of 80 GB with a pretended compiler."""
    asked = []

    class Played:
        """Stand in for the compiler process."""

        peak_rss_bytes = 1

        folder = tmp_path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def log(self):
            return ""

        def ask(self, request, timeout_s):
            options = request["compiler_options"]
            asked.append(options)
            timeouts.append(timeout_s)
            sizes = dict.fromkeys(("argument", "output", "alias", "generated_code"), 0)
            (self.folder / "module.pb").write_bytes(b"module")
            return {
                "left_out": {n: "this XLA has no such option" for n in options if n == "xla_unknown"},
                "lower_s": 0.1,
                "compile_s": 1.0,
                "partitioner": "shardy",
                "memory": sizes | {"temp": taken(options)},
                "host_memory": sizes | {"temp": 0},
            }

    monkeypatch.setattr(program.COMPILER, "use", lambda _: Played())
    monkeypatch.setattr(program, "check_compiler", lambda: None)
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def run(**given):
        made = program.compile_absent(lambda x: x.sum(), (x,), mesh=mesh, cluster=cluster, choices=choices(**given))
        return made, asked

    return run


def test_options_that_do_not_fit_are_left_out_and_said(compiled):
    made, asked = compiled(derived=(CHEAP, COSTLY), pool_bytes=73 * GIB)
    assert [("xla_costly" in a, "xla_cheap" in a) for a in asked] == [(True, True), (False, True)]
    assert "xla_costly" not in made.options
    assert made.options["xla_cheap"] is True
    (said,) = made.log
    assert "they need 90.0 GiB of GPU memory" in said
    assert "without them it needs 30.0 GiB" in said


def test_they_stay_where_they_fit_or_where_nothing_would(compiled):
    fits, asked = compiled(derived=(COSTLY,), pool_bytes=100 * GIB)
    assert "xla_costly" in fits.options
    assert len(asked) == 1
    neither, _ = compiled(derived=(COSTLY,), pool_bytes=20 * GIB)
    assert "xla_costly" in neither.options
    assert neither.log == ()


def test_options_that_cost_no_memory_are_not_tried_without(compiled):
    _, asked = compiled(derived=(CHEAP,), pool_bytes=1 * GIB)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("pool", "other", "limits", "kept"),
    [
        (130, COSTLY, [10_000], True),  # The program needs 120 GiB, so 2 % are to spare.
        (61, CHEAP, [10_000, 115], True),  # There is not enough to spare.
        (35, CHEAP, [10_000, 115], True),
        (80, COSTLY, [10_000, 115, 115], False),
        (20, COSTLY, [10_000, 115, 115], True),  # Nothing fits, so the option stays as it was wanted.
    ],
)
def test_xlas_limit_is_out_of_reach_of_a_step_that_fits(compiled, pool, other, limits, kept):
    made, asked = compiled(derived=(LIMIT, other), pool_bytes=pool * GIB)
    assert [a["xla_limit"] for a in asked] == limits
    assert made.options["xla_limit"] == limits[-1]
    assert (other.name in made.options) == kept
    gpus = OnGpus()
    compile_for_gpus(gpus, H100S, PLACEMENT, choices((LIMIT, other), pool * GIB))
    assert [a["xla_limit"] for a in gpus.asked] == limits


def test_a_limit_of_the_users_is_kept(compiled):
    _, asked = compiled(derived=(LIMIT,), options={"xla_limit": 95}, pool_bytes=1 * GIB)
    assert [a["xla_limit"] for a in asked] == [95]


def test_what_xla_refuses_is_not_among_the_options_and_is_said(compiled):
    made, _ = compiled(derived=(Option("xla_unknown", 1, "it helps"),))
    assert "xla_unknown" not in made.options
    assert made.log == ("xla_unknown is left out: this XLA has no such option; meshkit sets it because it helps",)


def test_the_hash_is_of_the_options(compiled):
    plain, _ = compiled()
    same, _ = compiled()
    other, _ = compiled(options={"xla_mine": 1})
    assert plain.options_hash == same.options_hash != other.options_hash
    assert [o.why for o in other.chosen if o.name == "xla_mine"] == ["[xla]"]


class OnGpus:
    """Stand in for a program lowered for real GPUs, whose executable says what memory it needs."""

    def __init__(self):
        self.asked = []

    def compile(self, compiler_options):
        self.asked.append(compiler_options)
        return self

    def memory_analysis(self):
        temp = taken(self.asked[-1])
        fields = ("argument", "output", "alias", "generated_code")
        return type("Stats", (), {f"{n}_size_in_bytes": 0 for n in fields} | {"temp_size_in_bytes": temp})()


def test_train_decides_as_plan_does():
    lowered = OnGpus()
    made = compile_for_gpus(lowered, H100S, PLACEMENT, choices((CHEAP, COSTLY), 73 * GIB, {"xla_mine": 1}))
    assert [("xla_costly" in a, "xla_cheap" in a, a["xla_mine"]) for a in lowered.asked] == [
        (True, True, 1),
        (False, True, 1),
    ]
    assert len(made.log) == 1
    made = compile_for_gpus(OnGpus(), H100S, PLACEMENT, choices((CHEAP, COSTLY), 100 * GIB))
    assert made.log == ()


def test_the_compiler_process_says_what_plan_reads(monkeypatch):
    """plan reads XLA's warnings in its log and the buffers in a dump, which jax's own cache does not keep."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    environment = program.child_environment()
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert "XLA_FLAGS" not in environment


def test_xlas_last_words_are_no_note_of_its_loading():
    """On every machine without a GPU, jaxlib 0.11 logs that it found no driver."""
    note = (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1795312420.499266   32520 cudart_stub.cc:31] Could not find cuda drivers on your machine.\n"
    )
    assert program.last_words(note) == "it said nothing"
    fatal = "F0000 00:00:1795312420.499266   32520 spmd_partitioner_util.cc:2374] Check failed: 4 == 8\n"
    assert program.last_words(fatal + "*** Check failure stack trace: ***\n" + note) == "Check failed: 4 == 8"


def test_the_limit_of_a_compile_is_the_option_the_variable_or_half_an_hour(compiled, timeouts, monkeypatch):
    """The limit holds for this process and for those that it starts."""
    compiled()
    monkeypatch.setenv("MESHKIT_COMPILE_TIMEOUT", "7200")
    compiled()
    with program.compiling(timeout_s=60):
        compiled()
        assert os.environ["MESHKIT_COMPILE_TIMEOUT"] == "60"
    with program.compiling():
        compiled()
    assert timeouts == [1800.0, 7200.0, 60.0, 7200.0]
    for wrong in ("0", "-1", "1e3", "soon", "9" * 5000):
        monkeypatch.setenv("MESHKIT_COMPILE_TIMEOUT", wrong)
        with pytest.raises(ConfigError, match=r"MESHKIT_COMPILE_TIMEOUT is '.{1,80}', not a number of seconds"):
            compiled()


@pytest.mark.deviceless
def test_a_compile_beyond_its_limit_is_stopped_and_says_how_it_gets_more(monkeypatch):
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    monkeypatch.setenv("TF_ANEW", "1")  # This variable makes COMPILER start a new process.
    monkeypatch.setenv("MESHKIT_COMPILE_TIMEOUT", "1")  # Importing jax and XLA alone takes longer than a second.
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), H100S, devices=mk.describe_devices(H100S))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ProgramError, match=r"still compiling after 1 s(.|\n)*a longer --compile-timeout \(MESHKIT_"):
        program.compile_absent(lambda x: x.sum(), (x,), mesh=mesh, cluster=H100S)
