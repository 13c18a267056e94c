"""`onceward boundary append`: facts into a boundary."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.boundary_calling import HERE, Url, connected
from onceward.cli.boundary_lines import append_lines
from onceward.cli.database import MISUSED, AsJson, fail
from onceward.cli.printing import print_json

ALL_NEEDED = "One fact: all of these are needed"
ONE_NEEDED = "Its id: one of these is needed"
INSTEAD = "Or many facts"


def append(
    subject: Annotated[
        str | None,
        typer.Option(metavar="KIND:ID", help="Of what: batch:B1042.", rich_help_panel=ALL_NEEDED),
    ] = None,
    predicate: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What happened, in lower_snake_case.", rich_help_panel=ALL_NEEDED),
    ] = None,
    value: Annotated[
        str | None,
        typer.Option(
            "--object",
            metavar="JSON|@FILE|-",
            help="More about it; - reads standard input.",
            rich_help_panel=ALL_NEEDED,
        ),
    ] = None,
    from_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Where it happened.", rich_help_panel=ALL_NEEDED)
    ] = None,
    to_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="For whom.", rich_help_panel=ALL_NEEDED)
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The same for every retry, never used for anything else.",
            rich_help_panel=ONE_NEEDED,
        ),
    ] = None,
    id_part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="What makes one: may be repeated, as in `message_id_for` with texts.",
            rich_help_panel=ONE_NEEDED,
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A hint for operators; may be repeated.")
    ] = None,
    correlation_id: Annotated[str, typer.Option(metavar="ID", help="The wider conversation.")] = "",
    causation_id: Annotated[str, typer.Option(metavar="ID", help="The message that led to this.")] = "",
    lines: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="{envelope, fact} in each line.", rich_help_panel=INSTEAD),
    ] = None,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Make a fact durable, or with `--lines` many. It is safe to repeat: what is there already is not appended again.

    Lines are appended many at a time; those of one subject in their order. `fetch --json` writes such lines.

    Exit code: 0, also if it was there already; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    needed = {
        "--subject": subject,
        "--predicate": predicate,
        "--object": value,
        "--from-zone": from_zone,
        "--to-zone": to_zone,
    }
    if lines is not None:
        others = {
            **needed,
            "--message-id": message_id,
            "--id-part": id_part,
            "--label": label,
            "--correlation-id": correlation_id,
            "--causation-id": causation_id,
        }
        if said := [name for name, given in others.items() if given]:
            fail(f"--lines has all that is to be said in its lines; leave out {said[0]}", as_json, MISUSED)
        append_lines(lines, url, as_json)
        return
    if missing := [name for name, given in needed.items() if not given]:
        fail(f"{', '.join(missing)} missing; see `onceward boundary append --help`", as_json, MISUSED)
    labels = _labels(label or [], as_json)
    body = _read(str(value), as_json)
    with connected(url, as_json) as (client, runner):
        from onceward.boundary import Fact, envelope_for

        made_id = _message_id(message_id, id_part, as_json)
        envelope = envelope_for(
            made_id,
            from_zone=str(from_zone),
            to_zone=str(to_zone),
            labels=labels,
            correlation_id=correlation_id,
            causation_id=causation_id,
        )
        fact = Fact(subject=str(subject), predicate=str(predicate), object_json=body)
        appended = runner.run(client.append(envelope, fact))
    if as_json:
        print_json({"offset": appended.offset, "duplicate": appended.duplicate, "message_id": made_id})
    elif appended.duplicate:
        typer.echo(f"It was there already, at offset {appended.offset}.")
    else:
        typer.echo(f"Appended at offset {appended.offset}.")


def _message_id(given: str | None, parts: list[str] | None, as_json: bool) -> str:
    from onceward.boundary import message_id_for

    if bool(given) == bool(parts):
        fail(
            "say either --message-id, or --id-part for each thing that makes this event unlike every other",
            as_json,
            MISUSED,
        )
    try:
        return given or message_id_for(*parts or ())
    except ValueError as error:
        fail(f"--id-part: {error}", as_json, MISUSED)


def _labels(given: list[str], as_json: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals or name in found:
            fail(f"--label must be NAME=VALUE, each name once, not {each!r}", as_json, MISUSED)
        found[name] = value
    return found


def _read(value: str, as_json: bool) -> str:
    try:
        if value == "-":
            return _piped(sys.stdin.read(), as_json)
        return Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--object {value} cannot be read: {error}", as_json, MISUSED)


def _piped(text: str, as_json: bool) -> str:
    """A command before this one in a pipe may have failed, and said so where its result would stand."""
    try:
        found = json.loads(text)
    except ValueError:
        return text  # the boundary says what is wrong with it
    if isinstance(found, dict) and found.keys() == {"error"}:
        fail(
            f"--object -: the command before this one failed, and nothing is appended: {found['error']}",
            as_json,
        )
    return text
