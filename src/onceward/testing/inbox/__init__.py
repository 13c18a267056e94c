"""The conformance suite for inbox stores. A store is done when it passes, in threads and in asyncio.

    class TestMyStore(InboxConformance):
        def engine(self, *, patience=5.0):
            return create_engine("my://somewhere/" + self.name)

Needs pytest and hypothesis, and the marker `req` registered with pytest.
"""

import pytest

_PARTS = (
    "driver", "samples", "suite", "duplicates", "atomicity", "order", "schema", "effects",
    "effect_keys", "fences", "poison", "registry", "joins", "telemetry", "isolation", "schedules", "identity",
)  # fmt: skip

# Before the imports below: then a failed assertion shows what it compared.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from onceward.testing.inbox.atomicity import Atomicity  # noqa: E402
from onceward.testing.inbox.driver import InboxDriver, until  # noqa: E402
from onceward.testing.inbox.duplicates import Duplicates  # noqa: E402
from onceward.testing.inbox.effect_keys import EffectKeys  # noqa: E402
from onceward.testing.inbox.effects import Effects  # noqa: E402
from onceward.testing.inbox.fences import Fences  # noqa: E402
from onceward.testing.inbox.identity import Identity  # noqa: E402
from onceward.testing.inbox.isolation import Isolation  # noqa: E402
from onceward.testing.inbox.joins import Joins  # noqa: E402
from onceward.testing.inbox.order import EventOrder  # noqa: E402
from onceward.testing.inbox.poison import InboxPoison  # noqa: E402
from onceward.testing.inbox.registry import Registration  # noqa: E402
from onceward.testing.inbox.schedules import Schedules  # noqa: E402
from onceward.testing.inbox.schema import Schema  # noqa: E402
from onceward.testing.inbox.suite import InboxSuite  # noqa: E402
from onceward.testing.inbox.telemetry import InboxTelemetry  # noqa: E402

__all__ = ["InboxConformance", "InboxDriver", "InboxSuite", "until"]


class InboxConformance(
    Duplicates,
    Identity,
    Atomicity,
    EventOrder,
    Schema,
    Effects,
    EffectKeys,
    Fences,
    InboxPoison,
    Registration,
    Joins,
    InboxTelemetry,
    Isolation,
    Schedules,
):
    """Subclass it as `Test…`, override `engine`, and whatever else of `InboxSuite` your database needs."""
