"""`onceward dlq`: inspect, hold, redrive or discard dead letters."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward._text import quantity, strip_category
from onceward.cli.database import Database, TrustClock
from onceward.cli.dlq.edit import edit
from onceward.cli.dlq.export import export
from onceward.cli.dlq.groups import show_groups
from onceward.cli.dlq.leftovers import count, describe_holds, explain_discard, explain_release, tally
from onceward.cli.dlq.options import (
    Limit,
    Operator,
    Reason,
    Wanted,
    Yes,
    add_filter_options,
    age,
    confirm,
    open_letters,
    shorten,
    who,
)
from onceward.cli.dlq.redrive import redrive, redrives, stop_redrive
from onceward.cli.exit import FAILED, AsJson, argument, fail, flag
from onceward.cli.output import echo, for_people, print_json, print_result, print_table

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetter, DeadLetters, Filter

dlq = typer.Typer(
    no_args_is_help=True, help="Dead letters: inspect, discard or redrive messages that failed permanently."
)


ORDER_FIELDS = ("order_key", "waiting", "waiting_ids")


@dlq.command("list")
@add_filter_options()
def list_(
    database: Database,
    wanted: Wanted,
    limit: Limit = 50,
    group: Annotated[
        bool, flag("Group by consumer, type, error class and normalized message.", "--group")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters in the order in which they first died; with `--group` the groups, the largest first.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    from onceward.deadletters import Filter

    with open_letters(database, as_json) as letters:
        chosen = wanted()
        if group:
            show_groups(letters, chosen, limit, as_json)
            return
        found = letters.find(chosen, limit=limit)
        total = len(found) if len(found) < limit else letters.count(chosen)
        others = "" if found else _others(letters, chosen.consumer)
    if as_json:
        print_json(found)
        return
    columns = {
        "id": "id",
        "consumer": "consumer",
        "what": "type, category",
        "status": "status",
        "attempts": "deliveries",
        "deaths": "deaths",
        "age": "dead for",
        "error": "error",
    }
    empty = "No dead letters." if chosen == Filter() else f"No dead letter matches{others}."
    usual = {"status": "open", "deaths": 1}
    print_table([_row(letter) for letter in found], columns, empty, usual=usual)
    if total > len(found):
        echo(f"{total - len(found):,} more; see --limit")


def _others(letters: DeadLetters, consumer: str | None) -> str:
    """The consumers that have letters, if the wanted one has none: its name may be mistyped."""
    known = {row["consumer"] for row in letters.stats()}
    if consumer is None or consumer in known or not known:
        return ""
    return f": {consumer!r} has none; the consumers that do are {', '.join(sorted(known))}"


def _row(letter: DeadLetter) -> dict[str, Any]:
    """A row narrow enough for a terminal; a hold is shown only if there is one."""
    held = None if letter.hold is None else f"held: {letter.hold}"
    edited = None if letter.edited_at is None else f"edited by {letter.edited_by}"
    behind = f"{letter.waiting:,} wait behind it" if letter.waiting else None
    return {
        "id": letter.id,
        "consumer": letter.consumer,
        "what": tuple(filter(None, (letter.event_type, letter.category, held, edited, behind))),
        "status": letter.status,
        "attempts": letter.attempts,
        "deaths": letter.deaths,
        "age": age(letter.died_at),
        "error": shorten(strip_category(letter.error, letter.message_id), 100),
    }


@dlq.command()
def show(
    letter_id: Annotated[int, argument("ID", "Number in `onceward dlq list`.")],
    database: Database,
    raw: Annotated[bool, flag("Write the body to standard output.", "--raw")] = False,
    original: Annotated[
        bool, flag("Show the body as it was delivered, not as edited.", "--original")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show everything about one letter: its history and what was delivered.

    JSON has the delivered body in base64, the edited one if there is one, and as `payload` what a redrive delivers, if
    it can be decoded. `--original` shows what was delivered before an edit.

    Exit code: 0; 1 if there is no such letter or the database fails; 2 for wrong arguments or missing tables.
    """
    import base64

    from onceward.deadletters import Filter

    with open_letters(database, as_json) as letters:
        found = letters.find(Filter(ids=(letter_id,)))
        if not found:
            fail(f"dead letter {letter_id} does not exist; see `onceward dlq list`", as_json)
        delivered = letters.body(letter_id)
        edited = letters.edited_body(letter_id)
    body = delivered if original or edited is None else edited
    if raw:
        typer.get_binary_stream("stdout").write(body)
        return
    plain = msgspec.to_builtins(found[0])
    if as_json:
        bodies = {"body": base64.b64encode(delivered).decode()}
        if edited is not None:
            bodies["edited_body"] = base64.b64encode(edited).decode()
        print_json({**plain, **_readable(body), **bodies})
        return
    history = [
        {**each, "at": for_people(each["at"]), "error": strip_category(each["error"], plain["message_id"])}
        for each in plain.pop("history")
    ]
    labels = {"attempts": "deliveries"}
    if edited is None:
        plain = {name: value for name, value in plain.items() if not name.startswith("edit")}
    if plain["order_key"] is None:
        plain = {name: value for name, value in plain.items() if name not in ORDER_FIELDS}
    rows = [{"field": labels.get(name, name), "value": value} for name, value in plain.items()]
    what = "body" if body is delivered else "edited body (--original shows what was delivered)"
    rows.append({"field": what, "value": _format_body(body)})
    print_table(rows, {"field": "field", "value": "value"}, "")
    columns = {"attempt": "delivery", "at": "at (UTC)", "category": "category", "error": "error"}
    print_table(history, columns, "")


