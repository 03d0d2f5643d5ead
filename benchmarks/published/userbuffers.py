"""What tensor-parallel GPUs send beside matmuls, as TransformerEngine does it (userbuffers). Part of replica.py.

TransformerEngine v2.8, pytorch/module/base.py (initialize_ub), linear.py and common/comm_gemm_overlap; which run had
what is in userbuffers.toml.

    gathers forward, and of       a ring of copies by copy engines; the matmul in as many pieces of its tokens as there
    gradients of outputs          are GPUs, on three streams, the own piece first. Copies slow matmuls as they do in any
                                  plan, and the last piece cannot start before it is there
    scatters forward: ring        the same, the own piece last, in 16 bits; then a kernel reads all partial sums
    scatters forward: pipeline    four pieces of the output; the scatter's multiprocessors are taken from the matmul,
                                  and the last scatter is beside nothing
    backward: bulk                the gather of inputs beside the matmul for their gradients, the scatter of those
                                  beside the matmul for gradients of weights; each slows it as NCCL's do in a plan

Gathers travel in 8 bits in fp8. What is gathered is copied into a buffer first. With current scaling the largest values
of what is gathered are reduced, with MXFP8 its scales are gathered, by NCCL and beside nothing; gradients of outputs
are gathered twice in MXFP8, as their transpose is cast anew.

Matmuls of pieces that run at once fill the GPU as one of all their rows does. Of a layer with experts only attention's
two linear layers have userbuffers.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.blocks import is_mxfp8, slowed_s
from benchmarks.published.experiments import Run
from benchmarks.published.ours import is_current
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import kernel_work, memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left

_PATTERNS = ("source", "model", "gpu", "precision")
_HALF_BYTES, _SCALE_BYTES, _LARGEST_BYTES = 2, 1 / 32, 4
_STREAMS, _PIECES = 3, 4  # of pieces at a time; of a pipeline
_RING_MARGIN = 1  # multiprocessors that a ring of scatters takes, to wait


@dataclass(frozen=True)
class Overlap:
    """What userbuffers.toml says of a run; the defaults are TransformerEngine's.

    Attributes:
        proj, fc2: multiprocessors of the scatters behind the forward matmuls, in pieces of the output; 0: a ring.
        scatter: bytes of an element that those send.
        aggregated: layers whose ring sends two pieces at a time.
        off: NCCL's collectives instead.
        why: where this is from; "" for the defaults.
    """

    proj: int = 16
    fc2: int = 16
    scatter: int = _HALF_BYTES
    aggregated: Sequence[str] = ()
    off: bool = False
    why: str = ""


@functools.cache
def _tables() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("userbuffers.toml").read_text(encoding="utf-8"))["overlap"]


def find_overlap(run: Run) -> Overlap | None:
    """What a run's userbuffers do; None without tensor parallelism, in NVFP4 (blocks.py) and in other frameworks."""
    if not run.framework.chunked_tensor or run.tensor == 1 or run.precision == "nvfp4":
        return None
    words = {name: run.row.say(name) for name in _PATTERNS[1:]} | {"source": run.row.source}
    for table in _tables():
        if all(re.search(table[name], words[name], re.IGNORECASE) for name in _PATTERNS if name in table):
            return Overlap(**{key: value for key, value in table.items() if key not in _PATTERNS})
    return Overlap()


def without_tensor(run: Run, schedule: Schedule) -> Schedule:
    """The schedule without what tensor-parallel GPUs send in its layers; unchanged where `find_overlap` is None.

    Gradients of norms are among it: frameworks sum them once a step.
    """
    if find_overlap(run) is None:
        return schedule

    def travels(i: Instruction) -> bool:
        return i.collective is not None and "tensor" in i.collective.axes and "/moe/" not in i.source

    bodies = dict(schedule.computations)
    for name in bodies.keys() - {schedule.entry}:
        gone = {i.name for i in bodies[name] if travels(i)}
        bodies[name] = tuple(i for i in bodies[name] if i.name not in gone and i.starts not in gone)
    return replace(schedule, computations=bodies)


def tensor_s(run: Run, cluster: Cluster, *, forward: bool, beside: bool = True) -> float:
    """Seconds that a layer and micro-batch takes longer for what its tensor-parallel GPUs send in one pass.

    Args:
        run: the row.
        cluster: its GPUs.
        forward: or backward.
        beside: False: nothing runs beside a matmul.
    """
    overlap = find_overlap(run)
    if overlap is None:
        return 0.0
    wire = _Wire(run, cluster)
    layers = 1 if run.shape.experts else 2  # pairs that gather before the first and scatter behind the second
    gather, scatter = wire.gather_s(), wire.nccl_s("reduce-scatter", _HALF_BYTES)
    largest = wire.nccl_s("all-reduce", _LARGEST_BYTES / wire.elements) if is_current(run) else 0.0
    if overlap.off or not beside:
        if forward:
            return layers * (gather + scatter + largest)
        block = gather * (2 if is_mxfp8(run) else 1) + largest
        return layers * (block + (slowed_s(gather + scatter, cluster) if beside else gather + scatter))
    total = layers * (largest + wire.scales_s(2 if not forward else 1) + wire.copied_s(1 if forward else 2))
    for pair in _pairs(run)[:layers]:
        total += _forward_s(wire, overlap, pair) if forward else _backward_s(wire, overlap, pair)
    return total


@dataclass(frozen=True)
class _Pair:
    """Two linear layers, the first cut along its outputs, the second along its inputs, by their widths on one GPU."""

    first: str
    second: str
    out: int
    inside: int


