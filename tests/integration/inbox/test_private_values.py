"""A card number in a failed statement is shown nowhere, however user code passes its error on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.deadletters import AsyncDeadLetters, DeadLetters
from onceward.deadletters.dry_run import dry_run, dry_run_async
from onceward.deadletters.source import AsyncWithDeadLetters, WithDeadLetters
from onceward.inbox import AsyncInbox, Inbox
from onceward.task.exceptions import TransactionException
from onceward.telemetry.logs import ConsoleLines, JsonLines, extras
from onceward.testing.telemetry import record
from tests.support.inbox.contracts import contract

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

pytestmark = pytest.mark.req("CC-078")

CARD = "4111111111111111"
INSERT = "INSERT INTO cards (card, owner) VALUES (:card, :owner)"
TAKEN = {"card": CARD, "owner": "ann"}


class PaymentError(Exception): ...


class Verbose(Exception):
    """Builds its message when asked for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.reason = [str(error)]

    def __str__(self) -> str:
        return f"payment failed: {self.reason[0]}"


def wrap(error: Exception, style: str) -> Exception:
    """What the handler raises inside its `except`, so the error of the database is always its context."""
    made: Exception = error
    if style == "text":
        made = PaymentError(str(error))
    elif style == "repr":
        made = PaymentError(f"{error!r}")
    elif style == "on one line":
        made = PaymentError(" ".join(str(error).split()))
    elif style == "argument":
        made = PaymentError(error)
    elif style == "group":
        made = ExceptionGroup("several", [ValueError("other"), error, PaymentError(str(error))])
    elif style == "note":
        made = PaymentError("see the note")
        made.add_note(f"while inserting: {error}")
    elif style == "business":
        made = TransactionException(f"refused: {error}", category="BUSINESS")
    elif style == "own __str__":
        made = Verbose(error)
    elif style == "driver":
        made = PaymentError(str(getattr(error, "orig", error)))
    elif style == "parameters":
        made = PaymentError(f"refused: {getattr(error, 'params', error)}")
    elif style == "from None":
        made = PaymentError("hidden cause")
        made.__suppress_context__ = True
    elif style == "implicit":
        made = PaymentError("something else")
    return made


STYLES = (
    "plain", "implicit", "from None", "text", "repr", "on one line", "argument", "group", "note", "business",
    "own __str__", "driver", "parameters",
)  # fmt: skip
FAILURES = (
    "no owner",
    "not a number",
    "missing parameter",
    "literal",
    "at commit",
    "raised",
    "raised at commit",
)
RAISES = (
    "CREATE FUNCTION decline() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'cards: %% declined', upper(NEW.card) "
    "USING HINT = 'not ' || quote_literal(NEW.card); END $$"
)
TRIGGERS = (
    "CREATE TRIGGER decline BEFORE INSERT ON declined FOR EACH ROW EXECUTE FUNCTION decline()",
    "CREATE CONSTRAINT TRIGGER decline_late AFTER INSERT ON declined_late DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION decline()",
)


def statement(failure: str, database: Database) -> tuple[str, dict[str, Any]]:
    number = "CAST(:card AS integer)" if not database.is_sqlite else "abs(:card, 1)"
    return {
        "taken": (INSERT, TAKEN),
        "no owner": (INSERT, {"card": CARD + "1", "owner": None}),
        "not a number": (f"SELECT {number}", {"card": f"x{CARD}"}),
        "missing parameter": (INSERT, {"card": CARD}),
        "literal": (f"INSERT INTO cards (card, owner) VALUES ('{CARD}', 'ann')", {}),
        "at commit": ("INSERT INTO late (card) VALUES (:card)", {"card": CARD}),
        "raised": raised(database, "declined"),
        "raised at commit": raised(database, "declined_late"),
    }[failure]


def raised(database: Database, table: str) -> tuple[str, dict[str, Any]]:
    """A statement whose error is worded by the database's own code. SQLite quotes values in few messages."""
    if database.is_sqlite:
        return "SELECT json_extract('{}', :card) FROM cards", {"card": f"cards-{CARD}"}
    return f"INSERT INTO {table} (card) VALUES (:card)", {"card": CARD}


class Handler:
    def __init__(self, database: Database, own_engine: Any = None) -> None:
        self._database = database
        self._own = own_engine

    def do(self, order: dict[str, str], session: Any) -> None:
        sql, values = statement(order["failure"], self._database)
        try:
            if self._own is not None:
                with self._own.begin() as connection:
                    connection.execute(text(sql), values)
            else:
                session.execute(sql, values)
        except Exception as error:
            raise_as(error, order["style"])

    async def do_async(self, order: dict[str, str], session: Any) -> None:
        sql, values = statement(order["failure"], self._database)
        try:
            if self._own is not None:
                async with self._own.begin() as connection:
                    await connection.execute(text(sql), values)
            else:
                await session.execute(sql, values)
        except Exception as error:
            raise_as(error, order["style"])


def raise_as(error: Exception, style: str) -> None:
    if style == "plain":
        raise error
    raise wrap(error, style)


