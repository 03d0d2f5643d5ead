"""Test `mk.tune` of steps without an experiment, in this process, in others and on executors, with JSON requests."""

import json
import multiprocessing
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

import meshkit as mk
from meshkit.errors import RunError
from meshkit.search import workers as pool
from meshkit.search.candidate import Outcome
from meshkit.search.tuner import tune_experiment
from tests.search import tuned_steps

CLUSTER = mk.Cluster.load("dgx_h100", gpus_per_host=2)
FASTEST = {"fsdp": 1.0, "tensor": 3.0}


def made_up(request):
    """Return a made-up outcome: tensor parallelism helps, and so does full recomputation."""
    wanted = json.loads(request)
    text = " ".join(wanted["settings"])
    if "odd" in text:
        return Outcome(settings=wanted["settings"], status="error", error="does not divide").model_dump_json()
    time_s = 4.0 - 2 * ("tensor = 4" in text or "tensor = 8" in text) - ("full" in text)
    fits = "fits" if "fsdp = 1," not in text else "does_not_fit"
    return Outcome(settings=wanted["settings"], status=fits, time_s=time_s, num_gpus=16).model_dump_json()


class Recorder(Executor):
    """Answer at once and keep the requests, which are texts only, as a cluster's would be."""

    def __init__(self):
        self.asked = []

    def submit(self, fn, /, *args, **kwargs):
        assert fn is pool.answer
        (request,) = args
        assert isinstance(request, str)
        self.asked.append(json.loads(request))
        future = Future()
        future.set_result(made_up(request))
        return future


def test_an_executor_gets_texts_and_the_search_goes_towards_the_best():
    recorder, cluster = Recorder(), mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"fsdp": {"nvlink": 8, "infiniband": 2}, "tensor": 1})
    choices = {"remat": ["none", "full"], "size": ["even", "odd"]}
    report = mk.tune(tuned_steps.small, spec, cluster, choices=choices, budget=12, jobs=recorder)
    assert {tuple(request) for request in recorder.asked} == {("build", "cluster", "mesh", "choices", "settings")}
    assert recorder.asked[0]["build"] == "tests.search.tuned_steps:small"
    assert recorder.asked[0]["settings"] == []
    assert mk.Cluster.load(recorder.asked[0]["cluster"]) == cluster
    assert report.space == 8 * 2 * 2
    assert report.winner.time_s == 1.0
    assert 'remat="full"' in report.winner.settings
    assert report.compiled == 12  # Those of an odd size cost nothing of the budget.
    assert report.left > 0
    assert "remat full" in str(report)
    # These are arguments for `small`, because it has no `--set`.
    how = str(report).split("the winner\n")[1].splitlines()[:2]
    assert [line.strip() for line in how] == [
        # It is as fast as tensor 4, so the alphabet decides.
        "mesh = MeshSpec.parse({'fsdp': {'infiniband': 2}, 'tensor': 8})",
        "remat = 'full'",
    ]
    assert "--set" not in str(report)
    assert report._repr_html_().startswith("<pre")


def test_an_experiment_is_searched_on_an_executor_too(tmp_path):
    recorder = Recorder()
    file = "configs/experiments/llama_debug_cpu.toml"
    overrides = ('cluster={ name = "dgx_h100", hosts = 1 }', "mesh={ fsdp = 8 }", 'rules.preset="fsdp"')
    report = tune_experiment(file, overrides, axes=("fsdp",), budget=3, jobs=recorder)
    assert report.compiled == len(recorder.asked) == 3
    assert recorder.asked[0]["experiment"].startswith("/")
    with pytest.raises(mk.ConfigError, match="has no GPUs"):
        mk.tune(file, budget=1, out=tmp_path / "new")


def test_what_an_executor_loses_is_an_error_of_that_variant():
    class Losing(Recorder):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(fn, *args)
            if len(self.asked) == 2:
                future = Future()
                future.set_exception(OSError("node 7 is gone"))
            return future

    report = mk.tune(tuned_steps.small, tuned_steps.SPEC, CLUSTER, jobs=Losing())
    assert [o.error for o in report.outcomes if o.status == "error"] == ["the executor failed: OSError: node 7 is gone"]


def test_what_cannot_be_searched_is_said():
    with pytest.raises(mk.ConfigError, match="an executor cannot import 'test_what"), ThreadPoolExecutor(1) as executor:
        mk.tune(lambda mesh: None, tuned_steps.SPEC, CLUSTER, jobs=executor)
    for values in ("none", [], [object()], 3):
        with pytest.raises(mk.ConfigError, match="choice 'remat' must be a list"):
            mk.tune(tuned_steps.small, tuned_steps.SPEC, CLUSTER, choices={"remat": values})
    with pytest.raises(mk.ConfigError, match="give a mesh and a cluster"):
        mk.tune(tuned_steps.small)
    with pytest.raises(RunError, match="none of 2 variants could be planned; the first: ValueError: no batch"):
        mk.tune(lambda mesh: (_ for _ in ()).throw(ValueError("no batch")), tuned_steps.SPEC, CLUSTER)


@pytest.mark.deviceless
def test_a_step_is_tuned_here_and_by_its_name_alike():
    here = mk.tune(
        lambda mesh, wide: tuned_steps.small(mesh, wide), tuned_steps.SPEC, CLUSTER, choices={"wide": [4097]}
    )
    assert (here.space, here.compiled, here.winner_is_base) == (2, 1, True)
    (error,) = (o for o in here.outcomes if o.status == "error")
    assert error.settings == ("mesh={ fsdp = 1, tensor = 2 }",)
    assert "dim 1 of w has size 4097, which the 2 GPUs of mesh axis 'tensor' do not divide" in error.error
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        (named,) = mk.tune(
            tuned_steps.small, tuned_steps.SPEC, CLUSTER, choices={"wide": [4097]}, budget=1, jobs=executor
        ).outcomes
    assert (named.settings, named.time_s, named.peak_bytes) == ((), here.base.time_s, here.base.peak_bytes)


def test_submitit_runs_requests_as_jobs(tmp_path):
    submitit = pytest.importorskip("submitit")
    executor = pool.SubmititExecutor(submitit.LocalExecutor(folder=tmp_path), poll_s=0.1)
    request = {"experiment": "missing.toml", "overrides": [], "settings": []}
    futures = [executor.submit(pool.answer, json.dumps(request)), executor.submit(json.loads, "{")]
    assert "no such experiment file" in Outcome.model_validate_json(futures[0].result(timeout=120)).error
    with pytest.raises(submitit.core.utils.FailedJobError):
        futures[1].result(timeout=120)
