"""Dead letters: groups, their letters, one letter; and what operators do with them.

A set of letters is a filter in the form, with the time of the last death that was shown: what arrives later is not in
it, and another operator who looks at the same page acts on the same set.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward._sync import run_blocking
from onceward.app.rehearsal import PREDICTED, predict_edit, rehearse
from onceward.connectors.codec import DecodeError
from onceward.console.access import Role
from onceward.console.consumers import hides_keys
from onceward.console.effects import effects_of
from onceward.console.forms import FIELDS, filter_of, form_of, letter_of, number_of, written
from onceward.console.guard import allow
from onceward.console.look import is_too_deep, pretty
from onceward.console.redaction import HIDDEN
from onceward.deadletters import Category, DeadLetter, DeadLetters, Filter, Rca, Status
from onceward.deadletters.dry_run import Prediction
from onceward.deadletters.edits import Draft, is_json, parse
from onceward.deadletters.redrive import HIGHEST_RATE, MOST, RATE
from onceward.deadletters.row_watch import SMALL
from onceward.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from onceward.console.backstage import Backstage
    from onceward.console.site import Console

PAGE = 50
MOST_GROUPS = 200
TRIED = 25
"""Letters of a set that a dry run tries."""
LONGEST_PAYLOAD = 100_000


async def groups(request: Request) -> Response:
    console: Console = request.app.state.console
    wanted = filter_of({"status": "open", **request.query_params})

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        found = letters.groups(wanted)
        return {
            "groups": found[:MOST_GROUPS],
            "more": max(len(found) - MOST_GROUPS, 0),
            "total": sum(each.letters for each in found),
            "redrives": [each for each in letters.redrives(limit=5) if each["waiting"]],
        }

    return console.page(
        request,
        "groups.html",
        wanted={**dict.fromkeys(FIELDS), **form_of(wanted)},
        together=form_of(wanted),
        consumers=list(console.backstage.app.consumers),
        ids={name: _id_of(console.backstage, name) for name in console.backstage.app.consumers},
        categories=list(Category),
        statuses=list(Status),
        **await run_in_threadpool(read),
    )


def _id_of(backstage: Backstage, name: str) -> str:
    from onceward.app.build import consumer_id

    return consumer_id(backstage.app.consumers[name])


async def group(request: Request) -> Response:
    """The letters of a group, and what can be done with exactly those."""
    console: Console = request.app.state.console
    wanted = filter_of({"status": "open", **request.query_params})
    after = number_of(request.query_params.get("after") or "0", "a page begins after the number of a letter")

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        shown, total = wanted, 0
        found = letters.groups(wanted)
        if found:
            total = sum(each.letters for each in found)
            if shown.until is None:  # the microsecond that a time of Python may be too early
                last = max(each.last_at for each in found).timestamp() + 1e-6
                shown = msgspec.structs.replace(wanted, until=last)
        listed = run_blocking(letters.operations.find(shown, PAGE + 1, after))
        rcas = [each for each in letters.rcas(limit=50) if each["closed_at"] is None]
        poison = shown.category in (None, Category.POISON) and letters.count(
            msgspec.structs.replace(shown, category=Category.POISON)
        )
        return {
            "shown": form_of(shown),
            "found": found,
            "consumers": sorted({each.consumer for each in found}),
            "types": sorted({each.event_type for each in found if each.event_type}),
            "first_at": min((each.first_at for each in found), default=None),
            "last_at": max((each.last_at for each in found), default=None),
            "total": total,
            "letters": listed[:PAGE],
            "more": len(listed) > PAGE,
            "rcas": rcas,
            "has_poison": bool(poison),
        }

    values = await run_in_threadpool(read)
    return console.page(
        request,
        "group.html",
        wanted=form_of(wanted),
        page_size=PAGE,
        categories=list(Category),
        may_act=allow(request, Role.OPERATOR),
        may_discard=allow(request, Role.ADMIN),
        **redrive_defaults(values["total"]),
        **values,
    )


def redrive_defaults(letters: int) -> dict[str, Any]:
    return {
        "redrive_id": uuid.uuid4().hex,
        "rate": RATE,
        "highest_rate": HIGHEST_RATE,
        "most": MOST,
        "tried": TRIED,
        "minutes": ceil(min(letters, MOST) / HIGHEST_RATE),
    }


# ── one letter ──────────────────────────────────────────────────────────────────────────────────────────


async def letter(request: Request) -> Response:
    console: Console = request.app.state.console
    number = letter_of(request)
    whole = request.method == "POST"  # to look at hidden fields is an action, which the audit has
    if whole and not allow(request, Role.ADMIN):
        return console.refuse(request, Role.ADMIN)

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        draft = run_blocking(letters.operations.draft(number))
        if whole:
            user = request.state.user.name
            run_blocking(letters.operations.note(user, "show_payload", {"letter": number}))
        behind = 0
        if draft.letter.aggregate_id is not None:
            same = Filter(consumer=draft.letter.consumer, aggregate_id=draft.letter.aggregate_id)
            behind = letters.count(same) - 1
        own = {"consumer": draft.letter.consumer, "status": str(draft.letter.status)}
        return {
            "letter": draft.letter,
            "groups": [
                {**own, "event_type": each.event_type, "group": each.group}
                for each in letters.groups(Filter(ids=(number,)))
            ],
            "behind": behind,
            "history": history_of(draft.letter),
            "effects": effects_of(console.backstage, draft.letter),
            **payload_of(console.backstage, draft, whole),
        }

    values = await run_in_threadpool(read)
    found: DeadLetter = values["letter"]
    trace, consumer = console.backstage.trace_url, console.backstage.consumer_of(found.consumer)
    return console.page(
        request,
        "letter.html",
        owner=consumer,
        trace_url=trace.replace("{trace_id}", quote(found.trace_id, safe=""))
        if trace and found.trace_id
        else None,
        shown={"consumer": found.consumer, "ids": str(found.id), "status": "open"},
        may_act=allow(request, Role.OPERATOR),
        may_discard=allow(request, Role.ADMIN),
        may_see=allow(request, Role.ADMIN),
        whole=whole,
        hides_keys=consumer is not None and not whole and hides_keys(console.backstage, consumer),
        HIDDEN=HIDDEN,
        categories=list(Category),
        rcas=[],
        has_poison=found.category is Category.POISON,
        **redrive_defaults(1),
        **values,
    )


def history_of(letter: DeadLetter) -> list[dict[str, Any]]:
    """Its failures, the last first; those in a row that are the same are one."""
    found: list[dict[str, Any]] = []
    for each in letter.history:
        if found and (found[-1]["error"], found[-1]["where"]) == (each.error, each.where):
            found[-1] |= {"last_at": each.at, "attempt": each.attempt, "times": found[-1]["times"] + 1}
        else:
            found.append({**msgspec.structs.asdict(each), "last_at": each.at, "times": 1})
    return found[::-1]


def payload_of(backstage: Backstage, draft: Draft, whole: bool) -> dict[str, Any]:
    """The payload as the user may see it, and the metadata."""
    try:
        transaction = draft.transaction()
    except DecodeError as error:
        shown = draft.current[:LONGEST_PAYLOAD].decode("utf-8", "replace") if whole else HIDDEN
        return {"payload": shown, "metadata": {}, "unreadable": str(error), "editable": False}
    if is_too_deep((transaction.payload, transaction.metadata)):
        return {"payload": HIDDEN, "metadata": {}, "unreadable": "it is nested too deep", "editable": False}
    hide = backstage.redaction.of
    text = pretty(transaction.payload if whole else hide(transaction.payload))
    metadata = dict(transaction.metadata) if whole else hide(dict(transaction.metadata))
    is_small = len(text) <= LONGEST_PAYLOAD
    editable = is_small and is_json(transaction.payload) and draft.letter.status is Status.OPEN
    large = None if is_small else f"It is large: these are its first {LONGEST_PAYLOAD:,} characters."
    return {
        "payload": text[:LONGEST_PAYLOAD],
        "metadata": metadata,
        "unreadable": large,
        "editable": editable,
    }


async def edit(request: Request) -> Response:
    """Try a corrected payload, and keep it if it would succeed."""
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    number = letter_of(request)
    backstage, user = console.backstage, request.state.user.name
    form: Mapping[str, Any] = request.state.form if request.method == "POST" else {}

    def read() -> dict[str, Any]:
        draft = run_blocking(backstage.letters.operations.draft(number))
        shown = payload_of(backstage, draft, whole=False)
        if not shown["editable"]:
            why = shown["unreadable"] or "it is not open, or its payload is not JSON"
            raise ConfigurationError(f"letter {number} cannot be edited here: {why}")
        return {"letter": draft.letter, "prediction": None, "done": False, **shown}

    def change() -> dict[str, Any]:
        letters = backstage.letters
        draft = run_blocking(letters.operations.draft(number))
        original = draft.transaction().payload
        edited = backstage.redaction.restore(parse(str(form.get("payload", ""))), original)
        body = draft.with_payload(edited)
        found: dict[str, Any] = {
            "letter": draft.letter,
            "payload": pretty(backstage.redaction.of(edited)),
            "done": False,
        }
        if not draft.changes(body):
            return {**found, "prediction": None, "problem": "the payload is the same; nothing was changed"}
        task = backstage.task_of(draft.letter.consumer)
        prediction = predict_edit(task, draft, body, backstage.engine)
        found |= {"prediction": prediction, "changed_file": backstage.changed_file(draft.letter.consumer)}
        if form.get("do") == "save" and prediction.is_good:
            cause = written(form, "cause")
            run_blocking(letters.operations.store_edit(draft, body, cause, user, prediction))
            found["done"] = True
        return found

    values = await run_in_threadpool(change if request.method == "POST" else read)
    if values["done"]:
        return console.go(request, f"/letters/{number}", "edited")
    given = {
        "cause": str(form.get("cause", "")),
        "text": str(form.get("payload", "")),
        "problem": None,
        "changed_file": None,
    }
    return console.page(
        request, "edit.html", words=PREDICTED, hide=backstage.redaction.of, **{**given, **values}
    )


# ── what operators do with a set ────────────────────────────────────────────────────────────────────────


async def dry_run(request: Request) -> Response:
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    form = request.state.form
    wanted = filter_of({**form, "status": "open"})
    fixed = bool(form.get("poison_fixed"))

    def run() -> dict[int, Prediction]:
        if wanted.consumer is None:
            raise ConfigurationError("a dry run takes the letters of one consumer")
        letters = console.backstage.letters
        task = console.backstage.task_of(wanted.consumer)
        return rehearse(letters, letters.find(wanted, limit=TRIED), task, fixed)

    predicted = await run_in_threadpool(run)
    outcomes: dict[str, int] = {}
    for each in predicted.values():
        outcomes[PREDICTED[each.outcome]] = outcomes.get(PREDICTED[each.outcome], 0) + 1
    return console.page(
        request,
        "_dry_run.html" if request.headers.get("hx-request") else "dry_run.html",
        predicted=predicted,
        changed_file=console.backstage.changed_file(wanted.consumer or ""),
        unread=too_large(list(predicted.values())),
        small=SMALL,
        outcomes=outcomes,
        words=PREDICTED,
        hide=console.backstage.redaction.of,
        good=all(each.is_good for each in predicted.values()),
        tried=TRIED,
    )


def too_large(predicted: list[Prediction]) -> list[str]:
    """Tables that would change, but are too large to be compared."""
    written = {one.table for each in predicted for one in each.statements if one.rows}
    return sorted(written - {diff.table for each in predicted for diff in each.tables})


async def redrive(request: Request) -> Response:
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    form, user = request.state.form, request.state.user.name
    wanted = filter_of({**form, "status": ""})
    whole = "the pace and the number of a root cause are whole numbers"
    rca_id, rate = str(form.get("rca") or ""), number_of(str(form.get("rate") or RATE), whole)

    def run() -> str:
        category: Any = form.get("cause_category") or Category.BUSINESS
        new = Rca(category=category, root_cause=written(form, "root_cause"), fix_ref=written(form, "fix_ref"))
        made = console.backstage.letters.redrive(
            wanted,
            rca=number_of(rca_id, whole) if rca_id else new,
            operator=user,
            rate=rate,
            redrive_id=str(form.get("redrive_id") or "") or None,
            poison_fixed=bool(form.get("poison_fixed")),
        )
        console.backstage.note_change_of_letters()
        return made.id

    return console.go(request, f"/redrives/{await run_in_threadpool(run)}")


async def act(request: Request) -> Response:
    """Hold, release or discard."""
    console: Console = request.app.state.console
    action = request.path_params["action"]
    role = Role.ADMIN if action == "discard" else Role.OPERATOR
    if not allow(request, role):
        return console.refuse(request, role)
    form, user = request.state.form, request.state.user.name
    wanted = filter_of({**form, "status": ""})
    reason = written(form, "reason")

    def run() -> str:
        letters = console.backstage.letters
        does = {"hold": letters.hold, "release": letters.release, "discard": letters.discard}[action]
        changed = does(wanted, reason=reason, operator=user)
        console.backstage.note_change_of_letters()
        return f"{action}:{changed}" if changed else _why_not(letters, wanted, action)

    note = await run_in_threadpool(run)
    back = f"/letters/{wanted.ids[0]}" if len(wanted.ids) == 1 else "/letters"
    return console.go(request, back, note)


def _why_not(letters: DeadLetters, wanted: Filter, action: str) -> str:
    """The note that says why nothing was changed."""
    found = run_blocking(letters.operations.tally(wanted))
    held = sum(each.letters for each in found if each.is_open and each.held)
    if action == "discard" and held:
        return f"held:{held}"
    return "not_held" if action == "release" and found else "nothing"


async def redrives(request: Request) -> Response:
    console: Console = request.app.state.console

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        return {
            "redrives": letters.redrives(limit=50),
            "rcas": {each["id"]: each for each in letters.rcas(limit=100)},
        }

    return console.page(request, "redrives.html", **await run_in_threadpool(read))


async def one_redrive(request: Request) -> Response:
    """How far a redrive is. The database knows, so it goes on whatever becomes of this server."""
    console: Console = request.app.state.console
    wanted = request.path_params["id"]

    def read() -> dict[str, Any]:
        letters = console.backstage.letters
        found = next((each for each in letters.redrives(limit=1000) if each["id"] == wanted), None)
        if found is None:
            raise NotFoundError(f"there is no redrive {wanted!r}")
        rca = next((each for each in letters.rcas(limit=1000) if each["id"] == found["rca_id"]), None)
        return {"redrive": found, "rca": rca}

    part = "_redrive.html" if request.headers.get("hx-request") else "redrive.html"
    may_act = allow(request, Role.OPERATOR)
    return console.page(request, part, may_act=may_act, **await run_in_threadpool(read))


async def stop_redrive(request: Request) -> Response:
    """Give back the letters that no worker has yet."""
    console: Console = request.app.state.console
    if not allow(request, Role.OPERATOR):
        return console.refuse(request, Role.OPERATOR)
    reason, user = written(request.state.form, "reason"), request.state.user.name
    wanted = request.path_params["id"]

    def run() -> int:
        opened = console.backstage.letters.stop_redrive(wanted, reason=reason, operator=user)
        console.backstage.note_change_of_letters()
        return opened

    return console.go(request, f"/redrives/{quote(wanted, safe='')}", f"stop:{await run_in_threadpool(run)}")
