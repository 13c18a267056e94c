"""The conformance suite for boundary stores. A store is done when it passes.

    class TestMyStore(StoreConformance):
        async def open(self):
            return MyStore(self.place)

Needs pytest and hypothesis, and the marker `req` registered with pytest.
"""

import pytest

_PARTS = ("suite", "facts", "cursors", "expiry", "limits", "objects", "reference")

# Before the imports below: then a failed assertion shows what it compared.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from onceward.testing.boundary.cursors import CursorCases  # noqa: E402
from onceward.testing.boundary.expiry import ExpiryCases  # noqa: E402
from onceward.testing.boundary.facts import FactCases  # noqa: E402
from onceward.testing.boundary.limits import LimitCases  # noqa: E402
from onceward.testing.boundary.objects import ObjectCases  # noqa: E402
from onceward.testing.boundary.reference import ModelCases  # noqa: E402
from onceward.testing.boundary.suite import StoreSuite, fact  # noqa: E402

__all__ = ["StoreConformance", "StoreSuite", "fact"]


class StoreConformance(FactCases, CursorCases, ExpiryCases, LimitCases, ObjectCases, ModelCases):
    """Subclass it as `Test…` and override `open`."""
