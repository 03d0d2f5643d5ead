"""Open traces of any JAX job for `reader`, without the records of a run folder.

FILE.xplane.pb[.gz], a folder of them, or plugins/profile/RUN/ of jax.profiler
FILE.sqlite of nsys, a folder of them, the folder of nsys-jax, or a folder of such folders
  -> devices; the program that ran longest on them; its HLO, from the trace or from a file beside it
  -> TracedProgram, and Notes on assumptions and missing data
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.config.files import gunzip, read_regular, unxz
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.errors import ConfigError, MeshkitError, ProgramError, TraceError
from meshkit.hlo.module import COLLECTIVES, Module, ReadProgram, read_program
from meshkit.hlo.proto import ints, message, messages, read_fields, text
from meshkit.hlo.schedule import Collective, read_groups
from meshkit.trace.captured import LARGEST_PROGRAM_BYTES, has_capture, no_trace, traced_program
from meshkit.trace.nsys import home, is_nsys, read_nsys
from meshkit.trace.operations import KINDS, Operations, TracedProgram, TraceFile, is_container, read_operations
from meshkit.trace.reader import Note, some
from meshkit.trace.xspace import Plane, read_xspace
from meshkit.units import format_percent

_PATTERNS = ("*.xplane.pb", "*.xplane.pb.gz")
# Files with HLO: of meshkit, of XLA's dumps (nsys-jax packs them, in a folder if processes differ), and of XProf.
_SIDECARS = ("*.hlo.pb", "*.hlo.pb.gz", "*.hlo.pb.xz", "*.hlo.pb.xz/*", "*.hlo_proto.pb")
_DUMPED = re.compile(r"\bmodule_\d+\.")  # The module's name follows.
# MaxText writes to BASE/RUN/tensorboard/plugins/profile; the given folder may be BASE, or the one above it.
_BELOW = tuple(f"{'*/' * depth}plugins/profile/*" for depth in (1, 2, 3))
_TOGETHER_S = 60.0  # The hosts' traces of one profile begin within this time.
_OF_A_PROCESS = re.compile(r"p\d+")  # The name of meshkit's session for one process of a capture.
_KEPT_EVENTS = 4_000_000  # Limit on events of all files that are kept, so that they are read once: 120 MB.
_MOST_OTHERS = 4  # The most other programs that a note names.
_OF_A_RUN = ("report.json", "plan.json")  # A path to one of these files means its run folder.
_MOST_GROUPS = 8  # The most replica groups of a row, and members of a group, that are written out.


@dataclass(frozen=True)
class Loose:
    """Traces, and the program whose executions are their steps."""

    files: tuple[TraceFile, ...]
    hosts: Mapping[int, str]
    """Process -> its host's name, from the name of its file."""
    program: TracedProgram
    module: Module | None
    """The compiled program; None if it was not found."""
    read: ReadProgram | None
    placement: Placement | None
    """Placement on the mesh; None if no mesh is known."""
    cluster: Cluster | None
    versions: Mapping[str, str]
    damaged: Mapping[int, str]
    """Process -> the reason why its file cannot be used."""
    notes: tuple[Note, ...]
    num_devices: int
    """Number of devices that the program runs on, traced or not."""
    operations: dict[int, Operations]
    """Process -> the operations of its file, for files within the limit `_KEPT_EVENTS`."""


def is_loose(path: Path) -> bool:
    """Return whether a path is a trace, or a folder with traces in or below it, but not a run folder with a capture."""
    if path.is_file() or (path.name.endswith((".xplane.pb", ".xplane.pb.gz", ".sqlite")) and not path.exists()):
        return path.suffix != ".json" or not (path.name in _OF_A_RUN or has_capture(path.parent))
    return path.is_dir() and not has_capture(path) and bool(_sessions(path))


