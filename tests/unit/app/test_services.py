"""Services: which parameter gets which, and their lives."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import pytest

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async, task_class
from onceward.app.lifespan import ServiceError
from onceward.errors import ConfigurationError

SOURCE = "memory://services"


class Base:
    pass


class Payments(Base):
    pass


class Rates(Base):
    pass


class Mailer(Protocol):
    def send(self) -> None: ...


class Smtp:
    def send(self) -> None: ...


def an_app(*factories: Callable[..., Any]) -> Onceward:
    app = Onceward("shop")
    for each in factories:
        app.service(each)
    return app


def payments() -> Payments:
    return Payments()


def rates() -> Rates:
    return Rates()


def mail() -> Smtp:
    return Smtp()


def untyped():  # type: ignore[no-untyped-def]
    return {"a": 1}


def config() -> dict[str, str]:
    return {}


def deliver(app: Onceward, name: str = "handle", payload: Any = 7, **given: Any) -> None:
    with open_task(app, app.consumers[name], **given) as task:
        outcome = task.start_processing(Transaction(payload=payload))
    assert outcome.error is None


# ── which parameter gets which ──────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-065")
def test_parameters_get_services_by_type_by_name_and_by_a_base_class() -> None:
    app = an_app(payments, mail, untyped, config)
    seen: list[Any] = []

    @app.consumer(SOURCE)
    def handle(
        number: int,
        pay: Payments,
        mail: Mailer,
        untyped: Any,
        base: Base,
        config: dict[str, str],
        transaction: Transaction,
    ) -> None:
        seen.extend([number, pay, mail, untyped, base, config])

    deliver(app)
    number, pay, mailer, plain, base, settings = seen
    assert (number, plain, settings) == (7, {"a": 1}, {})
    assert isinstance(pay, Payments)
    assert isinstance(mailer, Smtp)
    assert base is pay, "a service is opened once"


@pytest.mark.req("CC-065")
def test_a_payload_of_a_plain_type_is_no_service() -> None:
    app = an_app(config, payments)

    @app.consumer(SOURCE)
    def handle(order: dict[str, int], pay: Annotated[Payments, "the real one"]) -> None:
        assert order == {"total": 3}
        assert isinstance(pay, Payments)

    deliver(app, payload={"total": 3})


@pytest.mark.req("CC-065")
@pytest.mark.parametrize(
    ("factories", "consumer", "words"),
    [
        (
            [payments, rates],
            lambda: _takes_base,
            [
                "takes thing: Base",
                "2 services provide",
                "payments (test_services.py",
                "rates (",
                "name the parameter",
            ],
        ),
        (
            [rates],
            lambda: _takes_payments,
            ["parameters for a payload: order, pay", "the services are rates: Rates"],
        ),
        ([], lambda: _takes_payments, ["the app has no services", "@app.service"]),
        ([rates], lambda: _misnamed, ["takes rates: Payments", "provides Rates"]),
    ],
)
def test_what_is_not_clear_is_refused_where_the_consumer_is_declared(
    factories: list[Any], consumer: Callable[[], Any], words: list[str]
) -> None:
    app = an_app(*factories)
    with pytest.raises(ConfigurationError) as refused:
        app.consumer(SOURCE)(consumer())
    for each in words:
        assert each in str(refused.value)


def _takes_base(order: int, thing: Base) -> None: ...
def _takes_payments(order: int, pay: Payments) -> None: ...
def _misnamed(order: int, rates: Payments) -> None: ...


def one(two: Any) -> Payments: ...  # type: ignore[empty-body]
def two(one: Payments) -> Rates: ...  # type: ignore[empty-body]
def needs_url(url: str) -> Payments: ...  # type: ignore[empty-body]
def session() -> Payments: ...  # type: ignore[empty-body]


@pytest.mark.req("CC-065")
def test_factories_are_checked() -> None:
    def _takes_one(order: int, one: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="need each other: one → two → one"):
        an_app(one, two).consumer(SOURCE)(_takes_one)
    with pytest.raises(ConfigurationError, match="need each other"):
        an_app(one, two).check()
    with pytest.raises(
        ConfigurationError, match=r"needs_url \(test_services.*\) takes url, but a factory takes other"
    ):
        an_app(needs_url).check()
    with pytest.raises(ConfigurationError, match="cannot be named 'session'"):
        an_app(session)
    with pytest.raises(ConfigurationError, match="two services are named 'payments'"):
        an_app(payments, payments)
    with pytest.raises(ConfigurationError, match="goes above a function"):
        an_app(Payments)


async def loop_only() -> Payments:
    return Payments()


def through(loop_only: Payments) -> Rates:
    return Rates()


@pytest.mark.req("CC-065")
def test_a_consumer_in_threads_cannot_take_an_async_service() -> None:
    def handle(order: int, loop_only: Payments) -> None: ...
    def indirect(order: int, through: Rates) -> None: ...

    app = an_app(loop_only, through)
    with pytest.raises(
        ConfigurationError, match=r"handle takes loop_only, but it runs in threads .* is `async def`"
    ):
        app.consumer(SOURCE)(handle)
    with pytest.raises(ConfigurationError, match=r"the service through .*, which needs loop_only"):
        app.consumer(SOURCE)(indirect)


# ── their lives ─────────────────────────────────────────────────────────────────────────────────────────


class Diary:
    """Factories that write down what happens to them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.lines.append(f"open {name}")
        yield
        self.lines.append(f"close {name}")


