"""Make a seeded mistake at every key of an experiment file, and check the error that `load` raises.

    python -m benchmarks.attack.mistakes [SEED]

The keys come from the schema. For each, a correct file gets one mistake and is loaded. The error must name the key's
place, and its remedy, applied to the file, must make the file load or lead to an error at another key.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshkit.config.experiment import experiment_json_schema, load_any
from meshkit.config.toml import Key, dotted, to_toml
from meshkit.errors import ConfigError

SCHEMA = experiment_json_schema()
WRONG: tuple[Any, ...] = ("two hundred", "", "4", -1, 0, 2.5, 10**12, True, [], ["x", 3], {}, {"nvlink": -1})
BASE = tomllib.loads("""
    cluster = { gpu = "h100_sxm", gpus_per_host = 8, nic = "ib_ndr" }
    mesh = { data = 1, fsdp = 4, pipeline = 2 }
    model = { class = "models.llama:Llama" }
    rules = { logical = { act_batch = "data" } }
    train = { global_batch = 16 }
""")
RIGHT: dict[str, Any] = {  # Correct values of keys for which the schema declares neither a default nor an example.
    "": BASE, **BASE,
    "cluster.nvlink_domain_size": 8, "cluster.gpus_used_per_domain": 8, "cluster.fabric": "infiniband",
    "cluster.calibration": "cluster.toml", "cluster.cpu_link": "pcie", "cluster.file": "cluster.toml",
    "rules.override.0": {"path": "**/kernel", "spec": ["fsdp"]}, "rules.auto": {"axis": "fsdp"},
    "train.remat": {"offload": ["up"]}, "train.remat.offload": ["up"], "train.loss": "mine:loss",
    "train.metrics": "mine:show", "optimizer.class": "optax:lion", "local_sgd": {"axis": "data"},
    "compression": {"axis": "data"}, "pipeline": {"axis": "pipeline", "microbatches": 4},
    "launch.drain": False, "lint.allow.0": {"code": "idle_axis", "reason": "meant"}, "program": {"make": "mine:make"},
    **{f"rules.{kind}.embed": "fsdp" for kind in ("logical", "compute", "gradients", "optimizer")},
}  # fmt: skip


class Told(NamedTuple):
    """The error that `load` raises for a mistake."""

    at: str
    """The place that it names."""
    message: str
    """Its message."""
    remedy: str
    """Its hint."""
    fault: str
    """The fault of the error; empty if it is at the mistake's key and its remedy helps."""