def find_traces(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the traces of one profile, and the sessions that are left out, the newest last.

    The profile is the given file, or the newest session in the given folder. Sessions of other hosts that began within
    a minute of the newest session belong to the same profile, and their traces come last. Folders with nsys traces of
    other processes belong to the profile under the same condition.

    Raises:
        TraceError: there is no trace.
    """
    if path.is_file():
        beside = _jax_traces(path.parent) if "trace.json" in path.name else []  # jax writes both kinds of files.
        host = path.name.partition(".trace.json")[0]
        own = [file for file in beside if path.name.startswith("perfetto_trace.json") or _host_of(file) == host]
        return own or [path], []
    sessions = _sessions(path) if path.is_dir() else []
    if not path.exists():
        hint = "a *.xplane.pb or *.sqlite file, or its folder"
        raise TraceError("there is no such trace.", at=str(path), hint=hint)
    if not sessions:
        raise no_trace(path, "this folder has no")
    if all(_OF_A_PROCESS.fullmatch(s.name) for s in sessions):
        return [file for s in sessions for file in _traces(s)], []
    *earlier, newest = sessions
    if not _jax_traces(newest):  # nsys-jax writes a folder for each process.
        near = sorted(s for s in sessions if _began_s(newest) - _began_s(s) <= _TOGETHER_S)
        return [file for s in near for file in _traces(s)], [s for s in earlier if s not in near]
    found, others, hosts = _traces(newest), [], {(newest.parent, file.name) for file in _traces(newest)}
    for session in reversed(earlier):
        mine = {(session.parent, file.name) for file in _traces(session)}
        if _began_s(newest) - _began_s(session) <= _TOGETHER_S and not mine & hosts:
            found, hosts = found + _traces(session), hosts | mine
        else:
            others.insert(0, session)
    return found, others


def open_loose(
    path: str | Path,
    *,
    mesh: MeshSpec | None = None,
    cluster: Cluster | None = None,
    program: str | None = None,
    devices: Mapping[int, int] | None = None,
) -> Loose:
    """Find the program and its devices in traces without a run folder.

    Args:
        mesh: the mesh of the job; None if unknown.
        cluster: the job's GPUs and links; None if unknown.
        program: the program whose executions are the steps, by the name of its module or of the jitted function; None
            for the program that ran longest.
        devices: for a single trace, number of a device in the trace -> its id; None if the numbers are the ids.

    Raises:
        TraceError: there is no trace, no trace can be read, or none has an operation of a device or of that program.
        ConfigError: the mesh or the cluster has another number of devices than the program.
    """
    found, others = find_traces(Path(path))
    scan = _Scan(found, program, devices)
    module, read, placement, ids = scan.module(), None, None, np.array(scan.devices)
    own = [file for file in found if file.parent == found[0].parent]
    joined = len(own) < len(found) and not (_OF_A_PROCESS.fullmatch(found[0].parent.name) or is_nsys(found[0]))
    if module is not None and joined and len(_assigned(module)) < len(scan.devices):
        scan = _Scan(own, program)  # The program has fewer devices, so the other sessions are of another job.
        module, ids = scan.module(), np.array(scan.devices)
        others += dict.fromkeys(file.parent for file in found[len(own) :])
    if module is not None:
        try:
            ids, placement = _placed(module, scan.devices, mesh, cluster)
            read = _without_unknown(read_program(module, placement), axes=mesh is not None, links=cluster is not None)
        except (ProgramError, UnicodeDecodeError) as error:  # UnicodeDecodeError: a name is not text.
            module, read, placement, scan.reason = None, None, None, str(error)
    if module is not None and read is not None:
        schedule = read.schedule
        once = {name for name, n in schedule.known_runs().items() if n == 1} if schedule else set()
        traced = traced_program(module, read, ids.tolist())
        traced = replace(traced, program_id=scan.program, found=True, once=frozenset(once))
    else:
        kinds = {kind: _stand_in(kind) for kind in ("", *KINDS)}
        traced = TracedProgram(scan.name, program_id=scan.program, found=True, kinds=kinds)
    missing = sorted(set(ids.tolist()) - set(scan.devices))
    return Loose(
        tuple(scan.files),
        scan.hosts,
        traced,
        module,
        read,
        placement if mesh is not None else None,
        cluster,
        scan.versions,
        scan.damaged,
        tuple(_notes(scan, module, mesh, cluster, missing, others, communicates=bool(read and read.collectives))),
        len(ids),
        scan.operations,
    )


def _traces(folder: Path) -> list[Path]:
    """Return the traces directly in a folder: those of jax, or if there are none, those of nsys."""
    return _jax_traces(folder) or _nsys_traces(folder)


def _jax_traces(folder: Path) -> list[Path]:
    """Return the traces of jax in a folder; if a trace also has a `.gz` copy, the unpacked file."""
    files = {file.name.removesuffix(".gz"): file for pattern in reversed(_PATTERNS) for file in folder.glob(pattern)}
    return [files[name] for name in sorted(files)]


def _nsys_traces(folder: Path) -> list[Path]:
    if found := sorted(folder.glob("*.sqlite")):
        return found
    for trace in (folder / "trace.parquet", folder / "nvtx_gpu_proj_trace" / "trace.parquet"):
        if trace.exists():
            return sorted(trace.iterdir()) if trace.is_dir() else [trace]
    return []


def _sessions(folder: Path) -> list[Path]:
    """Return the folders with traces, newest last: `folder`, else those in its `plugins/profile/`, else those below."""
    for traces in (_jax_traces, _nsys_traces):
        if traces(folder):
            return [folder]
        for patterns in (["plugins/profile/*"], ["profile/*"], ["*"], _BELOW):
            found = [s for pattern in patterns for s in sorted(folder.glob(pattern)) if s.is_dir() and traces(s)]
            if patterns is _BELOW:
                found = [s for s in found if not has_capture(s.parents[2])]
            if found:
                return sorted(found, key=_began_s)
    return []


def _host_of(trace: Path) -> str:
    """Return a trace's file name without its suffix, usually its host; for nsys-jax, the name of its folder."""
    name = trace.name.split(".xplane")[0].removesuffix(".sqlite")
    return home(trace).name if name == "trace.parquet" else name


def _began_s(session: Path) -> float:
    """Return when a session began, from its name (jax: to the second), else when its last trace was written."""
    try:
        return time.mktime(time.strptime(session.name, "%Y_%m_%d_%H_%M_%S"))
    except ValueError:
        return max(file.stat().st_mtime for file in _traces(session))


class _EveryDevice(dict[int, int]):
    """Maps each device's number in the file to itself, as its id."""

    def __contains__(self, ordinal: object) -> bool:
        return True

    def __missing__(self, ordinal: int) -> int:
        return ordinal


class _Scan:
    """First pass over the files: finds the devices, and the time of each program on them."""

    def __init__(self, found: Sequence[Path], wanted: str | None = None, devices: Mapping[int, int] | None = None):
        self._ids_of = devices
        self.files: list[TraceFile] = []
        self.hosts: dict[int, str] = {}
        self.damaged: dict[int, str] = {}
        self.versions: dict[str, str] = {}
        self.devices: list[int] = []
        self.operations: dict[int, Operations] = {}  # Process -> operations of its file, within `_KEPT_EVENTS`.
        self.kept: dict[tuple[str, int], bytes] = {}  # Programs in the traces.
        self.reason = ""  # The reason why there is no program.
        self._ids: list[set[int]] = []  # Ids of each file's programs.
        self._busy: Counter[tuple[str, int]] = Counter()  # (module, the runtime's id) -> ps on all devices.
        errors: list[TraceError] = []
        for process, path in enumerate(found):
            try:
                self._file(process, path, alone=len(found) == 1)
            except TraceError as error:
                errors.append(error)
                self.damaged[process] = error.message
        if not self.files:
            raise errors[0]
        modules: Counter[str] = Counter()
        for (module, _), busy in self._busy.items():
            modules[module] += busy
        named = [module for module in modules if module]
        self.name = max(named, key=modules.__getitem__) if named else ""
        if wanted is not None:
            ends = wanted.rstrip("_")  # jax names the module of a `<lambda>` without its last underscore.
            self.name = next((m for m in named if m in (wanted, ends, f"jit_{ends}")), "")
            if not self.name:
                seen = ", ".join(sorted(named, key=lambda m: -modules[m])) or "no named program"
                raise TraceError(f"the trace has no program '{wanted}'.", at=str(found[0]), hint=seen)
        total = max(1, sum(modules.values()))
        self.others = {m: modules[m] / total for m in named if m != self.name}
        self.programs = {program: busy for (module, program), busy in self._busy.items() if module == self.name}
        most = max(self.programs, key=self.programs.__getitem__)
        self.program = most if most != -1 and all(most in ids for ids in self._ids) else None
        self.share = (modules[self.name] if self.program is None else self.programs[most]) / total

    def _file(self, process: int, path: Path, *, alone: bool) -> None:
        file = TraceFile(path, self._ids_of or _EveryDevice())
        space = None if is_nsys(path) else read_xspace(path)
        operations = read_nsys(file) if space is None else read_operations(file, space)
        if not operations.devices or all(is_container(label) for label in operations.labels):
            raise _nothing_ran([] if space is None else space.planes, path)
        ordinals = sorted(operations.devices)
        apart = alone or not set(ordinals) & set(self.devices)
        ids = ordinals if apart else [max(self.devices) + 1 + i for i in range(len(ordinals))]
        self.files.append(TraceFile(path, self._ids_of or dict(zip(ordinals, ids)), process))
        self.devices += ids
        self.hosts[process] = _host_of(path)
        self._count(operations)
        if sum(kept.events for kept in self.operations.values()) + operations.events <= _KEPT_EVENTS:
            named = {device: operations.devices[ordinal] for ordinal, device in zip(ordinals, ids)}
            self.operations[process] = replace(operations, devices=named)
        if space is None:
            return
        try:
            self.kept |= space.programs()
        except TraceError as error:  # The operations are usable without the programs.
            self.reason = error.message or ""
        for plane in space.planes:
            if plane.name == "/host:metadata":
                known = {"jax": plane.stats.get("jax_version"), "jaxlib": plane.stats.get("jaxlib_version")}
                self.versions |= {name: v for name, v in known.items() if isinstance(v, str)}

    def _count(self, operations: Operations) -> None:
        """Add each program's time on the devices; loops do not count, since the operations inside them do."""
        labels = operations.labels
        self._ids.append({label.program for label in labels})
        busy = np.zeros(len(labels))
        for ops in operations.devices.values():
            busy += np.bincount(ops.label, weights=ops.end_ps - ops.start_ps, minlength=len(labels))
        for label, each in zip(labels, busy.tolist()):
            if not is_container(label):
                self._busy[label.module, label.program] += int(each)

    def module(self) -> Module | None:
        """Return the compiled program from the trace or a file beside it; None, and the `reason`, if there is none."""
        exact = [blob for (name, id_), blob in self.kept.items() if name == self.name and id_ == self.program]
        named = [blob for (name, _), blob in self.kept.items() if name == self.name]
        for blob in exact or named[:1] or list(self._programs_in_files()):
            try:
                return _loaded(blob)
            except MeshkitError as error:
                self.reason = error.message
        self.reason = self.reason or "neither the trace nor a file beside it has its HLO"
        return None

    def _programs_in_files(self) -> Iterator[bytes]:
        """Yield programs called `self.name` from files beside the traces, in `dump/` there, or above `plugins/`."""
        numbered = "module_" if self.program is None else f"module_{self.program:04d}."  # A prefix in XLA's dump.
        for folder in dict.fromkeys(home(f.path) for f in self.files):
            above = [folder.parents[2]] if folder.parts[-3:-1] == ("plugins", "profile") else []
            found = [p for at in (folder, folder / "dump", *above) for s in _SIDECARS for p in sorted(at.glob(s))]
            for path in sorted(found, key=lambda p: numbered not in _dump_name(p)):
                name = _dump_name(path)
                if "before_optimizations" in name or (_DUMPED.search(name) and f".{self.name}." not in name):
                    continue
                try:
                    content = read_regular(path, LARGEST_PROGRAM_BYTES)
                    if unpack := {b"\x1f\x8b": gunzip, b"\xfd7": unxz}.get(content[:2]):
                        content = unpack(content, LARGEST_PROGRAM_BYTES)
                    fields = read_fields(content)
                    if text(fields, 1) == self.name or text(message(fields, 1), 1) == self.name:
                        yield content
                except (OSError, ValueError, MeshkitError):
                    continue  # It is not a file with HLO.


def _dump_name(program: Path) -> str:
    return f"{program.parent.name}/{program.name}"


def _nothing_ran(planes: Sequence[Plane], path: Path) -> TraceError:
    names = [plane.name for plane in planes]
    if any(name.startswith("/device:TPU") for name in names):
        return TraceError(
            "this is a trace of TPUs, which meshkit does not read: it measures GPUs, and CPU devices in tests.",
            at=str(path),
        )
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return TraceError(
        "the trace has no operation of a GPU or of XLA:CPU" + (f"; {len(names)} planes: {listed}." if names else "."),
        at=str(path),
        hint="tracing a window in which a jitted function runs to its end (jax.block_until_ready before stop_trace)",
    )


def _loaded(content: bytes) -> Module:
    inner = next((v for v in read_fields(content).get(1, ()) if isinstance(v, bytes)), b"")
    try:
        wrapped = 3 in read_fields(inner)
    except MeshkitError:  # Field 1 is a name, so `content` is a plain `HloModuleProto`.
        wrapped = False
    return Module(inner if wrapped else content)


def _assigned(module: Module) -> list[int]:
    """Return the devices of a program: partition by partition, each with all its replicas."""
    return [device for m in messages(module.device_assignment, 3) for device in ints(m, 1)]


def _placed(
    module: Module, devices: Sequence[int], mesh: MeshSpec | None, cluster: Cluster | None
) -> tuple[np.ndarray, Placement]:
    """Return [partitions] the device of each, and their placement on the mesh; without a mesh, on a single axis."""
    assigned = _assigned(module)
    ids = np.array(assigned if len(assigned) > 1 else sorted(devices))
    if not set(ids.tolist()) & set(devices):  # The traces number devices in another way than the program.
        ids = np.array(sorted(devices))
    highest = 0
    for i in module.instructions.values():
        if i.opcode.removesuffix("-start") in COLLECTIVES:
            highest = max(highest, int(read_groups(i, 1).max()))
    if highest >= len(ids):
        ids = np.concatenate([ids, np.arange(highest + 1 - len(ids)) + ids.max() + 1])
    count = len(ids)
    names, shape = (mesh.axis_names, mesh.shape) if mesh else (("devices",), (count,))
    if mesh is not None and mesh.size != count:
        sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items())
        raise ConfigError(
            f"the mesh has {mesh.size} devices ({sizes}), but the program in the trace runs on {count}.",
            hint=f"a mesh whose axes multiply to {count}",
        )
    if cluster is None:
        return ids, Placement.from_shape(names, shape)
    if count > cluster.num_gpus:
        raise ConfigError(
            f"the program in the trace runs on {count} devices, but the cluster has {cluster.num_gpus}.",
            hint=f"a cluster of {-(-count // cluster.gpus_per_host)} hosts, or leaving out --cluster",
        )
    if mesh is not None and mesh.size == cluster.num_gpus and _fills(mesh, cluster):
        return ids, mesh.placement(cluster)
    return ids, Placement.of_gpus(names, shape, np.arange(count), cluster)


