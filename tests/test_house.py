"""Test the structure of the code: layers as the docs show them, no import cycle, unique names, and no early jax.

The docs name no missing path, and tests do not import, call or patch a private name of meshkit.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import meshkit as mk

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "meshkit").rglob("*.py"))
PROSE = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "meshkit").rglob("*.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(p): p for p in FILES}


@pytest.fixture(scope="module")
def trees():
    """Return the parsed modules; every worker collects this file, but only one parses them."""
    return {p: ast.parse(p.read_text(encoding="utf-8")) for p in FILES}


def imports_of(tree):
    """Yield modules of meshkit that a module imports: at its top, inside functions, or by name at run time."""
    dynamic = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshkit"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            dynamic |= name in ("import_module", "__import__", "find_spec", "resolve_name", "run_module")
        elif isinstance(node, ast.alias):
            dynamic |= node.name in ("import_module", "find_spec", "resolve_name", "run_module")
    if dynamic:  # Any text of it that names a module of ours may be what it imports.
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        yield from (named for text in texts if (named := text.partition(":")[0]) in MODULES)


@pytest.fixture(scope="module")
def imports(trees):
    """Return the meshkit imports of each module, except of `meshkit` itself, which has all public names."""
    inside = {name: path for name, path in MODULES.items() if name != "meshkit"}
    return {name: set(imports_of(trees[path])) - {name, "meshkit"} for name, path in inside.items()}


def rows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [sorted(re.split(r" [:|] ", row)) for row in contract["layers"]]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_pages_show_the_rows_of_the_import_contract(page):
    table = (ROOT / page).read_text(encoding="utf-8").split("<!-- rows -->")[1].split("<!-- end of rows -->")[0]
    shown = [
        sorted(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines() if line.startswith("| `")
    ]
    assert shown == rows()


def test_every_package_and_module_of_the_root_is_in_a_row():
    modules = {p.stem for p in (ROOT / "meshkit").glob("*.py")}
    packages = {p.parent.name for p in (ROOT / "meshkit").glob("*/__init__.py")}
    assert (modules | packages) - {"__init__", "__main__"} == {name for row in rows() for name in row}


def test_packages_name_their_input_and_output(trees):
    for folder in (ROOT / "meshkit").iterdir():
        if (folder / "__init__.py").exists():
            text = ast.get_docstring(trees[folder / "__init__.py"]) or ""
            assert all(word in text for word in ("Input:", "Output:", "May be imported")), folder.name


@pytest.mark.parametrize(
    "code",
    [
        "import importlib\ndef view():\n    return importlib.import_module('meshkit.report.views.report')",
        "from importlib import import_module\nview = import_module('meshkit.report.views.report')",
        "def view():\n    return __import__('meshkit.report.views.report')",
        "import importlib\nVIEWS = {'html': 'meshkit.report.views.report:write_html'}\nload = importlib.import_module",
        "def view():\n    from meshkit.report.views import report",
        "import meshkit.report.views.report",
    ],
)
def test_an_import_is_seen_however_it_is_written(code):
    assert "meshkit.report.views.report" in set(imports_of(ast.parse(code)))


def test_no_module_imports_itself_in_the_end(imports):
    reached = {name: set(found) for name, found in imports.items()}
    for _ in range(len(reached)):
        more = {name: found | {m for f in found for m in imports[f]} for name, found in reached.items()}
        if more == reached:
            break
        reached = more
    assert sorted(name for name, found in reached.items() if name in found) == []


def test_a_public_class_name_stands_once(trees):
    names = Counter(n.name for t in trees.values() for n in t.body if isinstance(n, ast.ClassDef) if n.name[0] != "_")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_small_module_has_several_users(imports):
    """If only one module uses a module of less than 60 lines, it belongs in that module."""
    users = Counter(m for found in imports.values() for m in found)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    small = {n for n, count in lines.items() if count < 60 and users[n] == 1 and not n.endswith(".cli")}
    assert sorted(n for n in small if MODULES[n].name not in ("__init__.py", "__main__.py")) == []


def private_names(trees):
    """Return names of functions, classes, methods, attributes and constants that are private to meshkit."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return {name for name in found if re.fullmatch(r"_[^_]\w*[^_]", name)}


