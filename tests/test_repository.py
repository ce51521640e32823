"""Rules for the source tree as a whole."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.suites.suite_file import load_suite

ROOT = Path(__file__).resolve().parent.parent
# In the order in which data walks, and the Python face of them all.
PACKAGES = ("moco", "convert", "detection", "benchmarks", "moco_transfer")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


# Layers of a package, from the top to the lowest, each with its subpackages. "" are the commands;
# subpackages of one layer do not import each other.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "moco": (
        ("",),
        ("pretraining", "classification"),
        ("engine",),
        ("data", "modeling"),
        ("common",),
    ),
    "detection": (
        ("",),
        ("d2", "embedded"),
        ("engine",),
        ("config",),
        ("evaluation", "modeling", "data"),
        ("datasets",),
    ),
    "benchmarks": (("speed",), ("",), ("suites",), ("report",)),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_modules(path: Path) -> set[str]:
    """Modules of this project that a file imports."""
    names = imported_names(path)
    return {
        name if name in MODULES else name.rpartition(".")[0]
        for name in names
        if name in MODULES or name.rpartition(".")[0] in MODULES
    }


def subpackage_of(module: str) -> tuple[str, str]:
    """Return package and subpackage of a module, "" for a file directly in a package."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return package, first if first and (ROOT / package / first).is_dir() else ""


# The doctor's command hands the doctor the score of perfect predictions, and the commands of moco/
# start as the console command, which hands them the reader of weights; nothing else looks ahead.
AT_THE_EDGE = {
    ("detection", "datasets"): {"detection.evaluation.reachable"},
    ("moco", ""): {"benchmarks.__main__"},
}


def test_imports_point_one_way():
    """The face → benchmarks → detection → convert → moco; in a package from layer to layer."""
    for path in SOURCES:
        package, subpackage = subpackage_of(module_name(path))
        layers = LAYERS.get(package, ())
        layer = next((i for i, names in enumerate(layers) if subpackage in names), None)
        for name in imported_modules(path) - AT_THE_EDGE.get((package, subpackage), set()):
            their_package, theirs = subpackage_of(name)
            wrong = f"{path.relative_to(ROOT)} imports {name}"
            assert PACKAGES.index(their_package) <= PACKAGES.index(package), wrong
            if name == package:  # its `__init__.py`, which imports nothing
                continue
            if their_package == package and layer is not None and theirs != subpackage:
                assert next(i for i, names in enumerate(layers) if theirs in names) > layer, wrong


# Stages of a conversion, and the commands after them: each imports only what is before it.
STAGES = [
    "families",
    "contract",
    "read",
    "facts",
    "metadata",
    "projects",
    "find",
    "extract",
    "verify",
    "recognize",
    "source_module",
    "translate",
    "write",
    "initial_weights",
    "report",
    "inspect_file",
    "convert_to_d2",
    "backbone",
]


def test_a_stage_of_a_conversion_imports_those_before_it():
    """Families and their networks are at the start, together."""
    order = {name: i for i, name in enumerate(STAGES)} | {"modeling": 0}
    paths = {tuple(name.split(".")): path for name, path in MODULES.items()}
    stages = {
        parts[1]: path for parts, path in paths.items() if parts[0] == "convert" and parts[1:]
    }
    assert stages.keys() == order.keys() | {"weights"}  # that command knows no stage
    for (_, stage, *_), path in ((p, f) for p, f in paths.items() if p[0] == "convert" and p[1:]):
        for other in imported_modules(path):
            package, *theirs = other.split(".")
            if package == "convert" and theirs and theirs[0] != stage:
                wrong = f"{path.relative_to(ROOT)} imports {other}"
                assert order[theirs[0]] <= order.get(stage, 0), wrong


def test_there_is_no_circle_of_imports():
    """Not even one that only closes inside a function, except of a family and its network.

    A family builds its network, and a network has the architecture of its family.
    """
    waiting = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    networks = {name for name in MODULES if name.startswith("convert.modeling.")}
    for name in (name for name in MODULES if name.startswith("convert.families.")):
        waiting[name] -= networks
    while free := {name for name, imports in waiting.items() if not imports}:
        waiting = {n: imports - free for n, imports in waiting.items() if n not in free}
    # What remains is in a circle or imports one: name the circles only.
    while leaves := waiting.keys() - set().union(*waiting.values()):
        waiting = {n: imports for n, imports in waiting.items() if n not in leaves}
    assert not waiting, f"circles among {sorted(waiting)}"


def test_only_the_plugin_imports_detectron2():
    plugin = ROOT / "detection" / "d2"
    for path in SOURCES:
        if plugin not in path.parents:
            names = {name for name in imported_names(path) if name.split(".")[0] == "detectron2"}
            assert not names, f"{path.relative_to(ROOT)} imports {names}"


