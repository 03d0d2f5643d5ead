"""Pipeline parallelism in one program, see the README in this folder.

Input: functions of a model's stages, parameters and a batch of microbatches. Output: loss, metrics and gradients.
`pipeline` does everything in one call; `make_pipeline` returns the Pipeline that a training step keeps.
"""

from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline import vocabulary
from meshkit.parallel.pipeline.engine import XLA_OPTIONS, Pipeline, make_pipeline, pipeline
from meshkit.parallel.pipeline.manual import ManualAxes
from meshkit.parallel.pipeline.schedules import SCHEDULES, Tables, make_report, make_tables
from meshkit.parallel.pipeline.stack import Stack, parse_layout
from meshkit.parallel.pipeline.worker import Functions, StageContext, StageOutput, scan_layers

__all__ = [
    "SCHEDULES",
    "XLA_OPTIONS",
    "Functions",
    "ManualAxes",
    "Pipeline",
    "PipelineReport",
    "Stack",
    "StageContext",
    "StageOutput",
    "Tables",
    "make_pipeline",
    "make_report",
    "make_tables",
    "parse_layout",
    "pipeline",
    "scan_layers",
    "vocabulary",
]
