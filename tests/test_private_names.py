"""Names that other packages keep private and this project uses nevertheless, all of them.

Such a name may go with any release of its package; the list says what each is needed for.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("benchmarks", "convert", "detection", "moco", "moco_transfer")


# The class or module that has a name, the name, the file that uses it.
PRIVATE = (
    # what a program has registered, which a child of multiprocessing runs itself from 3.13 on
    ("atexit", "_run_exitfuncs", "benchmarks/suites/forkserver.py"),
    # a second training in one process starts from nothing
    ("detectron2.utils.comm", "_LOCAL_PROCESS_GROUP", "detection/d2/engine.py"),
    # likewise
    ("detectron2.utils.comm", "_get_global_gloo_group", "detection/d2/engine.py"),
    # the unpickler that is written in Python, whose every step can be replaced
    ("pickle", "_Unpickler", "moco/common/unpickler.py"),
    # overridden: what two of its steps call to make an object
    ("pickle._Unpickler", "_instantiate", "moco/common/unpickler.py"),
    # the names of storages in a checkpoint
    ("torch.storage", "_dtype_to_storage_type_map", "moco/common/torch_files.py"),
    # the versions of modules, an attribute of the state dicts that a Module saves and reads
    ("torch.nn.Module", "_metadata", "moco/common/unpickler.py"),
    # one kernel for all parameters, as torch's own optimizers have it
    ("torch", "_foreach_lerp_", "moco/modeling/mechanisms/base.py"),
    ("torch", "_foreach_add", "moco/engine/lars.py"),
    ("torch", "_foreach_add_", "moco/engine/lars.py"),
    ("torch", "_foreach_mul", "moco/engine/lars.py"),
    ("torch", "_foreach_mul_", "moco/engine/lars.py"),
    ("torch", "_foreach_norm", "moco/engine/lars.py"),
    # a mode that sees every operation, to count the bytes that it moves
    ("torch.utils", "_python_dispatch", "benchmarks/speed/gpu.py"),
    # BoxCoder and Matcher, the parts of torchvision's detectors
    ("torchvision.models.detection", "_utils", "detection/embedded/boxes.py"),
    # the buffers that a module has itself, to give back what running it changes in them
    ("torch.nn.Module", "_buffers", "convert/source_module.py"),
    # the arguments that timm built a module with, which it keeps nowhere else
    ("timm.models._factory", "_model_args", "convert/modeling/timm_network.py"),
    # a stage of another width than torchvision's constructors build
    ("torchvision.models.ResNet", "_make_layer", "convert/modeling/resnet.py"),
)
# What only looks private: the methods of named tuples and enumerations.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_generate_next_value_"}
LISTED = {(file, name) for _, name, file in PRIVATE}
PRODUCT = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {"_", *PUBLIC}


def defined(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if on_self(node) else set()
    return names


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used(tree: ast.AST, own: set[str], inherited: set[str]) -> Iterator[str]:
    """Private names that a file uses and that neither it nor the project defines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [] if on_self(node) and node.attr in inherited else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            names = [text for text in texts if isinstance(text, str)]
        yield from (name for name in names if is_private(name) and name not in own)


@pytest.mark.slow
def test_no_other_is_used():
    trees = {path: ast.parse(path.read_text()) for path in PRODUCT}
    inherited = set().union(*map(defined, trees.values()))
    found = {
        (str(path.relative_to(ROOT)), name)
        for path, tree in trees.items()
        for name in used(tree, defined(tree), inherited)
    }
    assert found <= LISTED, f"not in the list: {sorted(found - LISTED)}"


@pytest.mark.detectron2
def test_no_other_is_overridden():
    """A method that happens to be called as a private one of its base class replaces it."""
    pytest.importorskip("detectron2")
    found = set()
    for path in PRODUCT:
        if path.name == "__main__.py" or "class " not in path.read_text():
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        classes = [c for c in vars(module).values() if inspect.isclass(c)]
        for cls in (c for c in classes if c.__module__ == module.__name__):
            foreign = [b for b in cls.__mro__[1:] if not b.__module__.startswith(PACKAGES)]
            found |= {
                (str(path.relative_to(ROOT)), own)
                for own, value in vars(cls).items()
                for base in foreign
                if is_private(own) and inspect.isfunction(value) and own in vars(base)
            }
    assert found <= LISTED, f"not in the list: {sorted(found - LISTED)}"


@pytest.mark.detectron2  # for most of them
@pytest.mark.parametrize(("owner", "name", "file"), PRIVATE)
def test_it_is_there_and_used(owner, name, file):
    pytest.importorskip(owner.split(".")[0])
    has_it = pkgutil.resolve_name(owner)
    assert hasattr(has_it, name) or f".{name}" in inspect.getsource(has_it), f"needed by {file}"
    assert name in (ROOT / file).read_text(), "remove it"
