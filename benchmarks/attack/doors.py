"""Define the campaigns on what a file may set and name, whose code runs, and which files are deleted or opened.

One campaign presses Ctrl-C. Each attack is a generator that yields its name and then its outcome.
"""

from __future__ import annotations

import functools
import gzip
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.attack.harness import Attack, Broken, command
from meshkit.compile import cache
from meshkit.config.experiment import load
from meshkit.config.user_code import load_function, load_object
from meshkit.config.xla_options import ENUMS, TEXTS
from meshkit.errors import ConfigError
from tests.config.debug_options import fields_of_debug_options
from tests.interrupted import LONGEST_S, interrupted_after

_EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
_KEYS = ("data.tokenizer", "data.source", "train.loss", "train.metrics", "optimizer.class")
_PACKAGES = sorted({*sys.stdlib_module_names, "yaml", "numpy", "pytest", "jax", "flax", "meshkit.cli", "optaxes"})
_FUNCTIONS = ("system", "run", "Popen", "exec", "unsafe_load", "main", "load", "call", "__import__")
_TEXTS = ("ran", "./tools", "../ran", "/tmp", "~/x", "${HOME}", "true", "--output-file=ran", "a,b", "")
_FILES = ("thesis.tex", "x.tmp", "k.program.bak", "old-01234567.tmp", ".program", "seal.key", "a b", "k")
_VERBS = ("explain --no-compile", "compare .", "topo --xml", "topo --bundle", "topo --matrix", "profile", "plan")
_ENDS = ("e.toml", "report.json", "x.xplane.pb", "x.xplane.pb.gz", "x.hlo.pb", "x.xml", "x.bin", "x.mlir")


@functools.cache
def _bomb() -> bytes:
    """Return 256 MiB of zeros, compressed twice."""
    return gzip.compress(gzip.compress(bytes(2**28)))


_PLACED: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "bomb": lambda path: path.write_bytes(_bomb()),
    "tebibyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


def _campaign(attack: Callable[[Path, random.Random], Iterator[str]]) -> Callable[[Path], Callable[[int], Attack]]:
    def make(folder: Path, number: int) -> Attack:
        steps = attack(Path(tempfile.mkdtemp(dir=folder)), random.Random(f"{attack.__name__} {number}"))
        return Attack(next(steps), lambda: next(steps))

    return lambda folder: functools.partial(make, folder)


@functools.cache
def _options() -> list[str]:
    return [*fields_of_debug_options(), "xla_of_a_later_release"]


@_campaign
def settings(folder: Path, chance: random.Random) -> Iterator[str]:
    """Set texts for XLA options, and name functions of installed packages.

    All must be refused, except the options that meshkit lists.
    """
    options = sorted(ENUMS | TEXTS) if chance.random() < 0.3 else _options()
    option, text, key = chance.choice(options), chance.choice(_TEXTS), chance.choice(_KEYS)
    function = f"{chance.choice(_PACKAGES)}:{chance.choice(_FUNCTIONS)}" if chance.random() < 0.5 else ""
    yield f"{key} = {function}" if function else f'xla.{option} = "{text}"'
    file = folder / "e.toml"
    file.write_text(_EXPERIMENT.read_text() + ("" if function else f'\n[xla]\n{option} = "{text}"\n'))
    try:
        places = load(file).places
        if function:
            load_function(function, [folder], key, places)
    except ConfigError:
        yield "refused"
    if function or option not in ENUMS | TEXTS:
        raise Broken("it is taken")
    yield "read"


@_campaign
def modules(folder: Path, chance: random.Random) -> Iterator[str]:
    """Load a package in which others may write or own a file, a folder or a link's target; none of its code may run."""
    mode, owner = chance.choice((0, 0o1, 0o2, 0o6, 0o20, 0o22, 0o77)), chance.choice((0, 0, 0, 12345))
    inside = chance.choice(("code", "code/oc", "code/oc/__init__.py", "code/oc/part.py", "linked"))
    yield f"mode {0o700 | mode:04o}, owner {owner or 'this one'}: {inside}"
    for path in (folder / "code" / "oc", folder / "linked"):
        path.mkdir(parents=True, mode=0o700)
    (folder / "code" / "oc" / "__init__.py").write_text("from . import part, more\nvalue = 1\n")
    for path in (folder / "code" / "oc" / "part.py", folder / "linked" / "more.py"):
        path.touch()
    (folder / "code" / "oc" / "more.py").symlink_to(path)
    (folder / inside).chmod(0o700 | mode)
    if owner and os.geteuid() == 0:
        os.chown(folder / inside, owner, -1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "oc"]:
        del sys.modules[name]
    others = mode & 0o2 or (owner and os.geteuid() == 0)
    try:
        load_object("oc:value", [folder / "code"])
    except ConfigError as error:
        if not others and not mode & 0o20:
            raise Broken(f"nobody else may write it: {error.message}") from None
        yield "refused"
    if others:
        raise Broken("it runs")
    yield "run"


@_campaign
def caches(folder: Path, chance: random.Random) -> Iterator[str]:
    """Point MESHKIT_CACHE at a folder with a user's files, or put such files into a cache folder; all must stay.

    The modes of the folders must stay too.
    """
    ours, mode, files = chance.random() < 0.5, chance.choice((0o755, 0o700, 0o777)), chance.sample(_FILES, 3)
    yield f"{'ours' if ours else f'theirs, {mode:04o}'}: {', '.join(files)}"
    place = folder / "programs"
    os.environ.update(MESHKIT_CACHE=str(folder), MESHKIT_CACHE_BYTES="1")
    if ours:
        cache.cache_folder()
    else:
        place.mkdir()
        place.chmod(mode)
    before, said = place.stat().st_mode, "kept beside"
    for name in files:
        (place / name).write_text(name)
        os.utime(place / name, (0, 0))
    try:
        cache.cache_folder()
        for key in ("a", "b"):
            cache.store(place, key, cache.KeptProgram({"memory": {}}, "", b"\x00module" * 1000))
    except ConfigError:
        said = "refused"
    lost = [name for name in files if not (place / name).is_file() or (place / name).read_text() != name]
    if lost or place.stat().st_mode != before or (said == "refused") == ours:
        raise Broken(f"{said}; lost {lost}, mode {place.stat().st_mode:o}")
    yield said


@_campaign
def inputs(folder: Path, chance: random.Random) -> Iterator[str]:
    """Give a command a path that is no regular file, has a tebibyte, or unpacks to more than the memory holds."""
    verb, path, kind = chance.choice(_VERBS), folder / chance.choice(_ENDS), chance.choice(sorted(_PLACED))
    yield f"{verb} {path.name}: {kind}"
    _PLACED[kind](path)
    yield command(*verb.split(), str(path))


@_campaign
def interrupts(folder: Path, chance: random.Random) -> Iterator[str]:
    """Press Ctrl-C at any moment of a plan: it exits with 130 within two seconds and leaves nothing behind."""
    moment = LONGEST_S * chance.random()
    yield f"after {moment:.2f} s"
    found = interrupted_after(moment, folder)
    if found and (found[0] != 130 or found[1] > 2 or found[3] or os.listdir(folder)):
        raise Broken(f"{found}, {os.listdir(folder)} left")
    yield "130" if found else "had ended"
