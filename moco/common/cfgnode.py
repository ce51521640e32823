"""Configuration files and `KEY VALUE` overrides, merged into a `CfgNode` as in Detectron2.

Differences from `CfgNode.merge_from_file`: an unknown key is an error that names the nearest valid
one; `_BASE_` is a local file or a shipped one; YAML tags that build objects are refused; an integer
is accepted where a float is expected.
"""

import copy
import difflib
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml
from fvcore.common.config import BASE_KEY, CfgNode

from moco.common import shipped
from moco.common.errors import UserError
from moco.common.files import PathLike, expand_home, read_text

MAX_PARTS = 100_000
MAX_BASES = 8
# Synonyms of a key in the configs of other projects, or in the other kind of config of this one.
_SYNONYMS = (
    ("BASE_LR", "LEARNING_RATE", "LR"),
    ("BATCH_SIZE", "IMS_PER_BATCH"),
    ("MAX_EPOCHS", "EPOCHS", "NUM_EPOCHS"),
    ("MAX_ITERS", "MAX_ITER", "ITERS", "ITERATIONS"),
    ("LOGGERS", "TENSORBOARD", "WANDB", "MLFLOW"),
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)


def load_cfg(defaults: CfgNode, config_file: PathLike | None, opts: Sequence[str]) -> CfgNode:
    """Return a frozen copy of `defaults` with a file and overrides; see `merge_cfg`."""
    cfg = defaults.clone()
    cfg.defrost()
    merge_cfg(cfg, config_file, opts)
    cfg.freeze()
    return cfg


def merge_cfg(cfg: CfgNode, config_file: PathLike | None, opts: Sequence[str]) -> None:
    """Merge a YAML file and then `KEY VALUE` pairs into `cfg`, in place.

    Raises:
        UserError: If the file cannot be read, a key is unknown (the message names the nearest valid
            one), a value has the wrong type, or an override has no value.
    """
    if config_file is not None:
        for key, value in flatten(read_yaml(config_file)).items():
            _set(cfg, key, value, where=str(config_file))
    for key, value in _pairs(opts):
        _set(cfg, key, value, where="the command line")


def explicit_keys(config_file: PathLike | None, opts: Sequence[str]) -> set[str]:
    """Return the dotted names of the keys set in the file, its bases or the overrides."""
    keys = {key for key, _ in _pairs(opts)}
    if config_file is not None:
        keys |= set(flatten(read_yaml(config_file)))
    return keys


def split_assignments(args: Sequence[str]) -> list[str]:
    """Split `KEY=VALUE` arguments, so that all arguments are `KEY VALUE` pairs."""
    pairs: list[str] = []
    for arg in args:
        assignment = None if len(pairs) % 2 else _ASSIGNMENT.fullmatch(arg)
        pairs += assignment.groups() if assignment else [arg]
    return pairs


