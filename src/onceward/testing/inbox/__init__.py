"""The conformance suite for inboxes. A store is done when it passes, in threads and in asyncio.

    class TestMyStore(InboxConformance):
        def engine(self, *, patience=5.0):
            return create_engine("my://somewhere/" + self.name)

Needs pytest and hypothesis, and the marker `req` registered with pytest.
"""

import pytest

_PARTS = (
    "driver", "samples", "suite", "duplicates", "atomicity", "order", "schema", "effects", "fencing", "poison",
    "registry", "joining", "telling", "isolation", "schedules",
)  # fmt: skip

# Before the imports below, so that a failing assertion shows what it compared.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from onceward.testing.inbox.atomicity import Atomicity  # noqa: E402
from onceward.testing.inbox.driver import InboxDriver, until  # noqa: E402
from onceward.testing.inbox.duplicates import Duplicates  # noqa: E402
from onceward.testing.inbox.effects import Effects  # noqa: E402
from onceward.testing.inbox.fencing import Fencing  # noqa: E402
from onceward.testing.inbox.isolation import Isolation  # noqa: E402
from onceward.testing.inbox.joining import Joining  # noqa: E402
from onceward.testing.inbox.order import Order  # noqa: E402
from onceward.testing.inbox.poison import Poison  # noqa: E402
from onceward.testing.inbox.registry import Registration  # noqa: E402
from onceward.testing.inbox.schedules import Schedules  # noqa: E402
from onceward.testing.inbox.schema import Schema  # noqa: E402
from onceward.testing.inbox.suite import InboxSuite  # noqa: E402
from onceward.testing.inbox.telling import Telling  # noqa: E402

__all__ = ["InboxConformance", "InboxDriver", "InboxSuite", "until"]


class InboxConformance(
    Duplicates,
    Atomicity,
    Order,
    Schema,
    Effects,
    Fencing,
    Poison,
    Registration,
    Joining,
    Telling,
    Isolation,
    Schedules,
):
    """Subclass it as `Test…`, override `engine`, and what else of `InboxSuite` is different in your database."""