dlq.command()(redrive)
dlq.command()(edit)


@dlq.command()
@add_filter_options(status=False)
def discard(
    database: Database,
    reason: Reason,
    wanted: Wanted,
    operator: Operator = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Close open letters without redriving them. They are kept for 90 days, like all others.

    Letters on hold are skipped; the output says so, and who holds them.

    Exit code: 0; 1 if none was discarded or the database fails; 2 for wrong arguments or missing tables.
    """
    from onceward.deadletters.queries import check

    with open_letters(database, as_json) as letters:
        chosen = wanted()
        check(chosen, "discard")
        if free := count([each for each in tally(letters, chosen) if each.is_open and not each.held]):
            confirm(f"Discard {quantity(free, 'letter')}?", yes, as_json)
        number = letters.discard(chosen, reason=reason, operator=who(operator))
        found = tally(letters, chosen)
        held = count([each for each in found if each.is_open and each.held])
        left = explain_discard(letters, found) if held or (found and not number) else None
        _report(letters, chosen, {"discarded": number, "on_hold": held}, left, as_json)


@dlq.command()
@add_filter_options()
def hold(
    database: Database, reason: Reason, wanted: Wanted, operator: Operator = None, as_json: AsJson = False
) -> None:
    """Protect letters from being discarded, and from every purge, until they are released.

    They can still be edited and redriven. A letter that is on hold already gets the new reason; the audit log keeps
    both.

    Exit code: 0; 1 if there was none or the database fails; 2 for wrong arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        chosen = wanted()
        earlier = [each for each in tally(letters, chosen) if each.held]
        left = describe_holds(letters, earlier, were=True) if earlier else None
        number = letters.hold(chosen, reason=reason, operator=who(operator))
        if left:
            left += "\nThe new reason counts now; the audit log keeps the earlier one."
        _report(letters, chosen, {"held": number, "held_before": count(earlier)}, left, as_json)


@dlq.command()
@add_filter_options()
def release(
    database: Database, reason: Reason, wanted: Wanted, operator: Operator = None, as_json: AsJson = False
) -> None:
    """End the hold on letters.

    Exit code: 0; 1 if none was on hold or the database fails; 2 for wrong arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        chosen = wanted()
        number = letters.release(chosen, reason=reason, operator=who(operator))
        found = [] if number else tally(letters, chosen)
        left = explain_release(found) if found else None
        _report(letters, chosen, {"released": number}, left, as_json)


dlq.command()(redrives)
dlq.command()(stop_redrive)


@dlq.command()
def purge(
    database: Database,
    trust_clock: TrustClock = False,
    operator: Operator = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete letters that are resolved or discarded, dead for more than 90 days, and not on hold.

    It deletes nothing if the database's clock may be wrong; see `onceward inbox purge`.

    Exit code: 0; 1 if the database fails or its clock is in doubt; 2 for wrong arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        confirm("Delete resolved and discarded letters older than 90 days?", yes, as_json)
        number = letters.purge(operator=who(operator), trust_clock=trust_clock)
    print_result({"removed": number}, f"{quantity(number, 'letter')} deleted.", as_json)


def _report(
    letters: DeadLetters, wanted: Filter, numbers: dict[str, int], left: str | None, as_json: bool
) -> None:
    """`numbers` begins with how many letters were changed; `left` says what was not, or was so before."""
    what, number = next(iter(numbers.items()))
    if as_json:
        print_json(numbers)
    if not number:
        none = f"No letter matches{_others(letters, wanted.consumer)}."
        echo(*(f"Nothing was {what}: {left}" if left else none).splitlines(), err=True)
        raise typer.Exit(FAILED)
    if not as_json:
        echo(f"{quantity(number, 'letter')} {what}.")
        echo(*f"{left[0].upper()}{left[1:]}".splitlines() if left else ())


def _readable(body: bytes) -> dict[str, Any]:
    """For JSON output: the payload, if the body is a transaction or JSON."""
    import json

    from onceward.connectors.codec import DecodeError, decode

    try:
        payload = decode(body).payload
    except DecodeError:
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError):
            return {}
    return {"payload": msgspec.to_builtins(payload, str_keys=True)}


def _format_body(body: bytes) -> Any:
    """For tables: JSON or a transaction's payload as text, anything else as its first bytes."""
    from onceward.connectors.codec import DecodeError, decode

    with suppress(DecodeError):
        return shorten(repr(decode(body).payload), 2000)
    with suppress(UnicodeDecodeError):
        return shorten(body.decode(), 2000)
    return body[:100].hex(" ") + (" …" if len(body) > 100 else "")


dlq.command()(export)
