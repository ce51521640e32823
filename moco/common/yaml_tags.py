"""Python tags in a YAML file: what they would give, as a literal to write instead.

Detectron2's own files have some (`!!python/object/apply:eval ["[x * 2 for x in range(3)]"]`), and
reading them would run code. Nothing is run here: a tag's arithmetic on numbers is worked out by
hand, within narrow limits.
"""

import ast
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

PREFIX = "tag:yaml.org,2002:python/"
_MAX_STEPS = 1000
_MAX_SHOWN = 500  # letters
_MAX_NUMBER = 1e12
_OPERATIONS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Any] = {
    "int": int,
    "float": float,
    "round": round,
    "list": list,
    "tuple": tuple,
}
_SCALARS = ("int", "long", "float", "bool", "none", "str", "unicode")


class _NotANumber(Exception):
    """More than arithmetic on numbers."""


def python_tag(text: str) -> tuple[int, str, str | None] | None:
    """The first Python tag of a YAML document: (line from 1, tag, literal or None)."""
    for node in _nodes(yaml.compose(text, Loader=yaml.SafeLoader)):
        if node.tag.startswith(PREFIX):
            tag = node.tag.removeprefix(PREFIX)
            return node.start_mark.line + 1, f"!!python/{tag}", _literal(tag, node)
    return None


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Every node once, parents first."""
    waiting, seen = [root] if root else [], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]


def _literal(tag: str, node: yaml.Node) -> str | None:
    from moco.common.limits import check_parts

    try:
        if tag in _SCALARS:
            literal = str(node.value)
        elif tag in ("tuple", "list"):
            plain = yaml.SequenceNode("tag:yaml.org,2002:seq", node.value)
            value = yaml.SafeLoader("").construct_document(plain)
            check_parts(value, _MAX_STEPS)  # one list may be named often
            literal = repr(value)
        elif tag in ("object/apply:eval", "object/new:eval"):
            [expression] = node.value
            body = ast.parse(expression.value, mode="eval").body
            literal = repr(_value(body, {}, iter(range(_MAX_STEPS))))
        else:
            return None
    except Exception:  # whatever it is, it is not simple arithmetic
        return None
    return literal if len(literal) <= _MAX_SHOWN else None


def _value(node: ast.AST, names: Mapping[str, Any], budget: Iterator[int]) -> Any:
    """A number, or nested lists and tuples of numbers.

    Args:
        names: of a comprehension's variables. budget: one is taken in each step.

    Raises:
        _NotANumber, ArithmeticError, ValueError, TypeError: it is something else, or too long.
    """
    if next(budget, None) is None:
        raise _NotANumber
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=parts):
            return [_value(part, names, budget) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names, budget) for part in parts)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_number(_value(operand, names, budget))))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, b = (_number(_value(side, names, budget)) for side in (left, right))
            if isinstance(op, ast.Pow):
                _bounded(float(a) ** float(b))  # overflows instead of growing
            return _bounded(_OPERATIONS[type(op)](a, b))
        case ast.Call(func=ast.Name(id="range"), args=[*args], keywords=[]):
            numbers = range(*(int(_value(arg, names, budget)) for arg in args))
            if len(numbers) > _MAX_STEPS:
                raise _NotANumber
            return list(numbers)
        case ast.Call(func=ast.Name(id=name), args=[arg], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(arg, names, budget))
        case ast.ListComp(
            elt=element,
            generators=[ast.comprehension(target=ast.Name(id=name), iter=items, ifs=[])],
        ):
            every = _value(items, names, budget)
            return [_value(element, {**names, name: item}, budget) for item in every]
    raise _NotANumber


def _number(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    raise _NotANumber


def _bounded(value: Any) -> Any:
    if isinstance(value, int | float) and abs(value) <= _MAX_NUMBER:
        return value
    raise _NotANumber
