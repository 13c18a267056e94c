"""The part of Lua that our scripts for Redis use, as Python: so a simulated Redis runs the scripts themselves.

A string of Lua is a `str` with one character for each byte. A call may return several values, as a tuple.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache, cmp_to_key
from typing import Any

import msgspec

Value = Any

_TOKEN = re.compile(
    r"""\s*(?:--[^\n]*\n\s*)*(?:
    (?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
    |(?P<sign>\.\.|==|~=|<=|>=|[-+*/<>=(){}\[\],;.\#])
    )""",
    re.VERBOSE,
)
_KEYWORDS = {
    *("and", "or", "not", "nil", "true", "false", "local", "function", "return", "end"),
    *("if", "then", "elseif", "else", "for", "in", "do", "repeat", "until", "while"),
}
_STRENGTH = {
    **dict.fromkeys(("or",), 1),
    **dict.fromkeys(("and",), 2),
    **dict.fromkeys(("==", "~=", "<", ">", "<=", ">="), 3),
    "..": 4,
    **dict.fromkeys("+-", 5),
    **dict.fromkeys("*/", 6),
}


class Table(dict[Any, Any]):
    @classmethod
    def of(cls, values: Any) -> Table:
        return cls(enumerate(values, 1))

    def items_in_order(self) -> Iterator[Any]:
        """Up to the first nil."""
        number = 1
        while self.get(number) is not None:
            yield self[number]
            number += 1


class LuaError(Exception):
    """An error that a script raised, or a command that it called."""


class Script:
    """A script, ready to be called with `keys`, `arguments` and what `redis.call` does."""

    def __init__(self, source: str) -> None:
        self._run = _Compiler(source).compile()

    def __call__(self, keys: list[str], arguments: list[str], call: Callable[..., Value]) -> Value:
        def pcall(*command: Any) -> Value:
            try:
                return call(*command)
            except LuaError as error:
                return Table(err=str(error))

        library = {
            "KEYS": Table.of(keys),
            "ARGV": Table.of(arguments),
            "redis": Table(call=call, pcall=pcall, error_reply=lambda text: Table(err=text)),
            **_LIBRARY,
        }
        return first(self._run(library))


compiled = cache(Script)


def first(value: Value) -> Value:
    return (value[0] if value else None) if isinstance(value, tuple) else value


def many(value: Value) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def pad(values: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return (values + (None,) * number)[:number]


def truth(value: Value) -> bool:
    return value is not None and value is not False


def both(left: Callable[[], Value], right: Callable[[], Value]) -> Value:
    value = left()
    return right() if truth(value) else value


def either(left: Callable[[], Value], right: Callable[[], Value]) -> Value:
    value = left()
    return value if truth(value) else right()


def text(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.14g}"
    raise LuaError(f"attempt to concatenate a {type(value).__name__}")


def number(value: Value) -> Any:
    if isinstance(value, str):
        value = tonumber(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LuaError(f"attempt to perform arithmetic on {value!r}")
    return value


def tonumber(value: Value) -> Any:
    if not isinstance(value, str):
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return None


def same(left: Value, right: Value) -> bool:
    """Strings and numbers are never equal in Lua."""
    return (type(left) in (int, float) and type(right) in (int, float) and left == right) or (
        type(left) is type(right) and left == right
    )


def size(value: Value) -> int:
    return len(value) if isinstance(value, str) else sum(1 for _ in value.items_in_order())


def index(value: Value, key: Value) -> Value:
    if not isinstance(value, Table):
        raise LuaError(f"attempt to index {value!r}")
    return value.get(key)


def make(*values: Any) -> Table:
    return Table((place, value) for place, value in enumerate(values, 1) if value is not None)


def ipairs(table: Table) -> Iterator[tuple[int, Any]]:
    return enumerate(table.items_in_order(), 1)


def unpack(table: Table, begin: int = 1, end: int | None = None) -> tuple[Any, ...]:
    return tuple(table.get(each) for each in range(begin, (size(table) if end is None else end) + 1))


def insert(table: Table, value: Value) -> None:
    table[size(table) + 1] = value


def sort(table: Table, is_before: Callable[[Value, Value], Value]) -> None:
    def compare(one: Value, other: Value) -> int:
        return -1 if truth(first(is_before(one, other))) else 1

    table.update(enumerate(sorted(table.items_in_order(), key=cmp_to_key(compare)), 1))


def match(subject: str, pattern: str) -> Any:
    found = _pattern(pattern).search(subject)
    if found is None:
        return None
    return found.groups() if found.groups() else found.group()


def gsub(subject: str, pattern: str, by: str) -> tuple[str, int]:
    return _pattern(pattern).subn(lambda _: by, subject)


def find(subject: str, pattern: str) -> Any:
    found = _pattern(pattern).search(subject)
    return None if found is None else (found.start() + 1, found.end())


def sub(subject: str, begin: int, end: int = -1) -> str:
    length = len(subject)
    begin = max(length + begin + 1, 1) if begin < 0 else max(begin, 1)
    end = length + end + 1 if end < 0 else min(end, length)
    return subject[begin - 1 : end]


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    if re.search(r"%[^d]", pattern):
        raise NotImplementedError(f"the pattern {pattern!r}")
    return re.compile(pattern.replace("%d", r"\d"), re.ASCII | re.DOTALL)


def from_python(value: Any) -> Value:
    """Convert what a decoder returns."""
    if isinstance(value, (list, tuple)):
        return Table.of(from_python(each) for each in value)
    if isinstance(value, dict):
        return Table({key: from_python(each) for key, each in value.items()})
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value


def read_json(encoded: str) -> Value:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, list):
            return [convert(each) for each in value]
        return {key: convert(each) for key, each in value.items()} if isinstance(value, dict) else value

    return from_python(convert(msgspec.json.decode(encoded.encode("latin-1"))))


def read_msgpack(packed: str) -> Value:
    """MessagePack in which strings may be any bytes."""
    return from_python(_read(memoryview(packed.encode("latin-1")), 0)[0])


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    kind = data[at]
    sizes = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    if 0xA0 <= kind <= 0xBF or kind in sizes:
        width = sizes.get(kind, 0)
        length = int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else kind & 0x1F
        begin = at + 1 + width
        return bytes(data[begin : begin + length]), begin + length
    if 0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD):
        width = {0xDC: 2, 0xDD: 4}.get(kind, 0)
        length = int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else kind & 0x0F
        at, values = at + 1 + width, []
        for _ in range(length):
            value, at = _read(data, at)
            values.append(value)
        return values, at
    if kind <= 0x7F or kind >= 0xE0:
        return (kind if kind <= 0x7F else kind - 256), at + 1
    widths = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    width = widths[kind]
    return int.from_bytes(data[at + 1 : at + 1 + width], "big", signed=kind >= 0xD0), at + 1 + width


_LIBRARY: dict[str, Any] = {
    "ipairs": ipairs,
    "unpack": unpack,
    "tonumber": tonumber,
    "string": Table(
        match=match,
        gsub=gsub,
        find=find,
        sub=sub,
        format=lambda form, *values: form % tuple(map(int, values)),
    ),
    "math": Table(floor=lambda each: math.floor(number(each)), min=min, max=max),
    "table": Table(insert=insert, sort=sort),
    "cjson": Table(decode=read_json),
    "cmsgpack": Table(unpack=read_msgpack),
}


_OPERATIONS: tuple[Any, ...] = (first, many, pad, truth, both, either, text, number, same, size, index, make)


class _Compiler:
    """Writes Python. Variables get a prefix, so none is a keyword."""

    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at, source = 0, source.rstrip()
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None or found.end() == at:
                raise SyntaxError(f"this is not in our Lua: {source[at : at + 40]!r}")
            kind, word = found.lastgroup or "", found.group(found.lastgroup or 0)
            self._tokens.append(("keyword" if word in _KEYWORDS else kind, word))
            at = found.end()
        self._at = 0
        self._lines: list[str] = []
        self._depth = 1

    def compile(self) -> Callable[[dict[str, Any]], Any]:
        self._block()
        if self._at < len(self._tokens):
            raise SyntaxError(f"unexpected {self._peek()}")
        code = "def chunk(library):\n" + "\n".join(self._lines or ["    pass"])
        scope = {each.__name__: each for each in _OPERATIONS}
        exec(compile(code, "<lua>", "exec"), scope)
        made: Callable[[dict[str, Any]], Any] = scope["chunk"]
        return made

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────

    def _peek(self) -> str:
        kind, word = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        return "" if kind == "string" else word

    def _next(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, *words: str) -> bool:
        if self._peek() in words:
            self._at += 1
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise SyntaxError(f"expected {word}, not {self._peek()!r}")

    def _write(self, line: str) -> None:
        self._lines.append("    " * self._depth + line)

    # ── statements ──────────────────────────────────────────────────────────────────────────────────────

    def _block(self, *ends: str) -> str:
        """Compile up to one of these words, and return it."""
        written = len(self._lines)
        while self._at < len(self._tokens) and self._peek() not in ends:
            self._statement()
        if len(self._lines) == written:
            self._write("pass")
        if not ends:
            return ""
        return self._next()[1]

    def _inner(self, *ends: str) -> str:
        self._depth += 1
        end = self._block(*ends)
        self._depth -= 1
        return end

    def _statement(self) -> None:
        if self._take(";"):
            return
        if self._take("local"):
            if self._take("function"):
                self._function()
                return
            names = self._names()
            self._assign(names, self._values() if self._take("=") else "()")
        elif self._take("if"):
            self._if()
        elif self._take("for"):
            self._for()
        elif self._take("repeat"):
            self._write("while True:")
            self._inner("until")
            self._depth += 1
            self._write(f"if truth({self._expression()}): break")
            self._depth -= 1
        elif self._take("return"):
            is_bare = self._peek() in ("end", "else", "elseif", "until")
            self._write(f"return {'()' if is_bare else self._values()}")
        else:
            self._assign_or_call()

    def _assign_or_call(self) -> None:
        target = self._suffixed()
        if self._peek() == ",":
            more = [target]
            while self._take(","):
                more.append(self._suffixed())
            self._expect("=")
            self._assign(more, self._values())
        elif self._take("="):
            self._store(target, f"first({self._values()})")
        else:
            self._write(self._single(target))

    def _store(self, target: str, value: str) -> None:
        if target.startswith("index("):
            inside = target[len("index(") : -1]
            table, key = _split(inside)
            self._write(f"{table}[{key}] = {value}")
        else:
            self._write(f"{target} = {value}")

    def _names(self) -> list[str]:
        names = [f"v_{self._next()[1]}"]
        while self._take(","):
            names.append(f"v_{self._next()[1]}")
        return names

    def _assign(self, names: list[str], values: str) -> None:
        self._write(f"{', '.join(names)}, = pad({values}, {len(names)})")

    def _function(self) -> None:
        name = f"v_{self._next()[1]}"
        self._expect("(")
        parameters = [] if self._peek() == ")" else self._names()
        self._expect(")")
        self._write(f"def {name}({', '.join(f'{each}=None' for each in parameters)}):")
        self._inner("end")

    def _if(self) -> None:
        word = "if"
        while True:
            self._write(f"{word} truth({self._expression()}):")
            self._expect("then")
            end = self._inner("elseif", "else", "end")
            if end == "else":
                self._write("else:")
                self._inner("end")
            if end != "elseif":
                return
            word = "elif"

    def _for(self) -> None:
        names = self._names()
        if self._take("="):
            begin = self._expression()
            self._expect(",")
            end = self._expression()
            step = self._expression() if self._take(",") else "1"
            head = f"for {names[0]} in range({begin}, {end} + 1, {step}):"
        else:
            self._expect("in")
            head = f"for {', '.join(names)} in {self._expression()}:"
        self._expect("do")
        self._write(head)
        self._inner("end")

    # ── expressions ─────────────────────────────────────────────────────────────────────────────────────

    def _values(self) -> str:
        """Compile a list of expressions to a tuple, whose last one may give several."""
        values = [self._expression(keep=True)]
        while self._take(","):
            values.append(self._expression(keep=True))
        return f"({', '.join(_spread(values))},)"

    def _expression(self, strength: int = 0, *, keep: bool = False) -> str:
        """With `keep`, a call alone keeps all its values."""
        left = self._operand()
        is_call = left.startswith("call(")
        while (sign := self._peek()) in _STRENGTH and _STRENGTH[sign] > strength:
            self._at += 1
            right = self._single(self._expression(_STRENGTH[sign] - (sign == "..")))
            left, is_call = _combine(sign, self._single(left), right), False
        if is_call and keep:
            return left
        return self._single(left)

    def _single(self, value: str) -> str:
        return f"first{value[len('call') :]}" if value.startswith("call(") else value

    def _operand(self) -> str:
        if self._take("not"):
            return f"(not truth({self._expression(7)}))"
        if self._take("#"):
            return f"size({self._expression(7)})"
        if self._take("-"):
            return f"(-number({self._expression(7)}))"
        if self._take("{"):
            values = []
            while not self._take("}"):
                values.append(self._expression(keep=True))
                self._take(",")
            return f"make({', '.join(_spread(values))})"
        kind, word = self._tokens[self._at]
        if kind in ("string", "number"):
            self._at += 1
            return word
        if word in ("nil", "true", "false"):
            self._at += 1
            return {"nil": "None", "true": "True", "false": "False"}[word]
        return self._suffixed()

    def _suffixed(self) -> str:
        if self._take("("):
            value = self._expression()
            self._expect(")")
        else:
            word = self._next()[1]
            value = (
                f"library[{word!r}]" if word in _LIBRARY or word in ("KEYS", "ARGV", "redis") else f"v_{word}"
            )
        while True:
            if self._take("."):
                value = f"index({self._single(value)}, {self._next()[1]!r})"
            elif self._take("["):
                value = f"index({self._single(value)}, {self._expression()})"
                self._expect("]")
            elif self._take("("):
                arguments = []
                while not self._take(")"):
                    arguments.append(self._expression(keep=True))
                    self._take(",")
                value = f"call({self._single(value)}({', '.join(_spread(arguments))}))"
            else:
                return value


def _spread(values: list[str]) -> list[str]:
    """All but the last value of a list give one."""
    single = [f"first{each[len('call') :]}" if each.startswith("call(") else each for each in values]
    if values and values[-1].startswith("call("):
        single[-1] = f"*many{values[-1][len('call') :]}"
    return single


def _combine(sign: str, left: str, right: str) -> str:
    if sign in ("and", "or"):
        return f"{'both' if sign == 'and' else 'either'}(lambda: {left}, lambda: {right})"
    if sign == "..":
        return f"(text({left}) + text({right}))"
    if sign in ("==", "~="):
        return f"({'' if sign == '==' else 'not '}same({left}, {right}))"
    if sign in "+-*/":
        return f"(number({left}) {sign} number({right}))"
    return f"({left} {sign} {right})"


def _split(inside: str) -> tuple[str, str]:
    """Split `table, key` at the comma that is not inside of brackets."""
    depth = 0
    for at in range(len(inside) - 1, -1, -1):
        depth += inside[at] in ")]"
        depth -= inside[at] in "(["
        if inside[at] == "," and not depth:
            return inside[:at], inside[at + 1 :].strip()
    raise SyntaxError(inside)