def _fills(mesh: MeshSpec, cluster: Cluster) -> bool:
    """Return whether a mesh declares which of its factors are inside an NVLink domain of the cluster."""
    return int(np.prod([axis.number("nvlink") for axis in mesh.axes])) == cluster.gpus_used_per_domain


def _without_unknown(read: ReadProgram, *, axes: bool, links: bool) -> ReadProgram:
    """Return the program; without `axes`, its collectives have groups instead of axes; without `links`, no links."""

    def known(c: Collective) -> Collective:
        if not axes:
            members = read.participants.get(c.name)
            groups = None if members is None else _groups_text(members)
            c = replace(c, axes=(), axes_complete=True, replica_groups=groups)
        return c if links else replace(c, link="", fabric=None)

    return replace(read, collectives={name: known(c) for name, c in read.collectives.items()})


def _groups_text(members: np.ndarray) -> str:
    groups = [
        "{" + ",".join(map(str, g[:_MOST_GROUPS])) + (",...}" if len(g) > _MOST_GROUPS else "}")
        for g in members.tolist()
    ]
    return ",".join(groups[:_MOST_GROUPS]) + (",..." if len(groups) > _MOST_GROUPS else "")


def _stand_in(kind: str) -> Collective:
    return Collective(
        name=kind or "communication", key=kind, collective=kind or "unknown", axes=(), axes_complete=True, link="",
        fabric=None, dtype="", group_size=0, num_groups=0, gpus_per_domain=0, payload_bytes=0,
    )  # fmt: skip


