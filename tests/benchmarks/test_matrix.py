"""Test that every shipped model plans on every shipped cluster, with hardly any operation priced by bytes alone."""

import pytest

from benchmarks.matrix import CLUSTERS, MODELS, plan_pair

pytestmark = pytest.mark.deviceless


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_plans_on_every_cluster(model, cluster):
    plan = plan_pair(model, cluster)
    assert plan.report.step.time_s
    unpriced = sum(w.seconds or 0.0 for w in plan.report.warnings if w.code == "opaque_custom_call")
    assert unpriced <= 0.01 * plan.report.step.time_s
    assert not {"unknown_trip_count", "flops"} & {w.code for w in plan.report.warnings}
