"""`onceward boundary certs`: a CA and certificates for development."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.boundary.options import handle_errors
from onceward.cli.exit import AsJson, argument, option
from onceward.cli.output import echo, print_json


def certs(
    directory: Annotated[Path, argument("DIR", "Directory for the files; created if missing.")],
    zone: Annotated[
        list[str] | None, option("NAME", "A zone: server and client; repeatable.", "--zone")
    ] = None,
    peer: Annotated[
        list[str] | None, option("NAME", "An application: client only; repeatable.", "--peer")
    ] = None,
    host: Annotated[
        list[str] | None,
        option(
            "NAME|IP", "Host of the servers, in addition to localhost and 127.0.0.1; repeatable.", "--host"
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until they expire.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create a CA, and certificates for zones and for applications that call them. For development only.

    Run it again on the same directory to add more; nothing is overwritten. The identity of zone plant-a is
    plant-a-bsfg, and the identity of peer billing is billing. Anyone with ca.key can impersonate everyone, so use
    your own CA in production.

    Exit code: 0; 2 for wrong arguments, or if a file cannot be written or exists for something else.
    """
    with handle_errors(as_json):
        from onceward.boundary.certs import make_certificates

        made = make_certificates(directory, zone or (), host or (), days, peer or ())
    if as_json:
        files = ("cert", "key", "ca")
        print_json(
            [
                {
                    "identity": each.identity,
                    **{name: str(getattr(each.tls, name)) for name in files},
                    "is_new": each.is_new,
                }
                for each in made
            ]
        )
        return
    for each in made:
        kept = "" if each.is_new else " (already there, unchanged)"
        echo(f"{each.identity}: {each.tls.cert}, {each.tls.key}{kept}")
    echo(f"Signed by {made[0].tls.ca}. For development only; do not use in production.")