@pytest.mark.req("CC-065")
def test_services_are_opened_in_order_once_and_closed_in_reverse() -> None:
    app, diary = Onceward("shop"), Diary()

    @app.service
    def top(middle: Rates, bottom: Payments) -> Iterator[Smtp]:
        with diary.around("top"):
            yield Smtp()

    @app.service
    @contextmanager
    def middle(bottom: Payments) -> Iterator[Rates]:
        with diary.around("middle"):
            yield Rates()

    @app.service
    def bottom() -> Iterator[Payments]:
        with diary.around("bottom"):
            yield Payments()

    @app.service
    def unused() -> Payments:
        raise AssertionError("nobody takes it")

    @app.consumer(SOURCE)
    def handle(order: int, top: Smtp, bottom: Payments) -> None:
        diary.lines.append("handle")

    deliver(app)
    opened = ["open bottom", "open middle", "open top"]
    assert diary.lines == [*opened, "handle", "close top", "close middle", "close bottom"]


@pytest.mark.req("CC-065")
def test_async_consumers_take_sync_and_async_services() -> None:
    app, diary = Onceward("shop"), Diary()

    @app.service
    async def http() -> AsyncIterator[Payments]:
        with diary.around("http"):
            yield Payments()

    @app.service
    async def coroutine() -> Rates:
        return Rates()

    @app.service
    def gateway(http: Payments) -> Iterator[Smtp]:
        with diary.around("gateway"):
            yield Smtp()

    @app.consumer(SOURCE)
    async def handle(order: int, gateway: Smtp, http: Payments, coroutine: Rates) -> None:
        assert (type(gateway), type(http), type(coroutine)) == (Smtp, Payments, Rates)

    async def deliver_async() -> None:
        async with open_task_async(app, app.consumers["handle"]) as task:
            assert (await task.start_processing(Transaction(payload=1))).error is None

    asyncio.run(deliver_async())
    assert diary.lines == ["open http", "open gateway", "close gateway", "close http"]


@pytest.mark.req("CC-065")
def test_a_factory_may_have_a_decorator() -> None:
    app, diary = Onceward("shop"), Diary()

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            return function(*args, **more)

        return call

    @app.service
    @decorated
    def yields(plain: Payments) -> Iterator[Rates]:
        with diary.around("yields"):
            yield Rates()

    @app.service
    @decorated
    def plain() -> Payments:
        return Payments()

    @app.consumer(SOURCE)
    def handle(order: int, pay: Payments, rates: Rates) -> None: ...

    deliver(app)
    assert diary.lines == ["open yields", "close yields"]


