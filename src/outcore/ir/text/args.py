"""args: the arguments of ops in text: `%3, none, (1, 1), "sum", dtype:float32, alpha=0.5`."""

from __future__ import annotations

import re

from outcore.ir.text.rows import comma
from outcore.ir.text.scan import DIGITS, INTEGER, KIND, NUMBER, STRING, SYMBOL, Line, bare, quoted
from outcore.ir.trace import Arg, Ref, Symbol

_CONSTANTS: dict[str, Arg] = {"none": None, "true": True, "false": False}
_VALUE = re.compile(rf"%{DIGITS}", re.ASCII)
_KEYWORD = re.compile(rf"(?:{KIND.pattern}|{STRING.pattern})=", re.ASCII)
_SYMBOL = re.compile(rf"{KIND.pattern}:(?={SYMBOL.pattern}|{STRING.pattern})", re.ASCII)


def arg_text(arg: Arg) -> str:
    """One argument, in the form that `read_arg` reads."""
    if isinstance(arg, Ref):
        return value_name(arg.value)
    if isinstance(arg, Symbol):
        return f"{bare(arg.kind, KIND)}:{bare(arg.name, SYMBOL)}"
    if isinstance(arg, tuple):
        return f"({arg_text(arg[0])},)" if len(arg) == 1 else f"({comma(map(arg_text, arg))})"
    if isinstance(arg, str):
        return quoted(arg)
    return repr(arg).lower()


def value_name(value: int) -> str:
    """The name of a Value in the text form: `%12`."""
    return f"%{value}"


def read_new_value(line: Line) -> int:
    """The id of a Value that this line defines, such as `%12`."""
    return int(line.take(_VALUE, "a value like %12")[1:])


def read_value(line: Line) -> int:
    """A Value id such as `%12`, also added to `line.values` to check later that it exists."""
    name = line.take(_VALUE, "a value like %12")
    line.values.append((line.at - len(name), int(name[1:])))
    return int(name[1:])


def read_values(line: Line) -> tuple[int, ...]:
    """Value ids to the end of the line: `%0, %1`."""
    found: list[int] = []
    while not line.done():
        if found:
            line.expect(",")
        found.append(read_value(line))
    return tuple(found)


def read_args(line: Line) -> tuple[Arg, ...]:
    """Arguments to the end of the line."""
    found: list[Arg] = []
    while not line.done():
        if found:
            line.expect(",")
        found.append(read_arg(line))
    return tuple(found)


def read_call(line: Line) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments of a call, with its parentheses: positional ones, then keyword ones."""
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    line.expect("(")
    while not line.accept(")"):
        if (args or kwargs) and not line.accept(","):
            line.miss("',' or ')'")
        if line.sees(_KEYWORD):
            name = line.name(KIND)
            line.expect("=")
            kwargs.append((name, read_arg(line)))
        elif kwargs:
            line.miss("a keyword argument")
        else:
            args.append(read_arg(line))
    return tuple(args), tuple(kwargs)


def read_arg(line: Line) -> Arg:
    """One argument."""
    if line.sees(_VALUE):
        return Ref(read_value(line))
    if line.accept("("):
        return _read_tuple(line)
    text = line.string()
    if text is not None:
        return Symbol(text, line.name(SYMBOL)) if line.accept(":") else text
    if (kind := line.find(_SYMBOL)) is not None:
        return Symbol(kind[:-1], line.name(SYMBOL))
    for word, constant in _CONSTANTS.items():
        if line.accept(word):
            return constant
    number = line.take(NUMBER, "an argument")
    return int(number) if INTEGER.fullmatch(number) else float(number)


def _read_tuple(line: Line) -> tuple[Arg, ...]:
    """The items of a tuple after its opening parenthesis. A comma may follow the last one."""
    items: list[Arg] = []
    while not line.accept(")"):
        items.append(read_arg(line))
        if line.accept(")"):
            break
        if not line.accept(","):
            line.miss("',' or ')'")
    return tuple(items)