def forms(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a node of the schema, with references resolved."""
    node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    yield node
    for form in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from forms(form)


def keys(node: Any = SCHEMA, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield every key with its node of the schema; a list has its first entry, a free table one key."""
    for form in forms(node):
        below = {**form.get("properties", {}), **({"0": form["items"]} if "items" in form else {})}
        if isinstance(form.get("additionalProperties"), dict):
            name = {"mesh": "data", "xla": "xla_gpu_enable_triton_gemm"}.get(path[-1], "embed")
            below[name] = form["additionalProperties"]
        for key, inner in below.items():
            yield (*path, key), inner
            yield from keys(inner, (*path, key))


NODES = dict(keys())


def right(key: Key) -> Any:
    """Return a correct value of a key."""
    held, found = RIGHT.get(dotted(key[:-1])), list(forms(NODES[key]))
    declared = (form.get("default") or form.get("examples", [None])[0] for form in found)
    empty = {"object": {}, "array": [], "string": "a_b", "boolean": True}
    values = [RIGHT.get(dotted(key)), held.get(key[-1]) if isinstance(held, dict) else None, *declared]
    values += [*(empty.get(str(form.get("type"))) for form in found), 1]
    return copy.deepcopy(next(value for value in values if value is not None))


def lay(document: dict[str, Any], key: Key, value: Any) -> dict[str, Any]:
    """Return the document with a value at a key, or without the key if the value is None.

    Tables that are missing on the way are made with the keys that they need.
    """
    document = copy.deepcopy(document)
    at: Any = document
    for depth, part in enumerate(key[:-1], 1):
        holds = list if key[depth] == "0" else dict
        if isinstance(at, list):
            at[:] = at or [right(key[:depth])]
        elif not isinstance(at.get(part), holds):
            made = RIGHT.get(dotted(key[:depth]))
            at[part] = copy.deepcopy(made) if isinstance(made, holds) else holds()
        index: Any = 0 if isinstance(at, list) else part
        at = at[index]
    last: Any = 0 if isinstance(at, list) else key[-1]
    at[last] = copy.deepcopy(value)
    if value is None:
        del at[last]
    return document


def after(document: dict[str, Any], key: Key, remedy: str) -> Iterator[dict[str, Any]]:
    """Yield the document after each reading of its remedy.

    A remedy may be a line of TOML, a section, a key or word that it names, or the removal of the key.
    """
    for line in re.finditer(r"(?:^|[ .])(\w+) = ", remedy):
        target = key if line[1] in key else (*key, line[1])
        rest = remedy[line.end() :]
        for end in (len(rest), *(m.start() for m in re.finditer(", | or | below | \\(", rest))):
            with suppress(tomllib.TOMLDecodeError):
                value = tomllib.loads(f"value = {rest[:end]}")["value"]
                yield lay(document, target, right(target) if "..." in str(value) else value)
                break
    if section := re.search(r"a section \[+([\w.]+)\]", remedy):
        target = key if key in NODES else tuple(section[1].split("."))
        yield lay(document, target, right(target))
    for word in re.findall(r"[\w./-]+", remedy.partition(": ")[2] or remedy):
        if key in NODES:
            yield lay(document, key, int(word) if word.isdigit() else word)
        elif (target := (*key[:-1], word)) in NODES:
            yield lay(lay(document, key, None), target, right(target))
    if re.search("^--set|without [^q]|leave|left out|remov", remedy):
        yield lay(document, key, None)
    if "a path" in remedy:
        yield lay(document, key, right(key))


def load_error(document: dict[str, Any], folder: Path) -> ConfigError | None:
    """Return the error that `load` raises for a document in a file; None if it loads."""
    path = folder / "experiment.toml"
    path.write_text(to_toml(document), encoding="utf-8")
    try:
        load_any(path)
    except ConfigError as error:
        return error
    return None


def mistakes(seed: int) -> Iterator[Told]:
    """Yield the error for one mistake at every key.

    The mistake is a value that the key may not have, a misspelt name, or a missing key.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(to_toml(BASE["cluster"]))
        for key, node in NODES.items():
            if key[-1] == "0":  # An entry of a list is not a key.
                continue
            base = {k: BASE[k] for k in ("cluster", "mesh")} if key[0] == "program" else BASE
            base = lay(base, ("optimizer", "class"), "optax:lion") if key[:2] == ("optimizer", "options") else base
            file = lay(base, key, right(key))
            if (error := load_error(file, folder)) is not None:
                raise AssertionError(f"the file without a mistake at {dotted(key)} is wrong: {error}")
            around = list(forms(NODES[key[:-1]] if key[:-1] else SCHEMA))
            is_table = any("properties" in form or "additionalProperties" in form for form in forms(node))
            tries = [(key, lay(file, key, value)) for value in WRONG if not (is_table and isinstance(value, dict))]
            misspelt = lambda text: text[1::-1] + text[2:]
            if not any(form.get("additionalProperties") for form in around):
                at = (*key[:-1], misspelt(key[-1]))
                tries += [(at, lay(lay(file, key, None), at, right(key)))] * 3
            if key[:-1] and any(key[-1] in form.get("required", ()) for form in around):
                tries += [(key[:-1], lay(file, key, None))] * 3
            if isinstance(text := right(key), str):
                tries += [(key, lay(file, key, misspelt(text)))] * 2
            chance.shuffle(tries)
            at, document, error = next((*t, error) for t in tries if (error := load_error(t[1], folder)))
            yield told(at, document, error, folder)


def told(at: Key, document: dict[str, Any], error: ConfigError, folder: Path) -> Told:
    """Return the error for a mistake at a key, with its fault.

    The error is right if it is at the key or below it, and if after some reading of its remedy the file loads or stops
    at another key.
    """
    place = (error.at or "").removeprefix(f"{folder}/")
    name = re.escape(dotted(at)) + r"(\.\d+)?"
    at_key = re.fullmatch(rf"experiment\.toml:\d+: ({name} = .*|\[{name}\].*)", place)
    left = (load_error(tried, folder) for tried in after(document, at, error.hint or ""))
    key_of = lambda error: (error.at or "").partition(": ")[2].partition(" = ")[0]
    helps = any(other is None or key_of(other) != key_of(error) for other in left)
    fault = "not at its key" if not at_key else "" if helps else "does not help"
    return Told(place, error.message, error.hint or "", fault)


def main() -> int:
    """Print the table; return 1 if a message is not at its key or its remedy does not help."""
    found = list(mistakes(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    print("| where | message | remedy | fault |\n|---|---|---|---|")
    for row in found:
        print(f"| `{row.at}` | {row.message} | {row.remedy} | {row.fault} |".replace("\n", " "))
    bad = sum(bool(row.fault) for row in found)
    print(f"\n{len(found)} mistakes, {bad} of them not at their key or without a remedy that helps")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