@pytest.mark.req("CC-065")
def test_a_factory_that_fails_is_named_and_what_was_open_is_closed() -> None:
    app, diary = Onceward("shop"), Diary()

    @app.service
    def first() -> Iterator[Payments]:
        with diary.around("first"):
            yield Payments()

    @app.service
    def second(first: Payments) -> Rates:
        raise ConnectionRefusedError("no provider")

    @app.service
    def nothing() -> Rates:
        return None  # type: ignore[return-value]

    @app.service
    def forgot_to_yield() -> Iterator[Rates]:
        return None  # type: ignore[return-value]

    @app.consumer(SOURCE)
    def handle(order: int, second: Rates) -> None: ...

    @app.consumer("memory://other")
    def other(order: int, nothing: Rates) -> None: ...

    @app.consumer("memory://another")
    def another(order: int, forgot_to_yield: Rates) -> None: ...

    with pytest.raises(ServiceError, match=r"second \(test_services.* cannot be opened: .*no provider"):
        deliver(app)
    assert diary.lines == ["open first", "close first"]
    for name in ("other", "another"):
        with pytest.raises(ServiceError, match="made None instead of Rates; return or yield"):
            deliver(app, name)


@pytest.mark.req("CC-065")
def test_a_cleanup_that_fails_is_logged_and_the_others_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    app, diary = Onceward("shop"), Diary()

    @app.service
    def first() -> Iterator[Payments]:
        with diary.around("first"):
            yield Payments()

    @app.service
    def second(first: Payments) -> Iterator[Rates]:
        yield Rates()
        raise ConnectionResetError("gone")

    @app.consumer(SOURCE)
    def handle(order: int, second: Rates) -> None: ...

    with caplog.at_level(logging.ERROR, "onceward"):
        deliver(app)
    assert diary.lines == ["open first", "close first"]
    assert "service second (test_services.py" in caplog.text
    assert "ConnectionResetError: gone" in caplog.text


# ── fakes ───────────────────────────────────────────────────────────────────────────────────────────────


class FakePayments(Payments):
    pass


def never() -> Payments:
    raise AssertionError("the real service was opened")


@pytest.mark.req("CC-065")
@pytest.mark.parametrize(
    "fakes",
    [
        {"never": FakePayments()},
        {Payments: FakePayments()},
        {Payments: FakePayments},
        {Payments: lambda rates: FakePayments()},
    ],
)
def test_a_test_replaces_services_by_name_or_type_with_objects_or_factories(fakes: dict[Any, Any]) -> None:
    app = an_app(never, rates)
    seen: list[Any] = []

    @app.consumer(SOURCE)
    def handle(order: int, pay: Payments) -> None:
        seen.append(pay)

    deliver(app, services=fakes)
    assert isinstance(seen[0], FakePayments)


@pytest.mark.req("CC-065")
def test_a_fake_of_an_unknown_service_is_refused() -> None:
    app = an_app(payments)

    @app.consumer(SOURCE)
    def handle(order: int, pay: Payments) -> None: ...

    for key in ("paymants", Smtp):
        with pytest.raises(
            ConfigurationError, match=r"no service (paymants|Smtp); the services are payments: Payments"
        ):
            deliver(app, services={key: 1})
    with pytest.raises(ConfigurationError, match=r"services must be a dict of fakes .*, not list"):
        deliver(app, services=[Payments()])  # type: ignore[arg-type]


@pytest.mark.req("CC-065")
def test_a_task_that_was_built_without_its_services_says_so() -> None:
    app = an_app(payments)

    @app.consumer(SOURCE)
    def handle(order: int, pay: Payments) -> None: ...

    task = task_class(app.consumers["handle"])(
        {"source": app.consumers["handle"].source.open(asynchronous=False)}
    )
    assert "without its service payments" in str(task.start_processing(Transaction(payload=1)).error)
