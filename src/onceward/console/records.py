"""The outbox, the audit, and the search for a message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward.app.app import RELAY
from onceward.console.access import Role
from onceward.console.forms import number_of
from onceward.console.guard import allow
from onceward.console.workers import address, flights_in
from onceward.inspection.life import life_of
from onceward.outbox.queries import STATES

if TYPE_CHECKING:
    from onceward.console.site import Console

LISTED = 100
MEANING = {
    "ready": "published next",
    "delayed": "sent for later",
    "held": "being published, or failed and tried again",
    "behind": "wait for an earlier one of their key",
    "published": "at their target",
    "dead": "given up, dead letters soon",
    "moved": "now dead letters",
}
"""What the states of a message in the outbox mean."""


async def outbox(request: Request) -> Response:
    console: Console = request.app.state.console
    state = request.query_params.get("state")
    state = state if state in STATES else None

    def read() -> dict[str, Any]:
        queries = console.backstage.outbox
        return {"counts": queries.counts(), "messages": queries.find(state=state, limit=LISTED)}

    values = await run_in_threadpool(read)
    relays = console.backstage.status(RELAY)
    return console.page(
        request,
        "outbox.html",
        meaning=MEANING,
        state=state,
        may_act=allow(request, Role.OPERATOR),
        knows_runs=console.backstage.knows_runs,
        relays=relays,
        waits=sorted({each.get("held") or each["problem"] for each in relays} - {None}),
        **values,
    )


async def retry(request: Request) -> Response:
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    form, user = request.state.form, request.state.user.name
    ids = [str(form.get("id", ""))]
    done = await run_in_threadpool(lambda: console.backstage.outbox.retry(ids, operator=user))
    return console.go(request, "/outbox", "retry" if done else "nothing")


async def audit(request: Request) -> Response:
    console: Console = request.app.state.console
    given = request.query_params.get("before", "")
    before = number_of(given, "an entry of the audit has a number") if given else None

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        found = letters.audit(limit=LISTED + 1, before=before)
        entries = [{**each, "details": json.loads(each["details"])} for each in found[:LISTED]]
        older = entries[-1]["seq"] if len(found) > LISTED else None
        return {"entries": entries, "older": older, "verdict": letters.verify_audit()}

    return console.page(request, "audit.html", before=before, **await run_in_threadpool(read))


async def search(request: Request) -> Response:
    console: Console = request.app.state.console
    wanted = request.query_params.get("id", "").strip()[:500]
    life = await run_in_threadpool(life_of, console.backstage.app, wanted) if wanted else None
    flights = [each for each in flights_in(console.backstage.states) if each["id"] == wanted]
    return console.page(
        request,
        "search.html",
        wanted=wanted,
        life=life,
        flights=flights,
        consumers=console.backstage.app.consumers,
        may_act=allow(request, Role.OPERATOR),
        end_of=address,
    )
