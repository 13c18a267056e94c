"""Limits and outages: what holds consumers back, and who waits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward.app.app import RELAY
from onceward.app.build import limit_scope
from onceward.console.consumers import limited
from onceward.failures.board import CONSUMER, shown, subjects_of
from onceward.failures.states import Down

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console
    from onceward.inspection.holds import Holds


async def limits(request: Request) -> Response:
    console: Console = request.app.state.console
    values = await run_in_threadpool(describe, console.backstage)
    return console.page(request, "limits.html", **values)


def describe(backstage: Backstage) -> dict[str, Any]:
    holds = backstage.look_at_holds()
    return {
        "known": holds is not None,
        "knows_runs": backstage.knows_runs,
        "outages": [] if holds is None else _outages(backstage, holds.state.down),
        "pauses": [] if holds is None else list(holds.state.paused.values()),
        "names": set(backstage.app.consumers),
        "waits": _waits(backstage, holds),
        "limits": _limits(backstage, holds),
    }


def _outages(backstage: Backstage, down: Any) -> list[dict[str, Any]]:
    """Each outage, with the consumers of this app that wait for its end."""
    found = []
    for subject, each in sorted(down.items()):
        waiting = [
            name
            for name, one in backstage.app.consumers.items()
            if subject in subjects_of(backstage.app.name, one.identity, one.failures.depends_on)
        ]
        found.append(_outage(subject, each, waiting))
    return found


def _outage(subject: str, down: Down, waiting: list[str]) -> dict[str, Any]:
    alone = subject.startswith(CONSUMER)
    return {
        "name": shown(subject),
        "what": "what it calls" if alone else "a dependency",
        "down": down,
        "waiting": waiting,
    }


def _waits(backstage: Backstage, holds: Holds | None) -> list[dict[str, Any]]:
    """What the workers wait for that no record of the database says: their source, the database itself; without a
    database, everything."""
    return [
        {
            "consumer": each["consumer"],
            "is_relay": each["consumer"] == RELAY,
            "worker": each["worker"],
            "why": each["problem"] or each.get("held"),
        }
        for worker in backstage.workers()
        for each in ({**one, "worker": worker["worker"]} for one in worker["consumers"])
        if each["problem"] or (each.get("held") and (holds is None or each["consumer"] == RELAY))
    ]


def _limits(backstage: Backstage, holds: Holds | None) -> list[dict[str, Any]]:
    """The limits of this app, and those of others in the same database."""
    app, known = backstage.app, {} if holds is None else dict(holds.limits)
    found = []
    for name, consumer in app.consumers.items():
        if consumer.limit is not None:
            use = known.pop(limit_scope(app, consumer), None)
            waiting = limited(backstage.status(name))
            found.append({"name": name, "of": None, "limit": consumer.limit, "use": use, "waiting": waiting})
    for scope, use in known.items():
        of, _, name = json.loads(scope)
        found.append({"name": name, "of": of, "limit": None, "use": use, "waiting": None})
    return found
