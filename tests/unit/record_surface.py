"""What others rely on and cannot recompile: wire formats, tables, Redis keys, names of telemetry, commands, variables.

`test_recorded_surface.py` compares it with recorded_surface.json. An intended change is recorded by

    python -m tests.unit.record_surface

and committed together with its reason, and with a way for what is stored or configured the old way.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import redis
import typer
from sqlalchemy import create_engine, inspect

import onceward
from onceward import ConsumerTask, ProducerTask, Transaction
from onceward.boundary import bundle
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server import process
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.cli import exit as exits
from onceward.cli.boundary import options
from onceward.cli.main import app
from onceward.connectors import MemoryConnector, SqliteConnector, codec
from onceward.connectors.jetstream import AsyncJetStreamConnector
from onceward.connectors.jetstream.records import KeptLetter, MessageState
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.inbox import Inbox
from onceward.queue import QueueConfig, RedisStreamsQueue
from onceward.storage import migrations
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.telemetry import catalogue, logs
from onceward.testing import servers
from onceward.testing.telemetry import record
from onceward.transaction import Settlement, Verdict
from tests.support.schema import Schema, new_schema

RECORDED = Path(__file__).with_name("recorded_surface.json")
PACKAGE = Path(onceward.__file__).parent
PROTO = PACKAGE.parents[1] / "proto" / "onceward" / "boundary" / "v1" / "boundary.proto"

FIXED = Transaction(
    id="t1",
    payload={"order": 7, "lines": [1.5, None, True, "ü"], "raw": b"\x00\xff"},
    metadata={"tenant": "north"},
    created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
    source="shop",
    correlation_id="c1",
    parent_id="p1",
)


def surface(redis_url: str, postgres_url: str, folder: Path) -> dict[str, Any]:
    """All of it. The servers and the folder must be empty, or at least have nothing of the same names."""
    return {
        "codec": _codec(),
        "redis": _redis(redis_url),
        "jetstream": asyncio.run(_jetstream_queue()),
        "boundary": _boundary(folder),
        "sqlite": _sqlite(folder),
        "postgresql": _postgresql(postgres_url),
        "migrations": _migrations(),
        "telemetry": _telemetry(),
        "loggers": sorted(set(_loggers())),
        "commands": _commands(),
        "exit codes": {
            "failed": exits.FAILED,
            "misused": exits.MISUSED,
            "interrupted": options.INTERRUPTED,
        },
        "environment": sorted(set(_environment())),
    }


# ── wires ───────────────────────────────────────────────────────────────────────────────────────────────


def _codec() -> dict[str, Any]:
    body = codec.encode(FIXED)
    return {"version": body[1], "bytes": body.hex()}


def _redis(url: str) -> dict[str, Any]:
    """The keys that a connector and a queue write, with the fields of their entries."""
    stream, queue = "recorded-connector", "recorded-queue"
    with redis.Redis.from_url(url) as client:
        _forget(client)
        with RedisStreamsConnector(url, stream, group="shop") as connector:
            connector.dispatch_transactions([Transaction(id=id_) for id_ in ("bad", "late", "good")])
            fetched = {each.id: each for each in connector.fetch_transactions(3)}
            endings = [
                (fetched["bad"], Verdict.FAILED, _error(ExceptionCategory.BUSINESS)),
                (fetched["late"], Verdict.FAILED, _error(ExceptionCategory.SYSTEM)),
            ]
            connector.settle_transactions([Settlement(*each) for each in endings])
        with RedisStreamsConnector(url, "recorded-lines", group="shop") as connector:
            connector.keep_order(lambda transaction: transaction.id[0], hold_dead=True)
            connector.dispatch_transactions([Transaction(id=id_) for id_ in ("a1", "a2", "a3", "b1")])
            first, bad = connector.fetch_transactions(4)
            refused = Settlement(bad, Verdict.FAILED, _error(ExceptionCategory.BUSINESS))
            connector.settle_transactions([Settlement(first, Verdict.DONE), refused])
        sender = RedisStreamsQueue(client, QueueConfig(queue, "shop", "one", block_ms=1))
        sender.enqueue({"order": 7, "name": "ü"})
        found = {key.decode(): _key(client, key) for key in sorted(client.scan_iter("*recorded-*"))}
        found["body of the queue"] = client.xrange(queue)[0][1][b"data"].decode()
        found["parked by"] = _owner(client, stream, b"late")
        found["in line by"] = _owner(client, "recorded-lines", b"a3")
        _forget(client)
    return found


def _forget(client: Any) -> None:
    for key in client.scan_iter("*recorded-*"):
        client.delete(key)


def _error(category: ExceptionCategory) -> TransactionException:
    return TransactionException("no", category=category)


def _owner(client: Any, stream: str, id_: bytes) -> str:
    """The consumer that a pending entry belongs to."""
    for each in client.xpending_range(stream, "shop", "-", "+", 10):
        [(_, fields)] = client.xrange(stream, each["message_id"], each["message_id"])
        if fields[b"id"] == id_:
            return str(each["consumer"].decode())
    raise AssertionError(f"{id_!r} is not pending")


def _key(client: Any, key: bytes) -> dict[str, Any]:
    kind = client.type(key).decode()
    if kind == "stream":
        entries = client.xrange(key)
        return {
            "type": kind,
            "fields": sorted({name.decode() for _, fields in entries for name in fields}),
            "groups": sorted(each["name"].decode() for each in client.xinfo_groups(key)),
        }
    if key.endswith(b":tally"):
        return {"type": kind, "fields": sorted(name.decode() for name in client.hkeys(key))}
    if key.endswith((b":places", b":holders")):
        return {
            "type": kind,
            "of": "entry id",
            "values": sorted({_values(each) for each in client.hvals(key)}),
        }
    if key.endswith(b":lines"):
        return {"type": kind, "members": sorted({_values(each) for each in client.zrange(key, 0, -1)})}
    if kind == "hash":
        lines = [line for value in client.hvals(key) for line in value.decode().splitlines()]
        return {"type": kind, "of": "entry id", "line": sorted({_shape(json.loads(line)) for line in lines})}
    return {"type": kind}


def _values(value: bytes) -> str:
    """With zeros for the digits of entry ids."""
    return re.sub(r"\d{13,}-\d+", lambda found: re.sub(r"\d", "0", found.group()), value.decode())


def _shape(value: Any) -> str:
    if isinstance(value, dict):
        return f"object: {', '.join(sorted(value))}"
    return f"array of {len(value)}" if isinstance(value, list) else type(value).__name__


def _boundary(folder: Path) -> dict[str, Any]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", PROTO.read_text(), flags=re.DOTALL)
    return {
        "proto": sorted(_proto(text)),
        "bundle of an empty log": asyncio.run(_bundle(folder)).hex(),
        "jetstream": asyncio.run(_jetstream()),
    }


def _proto(text: str) -> Iterator[str]:
    """Everything but comments and layout, a line each, with the message, enum or service that it is in."""
    path: list[str] = []
    for words, end in re.findall(r"([^;{}]*)([;{}])", text):
        line = " ".join(words.split())
        if end == "}":
            path.pop()
            continue
        if line:
            yield " / ".join([*path, line])
        if end == "{":
            path.append(line)


async def _bundle(folder: Path) -> bytes:
    path = folder / "empty.bundle"
    store = SqliteBoundaryStore(folder / "bundled")
    try:
        await bundle.export(store, "plant-a", 0, None, str(path))
    finally:
        await store.close()
    return path.read_bytes()


async def _jetstream_queue() -> dict[str, Any]:
    """The streams that a connector creates, the subjects of its records, and their fields."""
    import nats

    with servers.nats_server() as server:
        async with AsyncJetStreamConnector(server.url, "RECORDED", "shop", lease=60.0) as connector:
            connector.owner = "worker"
            await connector.dispatch_transactions_async([Transaction(id=id_) for id_ in ("bad", "late")])
            bad, late = await connector.fetch_transactions_async(2)
            endings = [
                (bad, Verdict.FAILED, _error(ExceptionCategory.BUSINESS)),
                (late, Verdict.FAILED, _error(ExceptionCategory.SYSTEM)),
            ]
            await connector.settle_transactions_async([Settlement(*each) for each in endings])
            client = await nats.connect(server.url)
            try:
                js = client.jetstream()
                streams = {str(each.config.name): each.config.subjects for each in await js.streams_info()}
                info = await js.stream_info("RECORDED-onceward-shop", subjects_filter=">")
                return {
                    "streams": dict(sorted(streams.items())),
                    "subjects": sorted({each.split(".")[3] for each in info.state.subjects or ()}),
                    "state": list(MessageState.__struct_fields__),
                    "letter": list(KeptLetter.__struct_fields__),
                }
            finally:
                await client.close()


async def _jetstream() -> dict[str, Any]:
    import nats

    with servers.nats_server() as server:
        store = await JetStreamBoundaryStore.open(server.url, name="recorded")
        client = await nats.connect(server.url)
        try:
            streams = await client.jetstream().streams_info()
            found = {str(each.config.name): sorted(each.config.subjects or ()) for each in streams}
            return dict(sorted(found.items()))
        finally:
            await client.close()
            await store.close()


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────


def _migrations() -> dict[str, list[str]]:
    folder = Path(migrations.__file__).parent
    return {
        dialect: sorted(each.name for each in (folder / dialect).glob("*.sql"))
        for dialect in ("sqlite", "postgresql")
    }


def _sqlite(folder: Path) -> dict[str, Any]:
    """Applied, as SQLite has kept it."""
    engine = create_engine(f"sqlite:///{folder / 'inbox.db'}")
    Inbox(engine).migrate()
    engine.dispose()
    SqliteConnector(folder / "queue.db").close()
    SqliteConnector(folder / "named.db", queue="orders").close()
    asyncio.run(SqliteBoundaryStore(folder / "boundary").close())
    places = {
        "database": "inbox.db",
        "queue": "queue.db",
        "named queue": "named.db",
        "boundary": "boundary/boundary.db",
    }
    return {name: _sqlite_file(folder / path) for name, path in places.items()}


def _sqlite_file(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        [(application,)] = connection.execute("PRAGMA application_id")
        [(version,)] = connection.execute("PRAGMA user_version")
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        return {
            "application_id": application,
            "user_version": version,
            "schema": {name: " ".join(re.sub(r"--[^\n]*", "", sql).split()) for name, sql in rows},
        }


def _postgresql(url: str) -> dict[str, Any]:
    """Applied, as PostgreSQL reports it: columns with their types, and indexes."""
    with new_schema(url) as schema:
        engine = create_engine(url, connect_args=schema.connect_args)
        Inbox(engine).migrate()
        asyncio.run(_boundary_tables(schema))
        with PostgreSqlConnector(schema.plain_url, "orders") as queue:
            queue.counts()
        looking = inspect(engine)
        found = {
            table: [
                *(f"{each['name']} {each['type']}" for each in looking.get_columns(table, schema.name)),
                *sorted(f"index {each['name']}" for each in looking.get_indexes(table, schema.name)),
            ]
            for table in sorted(looking.get_table_names(schema.name))
        }
        engine.dispose()
    return found


async def _boundary_tables(schema: Schema) -> None:
    store = await PostgreSqlBoundaryStore.open(schema.plain_url)
    await store.close()


# ── names of telemetry ──────────────────────────────────────────────────────────────────────────────────


def _telemetry() -> dict[str, Any]:
    boundary = BoundaryMetrics()
    families = [*boundary.registry.collect(), *boundary.deprecated.collect()]
    return {
        "scope": catalogue.SCOPE,
        "metrics": {
            name: f"{each.kind} of {each.unit} by {', '.join(each.attributes)}"
            for name, each in sorted(catalogue.METRICS.items())
        },
        "metrics of a boundary": {each.name: each.type for each in sorted(families, key=lambda it: it.name)},
        "spans": _spans(),
        "span attributes": sorted(catalogue.SPAN_ATTRIBUTES),
        "retry event": catalogue.RETRY_EVENT,
        "log fields": sorted({*logs.FIELDS, *process.LOG_FIELDS, *_log_extras()}),
    }


def _spans() -> dict[str, list[str]]:
    """Those of a consumer and a producer of which one transaction succeeds and one fails, with their attributes."""

    class Consumer(ConsumerTask):
        def process_transaction(self, transaction: Transaction) -> None:
            _fail(transaction)

    class Producer(ProducerTask):
        def produce_transaction(self, transaction: Transaction) -> None:
            _fail(transaction)

    given = [Transaction(id="good"), Transaction(id="bad")]
    found: dict[str, set[str]] = {}
    with record() as recording:
        source = MemoryConnector()
        source.dispatch_transactions(given)
        Consumer({"source": source}).consume_transactions()
        Producer({}).produce_transactions(given)
        for span in recording.spans():
            found.setdefault(span.name, set()).update(span.attributes or ())
    return {name: sorted(attributes) for name, attributes in sorted(found.items())}


def _fail(transaction: Transaction) -> None:
    if transaction.id == "bad":
        raise _error(ExceptionCategory.BUSINESS)


@cache
def _modules() -> dict[str, ast.Module]:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "template" not in path.parts)
    return {_module_name(path): ast.parse(path.read_text()) for path in paths}


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _loggers() -> Iterator[str]:
    """Of all modules."""
    for module, tree in _modules().items():
        for call in _calls(tree, "getLogger"):
            match call.args:
                case [ast.Constant(value=str(name))]:
                    yield name
                case [ast.Name(id="__name__")]:
                    yield module


def _log_extras() -> Iterator[str]:
    """Keys of `extra={…}` in calls."""
    for tree in _modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "extra" and isinstance(node.value, ast.Dict):
                yield from (key.value for key in node.value.keys if isinstance(key, ast.Constant))


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


# ── commands and variables ──────────────────────────────────────────────────────────────────────────────


def _commands() -> dict[str, Any]:
    return dict(_walk(typer.main.get_command(app), "onceward", None))


def _walk(command: Any, path: str, parent: Any) -> Iterator[tuple[str, Any]]:
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    codes = re.findall(
        r"\d+", " ".join(re.findall(r"Exit codes?: (.*?)(?:\n\n|\Z)", command.help or "", re.DOTALL))
    )
    yield (
        path,
        {
            "parameters": {_spellings(each): _parameter(each) for each in command.params},
            "exit codes": sorted(set(map(int, codes))),
        },
    )
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.resolve_command(context, [name])[1]  # loads commands that are listed but not imported
        yield from _walk(below, f"{path} {name}", context)


def _spellings(parameter: Any) -> str:
    return ", ".join(sorted([*parameter.opts, *parameter.secondary_opts]))


def _parameter(parameter: Any) -> str:
    """In words: whether it is an argument or an option, what it takes, and where else its value comes from."""
    default, takes = parameter.default, _describe_type(parameter.type_descriptor.annotation)
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    words = [
        parameter.param_type_name,
        "flag" if getattr(parameter, "is_flag", False) else takes,
        "required" if parameter.required else "",
        "many times" if getattr(parameter, "multiple", False) or parameter.nargs != 1 else "",
        f"at least {low}" if low is not None else "",
        f"at most {high}" if high is not None else "",
        f"default {getattr(default, 'value', default)}"
        if default is not None and not callable(default)
        else "",
        f"or {parameter.envvar}" if parameter.envvar else "",
    ]
    return ", ".join(filter(None, words))


def _describe_type(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(str(each.value) for each in annotation)}"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _environment() -> Iterator[str]:
    """Whole strings that name a variable or the beginning of one; docstrings and messages are not whole names."""
    yield from options.FILES.values()
    for tree in _modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(r"_?(ONCEWARD|OTEL)_[A-Z_]*", str(node.value)):
                yield str(node.value)


# ── comparing and recording ─────────────────────────────────────────────────────────────────────────────


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """One line for each name that has come, gone or changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for name in sorted({*before, *after})
            for line in _of_name(name, before, after, f"{path} › {name}" if path else name)
        ]
    if isinstance(before, list) and isinstance(after, list):
        gone = [each for each in before if each not in after]
        come = [each for each in after if each not in before]
        if gone or come:
            return [*(f"gone: {path} › {each}" for each in gone), *(f"new: {path} › {each}" for each in come)]
    return [] if before == after else [f"changed: {path}: {before!r} is now {after!r}"]


def _of_name(name: str, before: dict[str, Any], after: dict[str, Any], path: str) -> Iterable[str]:
    if name not in after:
        return [f"gone: {path}"]
    if name not in before:
        return [f"new: {path}"]
    return differences(before[name], after[name], path)


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def main() -> None:
    with (
        servers.redis_server() as redis_server,
        servers.postgres_server() as postgres_server,
        tempfile.TemporaryDirectory() as folder,
    ):
        url = postgres_server.url.replace("postgresql://", "postgresql+psycopg://", 1)
        found = surface(redis_server.url, url, Path(folder))
    before = recorded() if RECORDED.exists() else {}
    RECORDED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(differences(before, found)) or "nothing has changed")  # noqa: T201


if __name__ == "__main__":
    main()
