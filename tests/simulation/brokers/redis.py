"""A model of Redis: streams with groups, hashes and sorted sets, as far as the connector and its scripts use them.

It runs the scripts themselves: see `lua`. Its entries are never trimmed. Replies are what the driver returns, with
bytes for strings and an exception for an error.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from tests.simulation.brokers.lua import LuaError, Table, compiled

Id = tuple[float, float]
"""Milliseconds and a number."""
MISSING = "NOGROUP No such key '{}' or consumer group '{}'"


@dataclass
class Pending:
    """A delivery of an entry that is not acknowledged."""

    consumer: str
    since: float
    """Milliseconds: when its idle time began."""
    deliveries: int


@dataclass
class Group:
    last: Id = (0, 0)
    pending: dict[Id, Pending] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)


@dataclass
class Stream:
    entries: dict[Id, list[str]] = field(default_factory=dict)
    """The names and values of each."""
    last: Id = (0, 0)
    added: int = 0
    groups: dict[str, Group] = field(default_factory=dict)


class ModelRedis:
    """`clock` returns seconds since 1970. A string is a `str` with one character for each byte."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.keys: dict[str, Any] = {}
        self._scripts: dict[str, str] = {}
        self._caller: Any = None
        self.script = ""
        """The one that runs."""
        self.changed: Callable[[Any, Id, Pending | None, Pending | None], None] = lambda *_: None
        """Called with the caller, an entry, and its delivery before and after."""

    def execute(self, command: Sequence[Any], caller: Any = None) -> Any:
        """Return the reply; an error is a value."""
        self._caller, self.script = caller, ""
        try:
            return _to_reply(self._run([_as_text(each) for each in command]))
        except LuaError as error:
            kind = NoScriptError if str(error).startswith("NOSCRIPT") else ResponseError
            return kind(str(error).removeprefix("ERR ").removeprefix("NOSCRIPT "))

    def snapshot(self) -> Any:
        return copy.deepcopy(self.keys)

    def restart(self, keys: Any) -> None:
        """Come back with these keys, as `snapshot` has returned them, and without scripts."""
        self.keys = copy.deepcopy(keys)
        self._scripts.clear()

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, command: list[str]) -> Any:
        name, *arguments = command
        if name in ("XINFO", "XGROUP"):
            name = f"{name}_{arguments.pop(0)}"
        return getattr(self, f"_do_{name.lower()}")(*arguments)

    def _do_evalsha(self, sha: str, *rest: str) -> Any:
        if sha not in self._scripts:
            raise LuaError("NOSCRIPT No matching script. Please use EVAL.")
        return self._do_eval(self._scripts[sha], *rest)

    def _do_eval(self, source: str, number: str, *rest: str) -> Any:
        self._scripts[hashlib.sha1(source.encode("latin-1"), usedforsecurity=False).hexdigest()] = source
        self.script = source
        keys, arguments = rest[: int(number)], rest[int(number) :]

        def call(*inner: Any) -> Any:
            return self._run([each if isinstance(each, str) else _as_text(each) for each in inner])

        reply = compiled(source)(list(keys), list(arguments), call)
        if isinstance(reply, Table) and "err" in reply:
            raise LuaError(reply["err"])
        return reply

    def _do_time(self) -> Table:
        seconds, fraction = divmod(round(self._clock() * 1e6), 1_000_000)
        return Table.of([str(seconds), str(fraction)])

    def _do_exists(self, key: str) -> int:
        return int(key in self.keys)

    def _do_del(self, key: str) -> int:
        return int(self.keys.pop(key, None) is not None)

    # hashes

    def _hash(self, key: str) -> dict[str, str]:
        found: dict[str, str] = self.keys.get(key, {})
        return found

    def _do_hget(self, key: str, name: str) -> Any:
        return self._hash(key).get(name, False)

    def _do_hgetall(self, key: str) -> Table:
        return Table.of(each for pair in self._hash(key).items() for each in pair)

    def _do_hmget(self, key: str, *names: str) -> Table:
        return Table.of(self._hash(key).get(each, False) for each in names)

    def _do_hexists(self, key: str, name: str) -> int:
        return int(name in self._hash(key))

    def _do_hset(self, key: str, name: str, value: str) -> int:
        found = self.keys.setdefault(key, {})
        is_new = name not in found
        found[name] = value
        return int(is_new)

    def _do_hincrby(self, key: str, name: str, by: str) -> int:
        value = int(self._hash(key).get(name, 0)) + int(by)
        self._do_hset(key, name, str(value))
        return value

    def _do_hdel(self, key: str, *names: str) -> int:
        found = self._hash(key)
        removed = sum(found.pop(each, None) is not None for each in names)
        if removed and not found:
            del self.keys[key]
        return removed

    # sorted sets

    def _do_zadd(self, key: str, score: str, member: str) -> int:
        found = self.keys.setdefault(key, {})
        is_new = member not in found
        found[member] = float(score)
        return int(is_new)

    def _do_zremrangebyscore(self, key: str, low: str, high: str) -> int:
        if low != "-inf" or not high.startswith("("):
            raise NotImplementedError(f"ZREMRANGEBYSCORE {low} {high}")
        found = self.keys.get(key, {})
        gone = [member for member, score in found.items() if score < float(high[1:])]
        for member in gone:
            del found[member]
        if gone and not found:
            del self.keys[key]
        return len(gone)

    # streams

    def _stream(self, key: str) -> Stream:
        if key not in self.keys:
            raise LuaError("ERR no such key")
        found: Stream = self.keys[key]
        return found

    def _group(self, key: str, group: str) -> Group:
        if key not in self.keys or group not in self.keys[key].groups:
            raise LuaError(MISSING.format(key, group))
        found: Group = self.keys[key].groups[group]
        return found

    def _do_xadd(self, key: str, id_: str, *fields: str) -> Any:
        if id_ == "MAXLEN":
            raise NotImplementedError("entries are not trimmed here")
        if id_ == "NOMKSTREAM":
            return self._do_xadd(key, *fields) if key in self.keys else False
        stream = self.keys.setdefault(key, Stream())
        if id_ == "*":
            now = int(self.now())
            new: Id = (now, 0) if now > stream.last[0] else (stream.last[0], stream.last[1] + 1)
        else:
            new = _read_id(id_)
        if new <= stream.last:
            raise LuaError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream.entries[new] = list(fields)
        stream.last = new
        stream.added += 1
        return show(new)

    def _do_xlen(self, key: str) -> int:
        return len(self.keys[key].entries) if key in self.keys else 0

    def _do_xdel(self, key: str, *ids: str) -> int:
        entries = self.keys[key].entries if key in self.keys else {}
        return sum(entries.pop(_read_id(each), None) is not None for each in ids)

    def _do_xrange(self, key: str, low: str, high: str, *count: str) -> Table:
        entries = self.keys[key].entries if key in self.keys else {}
        inside = _between(low, high)
        found = [Table.of([show(id_), Table.of(each)]) for id_, each in entries.items() if inside(id_)]
        return Table.of(found[: int(count[1])] if count else found)

    def _do_xinfo_stream(self, key: str) -> Table:
        stream = self._stream(key)
        return Table.of(
            [
                "length",
                len(stream.entries),
                "last-generated-id",
                show(stream.last),
                "entries-added",
                stream.added,
            ]
        )

    def _do_xinfo_groups(self, key: str) -> Table:
        groups = sorted(self._stream(key).groups.items())
        return Table.of(
            Table.of(
                [
                    *("name", name, "consumers", len(each.consumers)),
                    *("pending", len(each.pending), "last-delivered-id", show(each.last)),
                ]
            )
            for name, each in groups
        )

    def _do_xinfo_consumers(self, key: str, group: str) -> Table:
        self._stream(key)
        found = self._group(key, group)
        return Table.of(
            Table.of(["name", name, "pending", sum(each.consumer == name for each in found.pending.values())])
            for name in sorted(found.consumers)
        )

    def _do_xgroup_create(self, key: str, group: str, begin: str, *options: str) -> Table:
        if begin != "0" or options != ("MKSTREAM",):
            raise NotImplementedError(f"XGROUP CREATE {begin} {options}")
        groups = self.keys.setdefault(key, Stream()).groups
        if group in groups:
            raise LuaError("BUSYGROUP Consumer Group name already exists")
        groups[group] = Group()
        return Table(ok="OK")

    def _do_xgroup_delconsumer(self, key: str, group: str, consumer: str) -> int:
        found = self._group(key, group)
        gone = [id_ for id_, each in found.pending.items() if each.consumer == consumer]
        for id_ in gone:
            del found.pending[id_]
        found.consumers.discard(consumer)
        return len(gone)

    def _do_xreadgroup(self, *words: str) -> Any:
        _, group, consumer, _, count, _, key, after = words
        if after != ">":
            raise NotImplementedError("XREADGROUP of earlier entries")
        if key not in self.keys or group not in self.keys[key].groups:
            raise LuaError(f"{MISSING.format(key, group)} in XREADGROUP with GROUP option")
        stream, found = self.keys[key], self.keys[key].groups[group]
        found.consumers.add(consumer)
        fresh = [id_ for id_ in stream.entries if id_ > found.last][: int(count)]
        for id_ in fresh:
            found.pending[id_] = Pending(consumer, self.now(), 1)
            found.last = id_
            self.changed(self._caller, id_, None, found.pending[id_])
        return self._entries(key, fresh)

    def _do_xread(self, *words: str) -> Any:
        """Without its wait: see `has_after`."""
        key, after = words[-2:]
        if key not in self.keys:
            return False
        return self._entries(key, [id_ for id_ in self.keys[key].entries if id_ > _read_id(after)][:1])

    def _entries(self, key: str, ids: list[Id]) -> Any:
        if not ids:
            return False
        entries = self.keys[key].entries
        return Table.of(
            [Table.of([key, Table.of(Table.of([show(id_), Table.of(entries[id_])]) for id_ in ids)])]
        )

    def _do_xack(self, key: str, group: str, *ids: str) -> int:
        if key not in self.keys or group not in self.keys[key].groups:
            return 0
        pending, ended = self.keys[key].groups[group].pending, 0
        for id_ in map(_read_id, ids):
            gone = pending.pop(id_, None)
            if gone is not None:
                ended += 1
                self.changed(self._caller, id_, gone, None)
        return ended

    def _do_xclaim(self, key: str, group: str, consumer: str, least: str, id_: str, *options: str) -> Table:
        """Only of a pending entry that is in the stream, by whatever idle time."""
        found = self._group(key, group)
        given = dict(zip(options[:-1:2], options[1:-1:2], strict=True))
        if least != "0" or options[-1] != "JUSTID" or given.keys() != {"IDLE", "RETRYCOUNT"}:
            raise NotImplementedError(f"XCLAIM {least} {options}")
        found.consumers.add(consumer)
        each = found.pending.get(_read_id(id_))
        if each is None:
            return Table()
        claimed = Pending(consumer, self.now() - int(given["IDLE"]), int(given["RETRYCOUNT"]))
        found.pending[_read_id(id_)] = claimed
        self.changed(self._caller, _read_id(id_), each, claimed)
        return Table.of([id_])

    def _do_xpending(self, key: str, group: str, *words: str) -> Table:
        found = self._group(key, group)
        if not words:
            return _summary(found)
        rest, idle = list(words), 0.0
        if rest[0] == "IDLE":
            idle, rest = float(rest[1]), rest[2:]
        low, high, count, *consumer = rest
        inside, now = _between(low, high), self.now()
        rows = [
            Table.of([show(id_), each.consumer, max(int(now - each.since), 0), each.deliveries])
            for id_, each in sorted(found.pending.items())
            if inside(id_) and now - each.since >= idle and (not consumer or consumer[0] == each.consumer)
        ]
        return Table.of(rows[: int(count)])

    def has_after(self, key: str, after: str) -> bool:
        return key in self.keys and self.keys[key].last > _read_id(after)

    def now(self) -> float:
        return self._clock() * 1000


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, float):
        return f"{value:.17g}"
    return value if isinstance(value, str) and value.isascii() else str(value).encode().decode("latin-1")


