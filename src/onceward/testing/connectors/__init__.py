"""The conformance suite for connectors. A connector is done when it passes.

    class TestMyConnector(ConnectorConformance):
        def make(self, clock, **settings):
            return MyConnector("my://somewhere/" + uuid4().hex, clock=clock, **settings)

Needs pytest and hypothesis.
"""

from typing import Any

import pytest

# Before the imports below: then a failed assertion shows what it compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in (
            "round_trip",
            "outcomes",
            "redelivery",
            "poison",
            "owners",
            "reconnect",
            "concurrency",
            "waits",
        )
    )
)

from onceward.testing.clock import FakeClock  # noqa: E402
from onceward.testing.connectors.concurrency import Concurrency  # noqa: E402
from onceward.testing.connectors.driver import ConnectorDriver  # noqa: E402
from onceward.testing.connectors.outcomes import Outcomes  # noqa: E402
from onceward.testing.connectors.owners import Owners  # noqa: E402
from onceward.testing.connectors.poison import ConnectorPoison  # noqa: E402
from onceward.testing.connectors.reconnect import Reconnect  # noqa: E402
from onceward.testing.connectors.redelivery import Redelivery  # noqa: E402
from onceward.testing.connectors.round_trip import RoundTrip  # noqa: E402
from onceward.testing.connectors.samples import payloads, transactions  # noqa: E402
from onceward.testing.connectors.waits import Waits  # noqa: E402

__all__ = ["ConnectorConformance", "ConnectorDriver", "FakeClock", "payloads", "transactions"]


class ConnectorConformance(
    RoundTrip, Outcomes, Redelivery, ConnectorPoison, Owners, Reconnect, Concurrency, Waits
):
    """Subclass it as `Test…`, override `make`, and the other hooks of `ConnectorSuite` that your connector supports.

    Every test drives sync and async connectors alike. To leave out a test because your connector has other rules, set
    `test_… = None`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, test in _tests_with_needs():
            if name not in vars(cls):
                setattr(cls, name, test if getattr(cls, test.needs) is not None else None)


def _tests_with_needs() -> list[tuple[str, Any]]:
    tests = ((name, getattr(ConnectorConformance, name)) for name in dir(ConnectorConformance))
    return [(name, test) for name, test in tests if hasattr(test, "needs")]
