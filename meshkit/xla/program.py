"""A jitted function -> its program for GPUs that are not there. Layer 4.

This process traces and lowers for CUDA (jax.export); a child process compiles, because XLA aborts on some programs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError, ProgramError
from meshkit.sharding.mesh import DescribedMesh
from meshkit.spec.cluster import Cluster
from meshkit.xla.hlo import source_path
from meshkit.xla.options import compiler_options
from meshkit.xla.target import target_config, topology_name

# Custom calls that jax.export refuses by default because their backend may change; ours is compiled at once.
_ALLOWED_CALLS = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmaxDropout",
    "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
    "__cudnn$fmhaSoftmaxF8",
    "__cudnn$fmhaSoftmaxBackwardF8",
    "__cudnn$blockScaledDot",
    "__gpu$xla.gpu.triton",
    "mosaic_gpu_v2",
    "ragged_all_to_all",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
)
# How jax words that an operation (a Python callback) wants the attached backend while it is lowered for another.
_NEEDS_GPU = ("require devices", "different from the lowering platform")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclass(frozen=True)
class Rematerialization:
    """XLA's "Involuntary full rematerialization": an array made whole on every GPU to change its sharding.

    Attributes:
        array: dtype and shape of one GPU's part as XLA prints it, `bf16[8,512,128]`.
        source: op_name path of the model code; "" where XLA names none.
    """

    array: str
    source: str


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a program for an absent cluster.

    Attributes:
        module: serialized `HloModuleProto`, scheduled.
        memory: bytes per GPU: `argument`, `output`, `alias`, `temp`, `generated_code`.
        host_memory: the same, of what the program keeps in host memory for one GPU.
        lower_s: tracing and lowering, both processes.
        compile_s: XLA.
        peak_rss_bytes: of the child process.
        partitioner: `shardy` or `gspmd`.
        options: compiler options used.
        log: lines that the compiler wrote about memory.
        rematerializations: arrays that XLA makes whole to reshard them, each once.
    """

    module: bytes
    memory: Mapping[str, int]
    lower_s: float
    compile_s: float
    peak_rss_bytes: int
    partitioner: str
    options: Mapping[str, object]
    log: tuple[str, ...]
    rematerializations: tuple[Rematerialization, ...] = ()
    host_memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Bytes of GPU memory the program needs at once: arguments, outputs that alias none of them, temporaries."""
        return _at_once(self.memory)

    @property
    def host_peak_bytes(self) -> int:
        """The same, of host memory for one GPU."""
        return _at_once(self.host_memory) if self.host_memory else 0


def _at_once(m: Mapping[str, int]) -> int:
    return m["argument"] + m["output"] - m["alias"] + m["temp"] + m["generated_code"]


def compile_absent(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh,
    cluster: Cluster,
    options: Mapping[str, object] | None = None,
    timeout_s: float = 1800.0,
) -> CompiledProgram:
    """Compiles a function for the GPUs of a described cluster.

    Args:
        step: jitted or plain; shardings come from args and from constraints inside.
        args: abstract arguments: `jax.ShapeDtypeStruct`s with NamedShardings on mesh.
        mesh: from `build_mesh(..., devices=describe_devices(cluster))`.
        cluster: the GPUs to compile for.
        options: XLA options beyond meshkit's own (`[xla]`).
        timeout_s: for the child process.

    Raises:
        ConfigError: the `plan` extra is missing or does not match jaxlib.
        ProgramError: the program cannot be traced for CUDA, or XLA refuses it or dies of it.
    """
    check_compiler()
    start = time.perf_counter()
    chosen = compiler_options(cluster.gpu, options)
    exported = export_for_cuda(step, args, mesh, cluster)
    lowered_s = time.perf_counter() - start
    request = {
        "topology": topology_name(cluster),
        "target_config": target_config(cluster.gpu),
        "mesh_shape": list(mesh.devices.shape),
        "axis_names": list(mesh.axis_names),
        "device_order": [d.id for d in mesh.devices.flat],
        "donated": exported.donated,
        "arguments": exported.arguments,
        "enable_x64": bool(jax.config.jax_enable_x64),
        "compiler_options": chosen,
    }
    with tempfile.TemporaryDirectory(prefix="meshkit-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(exported.program)
        stderr = _run_child(folder, timeout_s)
        result = json.loads((folder / "result.json").read_text())
        if "error" in result:
            raise ProgramError(
                f"XLA refused the program: {result['error'].splitlines()[0][:500]}", hint=_hint(result["error"])
            )
        module = (folder / "module.pb").read_bytes()
    return CompiledProgram(
        module=module,
        memory=result["memory"],
        host_memory=result["host_memory"],
        lower_s=lowered_s + result["lower_s"],
        compile_s=result["compile_s"],
        peak_rss_bytes=result["peak_rss_bytes"],
        partitioner=result["partitioner"],
        options=chosen,
        log=_notable(stderr),
        rematerializations=read_rematerializations(stderr),
    )


@dataclass(frozen=True)
class _Exported:
    """A program on its way to the child: its bytes, and what jax.export does not carry of each array argument."""

    program: bytes
    donated: list[int]
    arguments: list[dict[str, Any] | None]


def export_for_cuda(step: Callable[..., Any], args: Sequence[Any], mesh: DescribedMesh, cluster: Cluster) -> _Exported:
    """A function lowered for CUDA in this process, as a program of its array leaves; other leaves are constants."""
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    leaves, tree = jax.tree.flatten(tuple(args))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    arrays = [leaves[i] for i in places]

    def exported_step(*values: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for i, value in zip(places, values):
            filled[i] = value
        return tuple(jax.tree.leaves(jitted(*jax.tree.unflatten(tree, filled))))

    with lowering_for(cluster), _clear_errors():
        infos = jax.tree.leaves(jitted.trace(*args).args_info)
        of_arrays = [infos[i] for i in places] if len(infos) == len(leaves) else infos  # static arguments have no info
        donated = [i for i, info in enumerate(of_arrays) if info.donated]
        exported = _export(exported_step, arrays)
        if exported.nr_devices != mesh.size:  # nothing in the program mentions the mesh: every GPU runs all of it
            whole = NamedSharding(mesh, PartitionSpec())
            arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in arrays]
            exported = _export(exported_step, arrays)
    return _Exported(bytes(exported.serialize()), donated, [_describe_sharding(a.sharding) for a in arrays])


def _export(step: Callable[..., Any], arrays: Sequence[jax.ShapeDtypeStruct]) -> export.Exported:
    """jax.export for CUDA; a custom call that it does not vouch for is let through, since it is compiled at once."""
    allowed = set(_ALLOWED_CALLS)
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return export.export(jax.jit(step, keep_unused=True), platforms=["cuda"], disabled_checks=checks)(*arrays)
        except ValueError as e:
            named = set(re.findall(r"['\"]([\w$.]+)['\"]", str(e))) if "compatibility" in str(e) else set()
            if not named - allowed:
                raise
            allowed |= named


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turns what jax says of programs that cannot be lowered without GPUs into a ProgramError."""
    try:
        yield
    except AssertionError as e:
        raise ProgramError(
            f"the program holds an operation that can only be lowered with GPUs attached: {str(e)[:300]}",
            hint="cuDNN attention inside meshkit.sharding.shard_over(...) or jax.shard_map",
        ) from e
    except ValueError as e:
        if not any(mark in str(e) for mark in _NEEDS_GPU):
            raise
        raise ProgramError(
            "the program calls back into Python (jax.debug.print, io_callback, pure_callback), which cannot be "
            "compiled for GPUs that are not there.",
            hint="the step without its callbacks",
        ) from e


