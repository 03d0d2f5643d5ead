"""How a program is compiled, without XLA: the compiler process is played by a function."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.xla import program
from meshkit.xla.compiling import compile_for_gpus
from meshkit.xla.options import Option

GIB = 2**30
COSTLY = Option("xla_costly", True, "it hides something", costs_memory=True)
CHEAP = Option("xla_cheap", True, "it is free")


@pytest.fixture
def compiled(monkeypatch):
    """Compiles; the temporaries of the played compiler are 30 GiB, with the costly option 90 of an H100's 80."""
    asked = []

    def play(folder, environment, timeout_s):
        request = json.loads((folder / "request.json").read_text())
        asked.append(request["compiler_options"])
        sizes = dict.fromkeys(("argument", "output", "alias", "generated_code"), 0)
        temp = (90 if "xla_costly" in request["compiler_options"] else 30) * GIB
        left_out = {n: "this XLA has no such option" for n in request["compiler_options"] if n == "xla_unknown"}
        result = {
            "left_out": left_out,
            "lower_s": 0.1,
            "compile_s": 1.0,
            "peak_rss_bytes": 1,
            "partitioner": "shardy",
            "memory": sizes | {"temp": temp},
            "host_memory": sizes | {"temp": 0},
        }
        (folder / "module.pb").write_bytes(b"module")
        (folder / "result.json").write_text(json.dumps(result))
        return ""

    monkeypatch.setattr(program, "_run_child", play)
    monkeypatch.setattr(program, "check_compiler", lambda: None)
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def run(**options):
        return program.compile_absent(lambda x: x.sum(), (x,), mesh=mesh, cluster=cluster, **options), asked

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
    """A lowered program on real GPUs, whose executable says what it needs."""

    def __init__(self):
        self.asked = []

    def compile(self, compiler_options):
        self.asked.append(compiler_options)
        return self

    def memory_analysis(self):
        temp = (90 if "xla_costly" in self.asked[-1] else 30) * GIB
        fields = ("argument", "output", "alias", "generated_code")
        return type("Stats", (), {f"{n}_size_in_bytes": 0 for n in fields} | {"temp_size_in_bytes": temp})()


def test_train_decides_as_plan_does():
    gpu = mk.Cluster.load("dgx_h100", hosts=1).gpu
    lowered = OnGpus()
    _, lines = compile_for_gpus(lowered, gpu, {"xla_mine": 1}, (CHEAP, COSTLY), 73 * GIB)
    assert [("xla_costly" in a, "xla_cheap" in a, a["xla_mine"]) for a in lowered.asked] == [
        (True, True, 1),
        (False, True, 1),
    ]
    assert len(lines) == 1
    _, lines = compile_for_gpus(OnGpus(), gpu, {}, (CHEAP, COSTLY), 100 * GIB)
    assert lines == []
