"""Whether this is production, where a consumer runs only if it is proven."""

from __future__ import annotations

import os

VARIABLE = "ONCEWARD_ENV"
PRODUCTION = ("production", "prod")
NO_CONTRACT = (
    "it has no contract, so a crash may repeat its effects. Give it one (contract=Contract(…)), or write out "
    "contract=None if they may happen more than once"
)
"""Why a consumer does not run in production if its code does not mention a contract."""


def is_production(env: str | None) -> bool:
    """Whether this is production: by ONCEWARD_ENV if it is set, otherwise by `env`, which comes from the code."""
    return names_production(os.environ.get(VARIABLE, "").strip() or env)


def names_production(env: str | None) -> bool:
    return env is not None and env.strip().lower() in PRODUCTION
