"""A mistake at every key of an experiment file, by a seed: what `load` says of it, where, and whether its remedy helps.

schema -> keys -> a file with one mistake -> load -> message, place, remedy -> the file mended by it -> load

python -m benchmarks.attack.mistakes [SEED]
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.config.experiment import experiment_json_schema, load_any
from meshkit.config.toml import Key, dotted, to_toml
from meshkit.errors import ConfigError

SCHEMA = experiment_json_schema()
VALUES: tuple[Any, ...] = ("two hundred", "", "4", -1, 0, 2.5, 10**12, True, [], ["x", 3], {}, {"nvlink": -1})
FILE = tomllib.loads("""
    cluster = { gpu = "h100_sxm", gpus_per_host = 8, nic = "ib_ndr" }
    mesh = { data = 2, fsdp = 2, pipeline = 2 }
    model = { class = "models.llama:Llama" }
    rules = { logical = { act_batch = "data" }, override = [{ path = "**/kernel", spec = ["fsdp"] }] }
    train = { global_batch = 16 }
    local_sgd = { axis = "data" }
    compression = { axis = "data" }
    pipeline = { axis = "pipeline", microbatches = 4 }
    lint = { allow = [{ code = "idle_axis", reason = "meant" }] }
    program = { make = "my_steps:make" }
""")  # tables with what they need; a file has those of BASE, and the one that is about the key
BASE = ("cluster", "model", "mesh", "rules", "train")
ENTRIES = {"mesh": "data", "xla": "xla_gpu_enable_triton_gemm"}  # names in tables that are free
VALID = {"rules.auto": {"axis": "fsdp"}, "train.remat": {"offload": ["up"]}, "cluster.file": "cluster.toml"}


@dataclass(frozen=True)
class Told:
    """What `load` says of a mistake: `mended`, whether the file with the remedy loads or stops at another key."""

    at: str
    message: str
    remedy: str
    at_key: bool
    mended: bool


def forms(node: Any) -> Iterator[dict[str, Any]]:
    """The alternatives of a node of the schema, without references."""
    node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    yield node
    for form in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from forms(form)


def keys(node: Any = SCHEMA, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key with its node of the schema; of lists the first entry, of free tables one."""
    for form in forms(node):
        below = dict(form.get("properties", {}))
        below |= {"0": form["items"]} if "items" in form else {}
        if isinstance(form.get("additionalProperties"), dict):
            below[ENTRIES.get(path[-1], "embed")] = form["additionalProperties"]
        for key, inner in below.items():
            yield (*path, key), inner
            yield from keys(inner, (*path, key))


NODES = dict(keys())


def good(key: Key) -> Any:
    """A value that a key may have."""
    at: Any = FILE
    for part in key:
        at = at[0] if isinstance(at, list) else at.get(part) if isinstance(at, dict) else None
    found = list(forms(NODES[key]))
    declared = (form.get("default") or form.get("examples", [None])[0] for form in found)
    empty = {"object": {}, "array": [], "string": "a_b", "boolean": True}
    values = [at, VALID.get(dotted(key)), *declared, *(empty.get(str(form.get("type"))) for form in found), 1]
    return copy.deepcopy(next(value for value in values if value is not None))


def lay(document: dict[str, Any], key: Key, value: Any) -> dict[str, Any]:
    """The document with a value at a key; tables on the way to it hold what they need."""
    document = copy.deepcopy(document)
    at: Any = document
    for depth, part in enumerate(key[:-1], 1):
        if not isinstance(at, list) and not isinstance(at.get(part), dict | list):
            holder = VALID.get(dotted(key[:depth])) or good(key[:depth])
            at[part] = holder if isinstance(holder, dict | list) else {}
        elif at == []:
            at.append({})
        index: Any = 0 if isinstance(at, list) else part
        at = at[index]
    at[0 if isinstance(at, list) else key[-1]] = value
    return copy.deepcopy(document)


def load_error(document: dict[str, Any], folder: Path) -> ConfigError | None:
    """What `load` raises of a document in a file; None where it loads."""
    path = folder / "experiment.toml"
    path.write_text(to_toml(document), encoding="utf-8")
    try:
        load_any(path)
    except ConfigError as error:
        return error
    return None


def key_of(error: ConfigError) -> str:
    """The key in an error's place, without its value."""
    return re.sub(r" = .*", "", (error.at or "").partition(": ")[2])


