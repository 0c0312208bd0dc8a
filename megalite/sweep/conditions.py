"""Conditions over the settings of a configuration: `{tp: 4, pp: [2, 4]}` or `"tp * pp > 8"`."""

import ast
import operator
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalite.config.describe import settings
from megalite.config.errors import ConfigError
from megalite.config.values import coerce, nearest
from megalite.sweep.yaml_keys import plain_settings

RANKS = "ranks"
"""Beside the settings: the number of ranks that a configuration runs on."""

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
_COMPARE: Mapping[type, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.In: lambda value, among: value in among,
        ast.NotIn: lambda value, among: value not in among,
    }
)
_EXAMPLE = '"tp * pp > 8" or {tp: 4, pp: [2, 4]}'


@dataclass(frozen=True)
class Condition:
    """One entry of `exclude` or `only`."""

    where: str
    values: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Setting -> the values that it may have; all of them must hold."""
    formula: ast.expr | None = None

    def holds(self, of: Mapping[str, Any]) -> bool:
        """Whether it is true of these settings.

        Raises:
            ConfigError: the formula cannot be worked out, as where a setting in it has no value.
        """
        if self.formula is None:
            return all(of[name] in allowed for name, allowed in self.values)
        try:
            return bool(_value(self.formula, of))
        except (TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{self.where}: {ast.unparse(self.formula)} cannot be worked out: {error}"
            ) from None


def read_condition(given: Any, where: str) -> Condition:
    """A condition as it stands in a file.

    Raises:
        ConfigError: neither a mapping nor a formula, a name that is no setting, or something else in a formula.
    """
    if isinstance(given, dict) and given:
        return Condition(where, values=tuple(_allowed(name, value, where) for name, value in given.items()))
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"{where} takes conditions such as {_EXAMPLE}, got {reprlib.repr(given)}")
    try:
        formula = ast.parse(given.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise ConfigError(f"{where}: {given} is not a formula such as {_EXAMPLE}") from None
    _check(formula, where)
    return Condition(where, formula=formula)


def _allowed(name: Any, value: Any, where: str) -> tuple[str, tuple[Any, ...]]:
    """Setting and values; a list is several values, or one where the setting itself is a list."""
    if name == RANKS:
        return RANKS, tuple(value) if isinstance(value, list) else (value,)
    several = isinstance(value, list) and not (name in settings() and settings()[name].is_list)
    found: list[Any] = []
    canonical = str(name)
    for each in value if several else [value]:
        if each is None and canonical in settings():
            found.append(coerce(settings()[canonical], None, where))
            continue
        given = plain_settings({name: each}, where)
        if len(given) != 1:
            raise ConfigError(f"{where}: {name} stands for {' and '.join(given)}; write those")
        ((canonical, plain),) = given.items()
        found.append(plain)
    return canonical, tuple(found)


def _check(node: ast.expr, where: str) -> None:
    """Only numbers, text, settings, sums and comparisons."""
    children: list[ast.expr]
    match node:
        case ast.Name():
            known = (*settings(), RANKS)
            if node.id not in known:
                raise ConfigError(f"{where}: {node.id} is not a setting{nearest(node.id, known)}")
            return
        case ast.Constant() if node.value is None or isinstance(node.value, bool | int | float | str):
            return
        case ast.BoolOp():
            children = node.values
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            children = [node.operand]
        case ast.BinOp() if type(node.op) in _BINARY:
            children = [node.left, node.right]
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            children = [node.left, *node.comparators]
        case ast.List() | ast.Tuple():
            children = node.elts
        case _:
            raise ConfigError(
                f"{where}: {ast.unparse(node)} is more than a condition takes; use settings, numbers, + - * / // %, "
                f"comparisons, in, and, or, not, as in {_EXAMPLE}"
            )
    for child in children:
        _check(child, where)


def _value(node: ast.expr, of: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name():
            return of[node.id]
        case ast.Constant():
            return node.value
        case ast.BoolOp():
            wanted = isinstance(node.op, ast.Or)
            return wanted if any(bool(_value(each, of)) == wanted for each in node.values) else not wanted
        case ast.UnaryOp():
            value = _value(node.operand, of)
            return not value if isinstance(node.op, ast.Not) else -value
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, of), _value(node.right, of))
        case ast.Compare():
            left = _value(node.left, of)
            for op, right_node in zip(node.ops, node.comparators):
                right = _value(right_node, of)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.List() | ast.Tuple():
            return [_value(each, of) for each in node.elts]
    raise AssertionError(node)
