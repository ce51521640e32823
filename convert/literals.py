"""Settings in Python source, such as the configurations of OpenMMLab, read without executing it."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHARACTERS = 1 << 18  # configurations have up to 50,000
MAX_ENTRIES = 1 << 17  # of all dicts together


class Settings:
    """Assignments of literals at the top of Python source.

    Literals, calls of `dict` with keywords, and names that were assigned before are read; another
    expression is an object that equals nothing.

    Args:
        source: The source.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: If it is no Python, or too long.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARACTERS:
            raise ValueError("source is too long")
        self.values: dict[str, Any] = {}
        self._entries = 0
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.values[statement.targets[0].id] = self._value(statement.value)
            elif isinstance(statement, ast.Expr):
                self.values.setdefault("", []).append(self._value(statement.value))

    def dicts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield every dict and the name or key under which it is, outer ones first, each once."""
        waiting, seen = collections.deque(self.values.items()), set[tuple[str, int]]()
        while waiting:
            key, value = waiting.popleft()
            if (key, id(value)) in seen:  # names may hold each other in many ways
                continue
            seen.add((key, id(value)))
            if isinstance(value, dict):
                yield key, value
                waiting += [(str(name), inner) for name, inner in value.items()]
            elif isinstance(value, list | tuple):
                waiting += [(key, inner) for inner in value]

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._value(item) for item in node.elts]
            case ast.Dict():
                keys = [None if key is None else self._value(key) for key in node.keys]
                return self._joined(zip(keys, node.values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return self._joined((each.arg, each.value) for each in node.keywords)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Name() if node.id in self.values:
                return self.values[node.id]
        return object()

    def _joined(self, items: Any) -> dict[str, Any]:
        """Return a dict of texts, into which a key of None merges another one, as `**` does."""
        found: dict[str, Any] = {}
        for key, node in items:
            value = self._value(node)
            if key is None and isinstance(value, dict):
                found |= value
            elif isinstance(key, str):
                found[key] = value
        self._entries += len(found)
        if self._entries > MAX_ENTRIES:
            raise ValueError("dicts are merged too often")
        return found