def read_yaml(path: PathLike, _depth: int = 0) -> dict[str, Any]:
    """Read the mapping in a YAML file, merged over the files named by its `_BASE_`.

    Raises:
        UserError: If the file is missing, is not valid YAML, has tags that build objects or more
            than MAX_PARTS values, or if its `_BASE_` is remote or refers to itself.
    """
    path = expand_home(path)
    if _depth > MAX_BASES:
        raise UserError(f"{path}: more than {MAX_BASES} levels of {BASE_KEY}; does it name itself?")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: expected a .yaml file")
    try:
        own = copy.deepcopy(_parse(read_text(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UserError(
            f"{path}: line {line}: YAML tags are not supported ({error.problem}), because they can "
            "run code; write the resulting value"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date, a number, a text
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not valid YAML ({reason})") from error
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise UserError(f"{path}: expected KEY: VALUE lines, got {type(own).__name__}")
    merged: dict[str, Any] = {}
    bases = own.pop(BASE_KEY, [])
    bases = bases if isinstance(bases, list) else [bases]
    for base in bases:
        if not isinstance(base, str):
            raise UserError(
                f"{path}: {BASE_KEY}: got {base!r}, expected a file name or a list of them"
            )
        if "://" in base:
            raise UserError(f"{path}: {BASE_KEY} {base} is remote; copy it next to this file")
        local = path.parent / expand_home(base)
        try:
            exists = local.exists()
        except (OSError, ValueError) as error:  # too long, a NUL
            raise UserError(f"{path}: {BASE_KEY} {base!r}: cannot be read ({error})") from error
        shared = None if exists else shipped.find(re.sub(r"^(\.\./)+", "", base))
        _merge(read_yaml(shared or local, _depth + 1), merged)
    _merge(own, merged)
    return merged


def read_own_yaml(path: PathLike) -> dict[str, Any]:
    """Read one of this project's YAML files by libyaml, which is much faster.

    A malicious file could crash libyaml, so users' files are read by `read_yaml`.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree: dict[str, Any] = loader(read_text(path)).get_single_data()
    return tree


@functools.lru_cache(maxsize=16)  # many tasks have the same few bases
def _parse(text: str) -> Any:
    from moco.common.limits import check_parts

    tree = _Loader(text).get_single_data()
    # Aliases can repeat one list so often that a walk through it would never end.
    check_parts(tree, MAX_PARTS)
    return tree


class _Loader(yaml.SafeLoader):
    """YAML loader that limits merge keys, which could otherwise expand without end."""

    _merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self._merged += len(node.value)
        if self._merged > MAX_PARTS:
            raise yaml.YAMLError(f"merge keys (<<) expand to more than {MAX_PARTS} values")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into `{"A.B": value}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            # Empty nodes become plain dicts, so that copies of the result are plain data.
            flat[name] = {} if isinstance(value, Mapping) else value
    return flat


def cfg_sha256(cfg: Mapping[str, Any], exclude: Collection[str] = ()) -> str:
    """Return the hex SHA-256 of all keys and values except `exclude` (dotted keys or nodes)."""
    names = set(exclude)
    kept = {
        key: value
        for key, value in flatten(cfg).items()
        if names.isdisjoint(itertools.accumulate(key.split("."), "{}.{}".format))
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def differing(cfg: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat configuration whose values differ from their defaults."""
    return {
        key: value
        for key, value in cfg.items()
        if key not in defaults or not same_value(value, defaults[key])
    }


def same_value(a: Any, b: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether two values of a key are equal.

    A list equals a tuple and 1 equals 1.0, but True does not equal 1. Numbers may differ by
    `tolerance` (absolute), and always by a relative 1e-9.
    """
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(
            same_value(x, y, tolerance=tolerance) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=tolerance)
    return type(a) is type(b) and bool(a == b)


def _set(cfg: CfgNode, key: str, value: Any, where: str) -> None:
    old: Any = cfg
    for part in key.split("."):
        if not isinstance(old, Mapping) or part not in old:
            near = _nearest(key, flatten(cfg))
            hint = f"; the nearest is {near}" if near else ""
            raise UserError(f"{where}: unknown key {key}{hint}")
        old = old[part]
    if isinstance(old, Mapping) and old:
        raise UserError(f"{where}: {key} is a group of keys; set one of its keys, e.g. {key}.X")
    if isinstance(old, float):
        value = _as_float(value)
    try:
        cfg.merge_from_list([key, value])
    except (ValueError, AssertionError) as error:
        expected = type(old).__name__
        raise UserError(
            f"{where}: {key} expects {expected} such as {old!r}, got {value!r}"
        ) from error


def _nearest(key: str, known: Collection[str]) -> str:
    """Return the known key that is most similar to an unknown one, or ""."""
    key = key.upper()
    group, dot, name = key.rpartition(".")
    same = [f"{group}{dot}{other}" for names in _SYNONYMS if name in names for other in names]
    for meant in (key, *same):
        if meant in known:
            return meant
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
        name, known, n=1, cutoff=0.3
    )
    return near[0] if near else ""


def _as_float(value: Any) -> Any:
    """Convert integers and numerals to float; leave anything else to the type check."""
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value


def _pairs(opts: Sequence[str]) -> Iterator[tuple[str, str]]:
    if len(opts) % 2:
        raise UserError(
            f"the command line: {opts[-1]!r} has no value; overrides are KEY VALUE pairs"
        )
    yield from zip(opts[0::2], opts[1::2], strict=True)


def _merge(update: Mapping[str, Any], into: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(value, into[key])
        else:
            into[key] = value
