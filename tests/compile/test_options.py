"""Test XLA's options: which are set for which GPU and jaxlib, which XLA refuses, and what the user then reads."""

import pytest

import meshkit as mk
from meshkit.compile import options
from meshkit.compile.options import (
    OPTIONS,
    PLANNERS,
    Option,
    RefusedOption,
    chosen_options,
    compile_lowered,
    flags_in,
    known_options,
    left_out_lines,
    option_error,
    planners_options,
)
from meshkit.config.catalog import gpu

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
KERNELS = "xla_gpu_experimental_use_collective_kernels"
UNKNOWN = "INVALID_ARGUMENT: No such compile option: '{}'"
INVALID = "INVALID_ARGUMENT: While setting option {}, 'maybe' is not a valid bool value."


class Lowered:
    """Stand in for a lowered program of an XLA that refuses some options, with jax's messages."""

    def __init__(self, refused):
        self.refused, self.tried = dict(refused), []

    def compile(self, compiler_options):
        self.tried.append(dict(compiler_options or {}))
        for name, message in self.refused.items():
            if name in (compiler_options or {}):
                raise RuntimeError(message.format(name))
        return "compiled"


def values(*args, **keywords):
    return {o.name: o.value for o in chosen_options(*args, **keywords)}


def test_every_option_has_a_reason_and_no_two_have_one_name():
    both = (*OPTIONS, *PLANNERS)
    assert all(o.why and o.name.startswith("xla_") for o in both)
    assert len({o.name for o in both}) == len(both)


@pytest.mark.parametrize(("key", "hides"), [("a100_80gb", True), ("v100", True), ("h100_sxm", False), ("b200", False)])
def test_gpus_before_hopper_are_told_to_run_collectives_beside_compute(key, hides):
    assert (HIDING in values(gpu(key))) == hides


@pytest.mark.parametrize(
    ("jaxlib", "has"), [("0.10.2", False), ("0.11", True), ("0.12.0.1", True), ("0.13.0.dev3", True)]
)
def test_an_option_is_set_for_the_releases_that_have_it(monkeypatch, jaxlib, has):
    monkeypatch.setattr(options, "version_of", lambda _: jaxlib)
    assert (KERNELS in values(gpu("h100_sxm"))) == has


@pytest.mark.parametrize(("jaxlib", "searches"), [("0.11.2", True), ("0.12.0.1", False)])
def test_the_planner_leaves_out_the_search_for_kernels_where_xla_compiles_without(monkeypatch, jaxlib, searches):
    """With the search left out, jaxlib 0.11 finds no tiles for matmuls ("No supported config found")."""
    monkeypatch.setattr(options, "version_of", lambda _: jaxlib)
    assert planners_options() == ({} if searches else {"xla_gpu_autotune_level": 0})


def test_an_option_ends_with_the_release_that_dropped_it(monkeypatch):
    option = Option("xla_x", 1, "it helps", since="0.11", before="0.12.1")
    for jaxlib, has in (("0.12.0", True), ("0.12.1", False)):
        monkeypatch.setattr(options, "version_of", lambda _, jaxlib=jaxlib: jaxlib)
        assert ("xla_x" in values(gpu("h100_sxm"), derived=(option,))) == has


def test_the_user_wins_over_what_is_derived_and_that_over_the_table():
    derived = (Option(KERNELS, "derived", "the program asks for it"),)
    assert values(gpu("h100_sxm"), derived=derived)[KERNELS] == "derived"
    chosen = {o.name: o for o in chosen_options(gpu("h100_sxm"), {KERNELS: "mine"}, derived)}
    assert (chosen[KERNELS].value, chosen[KERNELS].why) == ("mine", "[xla]")


@pytest.mark.parametrize("message", [UNKNOWN, INVALID])
def test_one_of_ours_that_xla_refuses_is_left_out_and_named(message):
    lowered = Lowered({KERNELS: message, HIDING: message})
    options = values(gpu("a100_80gb"))
    compiled, left_out = compile_lowered(lowered, options)
    assert compiled == "compiled"
    assert set(left_out) == {KERNELS, HIDING}
    assert lowered.tried[-1] == {n: v for n, v in options.items() if n not in left_out}
    assert any("runs every collective synchronously" in line for line in left_out_lines(left_out))


def test_one_of_the_users_is_not_left_out():
    with pytest.raises(RefusedOption, match="xla_mine: this XLA has no such option"):
        compile_lowered(Lowered({"xla_mine": UNKNOWN}), {"xla_mine": 1, KERNELS: ""}, {"xla_mine"})


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_lowered(Lowered({KERNELS: "RESOURCE_EXHAUSTED: out of memory"}), {KERNELS: ""})


def test_names_are_read_from_the_library(tmp_path):
    library = tmp_path / "xla_cuda_plugin.so"
    library.write_bytes(b"\0xla_gpu_first\0\x12xla_gpu_second\xff yxla_gpu_third xla_n")
    assert flags_in(library) == {"xla_gpu_first", "xla_gpu_second"}


def test_the_error_names_the_closest_option(monkeypatch):
    monkeypatch.setattr("meshkit.compile.options.known_options", lambda: {HIDING, KERNELS})
    wrong = "xla_gpu_enable_latency_hiding_schedular"
    error = option_error(wrong, True, "this XLA has no such option", "0.12.0")
    assert str(error).splitlines() == [
        f"XLA (jaxlib 0.12.0) refuses the option {wrong}: this XLA has no such option.",
        f"  at [xla] {wrong} = true",
        f"  try {HIDING}",
    ]
    assert isinstance(error, mk.ConfigError)


@pytest.mark.deviceless
def test_the_compiler_itself_knows_the_options_that_are_set():
    known = known_options()
    assert {o.name for o in OPTIONS} <= known
    assert len(known) > 100
