"""The first page: every consumer with its state, rate, backlog, failures and dead letters; and the page of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onceward.console.history import ConsumerHistory
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console

LIVE_EVERY = 2.0
"""Seconds between two pictures of the first page."""
STATES = ("stalled", "outage", "starting", "stopping", "running")
"""The worst first: one worker in trouble is what an operator wants to see."""


async def overview(request: Request) -> Response:
    console: Console = request.app.state.console
    return console.page(request, "overview.html", **picture(console.backstage))


async def events(request: Request) -> Response:
    """The live part of the first page, whenever it has changed."""
    console: Console = request.app.state.console

    async def pictures() -> AsyncIterator[str]:
        last = ""
        while not console.stopping and not await request.is_disconnected():
            html = console.render(request, "_overview.html", **picture(console.backstage))
            if html != last:
                lines = "".join(f"data: {line}\n" for line in html.splitlines())
                yield f"event: overview\n{lines}\n"
                last = html
            else:
                yield ": still here\n\n"
            await asyncio.sleep(LIVE_EVERY)

    return StreamingResponse(pictures(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def picture(backstage: Backstage) -> dict[str, Any]:
    rows = [row(backstage, name) for name in backstage.app.consumers]
    return {
        "rows": rows,
        "knows_runs": backstage.knows_runs,
        "silent": backstage.silent,
        "workers": backstage.workers(),
        "database_problem": backstage.samples.database.problem,
        "waiting": _sum(each["waiting"] for each in rows),
        "dead": _sum(each["dead"] for each in rows),
        "rate": sum(rates)
        if (rates := [each["rate"] for each in rows if each["rate"] is not None])
        else None,
        "verdicts": [each["verdict"] for each in rows],
    }


def _sum(numbers: Any) -> int | None:
    known = [each for each in numbers if each is not None]
    return sum(known) if known else None


def row(backstage: Backstage, name: str) -> dict[str, Any]:
    reading = backstage.samples.sources.get(name)
    source = reading.current if reading is not None else None
    status = backstage.status(name)
    history: ConsumerHistory = backstage.history.of(name)
    checked = backstage.checked.get(name)
    dead = backstage.samples.dead(name)
    known = backstage.samples.database.current is not None
    balance = checked.balance if checked is not None else None
    return {
        "name": name,
        "source": str(backstage.app.consumers[name].source),
        "state": state_of(backstage, status),
        "problem": next((each["problem"] for each in status if each["problem"]), None)
        or (reading.problem if reading is not None else None),
        "rate": history.rate,
        "minutes": list(history.minutes),
        "failed": sum(each["failed"] for each in status) if status else None,
        "stuck": sum(each["stuck"] for each in status),
        "waiting": source.waiting if source is not None else None,
        "in_flight": source.in_flight if source is not None else None,
        "delayed": source.delayed if source is not None else None,
        "parked": backstage.samples.parked(name),
        "oldest": source.oldest_age if source is not None else None,
        "sample_age": reading.age if reading is not None else None,
        "dead": sum(dead.values()) if known else None,
        "dead_by": dead,
        "guarantee": checked.guarantee if checked is not None else None,
        "verdict": balance.verdict
        if balance is not None
        else "not checked yet"
        if checked is None
        else "unknown",
        "balance": balance,
        "checked": checked,
    }


def state_of(backstage: Backstage, status: list[dict[str, Any]]) -> str:
    """The state of a consumer in a word. Pausing is not known here yet: `run/outages.py` will report it."""
    if not status:
        return "not running" if backstage.knows_runs else "unknown"
    found = {_word(each) for each in status}
    return next(state for state in STATES if state in found)


def _word(status: dict[str, Any]) -> str:
    if not status["live"]:
        return "stalled"
    words = {"waiting": "outage", "starting": "starting", "stopping": "stopping", "ended": "stopping"}
    return words.get(status["state"], "running")


# ── one consumer ────────────────────────────────────────────────────────────────────────────────────────


async def consumer(request: Request) -> Response:
    console: Console = request.app.state.console
    name = request.path_params["name"]
    if name not in console.backstage.app.consumers:
        raise ConfigurationError(f"there is no consumer {name!r}")
    values = await run_in_threadpool(describe, console.backstage, name)
    return console.page(request, "consumer.html", **values)


async def check(request: Request) -> Response:
    """Balance a consumer now."""
    console: Console = request.app.state.console
    name = request.path_params["name"]
    if name not in console.backstage.app.consumers:
        raise ConfigurationError(f"there is no consumer {name!r}")
    await run_in_threadpool(console.backstage.check, name)
    return console.go(request, f"/consumers/{name}")


def describe(backstage: Backstage, name: str) -> dict[str, Any]:
    from onceward.app.provenance import consumer_rows
    from onceward.inspection.proofs import problem_of

    app = backstage.app
    found = app.consumers[name]
    contract = None if found.contract is None else found.contract.as_row()
    proof: list[dict[str, Any]] = []
    unproven: str | None = None
    if found.contract is not None:
        try:
            unproven = problem_of(app, found)
            proof = _evidence(backstage, found.contract.consumer_id)
        except OncewardError as error:
            unproven = str(error)
    return {
        "row": row(backstage, name),
        "status": backstage.status(name),
        "contract": contract,
        "policy": consumer_rows(app, found),
        "proof": proof,
        "unproven": unproven,
        "knows_runs": backstage.knows_runs,
    }


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
