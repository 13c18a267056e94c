"""`onceward boundary consumers|stats`: how far the consumers are, and which are no longer used."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from onceward._secrets import mask_url
from onceward.cli.boundary.options import HERE, Url, check_url, connect, handle_errors, tls_for
from onceward.cli.exit import MISUSED, AsJson, argument, fail
from onceward.cli.output import iso_time, print_json, print_result, print_table

SECONDS = 30.0


consumers = typer.Typer()


@consumers.callback(invoke_without_command=True)
def list_consumers(context: typer.Context, url: Url = HERE, as_json: AsJson = False) -> None:
    """List the consumers, how far each has confirmed, and how many facts wait for it; or remove one.

    Exit code: 0, even if there are none; 1 if the boundary cannot be reached; 2 for wrong arguments.
    """
    if context.invoked_subcommand is not None:
        if any(
            getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
            for name in context.params
        ):
            fail(f"put --url and --json after `{context.invoked_subcommand}`", as_json, MISUSED)
        return
    found = [
        {
            "name": each["name"],
            "offset": each["offset"],
            "backlog": each["backlog"],
            "confirmed_at": iso_time(at and at / 1000),
        }
        for each in _get_stats(url, as_json)["consumers"]
        for at in (each["confirmed_at_unix_ms"],)
    ]
    if as_json:
        print_json(found)
        return
    columns = {"name": "consumer", "offset": "confirmed", "backlog": "backlog", "confirmed_at": "at"}
    print_table(found, columns, "No consumer has fetched yet.")


@consumers.command("remove")
def remove_consumer(
    name: Annotated[str, argument("NAME", "A consumer that is no longer used.")],
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Remove a consumer and its cursor. It no longer counts in quotas, metrics and alerts.

    If it fetches again, it starts at the earliest fact, unless the server does not register names on fetch. Names in
    the configuration of a server come back when it starts.

    Exit code: 0; 1 if there is no such consumer, or the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    with connect(url, as_json) as (client, runner):
        offset = runner.run(client.remove_consumer(name))
    print_result(
        {"name": name, "offset": offset},
        f"Removed {name}, which had confirmed up to offset {offset:,}.",
        as_json,
    )


def stats(url: Url = HERE, as_json: AsJson = False) -> None:
    """Show what the log holds and which consumer is furthest behind.

    Exit code: 0; 1 if the boundary cannot be reached; 2 for wrong arguments.
    """
    found = _get_stats(url, as_json)
    if as_json:
        print_json(found)
        return
    slowest = max(found["consumers"], key=lambda each: int(each["backlog"]), default=None)
    behind = None if slowest is None else f"{slowest['name']}, by {slowest['backlog']:,} facts"
    rows = [
        {"what": "first offset retained", "value": found["first"]},
        {"what": "last offset", "value": found["last"]},
        {"what": "facts", "value": found["last"] - found["first"] + 1},
        {"what": "consumers", "value": len(found["consumers"])},
        {"what": "furthest behind", "value": behind},
    ]
    print_table(rows, {"what": "what", "value": "value"}, "")


def _get_stats(url: str, as_json: bool) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    with handle_errors(as_json):
        from onceward.boundary.client.errors import describe_unreachable
        from onceward.boundary.tls import client_context

        page, tls = f"{check_url(url)}/stats", tls_for(url)
        shown = mask_url(page)
        context = None if tls is None else client_context(tls)
        try:
            with urlopen(page, timeout=SECONDS, context=context) as answer:
                found: dict[str, Any] = json.load(answer)
                found["last"], found["consumers"]
                return found
        except HTTPError as error:
            with error:
                text = error.read(10_000).decode(errors="replace")
            if error.code == 503 and text.startswith('{"code"'):
                fail(f"{shown} answers 503: {json.loads(text)['message']}", as_json)
            if error.code == 401:
                fail(
                    f"{shown} answers 401: the certificate is not that of a peer of this boundary; see its [[peers]]",
                    as_json,
                )
            fail(f"{shown} answers {error.code} {error.reason}; is it a boundary? Check --url", as_json)
        except URLError as error:
            reason = error.reason
            fail(describe_unreachable(url, reason if isinstance(reason, Exception) else error), as_json)
        except (OSError, HTTPException) as error:
            fail(describe_unreachable(url, error), as_json)
        except (ValueError, LookupError, TypeError):
            fail(f"{shown} does not answer like a boundary; check --url", as_json)
