"""Choose the compiler options of plan, rehearse and train, then compile until the step fits and its order is fast.

    weights, rules, mesh, links -> derive_options -> CompileChoices -> chosen_options -> make -> does it fit?
    -> predicted seconds of every instruction -> a profile for XLA's scheduler -> make again -> the fastest program

A loop over layers that gathers its weights has no computation that hides the gathers of its first matmul or the
reductions of its last gradients, unless XLA moves them into the iteration before or after (collective pipelining).
Pipelining copies the gathered weights in each iteration, unless one loop body computes two iterations (double
buffering). Messages are combined up to the size at which a message uses most of the link's bandwidth, but at most up to
one layer. More and smaller messages have more latency in total. XLA's scheduler starts messages one iteration early,
and hides one message of a layer better than many.

XLA's latency hiding scheduler decides from estimated durations where a collective starts, and the estimates ignore the
links of the cluster and the rates that its kernels sustain. A measured profile (`meshkit profile` writes one) has the
true durations. Predicted durations replace it before the first run: the resulting programs are simulated, and the
fastest is used. With `train.pgle = "table"` XLA gets predicted durations only of collectives, and compiles once.

XLA has two models of a collective. Inside an NVLink domain it uses a table of measured throughputs for the GPU, and
takes the entry of the nearest size. Between hosts it uses a formula, whose numbers no compile option sets. A custom
table (`xla_gpu_experimental_collective_perf_table_path`) replaces XLA's table. It is the text of an
`xla.gpu.DeviceHloInstructionProfiles` (xla/service/gpu/model/hlo_op_profile.proto). XLA reads four fields of an entry:
opcode, shape, groups and throughput. The throughput counts bytes of the whole array: the result of an all-gather, the
operand of other collectives (collective_interpolator.cc in the same folder).
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
from meshkit.config.precisions import PRECISIONS
from meshkit.config.sections import PGLE_OPTION, PREDICTED, TABLE, TABLE_OPTION
from meshkit.hlo.module import Schedule
from meshkit.hlo.schedule import domains_spanned
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.network import collective_time_s
from meshkit.predict.simulate import simulate, step_pricer
from meshkit.sharding.resolve import placements_by_state
from meshkit.sharding.strategy import AxisRoles, Weight, make_weights
from meshkit.step.program import TrainProgram
from meshkit.units import format_bytes, format_seconds

# XLA's default threshold: 30 MiB of output. meshkit never sets a smaller threshold.
_DEFAULT_BYTES = 30 * 2**20
# A combined message must reach this share of a large message's bandwidth. In the simulator (2026-11-23) a step of Llama
# 2 70B on 64 H100s takes 7.39 s with 0.5 and 7.23 s with 0.9 (7.20 s with NVIDIA's own table of options). A step of
# Llama 3 70B on 512 H100s takes 8.89 s with 0.5 and 8.69 s with 0.9.
_SHARE = 0.9
# The two message sizes from which the bandwidth of large messages is computed.
_LARGE_BYTES = (2**32, 2**33)
# XLA limits temporaries to this percentage of the memory that inputs and results leave free. The total is what the
# client may allocate, which jax passes on (jaxlib/py_client.cc, bytes_limit of the allocator). Without a client it is
# _XLA_FRACTION of the GPU's memory (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit). XLA's
# rematerialization pass prints the limit.
LIMIT = "xla_gpu_memory_limit_slop_factor"
NO_LIMIT = 10_000
_XLA_FRACTION = 0.8
_ON = "COLLECTIVE_PIPELINING_MODE_ON"
# Llama 1B on one H100, jaxlib 0.11.2, 2026-11-22: with Triton GEMMs 158.6 s of compile and 491.5 ms a step, without
# them 5.2 s and 490.5 ms. In bf16 they are worth the compile time: 575 ms a step with them, 624 ms without.
_FP8 = Option(
    "xla_gpu_enable_triton_gemm",
    False,
    "XLA would make and time many kernels of its own for each fp8 matmul, minutes of compile, to take cuBLAS's",
)
# XLA does not count cuDNN's workspace and gaps between blocks. A program that is compiled without a limit must leave
# this share of its memory pool free for them.
_SPARE = 0.02
# Llama of width 4096 with `offload_dots` on one H100, jaxlib 0.11.2, 2026-11-27: all 263 ms of its copies were exposed.
# XLA records copies of slices into CUDA graphs since openxla/xla#28471; this list leaves DYNAMIC_SLICE_FUSION out.
_COPIES_APART = Option(
    "xla_gpu_enable_command_buffer",
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
    "copies to host memory and from it would stand in line with kernels in CUDA graphs, and hide under none",
)
# The first profile changes the schedule, and XLA then pipelines other collectives, whose names that profile lacks. The
# second profile has them. Further rounds only alternate between schedules.
ROUNDS = 2
_WHY = "train.pgle: XLA's own latencies know neither the links of this cluster nor what its kernels sustain"
_WHY_TABLE = "train.pgle: XLA's own table of collectives was measured on other hosts, launch and all"
_ITEM_BYTES = 4  # of f32: XLA uses the entries of f32 for types without entries
_GROUPED = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_PERMUTE = "collective-permute"
# One example of each kind of permute that XLA distinguishes: one GPU sends to another, two exchange, four form a ring.
_PAIRS = (((0, 1),), ((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 3), (3, 0)))
_SCALARS = tuple(range(4, 32, 4))  # bytes, too few to split over a group: only all-reduces and permutes have them
# Table sizes from 32 B to 1.7 GB, because XLA computes distances between sizes in 32 bits. There are four sizes in each
# doubling, so every size in the range is within 9 % of an entry.
_SIZES = tuple(2 ** (quarter / 4) for quarter in range(4 * 5, 4 * 31 - 1))
_OLDEST = (9, 0)  # the oldest GPU with a table in XLA: Hopper and Blackwell have one


@dataclass(frozen=True)
class LoopTraffic:
    """The gathers of weights in one iteration of the loop over layers."""

    axes: tuple[str, ...]
    """The mesh axes over which most of the bytes are gathered."""
    gathered_bytes: float
    """Bytes of all gathered weights of one layer on one GPU, in the compute precision."""
    gpus_per_domain: int
    """The GPUs of one group (over `axes`) in one NVLink domain."""
    domains: int
    """The NVLink domains that one group spans."""


def choices_for(
    program: TrainProgram, cluster: Cluster, placement: Placement, xla: Mapping[str, object]
) -> CompileChoices:
    """Return the options with which plan, rehearse and train compile a training step.

    Args:
        program: the step; its `[train]` section sets the share of memory and `pgle`, which orders its instructions.
        cluster: the cluster to compile for.
        placement: the place of each partition in the cluster.
        xla: the options that the user set, which win.

    Raises:
        ConfigError: an option names a file that must not be read: a pipe, a device, or more than 256 MiB.
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
    """Return the same options, after a check that the files that they name can be read.

    Args:
        options: XLA options by name.
        places: the file and line of each `[xla]` option, for error messages.

    Raises:
        ConfigError: an option names a file that must not be read: a pipe, a device, or more than 256 MiB.
    """
    for name, path in named_paths(options):
        try:
            if not path.is_dir():
                digest_of(path)
        except FileNotFoundError:
            continue  # XLA reports a missing file
        except (OSError, ValueError) as error:
            message = f"XLA cannot be given {path}: {getattr(error, 'strerror', None) or error}."
            raise places.error(f"xla.{name}", message, hint="a file of costs, or none") from None
    return options


