"""The pytest plugin, with the fixtures `verify_consumer` and `onceward_app`:

    def test_billing(verify_consumer):
        verify_consumer(Bill, events=[…], setup=create_tables)

    def test_shop(onceward_app):
        t = onceward_app(app, setup=create_tables)

Every run of pytest loads it, so it imports their parts only when a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onceward.testing.under_test import AppUnderTest
    from onceward.verify import VerificationReport


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("onceward").addoption(
        "--onceward-seed",
        type=int,
        metavar="N",
        help="Verify consumers with this seed, to reproduce a failure.",
    )


@pytest.fixture
def verify_consumer(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., VerificationReport]:
    """`onceward.verify.verify_consumer`, with the seed of `--onceward-seed`."""
    from onceward.verify import VerificationError
    from onceward.verify import verify_consumer as verify

    def verify_or_fail(consumer: Any, events: Any = None, **given: Any) -> VerificationReport:
        __tracebackhide__ = True
        seed = request.config.getoption("--onceward-seed")
        if seed is not None:
            given.setdefault("seed", seed)
        try:
            report = verify(consumer, events, **given)
        except VerificationError as error:
            record_property("onceward_seed", error.report.seed)
            pytest.fail(str(error), pytrace=False)
        record_property("onceward_seed", report.seed)
        return report

    return verify_or_fail


@pytest.fixture
def onceward_app() -> Iterator[Callable[..., AppUnderTest]]:
    """`onceward.testing.app`, until the end of the test: `t = onceward_app(app, setup=…, services=…)`."""
    from onceward.testing.under_test import app as under_test

    with ExitStack() as stack:
        yield lambda app, **options: stack.enter_context(under_test(app, **options))
