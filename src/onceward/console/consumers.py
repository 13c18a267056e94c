"""The page of one consumer: what it does now, what holds it back, what it guarantees; and its pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward._sync import run_blocking
from onceward.app.app import Consumer
from onceward.app.build import consumer_id, limit_scope
from onceward.app.provenance import consumer_rows
from onceward.connectors.reports import ServerUnreachable
from onceward.console.access import Role
from onceward.console.backstage import CheckAnswer
from onceward.console.forms import written
from onceward.console.guard import allow
from onceward.console.overview import row, running_for
from onceward.console.redaction import HIDDEN
from onceward.console.workers import address
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError, NotFoundError, OncewardError
from onceward.failures import records
from onceward.failures.board import shown
from onceward.inspection.holds import Holds, held_lines
from onceward.inspection.proofs import problem_of
from onceward.run.flights import LONG
from onceward.storage.database import BlockingStoragePorts, Sql

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console

HELD = 20
"""Held keys that are listed."""


async def consumer(request: Request) -> Response:
    console: Console = request.app.state.console
    found = _consumer_of(request)
    console.backstage.look_at_own_run()
    values = await run_in_threadpool(describe, console.backstage, found)
    return console.page(request, "consumer.html", may_act=allow(request, Role.OPERATOR), **values)


async def check(request: Request) -> Response:
    """Balance a consumer now. Viewers may, too: it changes nothing, and costs no more than one check at a time."""
    console: Console = request.app.state.console
    name, again = _consumer_of(request).name, allow(request, Role.OPERATOR)
    answer = await run_in_threadpool(lambda: console.backstage.check_soon(name, again=again))
    note = "" if answer is CheckAnswer.DONE else answer
    return console.go(request, f"/consumers/{quote(name, safe='')}", note)


async def pause(request: Request) -> Response:
    return await _set_pause(request, "pause")


async def resume(request: Request) -> Response:
    return await _set_pause(request, "resume")


async def _set_pause(request: Request, action: str) -> Response:
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    found, user = _consumer_of(request), request.state.user.name
    reason = written(request.state.form, "reason")
    if not reason:
        raise ConfigurationError(f"say why you {action} {found.name}; the audit keeps it")
    if not console.backstage.has_database:
        raise ConfigurationError(f"{console.backstage.app.name} has no database, so it cannot be paused")

    def change(transaction: DbTransaction, rows: Sql) -> records.PauseChange:
        do = records.pause if action == "pause" else records.resume
        return do(transaction, rows, found.identity, user, reason)

    def run() -> records.PauseChange:
        ports = BlockingStoragePorts(console.backstage.engine)
        changed = run_blocking(ports.transact(change, Sql(ports.dialect.name)))
        console.backstage.look_at_holds()
        return changed

    changed, earlier = await run_in_threadpool(run)
    if action == "pause" and earlier:
        note = "pause_again" if changed else "paused_already"
    else:
        note = action if changed else "nothing"
    return console.go(request, f"/consumers/{quote(found.name, safe='')}", note)


def _consumer_of(request: Request) -> Consumer:
    console: Console = request.app.state.console
    name = request.path_params["name"]
    if name not in console.backstage.app.consumers:
        raise NotFoundError(f"there is no consumer {name!r}")
    return console.backstage.app.consumers[name]


# ── what the page shows ─────────────────────────────────────────────────────────────────────────────────


def describe(backstage: Backstage, found: Consumer) -> dict[str, Any]:
    status = backstage.status(found.name)
    return {
        "row": row(backstage, found.name),
        "status": status,
        "policy": consumer_rows(backstage.app, found),
        "knows_runs": backstage.knows_runs,
        "checking": backstage.checking,
        **_work(backstage, found, status),
        **_holds(backstage, found, status, backstage.look_at_holds()),
        **_contract(backstage, found),
    }


def _work(backstage: Backstage, found: Consumer, status: list[dict[str, Any]]) -> dict[str, Any]:
    """What is in flight, and what was stuck in processes that have been replaced."""
    hidden = hides_keys(backstage, found)
    flights = [
        {
            "key": None,
            "stack": None,
            **flight,
            **{name: each[name] for name in ("worker", "pid", "process", "ending")},
        }
        for each in status
        for flight in each.get("flights", ())
    ]
    for each in flights:
        if hidden and each["key"] is not None:
            each["key"] = HIDDEN
    were_stuck = [
        {"stack": None, **each, "worker": worker["worker"]}
        for worker in backstage.workers()
        for each in worker.get("were_stuck", ())
        if each["consumer"] == found.name
    ]
    return {
        "flights": sorted(
            flights,
            key=lambda each: (not each.get("stuck"), not each.get("attempt"), -(each["seconds"] or 0)),
        ),
        "were_stuck": were_stuck,
        "is_long": lambda flight: running_for(flight) >= LONG,
        "end_of": address,
        "has_keys": any(each["key"] is not None for each in flights),
    }


def _holds(
    backstage: Backstage, found: Consumer, status: list[dict[str, Any]], holds: Holds | None
) -> dict[str, Any]:
    lines, unread = None, None
    database = backstage.app.settings.database
    if found.order is not None and database is not None:
        try:
            lines = held_lines(database, consumer_id(found), HELD)
        except ServerUnreachable as error:
            unread = str(error)
    return {
        "pause": None if holds is None else holds.pause_of(found),
        "outages": []
        if holds is None
        else [(shown(name), each) for name, each in holds.outages_of(backstage.app, found).items()],
        "needs": found.failures.depends_on,
        "limit": found.limit,
        "use": None if holds is None else holds.limits.get(limit_scope(backstage.app, found)),
        "limited": limited(status),
        "order": found.order,
        "held_lines": lines,
        "held_unread": unread,
        "held_keys": backstage.samples.held_keys(found.name),
        "hides_keys": hides_keys(backstage, found),
        "HIDDEN": HIDDEN,
    }


def limited(status: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How many messages wait in the workers for their limit, and how long the oldest has; None if no worker says."""
    known = [each for each in status if each.get("limited") is not None]
    if not known:
        return None
    ages = [each["limited_seconds"] for each in known if each["limited_seconds"] is not None]
    return {"number": sum(each["limited"] for each in known), "seconds": max(ages, default=None)}


def hides_keys(backstage: Backstage, found: Consumer) -> bool:
    """Whether the field that its keys are from is hidden."""
    by = found.order.by if found.order is not None else None if found.limit is None else found.limit.by
    return isinstance(by, str) and backstage.redaction.hides(by)


def _contract(backstage: Backstage, found: Consumer) -> dict[str, Any]:
    if found.contract is None:
        return {"contract": None, "proof": [], "unproven": None}
    proof: list[dict[str, Any]] = []
    try:
        unproven = problem_of(backstage.app, found)
        proof = [] if backstage.lacks_tables() else _evidence(backstage, found.contract.consumer_id)
    except OncewardError as error:
        unproven = str(error)
    return {"contract": found.contract.as_row(), "proof": proof, "unproven": unproven}


def _evidence(backstage: Backstage, consumer_id: str) -> list[dict[str, Any]]:
    from onceward.inbox import Inbox

    return [
        {
            "at": each.recorded_at,
            "result": each.result,
            "backend": each.backend,
            "code": each.code.digest[:12],
        }
        for each in Inbox(backstage.engine).evidence(consumer_id)[:3]
    ]