def derive_options(program: TrainProgram, cluster: Cluster, placement: Placement) -> tuple[Option, ...]:
    """Return the options that follow from a training step: its memory, and the gathers of its loop over layers.

    Args:
        program, cluster, placement: see `choices_for`.

    Returns:
        An empty tuple on CPUs and with `train.derived_options = false`.
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
    """Return the option that raises XLA's memory limit, so that a step that fits does not reach the limit.

    At the limit XLA recomputes, and runs collectives one by one. XLA counts memory before it knows which buffers share
    memory, so a step can exceed the limit and still fit: Llama 3 70B on 64 H100s (data 2 x fsdp 32, whole layers
    recomputed) is counted as 79.8 GiB and takes 70.0. If a step does not fit, it is compiled again with the limit set
    to what the client may take. With offloaded activations there is no such second compile: XLA counts them as GPU
    memory, some of them twice, and would make room for them.

    Args:
        memory_fraction: the share of the GPU's memory that the client may take.
        offloads: whether activations are offloaded to host memory.

    Returns:
        An option whose values are percentages of what the client may take; with `offloads` it has no tight value.
    """
    why = "XLA counts what waits in host memory as the GPU's, and would make room for it"
    tight = None
    if not offloads:
        why = "XLA counts more than a step takes, and would recompute and serialize one that fits"
        tight = (100, f"memory_fraction gives the step {memory_fraction:.0%} of the memory, and it needs more")
    return Option(LIMIT, NO_LIMIT, why, tight=tight)


def described_memory_bytes(options: Mapping[str, object], cluster: Cluster, memory_fraction: float) -> int:
    """Return the GPU memory to describe to XLA, so that XLA without a client computes the same limit as in a run.

    Args:
        options: the compiler options of the run, by name.
        cluster: the cluster that the options are for.
        memory_fraction: the share of the GPU's memory that the client may take in the run.

    Returns:
        Bytes. If the limit is raised out of reach, they are the GPU's full memory, so that one cached program serves
        every `memory_fraction`.
    """
    percent, whole = options.get(LIMIT), cluster.gpu.memory_bytes
    if isinstance(percent, int) and percent >= NO_LIMIT:
        return int(whole)
    return int(whole * memory_fraction / _XLA_FRACTION)


def _waits_in_every_layer(program: TrainProgram) -> bool:
    """Return whether every layer communicates activations (sequence, expert or pipeline parallelism).

    Such collectives share a stream with the gathers of weights and would queue behind them, and XLA keeps another copy
    of each activation that it pipelines. With only the all-reduces of tensor parallelism, pipelining gains more than it
    loses (benchmarks/xla_options.md).
    """
    roles, sizes = AxisRoles.read(program.rules), program.mesh.shape
    waited_for = roles.residual | roles.expert
    return program.pipeline is not None or any(sizes.get(axis, 1) > 1 for axis in waited_for)


def loop_traffic(program: TrainProgram, placement: Placement) -> LoopTraffic | None:
    """Return the gathers of the loop over layers, or None if it gathers no weights.

    Args:
        program: its rules shard the weights; its `deferred` axes are gathered once a step, outside of the loop.
        placement: the place of each partition, which decides how many NVLink domains a group spans.
    """
    placed = placements_by_state(program.model.params, program.mesh, program.rules)
    sizes, bytes_each = program.mesh.shape, PRECISIONS[program.spec.train.precision].item_bytes
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
    """Return the options for a loop with this traffic.

    Args:
        traffic: the gathers of one iteration.
        cluster: its links decide from which size on a message uses most of their bandwidth.

    Returns:
        Options for collective pipelining, double buffering, and the sizes up to which collectives are combined. All
        of them are left out if the program fits only without them.
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
        # XLA counts the bytes of a collective's result on one GPU; a reduce-scatter leaves one share there.
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
    """Return the size up to which to combine a collective.

    It is XLA's default size, doubled until a message uses most of the bandwidth or holds a whole layer.

    Args:
        collective: HLO opcode, without `-start`.
        traffic: the group of the collective, and the bytes of a layer, at which doubling ends.
        cluster: its links determine how long a message takes.

    Returns:
        Payload bytes as in `collective_time_s`: 30 MiB times a power of two.
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
    """Return the axes over which the loop gathers a weight: axes that cut it, except `stays` and `deferred`."""
    axes = weight.cuts["compute"] - weight.stays - set(deferred)
    return tuple(name for name in sizes if name in axes and sizes[name] > 1)


def _elements(weight: Weight, gathered: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Return the elements of a weight on one GPU after the gather over these axes."""
    return weight.size / math.prod(sizes[name] for name in weight.cuts["compute"] - set(gathered))


