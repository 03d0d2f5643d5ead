"""Write the commented experiment file of `meshkit new`. Comments on keys are the descriptions in their declarations."""

from __future__ import annotations

import ast
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.files import STDLIB_SOURCE
from meshkit.config.rules import PRESETS, ShardingRules
from meshkit.config.sections import ExperimentTable
from meshkit.config.toml import did_you_mean, inline, string_text, to_toml
from meshkit.config.user_code import MODELS, find_source, is_shipped_name, shipped_experiments, shipped_folder
from meshkit.errors import ConfigError

_TEXT = """\
# {title}
{commands}
# Change a key for one command: --set train.steps=10
name = {name}

# The machines: a shipped name, or {{ file = "my_cluster.toml" }}, or every key inline.
# Shipped: {clusters}
cluster = {cluster}

[model]
class = {model}
{options}

[mesh]                                      # {num_gpus} devices; the outermost axis first
# A number is the size of an axis inside an NVLink domain. Over both links: fsdp = {{ nvlink = 2, infiniband = 4 }}.
# "fill" takes the GPUs of a domain, or the domains, that the other axes leave.
{mesh}

[rules]                                     # logical axis of an array -> mesh axis, or a list of them
preset = {preset:<34} # {presets}
[rules.logical]                             # what is here overrides the preset's rules:
{logical}
{sequence}# [[rules.override]]                        # by parameter path; wins over logical axes
# path = "**/router/kernel"
# spec = ["replicated", "replicated"]

[train]
global_batch = {batch}
sequence_length = {length}
steps = 200
# tokens_total = 1_000_000_000
# accumulate = 2
precision = "bf16"
# reduce_precision = "fp32"
{remat}
{loss}
evaluate_every = 100
seed = 0
# metrics = "package.module:function"
# hooks = ["package.module:hook"]
# tensorboard = true

[optimizer]
learning_rate = 3e-4
warmup_steps = 20
schedule = "cosine"
weight_decay = 0.1
clip = 1.0

[data]
source = {source}

[checkpoint]
every = 0
keep = 2
# keep_every = 1000
# verify = "own"

[profile]
steps = [10, 12]
# processes = 8

# [pipeline]
# axis = "pipeline"                         # pipeline = {{ infiniband = 4 }} in [mesh]
# schedule = "interleaved_1f1b"
# virtual_stages = 2
# microbatches = 16

# [xla]
# xla_gpu_enable_latency_hiding_scheduler = true
"""
_SEQUENCE = '# act_residual_length = "tensor"            # sequence parallelism\n'
_COMMENT_COLUMN = 44
_WIDTH = 120
_SECTIONS = ExperimentTable.fields_by_key()
_GIVEN = ("self", "rngs", "parent", "name")  # meshkit or linen passes these.


def new_experiment(
    name: str = "my_experiment",
    *,
    model: str = "models.llama:Llama",
    preset: str | None = None,
    cluster: str = "cpu8",
    hosts: int | None = None,
    file: Path | None = None,
) -> str:
    """Return the text of a commented experiment file that can be loaded without changes.

    Args:
        preset: a preset of the model; None takes that of its shipped example, or else the model's first, if any.
        cluster: the name of a shipped cluster, or the path of a cluster file.
        file: where the text will be written; None writes FILE into the commands.

    Raises:
        ConfigError: there is no such cluster, or the model has no such preset or takes none.
    """
    machines = Cluster.load(cluster, hosts=hosts)
    like = example_of(model, preset)
    train, rules = like.get("train", {}), like.get("rules", {}).get("preset", "fsdp_tensor")
    source = like.get("data", {}).get("source", STDLIB_SOURCE)
    inner = next((axis for axis in ("expert", "tensor") if axis in rules), None)
    length = train.get("sequence_length", 64)
    if preset != like.get("model", {}).get("preset") and source == STDLIB_SOURCE and not machines.is_cpu:
        length = 4096
    is_shipped = cluster in shipped_clusters()
    table = {"name" if is_shipped else "file": cluster, "hosts": hosts}
    text = _TEXT.format(
        title=f"{name}: {model} on {machines.num_gpus} x {machines.gpu.name}.",
        commands=_commands(shlex.quote(str(file)) if file else "FILE", machines),
        name=string_text(name),
        clusters=", ".join(shipped_clusters()),
        cluster=inline(table if hosts is not None else cluster),
        model=string_text(model),
        options="\n".join(_options(model, preset, like.get("model", {}), file.parent if file else Path())),
        num_gpus=machines.num_gpus,
        mesh=_mesh(machines, inner),
        preset=string_text(rules),
        presets=", ".join(PRESETS),
        logical=_preset_rows(rules),
        sequence=_SEQUENCE if inner == "tensor" else "",
        batch=2 * machines.num_gpus,
        length=length,
        remat=f"remat = {string_text(train['remat'])}" if "remat" in train else '# remat = "full"',
        loss=f"loss = {string_text(train['loss'])}" if "loss" in train else '# loss = "package.module:function"',
        source=string_text(source),
    )
    return "\n".join(_commented(text.splitlines())) + "\n"


