"""Consumers with their own `verification`, which is all that the command line needs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from tests.verification.consumers import EVENTS, Right, Swallows, setup


class Proven(Right):
    verification = {"events": EVENTS[:2], "setup": setup}  # noqa: RUF012


class Unproven(Swallows):
    @classmethod
    def verification(cls) -> dict[str, Any]:
        return {"setup": setup}


def broken(engine: Engine) -> None:
    raise RuntimeError("the set-up of this consumer is broken")


class BadSetup(Right):
    verification = {"events": EVENTS, "setup": broken}  # noqa: RUF012
