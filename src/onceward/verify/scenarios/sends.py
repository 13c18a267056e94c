"""What the handler sends, from its transaction to a sink: compares the rows that committed with what arrived.

The sink is a file of the verification's own; no message reaches the one that its target names. A transaction stays open
while others commit and a relay looks; one relay is killed between claim and dispatch, one between dispatch and record;
then two relays share the rest.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, text

from onceward._text import quantity
from onceward.connectors.codec import decode
from onceward.outbox.claims import OutboxRows
from onceward.outbox.relay import Relay
from onceward.outbox.targets import shown
from onceward.transaction import Settlement, Transaction, Verdict
from onceward.verify.databases import engine_at
from onceward.verify.faults import DeliveryBoundary, Fault
from onceward.verify.report import Finding
from onceward.verify.rows.messages import MESSAGES
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotApplicable, SharedDatabase, Trial, deliver_all, unsettled

HELD = 1.0
"""Seconds that a transaction stays open at most, for others to commit before it."""
PATIENCE = 5.0
"""Seconds that a relay waits for that transaction to be open."""
KILLS = ("between claim and dispatch", "between dispatch and record")
AS_IF_DUE = "UPDATE onceward_outbox SET state = 'ready', at = NULL WHERE state = 'delayed'"
AS_IF_EXPIRED = "UPDATE onceward_outbox SET at = 0 WHERE state = 'held'"
COMMITTED = text("SELECT target, message_id, key, body FROM onceward_outbox ORDER BY seq")


class Sent(NamedTuple):
    """A message that committed, or that arrived at the sink; there it has no key."""

    target: str
    id: str
    payload: str
    key: str | None = None


def sends(trial: Trial) -> Assessment:
    count = trial.oracle[MESSAGES].total()
    if not count:
        raise NotApplicable("no sample sends a message")
    with tempfile.TemporaryDirectory(prefix="onceward-verify-") as folder:
        findings = _relay_all(trial, Path(folder))
    return Assessment(
        findings,
        f"{quantity(count, 'message')}: a relay beside an open transaction, {quantity(len(KILLS), 'relay')} killed, "
        "2 at once",
    )


def _relay_all(trial: Trial, folder: Path) -> list[Finding]:
    sink = SinkFile(folder / "arrived")
    database = trial.new_database()
    phantoms = _relay_beside_open(trial, database, OpenTransaction(folder), sink)
    early = len(sink.read())

    def finish(stage: Stage) -> list[Delivery]:
        stage.expire_leases()
        deliveries = deliver_all(stage, trial.plan.events)
        stage.execute(AS_IF_DUE)
        return deliveries

    findings = phantoms + unsettled("beside a relay", trial.perform(finish, database).value)
    for kill in KILLS:
        trial.perform_until_killed(lambda stage, kill=kill: relay_all(stage, sink, kill), database)  # type: ignore[misc]
        trial.perform(lambda stage: stage.execute(AS_IF_EXPIRED), database)
    trial.perform_at_once([lambda stage: relay_all(stage, sink)] * 2, database)
    committed: list[Sent] = trial.perform(_committed, database).value
    return findings + compare_arrivals(committed, sink.read(), early)


# ── a relay beside an open transaction ──────────────────────────────────────────────────────────────────


class OpenTransaction:
    """Two processes that wait for each other: files say how far they are."""

    def __init__(self, folder: Path) -> None:
        self._written, self._looked = folder / "written", folder / "looked"

    def hold(self) -> None:
        """Keep the transaction open until a relay has looked."""
        self._written.touch()
        _wait(self._looked.exists, HELD)

    @contextmanager
    def while_held(self) -> Iterator[None]:
        _wait(self._written.exists, PATIENCE)
        yield
        self._looked.touch()


def _relay_beside_open(
    trial: Trial, database: SharedDatabase, gate: OpenTransaction, sink: SinkFile
) -> list[Finding]:
    """One event is held before its commit; where the database lets it, the next one commits first. The relay may send
    only what it can see."""
    events = trial.plan.events
    at = next((at for at, each in enumerate(events) if MESSAGES in trial.changes[each.id]), 0)
    trial.perform(lambda stage: deliver_all(stage, events[:at]), database)

    def hold(stage: Stage) -> list[Sent]:
        task = stage.instance()
        task.probe_of_verification.hold = gate.hold
        stage.settle(task, events[at], Fault(DeliveryBoundary.BEFORE_COMMIT, 0, "hold"))
        return []

    def look(stage: Stage) -> list[Sent]:
        task = stage.instance()
        with gate.while_held():
            if trial.databases.backend != "sqlite":  # there one writes at a time
                for event in events[at + 1 : at + 2]:
                    stage.deliver(task, event)
            relay_all(stage, sink)
            visible = {each.id for each in _committed(stage)}
            return [each for each in sink.read() if each.id not in visible]

    phantoms = [each for found in trial.perform_at_once([hold, look], database) for each in found]
    return [_finding("was published before its transaction committed", phantoms)] if phantoms else []


# ── relays ──────────────────────────────────────────────────────────────────────────────────────────────


def relay_all(stage: Stage, sink: SinkFile, kill: str = "") -> None:
    """Publish what is ready."""
    with _engine(stage) as engine:
        rows = OutboxRows(engine)
        relay = Relay(engine, lambda target: sink.of(target, kill))  # type: ignore[arg-type, return-value]
        try:
            while (outlook := rows.look()).targets or outlook.is_due:
                stage.watchdog.pet("the relay of the outbox")
                claimed = relay.fetch_transactions(16)
                for each in claimed:
                    relay.publish(each)
                relay.settle_transactions([Settlement(each, Verdict.DONE) for each in claimed])
        finally:
            relay.close()


class SinkFile:
    """A sink of the verification's own: a file that several processes append to."""

    def __init__(self, path: Path, target: str = "", kill: str = "") -> None:
        self._path = path
        self._target = target
        self._kill = kill

    def of(self, target: str, kill: str) -> SinkFile:
        return SinkFile(self._path, target, kill)

    def open(self, *, asynchronous: bool) -> SinkFile:
        return self

    def dispatch_transactions(self, transactions: Sequence[Transaction]) -> None:
        if self._kill == KILLS[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        with self._path.open("a") as file:
            file.write(
                "".join(json.dumps([self._target, each.id, _text(each)]) + "\n" for each in transactions)
            )
        if self._kill == KILLS[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self) -> list[Sent]:
        if not self._path.exists():
            return []
        return [Sent(*json.loads(line)) for line in self._path.read_text().splitlines()]

    def close(self) -> None:
        pass


def _committed(stage: Stage) -> list[Sent]:
    with _engine(stage) as engine, engine.connect() as connection:
        return [
            Sent(target, id, _text(decode(bytes(body))), key)
            for target, id, key, body in connection.execute(COMMITTED)
        ]


@contextmanager
def _engine(stage: Stage) -> Iterator[Engine]:
    """One for threads: a relay runs in threads, also that of an asyncio consumer."""
    engine = engine_at(stage.url)
    try:
        yield engine
    finally:
        engine.dispose()


def _text(message: Transaction) -> str:
    return json.dumps([message.payload, message.metadata], sort_keys=True, default=repr)


def _wait(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.005)


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────


def compare_arrivals(committed: Sequence[Sent], arrived: Sequence[Sent], early: int = 0) -> list[Finding]:
    """Every committed message arrived, in order within its key, and nothing else did. Copies have the same id.

    The first `early` of them arrived while a transaction was open that has no order with them.
    """
    expected = {(each.target, each.id): each for each in committed}
    first: dict[tuple[str, str], Sent] = {}
    for each in arrived:
        first.setdefault((each.target, each.id), each)
    problems: dict[str, list[Sent]] = {
        "committed and never arrived": [each for at, each in expected.items() if at not in first],
        "arrived without its row": [each for each in arrived if (each.target, each.id) not in expected],
        "arrived with another payload than its row has": [
            each
            for each in arrived
            if (row := expected.get((each.target, each.id))) is not None and row.payload != each.payload
        ],
        "arrived before an earlier one of its key": _overtaking(
            committed, list(first), {(each.target, each.id) for each in arrived[:early]}
        ),
    }
    return [_finding(what, found) for what, found in problems.items() if found]


def _overtaking(
    committed: Sequence[Sent], arrivals: list[tuple[str, str]], early: set[tuple[str, str]]
) -> list[Sent]:
    place = {at: number for number, at in enumerate(arrivals)}
    last: defaultdict[tuple[str, str], int] = defaultdict(lambda: -1)
    found = []
    for each in committed:
        number = place.get((each.target, each.id))
        if each.key is None or number is None or (each.target, each.id) in early:
            continue
        if number < last[each.target, each.key]:
            found.append(each)
        last[each.target, each.key] = number
    return found


def _finding(what: str, messages: Sequence[Any]) -> Finding:
    count = quantity(len(messages), "message")
    return Finding(f"{count} {what}", tuple(f"{each.id} for {shown(each.target)}" for each in messages[:5]))