def mend(document: dict[str, Any], key: Key, remedy: str) -> dict[str, Any] | None:
    """The document after its remedy: a line of TOML, a section, a word in quotes, or the first of a list; else None."""
    if line := re.search(r"(?:^|[ .])(\w+) = (.+)", remedy):
        target = key if line[1] in key else (*key, line[1])
        for end in (len(line[2]), *(m.start() for m in re.finditer(", | or | below | \\(", line[2]))):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                value = tomllib.loads(f"value = {line[2][:end]}")["value"]
                return lay(document, target, good(target) if "..." in str(value) else value)
    if section := re.search(r"a section \[+([\w.]+)\]", remedy):
        return lay(document, target := key if key in NODES else tuple(section[1].split(".")), good(target))
    if remedy.startswith("--set"):
        return without(document, key)
    if remedy.startswith("a path relative"):
        return lay(document, key, good(key))
    if word := re.search(r"'([^']+)'|: (\w+)|^\"([^\"]+)\"$", remedy):
        text = word[1] or word[2] or word[3]
        if key in NODES:
            return lay(document, key, int(text) if text.isdigit() else text)
        return lay(without(document, key), (*key[:-1], text), good((*key[:-1], text)))
    return without(document, key) if re.search("without|leave|left out|remov", remedy) else None


def without(document: dict[str, Any], key: Key) -> dict[str, Any]:
    """The document without a key."""
    document = copy.deepcopy(document)
    at: Any = document
    for part in key[:-1]:
        at = at[0 if isinstance(at, list) else part]
    del at[0 if isinstance(at, list) else key[-1]]
    return document


def mistakes(seed: int) -> Iterator[Told]:
    """One mistake at every key: a value that it may not have, its name misspelt, or it is left out."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / VALID["cluster.file"]).write_text(to_toml(FILE["cluster"]))
        for key in NODES:
            if key[-1] == "0":  # an entry of a list, not a key
                continue
            held = ("cluster", "mesh") if key[0] == "program" else BASE
            right = lay({name: FILE[name] for name in held}, key, good(key))
            around = list(forms(NODES[key[:-1]] if key[:-1] else SCHEMA))
            is_table = any("properties" in form or "additionalProperties" in form for form in forms(NODES[key]))
            tries = [(key, lay(right, key, v)) for v in VALUES if not (is_table and isinstance(v, dict))]
            if not any(form.get("additionalProperties") for form in around):
                misspelt = (*key[:-1], key[-1][1::-1] + key[-1][2:])
                tries += [(misspelt, lay(without(right, key), misspelt, good(key)))] * 3
            if key[:-1] and any(key[-1] in form.get("required", ()) for form in around):
                tries += [(key[:-1], without(right, key))] * 3
            if isinstance(text := good(key), str):
                tries += [(key, lay(right, key, text[1::-1] + text[2:]))] * 2
            for at, document in chance.sample(tries, len(tries)):
                if (error := load_error(document, Path(folder))) is not None:
                    mended = mend(document, at, error.hint or "")
                    left = load_error(mended, Path(folder)) if mended is not None else error
                    place = (error.at or "").removeprefix(f"{folder}/")
                    name = re.escape(dotted(at)) + r"(\.\d+)?"
                    at_key = re.fullmatch(rf"experiment\.toml:\d+: ({name} = .*|\[{name}\].*)", place)
                    filled = re.search(
                        r"\.\.\.|its keys|without quotes|one of", error.hint or ""
                    )  # the rest is the user's
                    helps = left is None or key_of(left) != key_of(error) or (filled and left.message != error.message)
                    yield Told(place, error.message, error.hint or "", at_key is not None, bool(helps))
                    break


def main() -> int:
    """Print the table; 1 where a message is not at its key or its remedy is none."""
    found = list(mistakes(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    print("| where | message | remedy | |\n|---|---|---|---|")
    for t in found:
        fault = "" if t.at_key and t.mended else "not at its key" if not t.at_key else "no remedy"
        print(f"| `{t.at}` | {t.message} | {t.remedy} | {fault} |".replace("\n", " "))
    bad = sum(not (t.at_key and t.mended) for t in found)
    print(f"\n{len(found)} mistakes, {bad} of them not at their key or without a remedy")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
