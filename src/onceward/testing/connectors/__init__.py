"""The conformance suite for connectors. A connector is done when it passes.

    class TestMyConnector(ConnectorConformance):
        def make(self, clock, **settings):
            return MyConnector("my://somewhere/" + uuid4().hex, clock=clock, **settings)

Needs pytest and hypothesis.
"""

from typing import Any

import pytest

# Before the imports below, so that a failing assertion shows what it compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in ("carrying", "outcomes", "redelivery", "poison", "reconnect", "sharing")
    )
)

from onceward.testing.clock import FakeClock  # noqa: E402
from onceward.testing.connectors.carrying import Carrying  # noqa: E402
from onceward.testing.connectors.driver import ConnectorDriver  # noqa: E402
from onceward.testing.connectors.outcomes import Outcomes  # noqa: E402
from onceward.testing.connectors.poison import Poison  # noqa: E402
from onceward.testing.connectors.reconnect import Reconnect  # noqa: E402
from onceward.testing.connectors.redelivery import Redelivery  # noqa: E402
from onceward.testing.connectors.samples import payloads, transactions  # noqa: E402
from onceward.testing.connectors.sharing import Sharing  # noqa: E402

__all__ = ["ConnectorConformance", "ConnectorDriver", "FakeClock", "payloads", "transactions"]


class ConnectorConformance(Carrying, Outcomes, Redelivery, Poison, Reconnect, Sharing):
    """Subclass it as `Test…`, override `make`, and what else your connector can offer of `ConnectorSuite`.

    Every test drives sync and async connectors alike. One that your connector means to fail, because its
    rules are others, is taken out by name: `test_… = None`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, test in _tests_with_a_need():
            if name not in vars(cls):
                setattr(cls, name, test if getattr(cls, test.needs) is not None else None)


def _tests_with_a_need() -> list[tuple[str, Any]]:
    tests = ((name, getattr(ConnectorConformance, name)) for name in dir(ConnectorConformance))
    return [(name, test) for name, test in tests if hasattr(test, "needs")]