def _pairs(run: Run) -> list[_Pair]:
    s = run.shape
    queries = s.heads * s.head_dim
    up = (2 if s.gated else 1) * s.ffn
    return [
        _Pair("qkv", "proj", (queries + 2 * s.keys) // run.tensor, queries // run.tensor),
        _Pair("fc1", "fc2", up // run.tensor, s.ffn // run.tensor),
    ]


def _forward_s(wire: _Wire, overlap: Overlap, pair: _Pair) -> float:
    hidden = wire.run.shape.hidden
    total = wire.ring_s(pair.out, hidden, wire.sends_s(wire.byte), pair.first in overlap.aggregated)
    taken = overlap.proj if pair.second == "proj" else overlap.fc2
    if taken:
        return total + wire.pipeline_s(pair.inside, taken, overlap.scatter)
    ring = wire.ring_s(hidden, pair.inside, wire.sends_s(_HALF_BYTES), margin=_RING_MARGIN)
    sums = wire.elements * _HALF_BYTES * (1 + 1 / wire.run.tensor)
    return total + ring + sums / memory_bytes_per_s(wire.cluster.gpu)


def _backward_s(wire: _Wire, overlap: Overlap, pair: _Pair) -> float:
    hidden = wire.run.shape.hidden
    sends = wire.sends_s(wire.byte) * (2 if is_mxfp8(wire.run) else 1)
    total = wire.ring_s(pair.inside, hidden, sends, pair.second in overlap.aggregated)
    for collective, byte in (("all-gather", wire.byte), ("reduce-scatter", _HALF_BYTES)):
        seconds = wire.nccl_s(collective, byte)
        total += max(slowed_s(seconds, wire.cluster), seconds - wire.matmul_s(hidden, pair.out))
    return total


@dataclass(frozen=True)
class _Wire:
    """Prices of one run's matmuls and of what it sends, whole activations of a layer."""

    run: Run
    cluster: Cluster

    @property
    def elements(self) -> float:
        return self.run.tokens * self.run.shape.hidden

    @property
    def byte(self) -> int:
        """Of an element that is gathered."""
        return 1 if self.run.precision == "fp8" else _HALF_BYTES

    def nccl_s(self, collective: str, byte: float) -> float:
        """Seconds of a collective alone, by elements of so many bytes."""
        payload = byte * self.elements
        return collective_time_s(
            collective, payload_bytes=payload, gpus_per_domain=self.run.tensor, cluster=self.cluster
        )

    def gather_s(self) -> float:
        """Seconds of a gather alone, with the scales of MXFP8."""
        return self.nccl_s("all-gather", self.byte) + self.scales_s(1)

    def scales_s(self, times: int) -> float:
        """Seconds of gathers of scales alone: of inputs, and of gradients of outputs; 0 but for MXFP8."""
        return times * self.nccl_s("all-gather", _SCALE_BYTES) if is_mxfp8(self.run) else 0.0

    def sends_s(self, byte: float) -> float:
        """Seconds of copies of all pieces but the own."""
        return collective_time_s(
            "all-gather", payload_bytes=byte * self.elements, gpus_per_domain=self.run.tensor, cluster=self.cluster,
            algorithm="copy engine", launch="nccl-tests", nccl="2.28.9",
        )  # fmt: skip

    def copied_s(self, times: int) -> float:
        """Seconds of copying own pieces into buffers."""
        moved = 2 * self.byte * self.elements / self.run.tensor
        return times * moved / memory_bytes_per_s(self.cluster.gpu)

    def matmul_s(self, n: int, k: int, share: float = 1.0) -> float:
        """Seconds of a matmul of a share of all tokens."""
        dtype = "bf16" if self.run.precision == "bf16" else "mxfp8" if is_mxfp8(self.run) else "f8e4m3fn"
        found = Matmul(dtype, 1, round(self.run.tokens * share), n, k)
        return kernel_work(Cost({dtype: found.flops}, matmuls=(found,)), self.cluster.gpu).arithmetic_s

    def pieces_s(self, n: int, k: int, pieces: int) -> float:
        """Seconds of a matmul in pieces of its tokens, three at a time."""
        rounds = [min(_STREAMS, pieces - first) for first in range(0, pieces, _STREAMS)]
        return sum(self.matmul_s(n, k, count / pieces) for count in rounds)

    def ring_s(self, n: int, k: int, sends_s: float, aggregated: bool = False, margin: int = 0) -> float:
        """Seconds that a matmul takes longer beside a ring of copies that lasts `sends_s`.

        Aggregated, neighbours swap their pieces before the first matmul.
        """
        ways, gpu = self.run.tensor, self.cluster.gpu
        whole = self.matmul_s(n, k)
        taken = self.pieces_s(n, k, ways // 2 if aggregated else ways) * gpu.sms / (gpu.sms - margin)
        first = sends_s / (ways - 1) if aggregated else 0.0
        last = taken / (ways // 2 if aggregated else ways)
        slowed = taken + (sends_s - first) * (1 - arithmetic_left(gpu, 0))
        return max(first + slowed, sends_s + last) - whole

    def pipeline_s(self, k: int, taken: int, byte: int) -> float:
        """Seconds that a matmul takes longer in four pieces of its outputs, each scattered while the next is made."""
        n, sms = self.run.shape.hidden, self.cluster.gpu.sms
        rounds = (self.matmul_s(n * count // _PIECES, k) for count in (_STREAMS, _PIECES - _STREAMS))
        seconds = sum(rounds) * sms / (sms - taken)
        scatter = self.nccl_s("reduce-scatter", byte / _PIECES)
        return max(seconds + scatter, seconds / _PIECES + _PIECES * scatter) - self.matmul_s(n, k)