def predicted_costs(schedule: Schedule, cluster: Cluster, assumptions: Assumptions) -> dict[str, float]:
    """Return the predicted seconds of one run of each instruction, as if nothing else ran at the same time.

    Args:
        assumptions: the effects that the prediction includes.

    Returns:
        Name of an instruction -> seconds without kernel launch; instructions that take no time are left out.

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
        """The options that it was compiled with."""
        ...

    @property
    def log(self) -> tuple[str, ...]:
        """Messages for the user."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The peak of its GPU memory."""
        ...

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its instructions in execution order."""
        ...


def compile_to_fit[T: CompileAttempt](
    make: Callable[[Sequence[Option]], T],
    cluster: Cluster,
    choices: CompileChoices,
    *,
    agree: Callable[[str, Any], Any] = lambda topic, mine: mine,
) -> tuple[T, list[T]]:
    """Return a program compiled so that it fits and, if `train.pgle` asks for it, ordered by predicted durations.

    Args:
        make: compiles the program with the given options.
        cluster: the cluster to compile for, which also determines the predicted durations.
        choices: the options of the user and of the program, and the share of memory that it may take.
        agree: (topic, value of this process) -> the value that all processes use, because all must compile the same.

    Returns:
        The fastest program that fits (the first one if none fits), and all programs that it was chosen from.

    Raises:
        ConfigError: `train.pgle` needs a cache that cannot be used, or a calibration that cannot be read.
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

    if choices.pgle != PREDICTED or not fits(first):  # reordering does not make it fit
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
    """Compile with the derived options; if that does not fit, with tight values, then without `costs_memory` options.

    Return the first program if it fits, otherwise the faster one of the programs that fit with tight values. If none
    fits, return the program with tight values and all options.
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
    if fits:  # XLA may stay below the limit by recomputing or serializing, which can cost more than exposed gathers.
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
    """Return the simulated seconds of one run of a program."""
    assumptions = assumptions_for({o.name: o.value for o in made.chosen})
    (step,) = simulate(made.schedule, cluster, assumptions=assumptions).timeline.steps
    return step.window[1] - step.window[0]


def room_for(peak_bytes: int) -> float:
    """Return the smallest memory pool in which a program with this peak may be compiled without XLA's limit."""
    return peak_bytes / (1 - _SPARE)


