"""What a pickle describes, as plain values: nothing in it is imported, called or made.

torch's own restricted unpickler knows the opcodes of protocol 2 alone; `.metadata` files are of protocol 4. Here the
standard library's disassembler gives the opcodes, and a class or function is a `Name` that must be in a list, a call of
it a `Made` that keeps the arguments.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any


class PickleError(ValueError):
    """The bytes are no pickle, or one with something that is not in the list."""


@dataclass(frozen=True)
class Name:
    """A class, function or constant of a module, by name alone."""

    name: str


@dataclass(eq=False)
class Made:
    """What calling `name` with `arguments` would have made, the state that it would have been given, and its items."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, attribute: str) -> Any:
        """An attribute of its state; None if it has none."""
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state.get(attribute) if isinstance(state, dict) else None


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
        *(
            "UNICODE",
            "BINUNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE8",
            "STRING",
            "BINSTRING",
            "SHORT_BINSTRING",
        ),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def describe(data: bytes, allowed: Collection[str]) -> Any:
    """The value that a pickle describes: dicts, lists, tuples, numbers, strings, `Name` and `Made`.

    Args:
        allowed: the dotted names that may occur.

    Raises:
        PickleError: another name occurs, or the bytes are not a pickle of plain data.
    """
    reader = _Reader(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            reader.step(opcode.name, argument)
        return reader.result()
    except PickleError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PickleError(f"it is not a pickle ({error})") from None


class _Reader:
    """The stack that the opcodes work on."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """What is left."""
        (value,) = self._stack
        return value

    def step(self, code: str, argument: Any) -> None:
        """One opcode."""
        if code in _VALUES:
            self._stack.append(argument)
        elif code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            self._stack.append(_EMPTY[code]())
        elif code == "MARK":
            self._stack.append(_MARK)
        elif code in _TUPLES:
            self._stack[-_TUPLES[code] :] = [tuple(self._stack[-_TUPLES[code] :])]
        elif code == "TUPLE":
            self._stack.append(tuple(self._pop_marked()))
        elif code in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if code == "MEMOIZE" else argument] = self._stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif code in ("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"):
            self._add(code)
        elif code in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"):
            self._object(code, argument)
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"it has the opcode {code}, which no data need")

    def _object(self, code: str, argument: Any) -> None:
        if code == "BUILD":
            state = self._stack.pop()
            if not isinstance(self._stack[-1], Made):
                raise PickleError("it gives a state to what is not an object")
            self._stack[-1].state = state
            return
        if code == "GLOBAL":
            name = argument.replace(" ", ".")
        else:
            second, first = self._stack.pop(), self._stack.pop()
            if code != "STACK_GLOBAL":
                if not isinstance(first, Name) or not isinstance(second, tuple):
                    raise PickleError("it calls what is not a class")
                self._stack.append(Made(first.name, second))
                return
            name = f"{first}.{second}"
        if name not in self._allowed:
            raise PickleError(f"GLOBAL {name}")
        self._stack.append(Name(name))

    def _add(self, code: str) -> None:
        if code.endswith("S"):
            items = self._pop_marked()
        else:
            count = 2 if code == "SETITEM" else 1
            items = self._stack[-count:]
            del self._stack[-count:]
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items.extend(items)
        elif code.startswith("SETITEM"):
            target.update(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, set):
            target.update(items)
        else:
            target.extend(items)

    def _pop_marked(self) -> list[Any]:
        place = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items