def _describe_sharding(sharding: Any) -> dict[str, Any] | None:
    if sharding is None:
        return None
    spec = [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]
    return {"spec": spec, "memory_kind": sharding.memory_kind}


@contextmanager
def lowering_for(cluster: Cluster) -> Iterator[None]:
    """Lets jax trace and lower cuDNN attention for the cluster's GPU although neither GPU nor cuDNN is here.

    jax asks the attached GPU and library three questions while it traces; the target answers them. Inside a fully
    manual shard_map attention lowers to a plain custom call, so it does not need devices either.
    """
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as attention

    capability = cluster.gpu.compute_capability or (0, 0)
    answers = {
        "check_cudnn_version": lambda: 91002,
        "check_compute_capability": lambda text: capability >= tuple(int(x) for x in text.split(".")),
        "is_cuda_compute_capability_equal": lambda text: capability == tuple(int(x) for x in text.split(".")),
    }
    saved = {name: getattr(attention, name) for name in answers if hasattr(attention, name)}
    primitives = {
        p for n, p in vars(attention).items() if n.startswith("_dot_product_attention") and hasattr(p, "bind")
    }
    needing = dispatch.prim_requires_devices_during_lowering
    removed = {p for p in primitives if p in needing}
    for name in saved:
        setattr(attention, name, answers[name])
    needing -= removed
    try:
        yield
    finally:
        needing |= removed
        for name, function in saved.items():
            setattr(attention, name, function)


