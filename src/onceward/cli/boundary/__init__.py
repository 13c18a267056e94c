"""`onceward boundary`: serve a boundary, and call one."""

from __future__ import annotations

import typer

from onceward.cli.boundary.append import append
from onceward.cli.boundary.bundle import export, import_
from onceward.cli.boundary.certs import certs
from onceward.cli.boundary.copy import copy
from onceward.cli.boundary.facts import confirm, fetch, tail
from onceward.cli.boundary.forward import forward
from onceward.cli.boundary.objects import get, put
from onceward.cli.boundary.serve import serve
from onceward.cli.boundary.skip import skip
from onceward.cli.boundary.stats import consumers, stats
from onceward.cli.boundary.trust_clock import trust_clock

SERVE_EXAMPLES = """
Examples:

- `onceward boundary serve` to serve this machine only

- `onceward boundary serve --config plant.toml --log-format json` to run it with TLS and peers

- `onceward boundary serve --listen 127.0.0.1:0 --data "$(mktemp -d)"` to use a free port; the first line names it

- `onceward boundary serve --config boundary.toml` to add TLS, peers and links
"""
CERTS_EXAMPLES = """
Examples:

- `onceward boundary certs ./certs --zone plant-a --zone hq` to try two zones on this machine

- `onceward boundary certs ./certs --zone lab --peer billing` to add a zone and an application later
"""
APPEND_EXAMPLES = """
Examples:

- `onceward boundary append --subject batch:B1042 --predicate completed --object '{"litres": 480}'
  --from-zone plant-a --to-zone hq --id-part batch --id-part B1042 --id-part completed`

- `onceward boundary put batch-files B1042.pdf report.pdf --json |
  onceward boundary append --object - --subject batch:B1042 --predicate report_filed ...` to refer to an artifact

- `onceward boundary append --lines facts.jsonl` to append many, with lines such as
  `{"envelope": {"message_id": "m1", "from_zone": "plant-a", "to_zone": "hq"},
  "fact": {"subject": "batch:B1042", "predicate": "completed", "object": {"litres": 480}}}`
"""

boundary = typer.Typer(
    no_args_is_help=True, help="A durable log of facts with named cursors: serve it, append, fetch, confirm."
)
boundary.command("serve", epilog=SERVE_EXAMPLES)(serve)
boundary.command("append", epilog=APPEND_EXAMPLES)(append)
boundary.command("fetch")(fetch)
boundary.command("confirm")(confirm)
boundary.command("tail")(tail)
boundary.command("put")(put)
boundary.command("get")(get)
boundary.add_typer(consumers, name="consumers")
boundary.command("stats")(stats)
boundary.command("copy")(copy)
boundary.command("forward")(forward)
boundary.command("skip")(skip)
boundary.command("trust-clock")(trust_clock)
boundary.command("export")(export)
boundary.command("import")(import_)
boundary.command("certs", epilog=CERTS_EXAMPLES)(certs)