# What one function does for all, and the files that may do it by themselves.
ONE_FUNCTION = {
    # open_file, read_text, read_bytes and require_regular: a pipe or a device would never answer.
    r"(?<!def )(?<![\w.])open\(|\.read_(text|bytes)\(": ("moco/common/files.py",),
    r"\bos\.open\(": ("moco/common/files.py", "moco/common/errors.py"),
    r"\bImage\.open\((?!require_regular\(|file,|source,|buffer)": (
        "benchmarks/speed/input.py",
        "benchmarks/speed/peers.py",
    ),
    r"\b(ZipFile|tarfile\.open)\((?!require_regular\(|file)": (),
    # expand_home: Path.expanduser raises RuntimeError for a user that does not exist.
    r"(?<!os\.path)\.expanduser\(": (),
    # quote: a line break in a path would break the message.
    r"\bshlex\.(quote|join)\(": (
        "moco/common/command.py",
        "moco/common/run.py",
        "benchmarks/suites/executors/slurm.py",
    ),
}


@pytest.mark.parametrize("pattern", ONE_FUNCTION)
def test_one_function_does_it(pattern):
    own = {ROOT / name for name in ONE_FUNCTION[pattern]}
    for path in SOURCES:
        found = re.search(pattern, text_of(path))
        assert bool(found) == (path in own), f"{path.relative_to(ROOT)}: {found}"


TEXTS = ("error", "reason", "note", "warning", "problem", "message")  # names of texts for people
TESTS_OF_TEXT = ("startswith", "endswith", "partition", "rpartition")
# torch has no class of errors for a data-loader worker that died.
OTHERS_TEXT = ("moco/engine/loader.py",)


def _texts_that_decide(tree: ast.AST) -> list[ast.AST]:
    """Return tests of an error's or a note's text: `x in str(error)`, `note.startswith(…)`."""
    caught = {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.name}

    def is_text(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
            return isinstance(node.args[0], ast.Name) and node.args[0].id in {*caught, "error"}
        return isinstance(node, ast.Name) and node.id in TEXTS

    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
                found += [node for each in node.comparators if is_text(each)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in TESTS_OF_TEXT and is_text(node.func.value):
                found.append(node)
            elif isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
                found += [node for each in node.args[1:] if is_text(each)]
    return found


def test_no_decision_reads_the_text_of_an_error():
    """A reworded message must not change what happens: errors and results have fields."""
    code = "try: f()\nexcept E as e:\n  if 'x' in str(e) or note.startswith('y'): pass"
    assert len(_texts_that_decide(ast.parse(code))) == 2
    own = {ROOT / name for name in OTHERS_TEXT}
    for path in SOURCES:
        found = _texts_that_decide(tree_of(path))
        assert not found or path in own, f"{path.relative_to(ROOT)}:{found[0].lineno}"


def test_parsed_arguments_stay_in_their_file():
    """Options are dataclasses; `detection.d2.config.setup` takes what Detectron2's own does."""
    own = {ROOT / "detection" / "d2" / "config.py"}
    for path in SOURCES:
        tree = tree_of(path)
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != "main"]
        passed = [n for n in public if "argparse.Namespace" in ast.unparse(n.args)]
        parses = "build_parser" in {n.name for n in public}
        assert not passed or parses or path in own, f"{path.relative_to(ROOT)}: {passed[0].name}"
        given = [n for n in public if "Namespace" in ast.unparse(n.returns or ast.Constant(""))]
        assert not given, f"{path.relative_to(ROOT)}: {given[0].name}"


def test_every_declared_deviation_is_in_the_list():
    """Deviations from the paper are declared at the line and listed in docs/deviations.md."""
    listed = (ROOT / "docs" / "deviations.md").read_text()
    for path in SOURCES:
        if "Deviation:" in text_of(path):
            assert f"`{path.relative_to(ROOT)}`" in listed, path.relative_to(ROOT)
    for name in re.findall(
        r"^\| `((?:moco|convert|detection|benchmarks)/[\w/]+\.py)`", listed, re.M
    ):
        assert "Deviation:" in (ROOT / name).read_text(), f"{name} declares no deviation"


def test_every_package_is_installed():
    """A package that setup.py forgets works in this tree and nowhere else."""
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in SOURCES
        if path.name == "__init__.py"
    }
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert folders == packages, "a folder of modules has no __init__.py"


def test_every_suite_is_on_its_page():
    page = (ROOT / "docs" / "guides" / "suites.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.M))
    assert listed.pop("paper") == "the paper's"
    for name, trials in listed.items():
        suite = load_suite(ROOT / "configs" / "suites" / f"{name}.yaml")
        numbers = sorted({task.trials for task in suite.tasks})
        assert trials == " and ".join(map(str, numbers)), name
    files = {path.stem for path in (ROOT / "configs" / "suites").iterdir()}
    assert files == {*listed, "paper"}
