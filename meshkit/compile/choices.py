"""How plan, rehearse and train compile: options that follow from the step and its links, does it fit, in which order.

    weights, rules, mesh, links -> derive_options -> CompileChoices -> chosen_options -> make -> fits?
    -> price of every instruction -> a profile that XLA's scheduler reads -> make again -> the fastest

A loop over layers that gathers its weights has nothing to hide the gathers of its first matmul under, nor the
reductions of its last gradients, unless XLA moves them into the iteration before or after (collective pipelining), and
copies of the weights in flight unless two iterations share a body (double buffering). Messages are combined up to the
size at which they use most of the link's bandwidth, at most a layer: below it latency costs, and XLA's scheduler, which
starts them an iteration early, hides one message of a layer better than many.

XLA's latency hiding scheduler decides where a collective starts by how long it thinks that things take, and knows
neither the links of a cluster nor what its kernels sustain. A measured profile tells it (`meshkit profile` writes one);
predicted prices do so before the first run. What is made of them is simulated, and taken where it is faster. With
`train.pgle = "table"` XLA has prices of collectives alone, and compiles once.

XLA has two models of a collective: inside an NVLink domain a table of measured throughputs, by GPU, of which it takes
the nearest size; between hosts a formula, whose numbers no compile option sets. A table of one's own
(`xla_gpu_experimental_collective_perf_table_path`) takes the place of the first. It is the text of an
`xla.gpu.DeviceHloInstructionProfiles` (xla/service/gpu/model/hlo_op_profile.proto). Of an entry XLA reads the opcode,
the shape, the groups and the throughput in bytes of the whole array: an all-gather's result, the operand of all else
(collective_interpolator.cc there).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from meshkit.compile.cache import digest_of, named_paths, profile_text, text_file
from meshkit.compile.options import CompileChoices, Option, chosen_options
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.config.places import Places
from meshkit.config.sections import PGLE_OPTION, PREDICTED, TABLE, TABLE_OPTION
from meshkit.hlo.module import Schedule
from meshkit.hlo.schedule import domains_spanned
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.network import collective_time_s
from meshkit.predict.simulate import simulate, step_pricer
from meshkit.sharding.resolve import placements_by_state
from meshkit.sharding.strategy import BYTES_OF, AxisRoles, Weight, make_weights
from meshkit.step.program import TrainProgram
from meshkit.units import format_bytes, format_seconds

# XLA's own: 30 MiB of output. Messages are not combined less than that.
_DEFAULT_BYTES = 30 * 2**20
# Of a large message's bandwidth. By the simulator (2026-11-23) Llama 2 70B on 64 H100s takes 7.39 s with 0.5 and 7.23
# with 0.9 (NVIDIA's own table of options: 7.20), Llama 3 70B on 512 8.89 and 8.69.
_SHARE = 0.9
# Sizes between which the bandwidth of large messages is taken.
_LARGE_BYTES = (2**32, 2**33)
# XLA keeps temporaries within this percentage of what inputs and results leave of the memory: of what the client may
# take, which jax tells it (jaxlib/py_client.cc, bytes_limit of the allocator), or of _XLA_FRACTION of the GPU's where
# no client is (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit). Its rematerialization prints that limit.
LIMIT = "xla_gpu_memory_limit_slop_factor"
NO_LIMIT = 10_000
_XLA_FRACTION = 0.8
_ON = "COLLECTIVE_PIPELINING_MODE_ON"
# Llama 1B on one H100, jaxlib 0.11.2, 2026-11-22: 158.6 s of compile and 491.5 ms a step with it, 5.2 s and 490.5 ms
# without. In bf16 it is worth its time: 575 ms a step with it, 624 ms without.
_FP8 = Option(
    "xla_gpu_enable_triton_gemm",
    False,
    "XLA would make and time many kernels of its own for each fp8 matmul, minutes of compile, to take cuBLAS's",
)
# Of the memory that a step may take, what XLA does not count in it (cuDNN's workspace, gaps between blocks): a program
# that is not held to a limit leaves this much.
_SPARE = 0.02
# Llama of width 4096 with `offload_dots` on one H100, jaxlib 0.11.2, 2026-11-27: all 263 ms of its copies were exposed.
# XLA records copies of slices into CUDA graphs (DYNAMIC_SLICE_FUSION) since openxla/xla#28471; this list is without.
_COPIES_APART = Option(
    "xla_gpu_enable_command_buffer",
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
    "copies to host memory and from it would stand in line with kernels in CUDA graphs, and hide under none",
)
# Another schedule pipelines other collectives, whose names the first profile lacks: the second has them.
# Further ones go back and forth.
ROUNDS = 2
_WHY = "train.pgle: XLA's own latencies know neither the links of this cluster nor what its kernels sustain"
_WHY_TABLE = "train.pgle: XLA's own table of collectives was measured on other hosts, launch and all"
_ITEM_BYTES = 4  # of f32, which XLA falls back to for all types
_GROUPED = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_PERMUTE = "collective-permute"
# Permutes as XLA tells them apart: GPUs send or receive, exchange, or pass on.
_PAIRS = (((0, 1),), ((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 3), (3, 0)))
_SCALARS = tuple(range(4, 32, 4))  # bytes that no group divides: of reductions and permutes
# 32 B to 1.7 GB (distances of sizes are taken in 32 bits), four an octave: at most 9 % from any size between.
_SIZES = tuple(2 ** (quarter / 4) for quarter in range(4 * 5, 4 * 31 - 1))
_OLDEST = (9, 0)  # XLA has such a model for Hopper and Blackwell


@dataclass(frozen=True)
class LoopTraffic:
    """The communication of one iteration of the loop over layers, over the axes that shard its weights."""

    axes: tuple[str, ...]
    """The mesh axes over which most of the bytes move."""
    gathered_bytes: float
    """Weights of one layer, whole over these axes, in the compute precision."""
    gpus_per_domain: int
    """GPUs of one group in one NVLink domain."""
    domains: int
    """NVLink domains that one group spans."""


def choices_for(
    program: TrainProgram, cluster: Cluster, placement: Placement, xla: Mapping[str, object]
) -> CompileChoices:
    """Return the options with which plan, rehearse and train compile a training step.

    Args:
        program: the step; its `[train]` says how much memory it may take, and in which order it is compiled.
        cluster: that it is compiled for.
        placement: of its partitions there.
        xla: the user's own options, which win.

    Raises:
        ConfigError: an option names what is no file to read: a pipe, a device, or more than 256 MiB.
    """
    train = program.spec.train
    options = readable_options({**program.xla_options, **xla}, program.spec.places)
    return CompileChoices(
        options=options,
        derived=derive_options(program, cluster, placement),
        memory_fraction=train.memory_fraction,
        pgle=train.pgle,
    )


def readable_options(options: Mapping[str, object], places: Places) -> Mapping[str, object]:
    """Return options once the files that they name can be read.

    Args:
        options: of XLA, by name.
        places: where `[xla]` was written.

    Raises:
        ConfigError: an option names what is no file to read: a pipe, a device, or more than 256 MiB.
    """
    for name, path in named_paths(options):
        try:
            if not path.is_dir():
                digest_of(path)
        except FileNotFoundError:
            continue  # XLA says so
        except (OSError, ValueError) as error:
            message = f"XLA cannot be given {path}: {getattr(error, 'strerror', None) or error}."
            raise places.error(f"xla.{name}", message, hint="a file of costs, or none") from None
    return options


def derive_options(program: TrainProgram, cluster: Cluster, placement: Placement) -> tuple[Option, ...]:
    """Options for a training step: its memory, and what its loop over layers gathers.

    Args:
        program, cluster, placement: as `choices_for` takes them.

    Returns:
        None of them on CPUs, nor with `train.derived_options = false`.
    """
    train = program.spec.train
    if cluster.is_cpu or not train.derived_options:
        return ()
    options = [memory_option(train.memory_fraction, offloads=train.offloads)]
    if train.precision == "fp8":
        options.append(_FP8)
    if train.offloads:
        options.append(_COPIES_APART)
    traffic = None if _waits_in_every_layer(program) else loop_traffic(program, placement)
    return tuple(options) if traffic is None else (*options, *options_for(traffic, cluster))


def memory_option(memory_fraction: float, *, offloads: bool = False) -> Option:
    """XLA's own limit, beyond which it recomputes and runs collectives one by one, out of reach of a step that fits.

    XLA counts before it knows which buffers share memory, so that a step can be over the limit and fit: Llama 3 70B on
    64 H100s (data 2 x fsdp 32, whole layers recomputed) is counted as 79.8 GiB and takes 70.0. A step that does not fit
    is compiled again with the limit at what the client may take, but where activations wait in host memory: XLA counts
    them, some twice, as if they lay on the GPU, and would make room that they do not take.

    Args:
        memory_fraction: share of the GPU's memory that the client may take.
        offloads: whether activations wait in host memory.

    Returns:
        Its values are percentages of what the client may take; with `offloads` there is no tight one.
    """
    why = "XLA counts what waits in host memory as the GPU's, and would make room for it"
    tight = None
    if not offloads:
        why = "XLA counts more than a step takes, and would recompute and serialize one that fits"
        tight = (100, f"memory_fraction gives the step {memory_fraction:.0%} of the memory, and it needs more")
    return Option(LIMIT, NO_LIMIT, why, tight=tight)


def described_memory_bytes(options: Mapping[str, object], cluster: Cluster, memory_fraction: float) -> int:
    """Return the memory of a described GPU with which XLA, with no client to ask, has the limit of a run.

    Args:
        options: of a run, by name.
        cluster: whose GPUs they are for.
        memory_fraction: share of the GPU's memory that its client may take.

    Returns:
        The GPU's own where no limit is within reach, so that one kept program serves every `memory_fraction`.
    """
    percent, whole = options.get(LIMIT), cluster.gpu.memory_bytes
    if isinstance(percent, int) and percent >= NO_LIMIT:
        return int(whole)
    return int(whole * memory_fraction / _XLA_FRACTION)


def _waits_in_every_layer(program: TrainProgram) -> bool:
    """Return whether every layer gathers or scatters activations (sequence or expert parallelism, a pipeline's stage).

    They share a stream with the gathers of weights and would queue behind them, and what XLA pipelines of them is kept
    once more. All-reduces of tensor parallelism alone lose less than is won (benchmarks/xla_options.md).
    """
    roles, sizes = AxisRoles.read(program.rules), program.mesh.shape
    waited_for = roles.residual | roles.expert
    return program.pipeline is not None or any(sizes.get(axis, 1) > 1 for axis in waited_for)


def loop_traffic(program: TrainProgram, placement: Placement) -> LoopTraffic | None:
    """Return what the loop over layers gathers, or None if it gathers nothing.

    Args:
        program: its rules cut the weights, of which some are gathered once a step, not in the loop.
        placement: of its partitions; groups of them span domains.
    """
    placed = placements_by_state(program.model.params, program.mesh, program.rules)
    sizes, bytes_each = program.mesh.shape, BYTES_OF[program.spec.train.precision]
    moved: dict[tuple[str, ...], float] = {}
    for weight in make_weights(placed, AxisRoles.read(program.rules)):
        axes = _gathered_over(weight, program.deferred, sizes)
        if weight.stack > 1 and axes:
            moved[axes] = moved.get(axes, 0.0) + bytes_each * _elements(weight, axes, sizes) / weight.stack
    if not moved:
        return None
    axes = max(moved, key=lambda over: moved[over])
    domains = domains_spanned(placement, axes)
    return LoopTraffic(axes, sum(moved.values()), math.prod(sizes[name] for name in axes) // domains, domains)


def options_for(traffic: LoopTraffic, cluster: Cluster) -> tuple[Option, ...]:
    """Return the options for a loop that communicates so much.

    Args:
        traffic: of one iteration.
        cluster: its links decide from which size on a message uses most of their bandwidth.

    Returns:
        Collectives pipelined over iterations, a loop that does two at a time, and bytes up to which collectives are
        combined. All are left out where the program fits only without them.
    """
    over, layer = " x ".join(traffic.axes), format_bytes(traffic.gathered_bytes)
    pipelined = f"each layer gathers {layer} over {over}, which can only be hidden under the layer before"
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    options = [
        Option(f"xla_gpu_pipeline_{kind.replace('-', '_')}", _ON, pipelined, costs_memory=True) for kind in kinds
    ]
    options.append(
        Option(
            "xla_gpu_enable_while_loop_double_buffering",
            True,
            f"the {layer} gathered for the next layer would be copied once a layer",
            costs_memory=True,
        )
    )
    for kind in kinds:
        size = message_bytes(kind, traffic, cluster)
        # XLA counts what a collective leaves on a GPU: of a reduce-scatter, its share.
        limit = size // (traffic.gpus_per_domain * traffic.domains) if kind == "reduce-scatter" else size
        options.append(
            Option(
                f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes",
                limit,
                f"over {over} {kind} of less than {format_bytes(size)} uses less than {_SHARE:.0%} of the bandwidth",
                costs_memory=True,
            )
        )
    return tuple(options)


def message_bytes(collective: str, traffic: LoopTraffic, cluster: Cluster) -> int:
    """Return the smallest doubling of XLA's default message that uses most of the bandwidth or holds a layer.

    Args:
        collective: HLO opcode, without `-start`.
        traffic: its group, and its `gathered_bytes`, from which on sizes are not doubled any more.
        cluster: whose links price it.

    Returns:
        Bytes, as `collective_time_s` takes them: 30 MiB or a doubling of that.
    """

    def seconds(size: float) -> float:
        return collective_time_s(
            collective,
            payload_bytes=size,
            gpus_per_domain=traffic.gpus_per_domain,
            domains=traffic.domains,
            cluster=cluster,
        )

    small, large = _LARGE_BYTES
    per_byte = (seconds(large) - seconds(small)) / (large - small)
    size = _DEFAULT_BYTES
    while size * per_byte < _SHARE * seconds(size) and size < traffic.gathered_bytes:
        size *= 2
    return size


def _gathered_over(weight: Weight, deferred: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes over which a weight is gathered where it is used: those that cut it and do not work on shards."""
    axes = weight.cuts["compute"] - weight.stays - set(deferred)
    return tuple(name for name in sizes if name in axes and sizes[name] > 1)


def _elements(weight: Weight, gathered: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Elements of a weight on one GPU, whole over the gathered axes."""
    return weight.size / math.prod(sizes[name] for name in weight.cuts["compute"] - set(gathered))


def predicted_costs(schedule: Schedule, cluster: Cluster, assumptions: Assumptions) -> dict[str, float]:
    """Return the seconds of one run of every instruction that takes any, each as if nothing else ran.

    Args:
        schedule: of the program.
        cluster: GPUs and links.
        assumptions: what to take into account.

    Returns:
        Name of an instruction -> seconds, without the launch of a kernel.

    Raises:
        ConfigError: the calibration that the cluster names cannot be read.
    """
    pricer, found = step_pricer(schedule, cluster, assumptions), {}
    for body in schedule.computations.values():
        for i in body:
            if i.collective is not None:
                found[i.name] = pricer.collective_s(i)
            elif i.cost is not None:
                work = pricer.work(i)
                found[i.name] = max(work.arithmetic_s, work.memory_s, work.host_s)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


class CompileAttempt(Protocol):
    """One compile of a program."""

    @property
    def chosen(self) -> Sequence[Option]:
        """Options that it was made with."""
        ...

    @property
    def log(self) -> tuple[str, ...]:
        """Lines that a user must see."""
        ...

    @property
    def peak_bytes(self) -> int:
        """GPU memory that it needs at once."""
        ...

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its instructions in order."""
        ...


def compile_to_fit[T: CompileAttempt](
    make: Callable[[Sequence[Option]], T],
    cluster: Cluster,
    choices: CompileChoices,
    *,
    agree: Callable[[str, Any], Any] = lambda topic, mine: mine,
) -> tuple[T, list[T]]:
    """Return a program compiled so that it fits and, where `train.pgle` asks for it, in the order that its prices give.

    Args:
        make: compiles it with some options.
        cluster: whose GPUs it is for, and whose prices they are.
        choices: of the user, of the program, and of its memory.
        agree: topic, what this process says -> what all processes take: they must compile the same.

    Returns:
        The fastest that fits, the first where none does; and those that it was chosen from.

    Raises:
        ConfigError: what `train.pgle` asks for needs a cache that cannot be used, or a calibration that cannot be read.
    """
    if choices.pgle == TABLE:
        with text_file(agree(TABLE, table_text(cluster))) as path:
            table = Option(TABLE_OPTION, str(path), _WHY_TABLE)
            only = _fitting(make, cluster, choices, [*choices.derived, table], agree)
        said = unread(cluster, only.schedule)
        return replace(cast(Any, only), chosen=without_path(only.chosen), log=(*said, *only.log)), [only]
    first = _fitting(make, cluster, choices, choices.derived, agree)
    made = [first]

    def fits(one: T) -> bool:
        return one.peak_bytes <= _pool_bytes(cluster, choices)

    if choices.pgle != PREDICTED or not fits(first):  # no order of its instructions makes room for them
        return first, made
    names = {o.name for o in choices.derived}
    settled = [o for o in first.chosen if o.name in names]
    assumptions = assumptions_for({o.name: o.value for o in first.chosen})
    for round_ in range(ROUNDS):
        costs = predicted_costs(made[-1].schedule, cluster, assumptions)
        with text_file(agree(f"latencies {round_}", profile_text(costs))) as path:
            made.append(_fitting(make, cluster, choices, [*settled, Option(PGLE_OPTION, str(path), _WHY)], agree))

    def order(n: int) -> tuple[bool, float, int]:
        return not fits(made[n]), _step_s(made[n], cluster), n

    best = made[agree("fastest", min(range(len(made)), key=order))]
    return replace(cast(Any, best), chosen=without_path(best.chosen)), made


def _fitting[T: CompileAttempt](
    make: Callable[[Sequence[Option]], T],
    cluster: Cluster,
    choices: CompileChoices,
    derived: Sequence[Option],
    agree: Callable[[str, Any], Any],
) -> T:
    """Compile with the derived options; where that does not fit, with tight values and without those that cost memory.

    The first where it fits, else the faster one that fits with tight values; where none does, that with all options.
    """
    pool_bytes = _pool_bytes(cluster, choices)

    def choose(some: Sequence[Option]) -> list[Option]:
        return chosen_options(cluster.gpu, choices.options, some)

    tight = [replace(o, value=o.tight[0], why=o.tight[1], tight=None) if o.tight else o for o in derived]
    loose = choose(derived)
    limited = loose != choose(tight)
    if limited:
        made = make(loose)
        if room_for(made.peak_bytes) <= pool_bytes:
            return made
    made = make(choose(tight))
    fits, cheap = made.peak_bytes <= pool_bytes, [o for o in tight if not o.costs_memory]
    if len(cheap) == len(tight) or (fits and not limited):
        return made
    plain = make(choose(cheap))
    if plain.peak_bytes > pool_bytes:
        return made
    said = "the options that hide the gathers of a layer are left out: "
    if fits:  # XLA keeps within the limit by recomputing or serializing, which can cost more than gathers in sight.
        seconds, without_s = _step_s(made, cluster), _step_s(plain, cluster)
        if not agree("without what hides gathers", without_s < seconds):
            return made
        said += f"with them XLA saves memory, and the step takes {format_seconds(seconds)}, not "
        said += format_seconds(without_s)
    else:
        said += (
            f"they need {format_bytes(made.peak_bytes)} of GPU memory, more than the step may take, and without them "
        )
        said += f"it needs {format_bytes(plain.peak_bytes)}"
    return replace(cast(Any, plain), log=(said, *plain.log))


def _step_s(made: CompileAttempt, cluster: Cluster) -> float:
    """Simulated seconds of one run of a program."""
    assumptions = assumptions_for({o.name: o.value for o in made.chosen})
    (step,) = simulate(made.schedule, cluster, assumptions=assumptions).timeline.steps
    return step.window[1] - step.window[0]


def room_for(peak_bytes: int) -> float:
    """Return the pool from which on a program with this peak is compiled without a limit."""
    return peak_bytes / (1 - _SPARE)


def _pool_bytes(cluster: Cluster, choices: CompileChoices) -> float:
    """GPU memory that a program may take."""
    return cluster.gpu.memory_bytes * choices.memory_fraction


def without_path(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options as a report has them: that the latencies are predicted, not where their file lay."""
    return tuple(replace(o, value=PREDICTED) if o.why in (_WHY, _WHY_TABLE) else o for o in options)


def device_key(cluster: Cluster) -> str:
    """Return the name by which XLA finds a GPU's table: `sm_90`; of compute capability 10.0 `sm_100_B200`."""
    major, minor = cluster.gpu.compute_capability or (0, 0)
    return f"sm_{major}{minor}" + (f"_{cluster.gpu.name.split()[-1]}" if (major, minor) == (10, 0) else "")


def table_text(cluster: Cluster) -> str:
    """Prices of collectives inside an NVLink domain, of groups of every size that cuts it evenly."""
    gpus, unit = cluster.gpus_used_per_domain, _ITEM_BYTES * cluster.gpus_used_per_domain
    sizes = sorted({max(1, round(size / unit)) * unit for size in _SIZES})
    sizes = [*(size for size in _SCALARS if size < unit), *sizes]
    entries = "".join(entry for size in sizes for entry in _entries(cluster, gpus, size))
    return f'entries {{\n key: "{device_key(cluster)}"\n value {{\n{entries} }}\n}}\n'


def unread(cluster: Cluster, schedule: Schedule) -> tuple[str, ...]:
    """Return a line for the user where XLA goes by the table in nothing of a program."""
    kinds = {i.collective.collective for body in schedule.computations.values() for i in body if i.collective}
    others = sorted(kinds - {*_GROUPED, _PERMUTE})
    if (cluster.gpu.compute_capability or (0, 0)) < _OLDEST:
        why = f"XLA has a table of collectives for Hopper and Blackwell alone, not for {cluster.gpu.name}"
    elif others:
        why = f"XLA leaves its table of collectives aside in a program with {', '.join(others)}"
    else:
        return ()
    return (f'train.pgle = "table" changes nothing: {why}; "predicted" does',)


def _entries(cluster: Cluster, gpus: int, size: int) -> Iterator[str]:
    """Every collective of a size, over every group."""
    for n in (n for n in range(2, gpus + 1) if gpus % n == 0):
        groups = (
            f"iota_collective_device_list {{ num_replica_groups: {gpus // n} num_devices_per_group: {n} "
            f"iota_reshape_dims: {gpus} iota_transpose_perm: 0 }}"
        )
        for collective in ("all-reduce",) if size in _SCALARS else _GROUPED:
            elements = size // _ITEM_BYTES // (n if collective == "reduce-scatter" else 1)
            yield _entry(cluster, collective, (size, elements), n, groups)
    for pairs in _PAIRS if gpus > 1 else ():
        sends = " ".join(f"source_target_pairs {{ source: {a} target: {b} }}" for a, b in pairs)
        yield _entry(cluster, _PERMUTE, (size, size // _ITEM_BYTES), 2, sends)


def _entry(cluster: Cluster, collective: str, size: tuple[int, int], n: int, groups: str) -> str:
    """One instruction: its bytes, the elements of its result, and how fast it is."""
    payload, elements = size
    seconds = collective_time_s(collective, payload_bytes=payload, gpus_per_domain=n, cluster=cluster)
    return (
        f'  entries {{ instruction {{ name: "_" opcode: "{collective}" channel_id: 1 use_global_device_ids: true '
        f"shape {{ element_type: F32 dimensions: {elements} is_dynamic_dimension: false "
        f"layout {{ minor_to_major: 0 tail_padding_alignment_in_elements: 1 }} }} {groups} }} "
        f"network_throughput_bytes_per_sec: {max(1, round(payload / seconds))} }}\n"
    )
