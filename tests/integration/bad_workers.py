"""Workers of the demo that are wrong in one way each: `python bad_workers.py WHICH SETUP NAME`."""

from __future__ import annotations

import sys
from typing import Any

from onceward.cli.demo import worker
from onceward.cli.demo.ledger import Ledger


def forgetful(*arguments: str) -> None:
    """Its ledger charges an order as often as it comes."""
    really_new = Ledger._is_new

    def always_new(self: Ledger, *arguments: Any) -> bool:
        really_new(self, *arguments)
        return True

    Ledger._is_new = always_new  # type: ignore[method-assign]
    worker.main(*arguments)


def broken(*arguments: str) -> None:
    """It cannot even begin."""
    raise RuntimeError("no coffee")


if __name__ == "__main__":
    which, *rest = sys.argv[1:]
    globals()[which](*rest)
