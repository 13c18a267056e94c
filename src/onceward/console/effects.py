"""Outside calls of a dead letter's event: their state, and what the provider says of one in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward._sync import run_blocking
from onceward.console.access import Role
from onceward.console.forms import letter_of, written
from onceward.console.guard import allow
from onceward.deadletters import DeadLetter
from onceward.deadletters.edits import parse
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console

STATES = {"intended": "in doubt", "done": "happened", "refused": "did not happen"}
"""What the states of the ledger mean."""
ANSWERS = {"yes": True, "no": False}


def effects_of(backstage: Backstage, letter: DeadLetter) -> list[dict[str, Any]]:
    rows = run_blocking(backstage.letters.operations.effects_of(letter.consumer, letter.message_id))
    return [{**row, "state": STATES[row["state"]]} for row in rows]


async def answer(request: Request) -> Response:
    """Record whether an effect in doubt has happened."""
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    form, user = request.state.form, request.state.user.name
    number = letter_of(request)
    happened, result = ANSWERS.get(str(form.get("happened"))), str(form.get("result") or "").strip()
    if happened is None:
        raise ConfigurationError("what does the provider say? It happened, or it did not")
    if result and not happened:
        raise ConfigurationError("only an effect that happened has a result; leave that field empty")

    def record() -> None:
        letters = console.backstage.letters
        letter = run_blocking(letters.operations.draft(number)).letter
        letters.resolve_effect(
            letter.consumer,
            letter.message_id,
            str(form.get("effect", "")),
            happened=happened,
            result=parse(result) if result else None,
            reason=written(form, "reason"),
            operator=user,
        )

    await run_in_threadpool(record)
    return console.go(request, f"/letters/{number}", "effect")