def maxtext_experiment(
    config: str, settings: Sequence[str], *, cluster: str, hosts: int | None = None, file: Path | None = None
) -> str:
    """Return the text of an experiment file that plans MaxText's own training step.

    Args:
        config: a MaxText configuration file; `base` is MaxText's own `base.yml`.
        settings: MaxText keys that override it, as `ici_fsdp_parallelism=8`.

    Raises:
        ConfigError: there is no such cluster or configuration, or its parallelism does not fit the cluster's size.
    """
    from meshkit.integrations.maxtext import experiment_table

    machines = Cluster.load(cluster, hosts=hosts)
    table = experiment_table(None if config == "base" else config, settings, machines)
    where = {"name" if cluster in shipped_clusters() else "file": cluster, "hosts": hosts}
    command = f"meshkit plan {shlex.quote(str(file)) if file else 'FILE'}"
    head = f"# MaxText's training step on {machines.num_gpus} x {machines.gpu.name}: {command}\n"
    named = {"cluster": where if hosts is not None else cluster}
    return head + to_toml({**named, **table})


def _commented(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, and add the meaning of its section or key to each line that has no comment."""
    keys: Mapping[str, FieldInfo] = {}
    for line in lines:
        header = re.fullmatch(r"(?:# )?\[(\w+)\]", line)
        key = re.fullmatch(r"(?:# )?(\w+) = [^#]*", line)
        meaning = keys.get(key[1]) if key else None
        if header:
            keys, meaning = ExperimentTable.table_at([header[1]]).fields_by_key(), _SECTIONS[header[1]]
        elif line.strip("# ").startswith("["):
            keys = {}
        yield from _with_comment(line, meaning) if meaning else (line,)


def _with_comment(line: str, field: FieldInfo) -> Iterator[str]:
    """Yield the line with the field's description as a comment, after the list of its values if it is a Literal."""
    choices = ", ".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ""
    comment = f"{choices}: {field.description}" if choices else field.description or ""
    for part in textwrap.wrap(comment, _WIDTH - _COMMENT_COLUMN - len("# ")):
        yield f"{line:<{_COMMENT_COLUMN - 2}}  # {part}"
        line = ""


def _mesh(cluster: Cluster, inner: str | None) -> str:
    """Return the rows of `[mesh]`: the inner axis has size 2 (1 if a domain has an odd size), `fsdp` takes the rest."""
    ways = 2 if cluster.gpus_used_per_domain % 2 == 0 else 1
    domains = cluster.num_nvlink_domains
    fsdp = inline({"nvlink": "fill", "infiniband": "fill"}) if domains > 1 else '"fill"'
    return f"data = 1\nfsdp = {fsdp}" + (f"\n{inner} = {ways}" if inner else "")


def _commands(file: str, cluster: Cluster) -> str:
    if cluster.is_cpu:
        return (
            f"# `meshkit explain {file}` checks it, `meshkit train {file}` runs it,\n"
            f"# `meshkit plan {file} --set cluster=dgx_h100` predicts it on GPUs that are not there."
        )
    return (
        f"# `meshkit explain {file}` checks it, `meshkit plan {file}` predicts it without a GPU;\n"
        f"# on the machines, `meshkit train {file}` runs it."
    )


def _options(model: str, preset: str | None, example: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the options in `[model]`: the preset, or else those of the shipped example.

    With neither, yield the options that the model's source requires, as comments. The source is read, not imported.
    """
    taken = read_signature(model, [Path.cwd(), folder])
    own = {key: value for key, value in example.items() if key != "class"}
    if preset is None and not own and taken is not None and "preset" in taken.names:
        preset = taken.presets[0] if taken.presets else None
    if preset is not None:
        if taken is not None and "preset" not in taken.names:
            raise ConfigError(f"{model} takes no preset.", at="--preset", hint=f"its options: {', '.join(taken.names)}")
        if taken is not None and taken.presets and preset not in taken.presets:
            hint = did_you_mean(preset, taken.presets)
            raise ConfigError(f"{model} has no preset '{preset}'.", at="--preset", hint=hint)
        own = {"preset": preset}
    yield from (f"{key} = {inline(value)}" for key, value in own.items())
    if not own and taken is not None:
        yield from (f"# {name} = ...{'':<30}# needed: {kind or 'no default'}" for name, kind in taken.needed.items())


def _preset_rows(preset: str) -> str:
    rules = ShardingRules.preset(preset).to_dict()["logical"]
    return "\n".join(f"# {logical} = {inline(axes)}" for logical, axes in rules.items())


@dataclass(frozen=True)
class Signature:
    """Options of a class or function."""

    names: list[str]
    needed: dict[str, str]
    """Options without a default -> their annotations."""
    presets: list[str] = field(default_factory=list)
    """Keys of the module's dict `PRESETS`."""


def read_signature(model: str, folders: Iterable[Path]) -> Signature | None:
    """Return the options of `"pkg.mod:Name"`; None if its source is not found, or defines no such class or function.

    Options of a class are the arguments of its `__init__`, or else its annotated fields. Arguments that meshkit itself
    passes, such as `rngs`, are left out.
    """
    module, _, name = model.partition(":")
    shipped = [shipped_folder()] if is_shipped_name(module) else []
    file = find_source(module, [*folders, *shipped])
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return None
    made = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(made, ast.ClassDef):
        init = next((n for n in made.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        options = dict(_arguments(init) if init else _fields(made))
    elif isinstance(made, ast.FunctionDef):
        options = dict(_arguments(made))
    else:
        return None
    options = {key: kind for key, kind in options.items() if key not in _GIVEN}
    needed = {key: kind for key, kind in options.items() if kind is not None}
    return Signature(list(options), needed, _presets(tree))


def _arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str | None]]:
    given = function.args
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + list(given.defaults)
    for argument, default in [*zip(places, defaults), *zip(given.kwonlyargs, given.kw_defaults)]:
        yield argument.arg, None if default is not None else _text(argument.annotation)


def _fields(made: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    """Yield the name and annotation of each annotated field; the annotation is None if the field has a default."""
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, None if node.value is not None else _text(node.annotation)


def _text(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation else "no default"


def _presets(tree: ast.Module) -> list[str]:
    tables = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    named = (n.value for n in tables if any(isinstance(t, ast.Name) and t.id == "PRESETS" for t in n.targets))
    keys = next((table.keys for table in named if isinstance(table, ast.Dict)), [])
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def example_of(model: str, preset: str | None = None) -> dict[str, Any]:
    """Return the tables of a shipped experiment with the model: one with the preset, or else the one on `cpu8`.

    The result is empty if there is none.
    """
    examples = _examples(model)
    same = (table for table in examples if table["model"].get("preset") == preset)
    return next(same, None) or next((table for table in examples if table["cluster"] == "cpu8"), {})


def _examples(model: str = "") -> list[dict[str, Any]]:
    texts = (file.read_text(encoding="utf-8") for file in shipped_experiments().values())
    tables = (tomllib.loads(text) for text in texts if model in text)  # Parse only these files: parsing is slow.
    return [table for table in tables if model in ("", table["model"]["class"])]


def copy_model(name: str, folder: Path) -> tuple[str, list[Path]]:
    """Copy a shipped model, and the modules of `models` that it imports, to `models/` in a folder.

    Returns:
        Import path of the model, and the files that were written.

    Raises:
        ConfigError: there is no such model, or a file exists or cannot be written.
    """
    paths = (table["model"]["class"] for table in _examples() if table["cluster"] == "cpu8")
    known = {path.partition(":")[0].removeprefix(f"{MODELS}."): path for path in paths}
    if name not in known:
        raise ConfigError(f"there is no shipped model '{name}'.", at="--copy-model", hint=did_you_mean(name, known))
    source, target = shipped_folder() / MODELS, folder / MODELS
    files = {target / f"{module}.py": source / f"{module}.py" for module in ["__init__", *_closure(source, name)]}
    if existing := next((file for file in files if os.path.lexists(file)), None):
        raise ConfigError(f"{existing} exists, and `new` overwrites nothing.", hint="another --out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, original in files.items():
            file.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.", at="--copy-model") from None
    return known[name], list(files)


def _closure(folder: Path, name: str) -> list[str]:
    found, pending = set(), [name]
    while pending:
        module = pending.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == MODELS:
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{MODELS}."):
                pending.append(str(node.module).split(".")[1])
    return sorted(found)
