"""Test that report.json always has every key of the contract, and that one message refuses what is not a report."""

import json
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from meshkit.errors import TraceError
from meshkit.report.folder import read_report
from meshkit.report.schema import Report, StepPart, WindowPart

CONTRACT = {
    "cluster": "gpu hosts gpus_per_host num_gpus nvlink_domain_size num_nvlink_domains scale_up fabric",
    "window": "steps devices processes_seen processes_expected aggregation",
    "step": "time_s compute_s communication_s overlapped_s exposed_s other_s idle_s bubble_s bubble_fraction "
    "model_flops mfu mfu_causal hfu tokens_per_s_per_gpu all_overlapped_s all_exposed_s time_interval",
    "spread": "time_s compute_s exposed_s idle_s",
    "memory": "capacity_bytes pool_bytes peak_bytes reserved_bytes margin_bytes fits parameters_bytes optimizer_bytes "
    "gradients_bytes activations_bytes temporary_bytes",
    "program": "fingerprint options_hash jax jaxlib partitioner",
    "compile": "lower_s compile_s cached",
    "training": "steps hours gpu_hours cost",
}
ROW = (
    "axes axes_complete link fabric collective dtype group_size num_groups gpus_per_domain count payload_bytes "
    "wire_bytes wire_bytes_nvlink wire_bytes_infiniband time_s overlapped_s exposed_s sole_exposed_s busy_s transfer_s "
    "wait_s bus_bandwidth_bytes_per_s ops"
)
TOP = "schema source cluster mesh window step spread communication memory program compile training warnings"
OP = "name key source count payload_bytes busy_s exposed_s"
# These parts are not in the contract's first list; they are null where they are unknown.
ADDED = "pipeline kernels quality stragglers per_step history goodput failures feedback predicted"


def has_keys(found, keys):
    """Return whether the contract's keys are all there, in order; others may stand between them."""
    return [key for key in found if key in keys.split()] == keys.split()


def test_every_key_is_there_even_when_nothing_is_known():
    empty = Report(source="plan", window=WindowPart(steps=0, devices=0), step=StepPart()).to_dict()
    assert has_keys(empty, TOP)
    assert all(empty[key] is None for key in ADDED.split())
    for part, keys in CONTRACT.items():
        assert has_keys(empty[part], keys)
    assert empty["schema"] == "meshkit.report/1"
    assert empty["step"]["time_s"] is None
    assert list(empty["spread"]["time_s"]) == ["min", "median", "p90", "max", "worst_device", "worst_step"]


def test_keys_of_rows(report):
    found = report.to_dict()
    assert has_keys(found["communication"][0], ROW)
    assert has_keys(found["communication"][0]["ops"][0], OP)
    assert list(found["mesh"][0]) == ["axis", "size", "nvlink", "infiniband"]
    assert list(found["warnings"][0]) == ["code", "message", "seconds"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_are_finite(value):
    with pytest.raises(ValidationError, match="finite"):
        StepPart(time_s=value)


def test_counts_are_written_as_integers(report):
    text = report.to_json()
    assert '"count": 2,' in text
    assert '"payload_bytes": 2097152,' in text


def test_round_trip_through_a_folder_and_a_file(report, tmp_path):
    file = report.write(tmp_path / "run")
    assert file.name == "report.json"
    assert read_report(tmp_path / "run") == read_report(file) == report


def test_keys_of_a_later_version_are_kept(report, tmp_path):
    file = report.write(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new": 1}))
    assert json.loads(read_report(file).to_json())["new"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a meshkit.report/1: Invalid JSON"),
        (b"\xff\xfe\x00", "it is not text"),
        (b"[]", "not a meshkit.report/1"),
        (b"{}", r"not a meshkit.report/1: source: Field required \(and 2 more\)"),
        (b'{"schema": "meshkit.report/9"}', "schema: Input should be 'meshkit.report/1'"),
        (b'{"source": "plan", "window": {"steps": 1, "devices": 1}, "step": {"time_s": NaN}}', "step.time_s"),
    ],
)
def test_garbage_is_refused(tmp_path, content, message):
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_report(file)


def test_a_missing_report_says_what_to_do(tmp_path):
    with pytest.raises(TraceError, match=r"no report to read(.|\n)*try a run folder"):
        read_report(tmp_path)


def test_json_schema_requires_every_key():
    schema = Report.model_json_schema(mode="serialization")
    assert set(schema["required"]) >= {"schema", *CONTRACT, "communication", "warnings"}
    assert set(schema["$defs"]["CommunicationPart"]["required"]) >= set(ROW.split())


def test_reports_open_without_jax():
    code = "import sys, meshkit.report.schema, meshkit.report.summarize, meshkit.report.views.report, "
    code += "meshkit.report.views.report, meshkit.report.compare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