def _pool_bytes(cluster: Cluster, choices: CompileChoices) -> float:
    """Return the GPU memory that a program may take."""
    return cluster.gpu.memory_bytes * choices.memory_fraction


def without_path(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options for a report, with `predicted` in place of the path of a profile or table."""
    return tuple(replace(o, value=PREDICTED) if o.why in (_WHY, _WHY_TABLE) else o for o in options)


def device_key(cluster: Cluster) -> str:
    """Return XLA's key of a GPU's table: `sm_90`; compute capability 10.0 also has the GPU's name, `sm_100_B200`."""
    major, minor = cluster.gpu.compute_capability or (0, 0)
    return f"sm_{major}{minor}" + (f"_{cluster.gpu.name.split()[-1]}" if (major, minor) == (10, 0) else "")


def table_text(cluster: Cluster) -> str:
    """Return the text of a table of collectives in an NVLink domain, for every group size that divides the domain."""
    gpus, unit = cluster.gpus_used_per_domain, _ITEM_BYTES * cluster.gpus_used_per_domain
    sizes = sorted({max(1, round(size / unit)) * unit for size in _SIZES})
    sizes = [*(size for size in _SCALARS if size < unit), *sizes]
    entries = "".join(entry for size in sizes for entry in _entries(cluster, gpus, size))
    return f'entries {{\n key: "{device_key(cluster)}"\n value {{\n{entries} }}\n}}\n'


def unread(cluster: Cluster, schedule: Schedule) -> tuple[str, ...]:
    """Return a message for the user if XLA does not use the table for this program."""
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
    """Yield the table entries for one size: every collective over every group size."""
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
    """Return one table entry; `size` is the payload in bytes and the elements of the result, `n` the group size."""
    payload, elements = size
    seconds = collective_time_s(collective, payload_bytes=payload, gpus_per_domain=n, cluster=cluster)
    return (
        f'  entries {{ instruction {{ name: "_" opcode: "{collective}" channel_id: 1 use_global_device_ids: true '
        f"shape {{ element_type: F32 dimensions: {elements} is_dynamic_dimension: false "
        f"layout {{ minor_to_major: 0 tail_padding_alignment_in_elements: 1 }} }} {groups} }} "
        f"network_throughput_bytes_per_sec: {max(1, round(payload / seconds))} }}\n"
    )