def _notes(
    scan: _Scan,
    module: Module | None,
    mesh: MeshSpec | None,
    cluster: Cluster | None,
    missing: Sequence[int],
    others: Sequence[Path],
    *,
    communicates: bool,
) -> Iterator[Note]:
    if scan.name:
        which = f"'{scan.name}'" + (
            f" (program {scan.program})" if len(scan.programs) > 1 and scan.program is not None else ""
        )
        message = f"Steps are the executions of {which}, which has {format_percent(scan.share)} of the devices' time."
        if scan.program is not None and (more := len(scan.programs) - 1):
            message += (
                f" {more} more of that name ran, since shapes or shardings of its arguments changed between "
                "calls; their executions are not steps: call it once before the block, and do not reshard its results."
            )
        if scan.others:
            most = sorted(scan.others.items(), key=lambda item: -item[1])[:_MOST_OTHERS]
            message += f" Others: {', '.join(f'{name} {format_percent(share)}' for name, share in most)}."
    else:
        message = "No kernel names its program: a step is a repetition of all kernels, or the whole trace."
    yield Note("steps_found", message)
    if module is None:
        yield Note(
            "no_program",
            f"The program is not known ({scan.reason}): kernels are classified by their names, and bytes, groups, axes "
            "and waiting are unknown.",
        )
    elif mesh is None and communicates:
        yield Note("no_mesh", "No mesh is known: rows are by collective and replica groups; --mesh names axes.")
    if module is not None and cluster is None and communicates:
        yield Note("no_cluster", "No cluster is known: links have no name and no peak; --cluster sets them.")
    if missing and module is not None:
        yield Note(
            "missing_processes",
            f"The program runs on {len(missing)} more devices than these traces have ({some(missing)}): "
            "the means do not include them, and waiting is unknown in groups with them.",
        )
    if scan.damaged:
        first, reason = next(iter(scan.damaged.items()))
        count = len(scan.files) + len(scan.damaged)
        message = f"{len(scan.damaged)} of {count} traces cannot be used; number {first}: {reason}"
        yield Note("damaged_traces", message)
    if len(scan.files) > 1:
        message = f"The {len(scan.files)} traces are taken as processes in the order of their names"
        folders = {f"{f.path.parent.name} of {f.path.parent.parent}": 0 for f in scan.files}
        message += f", of {len(folders)} sessions that began within a minute." if len(folders) > 1 else "."
        yield Note("assumed_order", message)
    if others:
        names = ", ".join(o.name for o in others[-3:])
        newest = scan.files[0].path.parent.name
        message = f"This is the newest profile, {newest}; {len(others)} others are left out ({names})."
        yield Note("other_profiles", message)
