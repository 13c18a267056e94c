"""`onceward boundary trust-clock`: an operator confirms the time, and facts expire again."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from onceward._time import Moment, boot_id, uptime
from onceward.cli.boundary.options import handle_errors, name_option
from onceward.cli.exit import AsJson, option
from onceward.cli.output import iso_time, print_json


def trust_clock(
    store: Annotated[
        str, option("STORE", "Store of the boundary: its directory, postgresql://… or nats://….", "--store")
    ],
    as_json: AsJson = False,
) -> None:
    """Confirm that the clock of this machine is right, so a boundary that doubts it removes expired facts again.

    A server does not let facts expire after its clock was set to another time, or after its machine seems to have
    been off for more than half of the retention, because expired facts are gone permanently. Compare the time with
    another machine before you confirm. Run this on the server's machine. It works while the server is running, and
    expiry continues within a minute. If the clock is wrong, correct it instead: then you do not have to confirm
    anything.

    Exit code: 0; 1 if the store cannot be reached; 2 for wrong arguments.
    """
    now = time.time()
    with handle_errors(as_json):
        from onceward.boundary.stores.trusted_time import trust_time

        with name_option("--store"):
            asyncio.run(trust_time(store, Moment(now, boot_id(), uptime())))
    if as_json:
        print_json({"time": iso_time(now)})
    else:
        typer.echo(f"Confirmed: it is {iso_time(now)}. Servers with this time let facts expire again.")