def check_compiler() -> None:
    """Stops with one clear message where this installation cannot compile for GPUs.

    Raises:
        ConfigError: not Linux, no CUDA plugin, two of them, or one that is not of jaxlib's version.
    """
    found = {name: version for name in _PLUGINS if (version := _version(name))}
    if not found:
        where = "" if sys.platform == "linux" else f" (they exist for Linux only; this is {sys.platform})"
        raise ConfigError(
            f"compiling for absent GPUs needs XLA's CUDA compiler, and no CUDA plugin of jax is installed{where}.",
            hint="pip install 'meshkit[plan]'",
        )
    if len(found) > 1:
        raise ConfigError(
            f"two different CUDA plugins of jax are installed: {', '.join(f'{n} {v}' for n, v in found.items())}.",
            hint=f"pip uninstall {_PLUGINS[0]} {_PLUGINS[0].replace('plugin', 'pjrt')}",
        )
    (name, version), jaxlib = next(iter(found.items())), _version("jaxlib")
    if version != jaxlib:
        raise ConfigError(
            f"{name} is version {version}, but jaxlib is {jaxlib}: the two must be the same.",
            hint=f"pip install '{name}=={jaxlib}' '{name.replace('plugin', 'pjrt')}=={jaxlib}'",
        )
    if _version("flatbuffers") is None:
        raise ConfigError(
            "the package flatbuffers is missing, with which programs travel.", hint="pip install flatbuffers"
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run_child(folder: Path, timeout_s: float) -> str:
    """Runs the compiler process; returns its log.

    Raises:
        ProgramError: it died or ran out of time, with the end of what it said.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-m", "meshkit.xla.child", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise ProgramError(
            f"XLA was still compiling after {timeout_s:.0f} s and was stopped.",
            hint='remat = "full", or scanned layers',
        ) from None
    if not (folder / "result.json").exists():
        name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        raise ProgramError(f"XLA's compiler died ({name}): {_last_words(done.stderr)}", hint=_hint(done.stderr, name))
    return done.stderr


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line[:1] == "F" or "Check failed" in line or "Error" in line]
    return (fatal or lines or ["it said nothing"])[-1][:500]


def _hint(text: str, signal_name: str = "") -> str | None:
    if signal_name == "SIGKILL":
        return "a machine with more memory: a kill without a word is nearly always the kernel's, out of memory"
    if "ptxas" in text or "nvjitlink" in text.lower() or "libdevice" in text:
        return "pip install 'meshkit[plan]' (ptxas and libdevice come with nvidia-cuda-nvcc-cu12)"
    if "No such compile option" in text:
        return "the option's name in this jaxlib, or remove it from [xla]"
    return None


def _notable(stderr: str) -> tuple[str, ...]:
    """What the compiler said that a user must see of memory and of its own parts, once each."""
    marks = ("Can't reduce memory use", "ptxas too old")
    said = (line.split("] ", 1)[-1].strip() for line in stderr.splitlines() if any(mark in line for mark in marks))
    return tuple(dict.fromkeys(said))


def read_rematerializations(stderr: str) -> tuple[Rematerialization, ...]:
    """XLA's warnings that it replicates an array to change its sharding, each place in the model once.

    Those about a `fake_parameter` are left out: there the partitioner prices a way that it need not take.
    """
    found: dict[Rematerialization, None] = {}
    for line in stderr.splitlines():
        if "Involuntary full rematerialization" not in line or "%fake_parameter" in line:
            continue
        array = re.search(r"HLO operation:? %\S+ = (\w+\[[\d,]*\])", line)
        found[Rematerialization(array[1] if array else "an array", source_path(line))] = None
    return tuple(found)
