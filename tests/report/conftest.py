"""Provide a small timeline with every kind of span, and its report."""

import numpy as np
import pytest

from meshkit.config.mesh import Placement
from meshkit.hlo.schedule import Collective
from meshkit.report.schema import CompilePart, MemoryPart, ProgramPart, Warning_
from meshkit.report.summarize import Machines, summarize
from meshkit.step.program import StepFacts
from meshkit.timeline import DeviceStep, Timeline


def make_collective(name, kind="all-gather", axes=("fsdp",), link="nvlink", size=4, per_domain=4, payload=2**20, **kw):
    fields = {
        "name": name,
        "key": f"{kind}|{'+'.join(axes)}|bf16|{name.split('.')[0]}|1",
        "collective": kind,
        "axes": axes,
        "axes_complete": True,
        "link": link,
        "fabric": {"nvlink": "nvlink4_nvswitch", "infiniband": "infiniband_ndr"}[link],
        "dtype": "bf16",
        "group_size": size,
        "num_groups": 2,
        "gpus_per_domain": per_domain,
        "payload_bytes": payload,
        "source": f"layers/{name}",
    }
    return Collective(**fields | kw)


COLLECTIVES = (
    make_collective("all-gather.1"),
    make_collective("all-gather.2"),
    make_collective("all-reduce.1", "all-reduce", ("data",), "infiniband", size=8, per_domain=4, payload=2**24),
    make_collective("never.1", "all-to-all", ("expert",)),
)


def make_step(device=0, step=0, shift=0.0, unmapped=True):
    """Return a step of 10 ms.

    In ms, compute is at 0-4 and 6-8, all-gathers are at 3-5 and 4-6, an all-reduce at 5-9, unmapped communication at
    7-7.5, and a copy at 9-9.5.
    """
    communication = [(3, 5), (4, 6), (5, 9), (7, 7.5)]
    owners = [0, 1, 2, -1]
    count = 4 if unmapped else 3
    return DeviceStep(
        device=device,
        step=step,
        window=(0.0, 0.010 + shift),
        compute=np.array([(0, 4), (6, 8)]) * 1e-3,
        compute_op=np.array([0, 1]),
        communication=np.array(communication[:count]) * 1e-3,
        collective=np.array(owners[:count]),
        copies=np.array([(9, 9.5)]) * 1e-3,
    )


@pytest.fixture
def timeline():
    steps = tuple(make_step(device, step, shift=1e-3 * (device == 1)) for device in (0, 1) for step in (5, 6))
    return Timeline(steps, COLLECTIVES, ("fusion", "gemm"))


@pytest.fixture
def report(timeline):
    made = summarize(
        timeline,
        source="profile",
        machines=Machines(Placement.from_shape(("data", "fsdp"), (2, 4), gpus_per_domain=4)),
        facts=StepFacts(model_flops=8e12, model_flops_causal=6e12, tokens=4096, peak_flops_per_gpu=1e15),
        warnings=[Warning_(code="x", message="A <script>alert(1)</script> to escape.")],
    )
    parts = {
        "memory": MemoryPart(
            capacity_bytes=80 * 2**30,
            pool_bytes=70 * 2**30,
            peak_bytes=60 * 2**30,
            margin_bytes=10 * 2**30,
            parameters_bytes=20 * 2**30,
            fits=True,
        ),
        "program": ProgramPart(fingerprint="abc"),
        "compile": CompilePart(compile_s=1.5),
    }
    return made.model_copy(update=parts)