def _to_reply(value: Any) -> Any:
    if isinstance(value, Table):
        if "ok" in value:
            return _to_reply(value["ok"])
        return [_to_reply(each) for each in value.items_in_order()]
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, float):
        return int(value)
    return None if value is False or value is None else value


def _read_id(text: str) -> Id:
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number or 0)


def show(id_: Id) -> str:
    return f"{id_[0]}-{id_[1]}"


def _summary(group: Group) -> Table:
    held = Counter(each.consumer for each in group.pending.values())
    if not held:
        return Table.of([0, False, False, False])
    ends = [show(min(group.pending)), show(max(group.pending))]
    return Table.of([held.total(), *ends, Table.of(Table.of([*each]) for each in sorted(held.items()))])


def _between(low: str, high: str) -> Callable[[Id], bool]:
    lowest: Id = (-1, 0) if low == "-" else _read_id(low.removeprefix("("))
    highest: Id = (inf, inf) if high == "+" else _read_id(high)
    if low.startswith("("):
        return lambda id_: lowest < id_ <= highest
    return lambda id_: lowest <= id_ <= highest


def entries_of(stream: Stream) -> Iterator[tuple[Id, dict[str, str]]]:
    for id_, fields in stream.entries.items():
        yield id_, dict(zip(fields[::2], fields[1::2], strict=True))
