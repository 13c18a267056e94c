"""Whether the call of an effect reads the key that it gets, and whether it says that it need not."""

from __future__ import annotations

import dis
import inspect
from types import FunctionType, MethodType
from typing import Any

_VARIADIC = 0x04
"""The flag of a function with `*args`."""


def ignores_key(call: Any) -> bool:
    """Whether the code of a function never reads its first parameter.

    False if that is unknown: for a partial, an object with `__call__`, `*args`, and a parameter that an inner function
    has. A name such as `_` says that it is not read on purpose.
    """
    method = isinstance(call, MethodType)
    function = call.__func__ if isinstance(call, MethodType) else call
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    if code.co_flags & _VARIADIC or code.co_argcount <= method:
        return False
    name = code.co_varnames[method]
    if waives_key(call) or name in code.co_cellvars:
        return False
    return not any(_reads(each, name) for each in dis.get_instructions(code))


def waives_key(call: Any) -> bool:
    """Whether the name of its parameter says so, as in `lambda _: …`."""
    try:
        parameters = list(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # of C
        return False
    return bool(parameters) and parameters[0].startswith("_")


def _reads(instruction: dis.Instruction, name: str) -> bool:
    """Newer Pythons load two variables in one instruction, whose argument is a tuple."""
    if "LOAD_FAST" not in instruction.opname:
        return bool(instruction.argval == "locals")
    value = instruction.argval
    return name in (value if isinstance(value, tuple) else (value,))
