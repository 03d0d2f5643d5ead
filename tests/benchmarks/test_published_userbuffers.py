"""What tensor-parallel GPUs send beside matmuls: closed forms of TransformerEngine's ways, and which run had which."""

from __future__ import annotations

import pytest

from benchmarks.published.blocks import slowed_s
from benchmarks.published.ours import is_current
from benchmarks.published.userbuffers import find_overlap, tensor_s, without_tensor
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.schedule import Collective
from meshkit.predict.kernels import kernel_work, memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left
from tests.benchmarks.published_rows import changed

PIPELINE = "nemo2504-llama3.1-70b-bf16-64"  # 4 GPUs, 4,096 tokens each of a context-parallel pair
RING = "mbridge-26.02-LLAMA3_70B-DGX-H100-64-FP8"  # 4 GPUs, 8,192 tokens


class Prices:
    """Of 70B's layers over 4 GPUs."""

    def __init__(self, dtype: str, tokens: int, byte: int):
        self.cluster = Cluster.load(changed(RING).machines.table)
        self.gpu, self.dtype, self.tokens, self.byte = self.cluster.gpu, dtype, tokens, byte
        self.memory = memory_bytes_per_s(self.gpu)
        self.lost = 1 - arithmetic_left(self.gpu, 0)  # of a matmul's rate, to copy engines

    def matmul(self, n: int, k: int, share: float = 1.0) -> float:
        found = Matmul(self.dtype, 1, round(self.tokens * share), n, k)
        return kernel_work(Cost({self.dtype: found.flops}, matmuls=(found,)), self.gpu).arithmetic_s

    def threes(self, n: int, k: int) -> float:
        """Four pieces, three at a time."""
        return self.matmul(n, k, 0.75) + self.matmul(n, k, 0.25)

    def nccl(self, kind: str, byte: float) -> float:
        size = byte * self.tokens * 8192
        return collective_time_s(kind, payload_bytes=size, gpus_per_domain=4, cluster=self.cluster)

    def sends(self, byte: float) -> float:
        size = byte * self.tokens * 8192
        return collective_time_s(
            "all-gather", payload_bytes=size, gpus_per_domain=4, cluster=self.cluster,
            algorithm="copy engine", launch="nccl-tests", nccl="2.28.9",
        )  # fmt: skip

    def copy(self) -> float:
        """An own piece into the buffer, read and written."""
        return 2 * self.byte * self.tokens * 8192 / 4 / self.memory

    def gathered(self, n: int, k: int) -> float:
        """A matmul beside a ring of gathers, which it outlasts."""
        beside = self.threes(n, k) + self.lost * self.sends(self.byte)
        assert beside > self.sends(self.byte) + self.threes(n, k) / 4
        return beside - self.matmul(n, k)

    def bulk(self) -> float:
        """A gather and a scatter beside whole matmuls that outlast both."""
        return slowed_s(self.nccl("all-gather", self.byte), self.cluster) + slowed_s(
            self.nccl("reduce-scatter", 2), self.cluster
        )


def test_sixteen_bits_gather_around_a_ring_and_scatter_in_four_pieces_of_the_output():
    """The last of which is beside nothing; 24 and 16 of 132 multiprocessors are taken from the matmuls."""
    p, run = Prices("bf16", 4096, 2), changed(PIPELINE)
    expected = 2 * p.copy() + p.gathered(2560, 8192) + p.gathered(14_336, 8192)
    scatter = p.nccl("reduce-scatter", 2 / 4)
    for inside, taken in ((2048, 24), (7168, 16)):
        pieces = (p.matmul(6144, inside) + p.matmul(2048, inside)) * 132 / (132 - taken)
        expected += max(pieces + scatter, pieces / 4 + 4 * scatter) - p.matmul(8192, inside)
    assert tensor_s(run, p.cluster, forward=True) == pytest.approx(expected)
    expected = 4 * p.copy() + p.gathered(7168, 8192) + 2 * p.bulk()
    beside = p.threes(2048, 8192) + p.lost * p.sends(2)
    expected += max(beside, p.sends(2) + p.threes(2048, 8192) / 4) - p.matmul(2048, 8192)
    assert tensor_s(run, p.cluster, forward=False) == pytest.approx(expected)


def test_eight_bits_scatter_around_a_ring_too_and_add_partial_sums_behind_it():
    """One multiprocessor waits for the copies; with current scaling largest values are reduced before a gather."""
    p, run = Prices("f8e4m3fn", 8192, 1), changed(RING)
    largest = collective_time_s("all-reduce", payload_bytes=4, gpus_per_domain=4, cluster=p.cluster)
    expected = 2 * (p.copy() + largest) + p.gathered(2560, 8192) + p.gathered(14_336, 8192)
    for inside in (2048, 7168):
        pieces = p.threes(8192, inside) * 132 / 131
        expected += max(pieces + p.lost * p.sends(2), p.sends(2) + pieces / 4) - p.matmul(8192, inside)
        expected += 8192 * 8192 * 2 * (1 + 1 / 4) / p.memory
    assert tensor_s(run, p.cluster, forward=True) == pytest.approx(expected)
    assert is_current(run)
    assert not is_current(changed("mbridge-25.09-LLAMA3.1_405B-DGX-B200-128-FP8"))


