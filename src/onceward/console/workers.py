"""End a worker process in which an attempt is stuck that has no time limit: nothing else ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onceward._sync import run_blocking
from onceward.app.app import Consumer
from onceward.console.access import Role
from onceward.console.forms import written
from onceward.console.guard import allow
from onceward.db.transaction import DbTransaction
from onceward.errors import OncewardError
from onceward.failures import records
from onceward.run.supervisor import END_PATIENCE, HURRY_PATIENCE, EndAnswer, ProcessEnd
from onceward.storage import audit
from onceward.storage.database import BlockingStoragePorts, Sql

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage, RunState
    from onceward.console.site import Console

RETRY = 0.5
PATIENCE = 30.0
"""Seconds to try again to note who ended a process: its handler may have locked the database."""
SHOWN_WITHIN = 1.5
"""Seconds that the answer waits for the note."""
NOTES = {
    EndAnswer.BEGUN: "end",
    EndAnswer.UNDER_WAY: "end_under_way",
    EndAnswer.GONE: "end_gone",
    EndAnswer.STOPPING: "end_stopping",
}

_log = logging.getLogger("onceward.run")


async def end(request: Request) -> Response:
    """Say what would happen, and do it if the form is sent."""
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    number, posted = int(request.path_params["number"]), request.method == "POST"
    given = request.state.form if posted else request.query_params
    process, name, id = (str(given.get(each, ""))[:500] for each in ("process", "consumer", "id"))
    if not process:
        raise HTTPException(404)
    console.backstage.look_at_own_run()
    worker = _find(console.backstage, number, process)
    back = f"/consumers/{quote(name, safe='')}" if name in console.backstage.app.consumers else "/"
    if worker is None:
        return console.go(request, back, NOTES[EndAnswer.GONE])
    consumer = console.backstage.app.consumers.get(name)
    if posted and console.backstage.end_worker is not None:
        reason = audit.check_reason(written(given, "reason"), "end a process")
        details = {
            "worker": number,
            "pid": worker["pid"],
            "host": worker["host"],
            "consumer": name if consumer is not None else None,
            "message": id if any(each["id"] == id for each in worker["flights"]) else None,
            "in_flight": sum(worker["in_flight"].values()),
            "reason": reason,
        }
        details = {field: value for field, value in details.items() if value is not None}
        pauses = consumer if given.get("pause") and console.backstage.has_database else None
        user = request.state.user.name
        noted = asyncio.Event()

        async def note() -> None:
            try:
                await _note(console.backstage, user, details, pauses)
            finally:
                noted.set()

        ending = ProcessEnd(user, reason, time.time())
        answer = console.backstage.end_worker(number, process, ending, note)
        if answer is EndAnswer.BEGUN:
            await _within(SHOWN_WITHIN, noted)
        return console.go(request, back, NOTES[answer])
    return console.page(
        request,
        "end_worker.html",
        409 if posted else 200,
        worker=worker,
        consumer=consumer,
        name=name,
        flight=next(
            (each for each in worker["flights"] if (each["consumer"], each["id"]) == (name, id)), None
        ),
        poison=_poison(console.backstage, list(worker["in_flight"])),
        reachable=console.backstage.end_worker is not None,
        grace=END_PATIENCE,
        longest=END_PATIENCE + HURRY_PATIENCE,
        back=back,
    )


def address(worker: int, process: str, consumer: str, id: str | None = None) -> str:
    """The page that ends a process, for one of its messages."""
    fields = {"process": process, "consumer": consumer, **({} if id is None else {"id": id})}
    return f"/workers/{worker}/end?{urlencode(fields)}"


def flights_in(states: Iterable[RunState]) -> Iterator[dict[str, Any]]:
    """What the workers of these runs have in flight, as far as they name it, with its worker."""
    for state in states:
        for worker in state["workers"]:
            place = {name: worker.get(name) for name in ("worker", "pid", "process", "ending")}
            for each in worker["consumers"]:
                for flight in each.get("flights", ()):
                    yield {"stack": None, **flight, "consumer": each["consumer"], **place}


def _find(backstage: Backstage, number: int, process: str) -> dict[str, Any] | None:
    """The worker, if this process is still its own, with all that is in flight in it."""
    for state in backstage.states:
        for worker in state["workers"]:
            if worker["worker"] == number and worker.get("process") == process:
                flights = flights_in([{"workers": [worker]}])
                counted = {each["consumer"]: each["in_flight"] for each in worker["consumers"]}
                return {
                    "ending": None,  # `/progress` does not say
                    **worker,
                    "host": state.get("host"),
                    "flights": sorted(
                        flights, key=lambda each: (not each.get("attempt"), -(each["seconds"] or 0))
                    ),
                    "in_flight": {name: each for name, each in counted.items() if each},
                }
    return None


def _poison(backstage: Backstage, names: list[str]) -> list[dict[str, Any]]:
    """After how many starts without an end each consumer takes a message for poison."""
    found = []
    for consumer in (backstage.app.consumers[name] for name in names if name in backstage.app.consumers):
        rules, contract = consumer.source.rules, consumer.contract
        if contract is not None:
            found.append({"name": consumer.name, "after": contract.poison_after})
        elif rules is not None:
            found.append({"name": consumer.name, "after": rules.most_lost})
    return found


async def _note(backstage: Backstage, user: str, details: dict[str, Any], pauses: Consumer | None) -> None:
    """Write the audit, and the pause with it; again while the process that ends has locked the database."""
    if not backstage.has_database:
        return

    def change(transaction: DbTransaction, rows: Sql) -> None:
        audit.note(transaction, rows, user, "end_worker", details)
        if pauses is not None:
            records.pause(transaction, rows, pauses.identity, user, details["reason"])

    def write() -> None:
        ports = BlockingStoragePorts(backstage.engine)
        run_blocking(ports.transact(change, Sql(ports.dialect.name)))
        backstage.look_at_holds()

    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            await run_in_threadpool(write)
        except (SQLAlchemyError, OncewardError) as error:
            if time.monotonic() >= give_up:
                _log.error("the audit could not record that %s ended a process: %s", user, details)
                raise
            last = error
        else:
            return
        _log.debug("the audit waits: %s", type(last).__name__)
        await asyncio.sleep(RETRY)


async def _within(seconds: float, event: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
