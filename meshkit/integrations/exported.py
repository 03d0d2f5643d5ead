"""Make a program from a file of `jax.export` or `JAX_DUMP_IR_TO`, to plan it without the code that made it.

    meshkit plan step.bin --cluster dgx_h100 --mesh '{ fsdp = 8 }'
    [program]
    make = "meshkit.integrations.exported:make"
    options = { file = "step.bin" }

The file is parsed, never unpickled. Parameters are recognized by their names (`state.params['w']`). Other arrays that
the step overwrites count as optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import export
from jax._src.core import ShapedArray
from jax._src.export._export import _module_to_bytecode
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.files import read_bounded
from meshkit.config.site import is_under, listed, read_site
from meshkit.errors import ConfigError, MeshkitError
from meshkit.hlo.proto import Module as HloModule
from meshkit.hlo.proto import read_fields
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.given import Program

_LARGEST_BYTES = 2**30
_WHAT = "program file"
_AXES = re.compile(r'"(\w+)"=(\d+)')
_SHARDING = re.compile(r"@\w+, \[(.*)\]")
_TARGET = re.compile(r"custom_call @([\w$.]+)|call_target_name = \"([^\"]+)\"")
_UNPARTITIONED = ("CustomSPMDPartitioning", "InspectSharding")
_CALLBACK = re.compile(r"callback|python", re.IGNORECASE)


@dataclass(frozen=True)
class _Argument:
    """One argument of a program, as its file describes it."""

    name: str
    spec: PartitionSpec | None
    donated: bool


def make(mesh: AnyMesh, file: str, names: Mapping[str, Any] | None = None) -> Program:
    """Return the program of a file, for a mesh with the axes that the program was lowered for.

    Args:
        mesh: a mesh with the axes and sizes of the file's mesh.
        file: the result of `jax.export.export(...).serialize()`; or a `.mlir` file, StableHLO as `JAX_DUMP_IR_TO`
            writes it; or a `.pb` file, the program before optimizations, as written by `--xla_dump_to` with
            `--xla_dump_hlo_as_proto`.
        names: as in `mk.Program`, for paths such as `state/params/w`.

    Raises:
        ConfigError: the file is no such program, or is for other GPUs than the mesh has.
    """
    path = Path(file)
    roots = read_site().file_roots
    if roots is not None and not is_under(path.resolve(), roots):
        raise ConfigError(f"{file} is outside of the folders that this site allows.", hint=f"a path in {listed(roots)}")
    data = read_bounded(path, _WHAT, _LARGEST_BYTES, ConfigError)
    with mlir.make_ir_context():
        exported, text = None, data
        if path.suffix == ".pb":
            text = _from_hlo(data, file)
        elif path.suffix != ".mlir":
            exported, text = _deserialized(data, file)
        module = _module(text, file)
        text = str(module)
        _check(text, exported, mesh, file)
        arguments = [_argument(each) for each in _arguments(module)]
        if exported is None:
            exported = _exported(module, mesh, arguments)
    return _program(exported, arguments, mesh, names)


def _deserialized(data: bytes, file: str) -> tuple[export.Exported, str]:
    try:
        found = export.deserialize(bytearray(data))
        return found, found.mlir_module()
    except Exception as e:  # jax raises several types of errors for invalid bytes.
        first = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise ConfigError(
            f"{file} is no program that jax.export serialized: {first}.", hint="a file of .mlir"
        ) from None


def _module(data: bytes | str, file: str) -> Any:
    try:
        return ir.Module.parse(data)
    except (ir.MLIRError, ValueError) as e:
        raise ConfigError(f"{file} is no StableHLO that this jax reads: {str(e).splitlines()[0][:200]}.") from None


def _from_hlo(data: bytes, file: str) -> str:
    """Return HLO as StableHLO in the form that jax writes, with Shardy's shardings."""
    instead = "the .mlir that JAX_DUMP_IR_TO=DIR writes, or jax.export.export(step)(*args).serialize()"
    try:
        inner = read_fields(data).get(1, [b""])[0]
        if isinstance(inner, bytes) and 3 in _fields(inner):  # It is an HloProto, whose first field is the module.
            data = inner
        opcodes = {i.opcode for i in HloModule(data).instructions.values()}
        if "fusion" in opcodes:
            raise ConfigError(f"{file} is a program that XLA has optimized.", hint="*.before_optimizations.hlo.pb")
        text = str(ir.Module.parse(_jax.mlir.hlo_to_stablehlo(data)))
    except (MeshkitError, ValueError, RuntimeError, ir.MLIRError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(
            f"{file} is no HLO that this jax reads: {str(e).splitlines()[0][:200]}.", hint=instead
        ) from None
    found = re.search(r"\{mesh\[([^\]]*)\]", text)
    if found is None or re.search(r"SPMDFullToShardShape|GlobalToLocal|devices=\[", text):
        raise ConfigError(f"{file} holds shardings that are not by mesh axes, or a shard_map.", hint=instead)
    mesh = re.sub(r"'(\w+)'=", r'"\1"=', found[1])
    dims = r"mhlo\.sharding = \"\{mesh\[[^\]]*\], (\[[^\"]*\])\}\""
    text = re.sub(
        rf"stablehlo\.custom_call @Sharding\((%\w+)\) \{{[^\n]*?{dims}[^\n]*?\}} : \((tensor<[^>]*>)\) -> \S+",
        lambda m: f"sdy.sharding_constraint {m[1]} <@mesh, {_quoted(m[2])}> : {m[3]}",
        text,
    )
    head, main, rest = text.partition("func.func @main(")
    signature, arrow, body = rest.partition("\n")
    signature = re.sub(dims, lambda m: f"sdy.sharding = #sdy.sharding<@mesh, {_quoted(m[1])}>", signature)
    body = re.sub(dims, lambda m: f"sdy.sharding = #sdy.sharding_per_value<[<@mesh, {_quoted(m[1])}>]>", body)
    head = head.rstrip() + f"\n  sdy.mesh @mesh = <[{mesh}]>\n  "
    return head + main + signature + arrow + body


def _fields(data: bytes) -> Mapping[int, Any]:
    try:
        return read_fields(data)
    except (MeshkitError, ValueError, IndexError):
        return {}


def _quoted(dims: str) -> str:
    return dims.replace("'", '"')


def _check(text: str, exported: export.Exported | None, mesh: AnyMesh, file: str) -> None:
    if exported is not None and "cuda" not in exported.platforms:
        raise ConfigError(
            f"{file} was lowered for {', '.join(exported.platforms)}, where operations such as attention differ.",
            hint='jax.export.export(step, platforms=["cuda"])(*args)',
        )
    found = re.search(r"sdy\.mesh @\w+ = <\[([^\]]*)\]", text)
    sizes = {name: int(size) for name, size in _AXES.findall(found[1])} if found else {}
    expected = dict(mesh.shape)
    if sizes and sizes != expected:
        said, wanted = (" x ".join(f"{n} {s}" for n, s in each.items()) for each in (sizes, expected))
        raise ConfigError(f"{file} is a program for a mesh {said}, but the mesh is {wanted}.", hint="--mesh")
    count = re.search(r"mhlo\.num_partitions = (\d+)", text)
    if count and int(count[1]) not in (1, mesh.size):
        raise ConfigError(f"{file} is a program of {count[1]} partitions, and the mesh has {mesh.size} GPUs.")
    for target in sorted({a or b for a, b in _TARGET.findall(text)}):
        if target in _UNPARTITIONED or _CALLBACK.search(target):
            raise ConfigError(
                f"{file} calls '{target}', whose Python function died with the process that wrote the file.",
                hint="[program] with a function that makes the step",
            )


def _main(module: Any) -> Any:
    for op in module.body.operations:
        if isinstance(op, func.FuncOp) and op.name.value == "main":
            return op
    raise ConfigError("the program has no function 'main'.", hint="a file of a whole training step")


def _arguments(module: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    main = _main(module)
    attributes = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [{}] * len(main.arguments)
    return list(zip(main.arguments, attributes))


def _argument(each: tuple[Any, Any]) -> _Argument:
    argument, attributes = each
    said = {a.name: str(a.attr) for a in attributes} if attributes else {}
    where = re.search(r'"((?:[^"\\]|\\.)*)"', str(argument.location))
    parts = re.findall(r"\w+", where[1]) if where else []
    sharding = _SHARDING.search(said.get("sdy.sharding", ""))
    spec = None
    if sharding:
        dims = re.findall(r"\{([^{}]*)\}", sharding[1])
        spec = PartitionSpec(*(tuple(re.findall(r'"(\w+)"', dim)) or None for dim in dims))
    donated = bool({"jax.buffer_donor", "tf.aliasing_output"} & said.keys())
    return _Argument("/".join(parts) or f"argument{argument.arg_number}", spec, donated)


def _exported(module: Any, mesh: AnyMesh, arguments: list[_Argument]) -> export.Exported:
    main = _main(module)
    aval = lambda of: ShapedArray(tuple(of.shape), _dtype(str(of.element_type)))
    inputs, outputs = (
        tuple(aval(ir.RankedTensorType(of)) for of in types) for types in (main.type.inputs, main.type.results)
    )
    placed = [a.spec and NamedSharding(mesh.abstract_mesh, a.spec) for a in arguments]
    nothing = (None,) * len(outputs)
    made: Any = export.Exported
    return made(
        fun_name="step",
        in_tree=jax.tree.structure((inputs, {})),
        in_avals=inputs,
        out_tree=jax.tree.structure(outputs),
        out_avals=outputs,
        _in_named_shardings=tuple(placed),
        _out_named_shardings=nothing,
        in_shardings_hlo=(None,) * len(inputs),
        out_shardings_hlo=nothing,
        nr_devices=mesh.size,
        platforms=("cuda",),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=_module_to_bytecode(module),
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(inputs))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def _dtype(name: str) -> np.dtype:
    """Return the dtype of an MLIR element type, such as `bf16`, `ui8` or `f8E4M3FN`."""
    if name == "i1":
        return np.dtype(bool)
    if found := re.fullmatch(r"(ui|i|f)(8|16|32|64)", name):
        return np.dtype({"ui": "uint", "i": "int", "f": "float"}[found[1]] + found[2])
    plain = {"bf16": "bfloat16"}.get(name, re.sub(r"^f(\d)", r"float\1", name).lower())
    kinds = {re.sub("_", "", kind): kind for kind in vars(ml_dtypes) if kind[0].islower()}
    if (kind := kinds.get(plain.replace("_", ""))) is None:
        raise ConfigError(f"the program has arrays of '{name}', which numpy cannot hold.")
    return np.dtype(getattr(ml_dtypes, kind))


def _program(
    exported: export.Exported, arguments: list[_Argument], mesh: AnyMesh, names: Mapping[str, Any] | None
) -> Program:
    kept: Callable[[bool], list[int]] = lambda donated: [n for n, a in enumerate(arguments) if a.donated is donated]
    groups = kept(True), kept(False)
    shapes = exported.in_avals

    def place(number: int) -> jax.ShapeDtypeStruct:
        spec, shape = arguments[number].spec, shapes[number]
        where = NamedSharding(mesh, spec) if spec is not None else None  # pyright: ignore[reportArgumentType]
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    def step(overwritten: dict[str, Any], others: dict[str, Any]) -> Any:
        values: list[Any] = [None] * len(arguments)
        for numbers, given in zip(groups, (overwritten, others)):
            for number, value in zip(numbers, given.values()):
                values[number] = value
        args, keywords = jax.tree.unflatten(exported.in_tree, values)
        return jax.tree.leaves(exported.call(*args, **keywords))

    args = tuple({f"{n:05}/{arguments[n].name}": place(n) for n in numbers} for numbers in groups)
    parameters = [n for n, a in enumerate(arguments) if "params" in a.name.split("/")]
    optimizer = [n for n in groups[0] if n not in parameters]
    found = {"parameters": parameters, "optimizer": optimizer, "batch": [n for n in groups[1] if n not in parameters]}
    patterns = {group: [f"*/{n:05}/*" for n in numbers] for group, numbers in found.items() if numbers}
    return Program(jax.jit(step, donate_argnums=0), args, names=names or patterns)
