"""`onceward boundary certs`: a CA and certificates for development."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.boundary.options import require_extra
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for the files; created if missing.")
    ],
    zone: Annotated[
        list[str] | None,
        typer.Option("--zone", metavar="NAME", help="A zone: server and client; repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME", help="An application: client only; repeatable."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME|IP",
            help="Host of the servers, in addition to localhost and 127.0.0.1; repeatable.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until they expire.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create a CA, and certificates for zones and for applications that call them. For development only.

    Run it again on the same directory to add more; nothing is overwritten. The identity of zone plant-a is
    plant-a-bsfg, that of peer billing is billing. Anyone with ca.key can impersonate everyone, so use your own CA in
    production.

    Exit code: 0; 2 for wrong arguments, or if a file cannot be written or exists for something else.
    """
    from onceward.errors import ConfigurationError

    try:
        with require_extra(as_json):
            from onceward.boundary.certs import make_certificates

            made = make_certificates(directory, zone or (), host or (), days, peer or ())
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    rows = [
        {
            "identity": each.identity,
            "cert": str(each.tls.cert),
            "key": str(each.tls.key),
            "ca": str(each.tls.ca),
            "is_new": each.is_new,
        }
        for each in made
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        kept = "" if row["is_new"] else " (already there, unchanged)"
        typer.echo(f"{row['identity']}: {row['cert']}, {row['key']}{kept}")
    typer.echo(f"Signed by {rows[0]['ca']}. For development only; do not use in production.")
