"""`onceward dlq list --group`: letters that died of the same error, together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from onceward.cli.dlq.options import age, shorten
from onceward.cli.output import echo, print_json, print_table

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters, Filter


def show_groups(letters: DeadLetters, wanted: Filter, limit: int, as_json: bool) -> None:
    found = letters.groups(wanted)
    if as_json:
        print_json(found[:limit])
        return
    columns = {
        "letters": "letters",
        "consumer": "consumer",
        "event_type": "type",
        "span": "first, last",
        "example": "example",
        "error": "error",
    }
    rows = [
        {
            **msgspec.to_builtins(each),
            "span": f"{age(each.first_at)}, {age(each.last_at)} ago",
            "error": shorten(": ".join(filter(None, (each.error_class, each.message))), 120),
        }
        for each in found[:limit]
    ]
    print_table(rows, columns, "No dead letter matches.", usual={"event_type": ""})
    if len(found) > limit:
        echo(f"{len(found) - limit:,} more groups; see --limit")