def test_without_userbuffers_gathers_and_scatters_block_but_for_those_beside_matmuls_of_weights():
    p, run = Prices("bf16", 4096, 2), changed(PIPELINE)
    both = p.nccl("all-gather", 2) + p.nccl("reduce-scatter", 2)
    assert tensor_s(run, p.cluster, forward=True, beside=False) == pytest.approx(2 * both)
    assert tensor_s(run, p.cluster, forward=False, beside=False) == pytest.approx(
        2 * both + 2 * p.nccl("all-gather", 2)
    )
    off = changed("nemo2407-LLAMA2-70B-64")
    overlap = find_overlap(off)
    assert overlap is not None
    assert overlap.off
    p = Prices("f8e4m3fn", 4096, 1)
    both = p.nccl("all-gather", 1) + p.nccl("reduce-scatter", 2)
    assert tensor_s(off, p.cluster, forward=True) == pytest.approx(2 * both)
    beside = 2 * p.nccl("all-gather", 1) + 2 * slowed_s(both, p.cluster)
    assert tensor_s(off, p.cluster, forward=False) == pytest.approx(beside)


def test_mxfp8_gathers_scales_alone_and_gradients_twice():
    run = changed("mbridge-26.04-LLAMA3_70B-DGX-GB200-64-MXFP8")
    cluster = Cluster.load(run.machines.table)
    scales = collective_time_s("all-gather", payload_bytes=8192 * 8192 / 32, gpus_per_domain=2, cluster=cluster)
    wider = tensor_s(run, cluster, forward=False, beside=False)
    gathered = collective_time_s("all-gather", payload_bytes=8192 * 8192, gpus_per_domain=2, cluster=cluster)
    summed = collective_time_s("reduce-scatter", payload_bytes=2 * 8192 * 8192, gpus_per_domain=2, cluster=cluster)
    assert wider == pytest.approx(2 * (3 * (gathered + scales) + summed))


@pytest.mark.parametrize(
    ("name", "proj", "fc2", "scatter"),
    [
        ("nemo2409-llama3.1-405b-bf16-576", 24, 8, 2),
        ("nemo2504-llama3.1-405b-fp8-512", 24, 8, 1),
        ("nemo2504-llama3.1-70b-fp8-64", 24, 16, 1),
        ("nemo2505-llama3.1-405b-gb200-bf16-128", 32, 8, 2),
        ("nemo2411-gpt3-175b-fp8-512", 24, 20, 2),
        ("nemo2407-GPT3-175B-128", 24, 0, 1),
        ("mbridge-26.02-LLAMA3.1_405B-DGX-GB300-256-FP8", 0, 0, 2),
        ("nemo-grok1-bf16-8", 16, 16, 2),  # as TransformerEngine is without any table
        ("mcore-h100-weak-462B", 16, 16, 2),
    ],
)
def test_which_run_had_what(name, proj, fc2, scatter):
    overlap = find_overlap(changed(name))
    assert overlap is not None
    assert (overlap.proj, overlap.fc2, overlap.scatter, overlap.off) == (proj, fc2, scatter, False)


@pytest.mark.parametrize(
    "name",
    ["mbridge-26.06-LLAMA3.1_405B-DGX-GB200-256-NVFP4", "nemo2504-llama3.1-8b-bf16-8", "korthikanti-22B-selective"],
)
def test_no_userbuffers_in_nvfp4_without_tensor_parallelism_and_elsewhere(name):
    run = changed(name)
    assert find_overlap(run) is None
    assert tensor_s(run, Cluster.load(run.machines.table), forward=True) == 0.0


def test_what_travels_in_layers_makes_way_and_the_rest_stays():
    def sent(name: str, axes: tuple[str, ...], source: str = "attention") -> Instruction:
        what = Collective(name, "k", "all-gather", axes, True, "nvlink", None, "bf16", 4, 1, 8, 64)
        return Instruction(name, "all-gather", "collective", source, collective=what)

    done = Instruction("done", "all-gather-done", "done", starts="both")
    body = (sent("a", ("tensor",)), sent("both", ("context", "tensor")), done, sent("ring", ("context",)),
            sent("moe", ("tensor",), "body/moe/experts"))  # fmt: skip
    schedule = Schedule("m", {"main": (sent("embedding", ("tensor",)),), "body": body}, "main", "x")
    found = without_tensor(changed(PIPELINE), schedule).computations
    assert [i.name for i in found["body"]] == ["ring", "moe"]
    assert [i.name for i in found["main"]] == ["embedding"]
    assert without_tensor(changed("nemo2504-llama3.1-8b-bf16-8"), schedule) == schedule