def private_uses(tree, private):
    """Yield private names of meshkit that a test imports, reads from an object, or patches, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("meshkit", "benchmarks", "models")):
            yield from ((node.lineno, alias.name) for alias in node.names if re.match("_(?!_)", alias.name))
        elif isinstance(node, ast.Attribute) and node.attr in private:
            # A class of the test may have such attributes itself.
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, text) for text in texts if text in private)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, word) for word in re.findall(r"(?<=\w\.)_\w+", node.value) if word in private)


@pytest.mark.parametrize(
    "code",
    [
        "from meshkit.runs.owner import _claim",
        "owner._claim(1)",
        "monkeypatch.setattr(owner, '_claim', None)",
        "monkeypatch.setattr('meshkit.runs.owner._claim', None)",
        "child = 'from meshkit.runs import owner\\nowner._claim(1)'",
    ],
)
def test_the_use_of_a_private_name_is_seen(code):
    assert list(private_uses(ast.parse(code), {"_claim"})) == [(1, "_claim")]


def test_no_test_uses_a_private_name(trees):
    benchmarks = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks").rglob("*.py")]
    private = private_names([*trees.values(), *benchmarks])
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for line, name in private_uses(ast.parse(path.read_text(encoding="utf-8")), private)
    ]
    assert uses == []


def test_one_module_prints(trees):
    """Other modules would send a terminal the escapes that are in names of files."""
    fixed = {"meshkit.verbs.train.session"}  # This one prints from a thread, at the exit.
    found = set()
    for name, path in MODULES.items():
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console"):
                found.add(name)
    assert found == {"meshkit.console"} | fixed


def test_one_module_starts_processes_of_python(trees):
    """Another way would differ in who dies, who is left over and what is imported; only jobs have their own."""
    ways = ("sys.executable", "os.fork", "os.posix_spawn")
    found = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(trees[path])
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ways
    }
    jobs = {f"meshkit.verbs.launch.{name}" for name in ("cli", "local", "processes", "reaper")}
    assert found == {"meshkit.children"} | jobs


def test_prose_names_no_path_that_is_missing():
    missing, public = [], {*mk.__all__, "__version__"}
    for page in PROSE:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"(?<![\w/.-])((?:meshkit|tests|benchmarks|configs|models|launch)/[\w/.-]*\w)", text):
            if "NAME" not in path and not any(ROOT.glob(f"{path}*")):
                missing.append((page.name, path))
        for dotted in re.findall(r"(?<![\w.])meshkit((?:\.[a-z_]\w*)+)(?!/1)(?!\w)", text):
            parts = ["meshkit", *dotted[1:].split(".")]
            known = any(".".join(parts[:i]) in MODULES for i in range(2, len(parts) + 1)) or parts[1] in public
            if not known and dotted != ".json":
                missing.append((page.name, dotted))
    assert missing == []


def test_no_jax_at_the_door():
    doors = ("cli", "config", "report", "verbs.launch", "verbs.new", "verbs.schema", "verbs.profile.profiler")
    doors += ("distributed.environment",)
    names = [m for m in MODULES if m.startswith(tuple(f"meshkit.{door}" for door in doors))]
    code = f"import sys\nfor name in {names}:\n  __import__(name)\n  assert 'jax' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], {"importlib.metadata", "pydantic"}),
        (["schema", "report"], {"meshkit.config.cluster", "meshkit.hlo.schedule"}),
        (["new"], set()),
    ],
    ids=["help", "schema", "new"],
)
def test_the_command_line_imports_what_it_prints_with_and_no_more(words, absent):
    absent |= {"jax", "numpy", "rich.console"}
    code = (
        f"import sys; from meshkit.cli import main; main({words}); sys.exit(str(sorted({absent} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_verbs_of_the_library_stay_functions_whatever_was_imported_before():
    code = """
import meshkit.planning.planner, meshkit.verbs.profile.profiler, meshkit.verbs.compare.cli, meshkit.parallel.pipeline
import meshkit as mk
assert all(callable(f) for f in (mk.plan, mk.profile, mk.compare, mk.pipeline, mk.overlap)), mk.plan
import meshkit.verbs.plan.cli, meshkit.verbs.profile.cli
assert all(callable(getattr(mk, name)) for name in mk.__all__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
