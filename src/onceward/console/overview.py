"""The first page: every consumer with its state, rate, backlog, failures and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onceward.app.app import RELAY
from onceward.app.build import consumer_id
from onceward.console.history import ConsumerHistory
from onceward.failures.board import shown
from onceward.run.flights import LONG

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console

LIVE_EVERY = 2.0
"""Seconds between two pictures of the first page."""
MOST_LIVE = 75
"""Pages that keep themselves current at the same time; others reload from time to time. The server's places for pages
are not all theirs."""
STATES = ("stalled", "outage", "paused", "running", "starting", "stopping")
"""One worker in trouble is what an operator wants to see first. A worker that starts or stops is not in trouble: the
consumer is running as long as another worker is."""


async def overview(request: Request) -> Response:
    console: Console = request.app.state.console
    return console.page(request, "overview.html", **picture(console.backstage))


async def events(request: Request) -> Response:
    """The live part of the first page, whenever it has changed."""
    console: Console = request.app.state.console
    if console.live >= MOST_LIVE:
        return Response(status_code=204)  # which tells a browser not to ask again

    async def pictures() -> AsyncIterator[str]:
        last = ""
        while not console.stopping.is_set() and not await request.is_disconnected():
            html = console.render(request, "_overview.html", **picture(console.backstage))
            if html != last:
                lines = "".join(f"data: {line}\n" for line in html.splitlines())
                yield f"event: overview\n{lines}\n"
                last = html
            else:
                yield ": still here\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(console.stopping.wait(), LIVE_EVERY)

    return LiveResponse(console, pictures())


class LiveResponse(StreamingResponse):
    """Counts from when it is made: of many that come at once, none has sent anything when the last one is let in."""

    def __init__(self, console: Console, pictures: AsyncIterator[str]) -> None:
        super().__init__(pictures, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._console = console
        console.live += 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._console.live -= 1


def picture(backstage: Backstage) -> dict[str, Any]:
    rows = [row(backstage, name) for name in backstage.app.consumers]
    return {
        "rows": rows,
        "locks": _locks(backstage, rows),
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
        "outbox": _outbox(backstage),
    }


def _locks(backstage: Backstage, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What may have locked the SQLite file that others wait for: of the attempts in a transaction, the longest."""
    if not any("LockTimeoutError" in (each["problem"] or "") for each in rows):
        return None
    known = [
        each
        for each in rows
        if each["longest"] and backstage.app.consumers[each["name"]].contract is not None
    ]
    return max(known, key=lambda each: each["longest"], default=None)


def running_for(flight: Mapping[str, Any]) -> float:
    """How long the attempt at a message has run; 0 if none does."""
    if not flight.get("attempt"):
        return 0.0
    return float(flight.get("attempt_seconds") or flight["seconds"] or 0.0)


def _longest(status: list[dict[str, Any]]) -> float | None:
    """How long the longest attempt has run, if that is worth a word."""
    found = max((running_for(flight) for each in status for flight in each.get("flights", ())), default=0.0)
    return found if found >= LONG else None


def _outbox(backstage: Backstage) -> dict[str, Any] | None:
    """What waits in the outbox, and why; None if that is unknown."""
    found = backstage.samples.outbox
    if found is None:
        return None
    relays = backstage.status(RELAY)
    return {
        "waiting": found.waiting,
        "oldest": found.age,
        "why": next((why for each in relays if (why := each.get("held") or each["problem"])), None),
    }


def _were_stuck(backstage: Backstage, name: str) -> int:
    """Attempts whose processes were replaced; those that are stuck now are not among them."""
    return sum(
        each["consumer"] == name for worker in backstage.workers() for each in worker.get("were_stuck", ())
    )


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
    holds, state = backstage.holds, state_of(backstage, name, status)
    return {
        "name": name,
        "source": str(backstage.app.consumers[name].source),
        "letters_of": consumer_id(backstage.app.consumers[name]),
        "state": state,
        "pause": None if holds is None else holds.pause_of(backstage.app.consumers[name]),
        "down": [
            (shown(subject), each)
            for subject, each in holds.outages_of(backstage.app, backstage.app.consumers[name]).items()
        ]
        if holds is not None and state == "outage"
        else [],
        "problem": next((each["problem"] for each in status if each["problem"]), None)
        or (reading.problem if reading is not None else None),
        "held": next((each["held"] for each in status if each.get("held")), None),
        "rate": history.rate,
        "minutes": list(history.minutes),
        "failed": None if history.total is None else history.total.failed,
        "stuck": sum(each["stuck"] for each in status),
        "were_stuck": _were_stuck(backstage, name),
        "longest": _longest(status),
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


def state_of(backstage: Backstage, name: str, status: list[dict[str, Any]]) -> str:
    """The state of a consumer in a word: as its workers report it, or the database if there are none here."""
    if not status:
        holds, consumer = backstage.holds, backstage.app.consumers[name]
        if holds is not None and holds.pause_of(consumer) is not None:
            return "paused"
        if not backstage.knows_runs:
            return "unknown"
        if backstage.restarts(name):
            return "restarting"
        return "starting" if backstage.starts() else "not running"
    found = {_word(each) for each in status}
    return next(state for state in STATES if state in found)


def _word(status: dict[str, Any]) -> str:
    if not status["live"]:
        return "stalled"
    if status.get("held"):
        return "paused" if status.get("paused") else "outage"
    words = {"waiting": "outage", "starting": "starting", "stopping": "stopping", "ended": "stopping"}
    return words.get(status["state"], "running")