def make_tables(engine: Engine, is_sqlite: bool) -> None:
    late = "" if is_sqlite else "DEFERRABLE INITIALLY DEFERRED"
    with engine.begin() as connection:
        for sql in (
            "CREATE TABLE cards (card VARCHAR(40) PRIMARY KEY, owner VARCHAR(40) NOT NULL)",
            f"INSERT INTO cards VALUES ('{CARD}', 'ann')",
            f"CREATE TABLE late (card VARCHAR(40) UNIQUE {late})",
            f"INSERT INTO late VALUES ('{CARD}')",
            "CREATE TABLE declined (card VARCHAR(40))",
            "CREATE TABLE declined_late (card VARCHAR(40))",
            *(() if is_sqlite else (RAISES, *TRIGGERS)),
        ):
            connection.exec_driver_sql(sql)
    engine.dispose()


class Site:
    """A consumer whose statements fail, and everything that shows its errors."""

    def __init__(self, database: Database, own: Path | None = None) -> None:
        """With `own`, the handler opens connections itself; on SQLite to that file."""
        self.database = database
        make_tables(create_engine(database.url, connect_args=database.connect_args), database.is_sqlite)
        engine = None
        if own is not None and database.is_sqlite:
            make_tables(create_engine(f"sqlite:///{own}"), is_sqlite=True)
            engine = database.engine(f"sqlite:///{own}")
        elif own is not None:
            engine = database.engine()
        handler = Handler(database, engine)
        engine = database.default
        self.letters: Any
        if database.asynchronous:

            class AsyncCharge(AsyncConsumerTask):
                contract = contract()

                async def process_transaction(self, transaction: Transaction, session: Any) -> None:
                    await handler.do_async(transaction.payload, session)

            self.letters = AsyncDeadLetters(engine)
            self.source: Any = AsyncWithDeadLetters(
                AsyncMemoryConnector(max_deliveries=1), self.letters, consumer="billing"
            )
            self.task: Any = AsyncCharge({"source": self.source}, {"inbox": AsyncInbox(engine)})
        else:

            class Charge(ConsumerTask):
                contract = contract()

                def process_transaction(self, transaction: Transaction, session: Any) -> None:
                    handler.do(transaction.payload, session)

            self.letters = DeadLetters(engine)
            self.source = WithDeadLetters(MemoryConnector(max_deliveries=1), self.letters, consumer="billing")
            self.task = Charge({"source": self.source}, {"inbox": Inbox(engine)})
        self.wait(self.task.services["inbox"].migrate())
        self.wait(self.task.services["inbox"].register(self.task.contract))

    def wait(self, result: Any) -> Any:
        return self.database.run(result) if self.database.asynchronous else result

    def consume(self, orders: list[Transaction]) -> None:
        dispatch = "dispatch_transactions_async" if self.database.asynchronous else "dispatch_transactions"
        self.wait(getattr(self.source, dispatch)(orders))
        self.wait(self.task.consume_transactions())

    def stored(self) -> str:
        rows = []
        for query in (
            "SELECT error, history, reason FROM onceward_dead_letters",
            "SELECT last_error FROM onceward_attempts",
        ):
            with self.database.session() as session:
                rows += session.fetch_all(query)
        return json.dumps(rows)

    def predicted(self, orders: list[Transaction]) -> str:
        """Why they would die again. The rows that would change are shown on purpose."""
        run = dry_run_async if self.database.asynchronous else dry_run
        found = self.wait(run(self.task, orders, self.database.default))
        return "\n".join(each.detail for each in found)


class Sink(logging.Handler):
    """What handlers and formatters of all kinds make of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._formatters = (logging.Formatter("%(message)s"), JsonLines(), ConsoleLines(extras))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [formatter.format(record) for formatter in self._formatters]
        if record.exc_info:  # as handlers do that have their own idea of a traceback
            record.exc_text = None
            self.lines.append(logging.Formatter().formatException(record.exc_info))


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(made)
    root.setLevel(logging.INFO)
    yield made
    root.removeHandler(made)
    root.setLevel(before)


def orders(styles: tuple[str, ...], failures: tuple[str, ...]) -> list[Transaction]:
    return [
        Transaction(
            id=f"{style} {failure}",
            payload={"style": style, "failure": failure},
            metadata={"event_type": "paid"},
        )
        for style in styles
        for failure in failures
    ]


def spans_of(recording: Any) -> str:
    return "".join(span.to_json() for span in recording.spans())


@pytest.mark.usual("session")
@pytest.mark.parametrize("own_connection", [False, True], ids=["session", "own connection"])
def test_a_card_number_is_nowhere(
    database: Database, sink: Sink, tmp_path: Path, own_connection: bool
) -> None:
    site = Site(database, tmp_path / "own.db" if own_connection else None)
    sent = [*orders(STYLES, ("taken", "raised")), *orders(("plain", "text"), FAILURES)]
    with record() as recording:
        site.consume(sent)
    stored, predicted, spans = site.stored(), site.predicted(sent), spans_of(recording)
    logged = "\n".join(sink.lines)
    assert "cards" in stored
    assert "cards" in predicted
    assert "cards" in spans
    assert "PaymentError" in logged
    for shown in (stored, predicted, spans, logged):
        assert CARD not in shown, shown[max(shown.index(CARD) - 1500, 0) : shown.index(CARD) + 100]
