"""Services in a verification: fakes replace them, real ones are refused, and nothing outside is called."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from unittest.mock import AsyncMock, MagicMock
from urllib.request import urlopen

import pytest
from sqlalchemy import Engine, create_engine, make_url

from onceward import AsyncConsumerTask, ConsumerTask, Contract, Onceward, Transaction
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInboxSession, InboxSession
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from onceward.verify.watch.blockade import split

ONLY = ("clean", "outside-calls")


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charges (id TEXT)")


def contract(name: str) -> Contract:
    return Contract(
        consumer_id=name,
        event_types=["*"],
        owner_team="shop",
        idempotency_mechanism="a key",
        mode="effectful",
    )


EVENT = Transaction(id="order-1", payload={"total": 3}, metadata={"event_type": "order"})
BASE: dict[str, Any] = {"events": [EVENT], "setup": setup, "seed": 7, "only": ONLY}
WRITE = "INSERT INTO charges VALUES ('order-1')"


class Provider:
    """A payment provider that counts its calls."""

    def __init__(self) -> None:
        provider = self
        self.calls = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.calls += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/charge"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Payments:
    def __init__(self, url: str = "") -> None:
        self.url = url

    def charge(self, key: str) -> str:
        with urlopen(self.url, timeout=5):
            return "real"


class FakePayments(Payments):
    def charge(self, key: str) -> str:
        return f"fake-{key}"


def shop(url: str) -> Onceward:
    app = Onceward("shop", database="sqlite:///unused.db")

    @app.service
    def payments() -> Payments:
        raise AssertionError(f"opened a client of {url}")

    @app.consumer("memory://shop", contract=contract("charge"))
    def charge(order: dict[str, int], pay: Payments, session: InboxSession) -> None:
        assert isinstance(pay, Payments)
        session.effect("charge", pay.charge)
        session.execute(WRITE)

    return app


def examine(consumer: Any, **given: Any) -> VerificationReport:
    return examine_consumer(consumer, **{**BASE, **given})


# ── fakes ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usual("type", "of the engine")
@pytest.mark.req("CC-065")
@pytest.mark.parametrize(
    "fakes",
    [
        {Payments: FakePayments()},
        {"payments": FakePayments()},
        {Payments: FakePayments},
        lambda engine: {"payments": FakePayments(str(engine.url))},
    ],
    ids=["type", "name", "factory", "of the engine"],
)
def test_a_fake_replaces_a_service_whose_factory_is_never_called(fakes: Any) -> None:
    report = examine(shop("real").consumers.charge, services=fakes)
    assert report.passed, str(report)


@pytest.mark.req("CC-066")
@pytest.mark.parametrize("fakes", [None, lambda engine: {}], ids=["nothing", "a function"])
def test_without_a_fake_it_refuses_to_run_and_says_what_to_write(fakes: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        examine(shop("real").consumers.charge, services=fakes)
    for words in (
        "charge takes the real payments (test_services.py:",
        "services={Payments: FakePayments()}",
        "reads=['payments']",
        "@app.service(outside=False)",
    ):
        assert words in str(refused.value)


@pytest.mark.req("CC-066")
def test_what_a_real_service_needs_is_checked_too_and_what_a_fake_needs_is_not() -> None:
    app = shop("real")

    @app.service(outside=False)
    def gateway(payments: Payments) -> list[Payments]:
        return [payments]

    @app.consumer("memory://gateway", contract=contract("gateway"))
    def through(order: dict[str, int], gateway: list[Payments], session: InboxSession) -> None:
        session.effect("charge", gateway[0].charge)
        session.execute(WRITE)

    with pytest.raises(ConfigurationError, match=r"takes the real payments \(test_services"):
        examine(app.consumers.through)
    assert examine(app.consumers.through, services={Payments: FakePayments()}).passed
    assert examine(app.consumers.through, services={"gateway": lambda: [FakePayments()]}).passed


@pytest.mark.req("CC-065")
def test_the_fake_of_an_unknown_service_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no service paymants; the services are payments: Payments"):
        examine(shop("real").consumers.charge, services={"paymants": FakePayments()})


class Part:
    def create(self) -> str:
        return "done"

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Client(FakePayments):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.charges = Part()


@pytest.mark.req("CC-066")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda client: client.charge("k"), "payments.charge"),
        (lambda client: client.charges.create(), "payments.charges.create"),
        pytest.param(
            lambda client: client.charges.__enter__(), "payments.charges.__enter__", marks=pytest.mark.long
        ),
    ],
)
def test_a_call_of_a_fake_outside_an_effect_is_found(call: Callable[[Any], Any], name: str) -> None:
    app = shop("real")

    @app.consumer("memory://direct", contract=contract("direct"))
    def direct(order: dict[str, int], client: Payments, session: InboxSession) -> None:
        assert client.limit == 3  # type: ignore[attr-defined]
        call(client)
        session.execute(WRITE)

    report = examine(app.consumers.direct, services={Payments: Client()})
    assert f"the handler called {name} at" in str(report["outside-calls"])
    assert examine(app.consumers.direct, services={Payments: Client()}, reads=["payments"]).passed


@pytest.mark.req("CC-065", "CC-066")
def test_a_mock_is_a_fake() -> None:
    report = examine(
        shop("real").consumers.charge,
        services={Payments: MagicMock(Payments, **{"charge.return_value": "paid"})},
    )
    assert report.passed, str(report)
    app = Onceward("shop", database="sqlite:///unused.db")

    @app.service
    async def payments() -> Payments:
        raise AssertionError("opened the real one")

    @app.consumer("memory://mock", contract=contract("mock"))
    async def direct(order: dict[str, int], pay: Payments, session: AsyncInboxSession) -> None:
        await pay.charge("k")  # type: ignore[misc]
        await session.execute(WRITE)

    report = examine(app.consumers.direct, services={Payments: AsyncMock()})
    assert report["clean"].result is ScenarioStatus.PASSED, str(report)
    assert "the handler called payments.charge at" in str(report["outside-calls"])


@pytest.mark.req("CC-065")
def test_async_services_are_replaced_and_opened_in_the_loop() -> None:
    app = Onceward("shop", database="sqlite:///unused.db")

    @app.service
    async def payments() -> AsyncIterator[Payments]:
        raise AssertionError("opened the real one")
        yield Payments()

    @app.consumer("memory://aio", contract=contract("aio"))
    async def charge(order: dict[str, int], pay: Payments, session: AsyncInboxSession) -> None:
        async def call(key: str) -> str:
            return pay.charge(key)

        await session.effect("charge", call)
        await session.execute(WRITE)

    async def fake() -> AsyncIterator[Payments]:
        await asyncio.sleep(0)
        yield FakePayments()
        await asyncio.sleep(0)

    report = examine(app.consumers.charge, services={Payments: fake})
    assert report.passed, str(report)


# ── the blockade ────────────────────────────────────────────────────────────────────────────────────────


class Effect(Protocol):
    def __call__(self, key: str, port: int) -> Any: ...


def with_urllib(key: str, port: int) -> None:
    urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()


def by_name(key: str, port: int) -> None:
    urlopen("http://api.example.invalid/", timeout=5).close()


def in_a_thread(key: str, port: int) -> None:
    thread = threading.Thread(target=with_urllib, args=(key, port))
    thread.start()
    thread.join()


def a_datagram(key: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"charge", ("127.0.0.1", port))


def a_process(key: str, port: int) -> None:
    subprocess.run(["true"], check=True)


def swallowed(key: str, port: int) -> str:
    try:
        with_urllib(key, port)
    except OSError:
        return "offline"
    return "done"


@pytest.mark.usual("by_name", "in_a_thread", "a_process")
@pytest.mark.req("CC-066")
@pytest.mark.parametrize(
    ("effect", "target"),
    [
        (with_urllib, "would call 127.0.0.1:{port}"),
        (by_name, "would call api.example.invalid:80"),
        (in_a_thread, "would call 127.0.0.1:{port}"),
        (a_datagram, "would call 127.0.0.1:{port}"),
        (a_process, "would start the process 'true'"),
        (swallowed, "would call 127.0.0.1:{port}"),
    ],
)
def test_an_effect_is_stopped_before_it_calls_the_provider(
    provider: Provider, effect: Effect, target: str
) -> None:
    class Charge(ConsumerTask):
        contract = contract("charging")

        def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
            session.effect("charge", lambda key: effect(key, provider.port))
            session.execute(WRITE)

    report = examine(Charge)
    found = str(report["outside-calls"])
    assert f"effect 'charge' of 'charging' {target.format(port=provider.port)} at {__file__}:" in found
    assert "the verification made no such call" in found
    assert "services={Client: FakeClient()}" in found
    assert provider.calls == 0


@pytest.mark.req("CC-066")
def test_an_effect_in_asyncio_is_stopped_too(provider: Provider) -> None:
    async def call(key: str) -> None:
        await asyncio.open_connection("127.0.0.1", provider.port)

    async def call_in_thread(key: str) -> None:
        await asyncio.to_thread(with_urllib, key, provider.port)

    class Charge(AsyncConsumerTask):
        contract = contract("charging")

        async def process_transaction(self, transaction: Transaction, session: AsyncInboxSession) -> None:
            await session.effect("charge", call if transaction.id == "order-1" else call_in_thread)

    events = [EVENT, Transaction(id="order-2", payload={}, metadata={"event_type": "order"})]
    report = examine(Charge, events=events)
    found = str(report["outside-calls"])
    assert f"effect 'charge' of 'charging' would call 127.0.0.1:{provider.port}" in found
    assert "test_services.py" in found
    assert report["clean"].result is ScenarioStatus.FAILED
    assert provider.calls == 0


@pytest.mark.req("CC-066")
def test_a_server_of_a_fake_may_be_called_where_it_is_allowed(provider: Provider) -> None:
    class Charge(ConsumerTask):
        contract = contract("charging")

        def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
            with suppress(socket.gaierror):  # the name of this machine may have no address
                socket.gethostbyname(socket.gethostname())
            session.effect("charge", lambda key: with_urllib(key, provider.port))
            session.execute(WRITE)

    assert not examine(Charge, allow=["127.0.0.1:1"]).passed
    assert provider.calls == 0
    for allowed in (f"127.0.0.1:{provider.port}", "localhost", provider.url):
        assert examine(Charge, allow=[allowed]).passed
    assert provider.calls > 0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost", "localhost", None),
        ("localhost:80", "localhost", 80),
        ("::1", "::1", None),
        ("[::1]:80", "::1", 80),
        ("http://user@fake.test:8080/charge", "fake.test", 8080),
        ("/run/fake.sock", "/run/fake.sock", None),
    ],
)
def test_allow_takes_hosts_ports_urls_and_sockets(text: str, host: str, port: int | None) -> None:
    assert split(text) == (host, port)


@pytest.mark.req("CC-066")
def test_a_real_service_that_only_reads_may_read(provider: Provider) -> None:
    app = Onceward("shop", database="sqlite:///unused.db")

    @app.service
    def rates() -> Payments:
        return Payments(provider.url)

    @app.consumer("memory://reads", contract=contract("reads"))
    def reads(order: dict[str, int], rates: Payments, session: InboxSession) -> None:
        rates.charge("only a name")
        session.execute(WRITE)

    for key in ("rates", Payments):
        report = examine(app.consumers.reads, reads=[key])
        assert report.passed, str(report)
    assert provider.calls > 0


@pytest.mark.req("CC-066")
def test_an_effect_reaches_no_other_database_but_the_verifications(postgres_url: str) -> None:
    class Charge(ConsumerTask):
        contract = contract("charging")

        def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
            def call(key: str) -> None:
                engine = create_engine(self.services["url"])
                with engine.begin() as connection:
                    connection.exec_driver_sql("SELECT 1")

            session.effect("charge", call)
            session.execute(WRITE)

    def own(engine: Engine) -> dict[str, Any]:
        return {"url": engine.url}

    database = make_url(postgres_url).set(drivername="postgresql+psycopg")
    other = examine(Charge, database=postgres_url, services={"url": database})
    assert "effect 'charge' of 'charging' would call" in str(other["outside-calls"])
    assert examine(Charge, database=postgres_url, services=own).passed
