"""Who probes: only a consumer that has fetched a message, so one that starts nothing keeps nobody from it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onceward import Contract, Limit, Onceward, RetryLater, outage
from onceward._sync import run_blocking
from onceward.app.build import open_task, open_task_async
from onceward.failures.board import shown
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction
from tests.support.wait import until

POLICY = {"loop": {"streaming": True}}
SOON = outage(probe_every="100ms", after=2)


class PayDown(Exception):
    pass


class MailDown(Exception):
    pass


def send(app: Onceward, name: str, *payloads: Any) -> None:
    queue = app.consumers[name].source.open(asynchronous=False)
    queue.dispatch_transactions([Transaction(payload=each) for each in payloads])
    queue.close()


@contextmanager
def running(app: Onceward) -> Iterator[None]:
    """All consumers of an app, each in a thread."""
    with ExitStack() as at_the_end:
        for consumer in app.consumers.values():
            task: list[Any] = []

            def run(consumer: Any = consumer, task: list[Any] = task) -> None:
                async def run_async() -> None:
                    async with open_task_async(app, consumer) as opened:
                        task.append(opened)
                        await opened.consume_transactions(consumer.policy)

                if consumer.asynchronous:
                    asyncio.run(run_async())
                    return
                with open_task(app, consumer) as opened:
                    task.append(opened)
                    opened.consume_transactions(consumer.policy)

            thread = threading.Thread(target=run)
            thread.start()
            at_the_end.callback(thread.join, 60)
            until(lambda task=task: task)
            at_the_end.callback(task[0].stop)
        yield


class Shop:
    """An app with a busy consumer, which needs `pay`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.app = Onceward(
            "shop",
            database=f"sqlite:///{directory}/shop.db",
            dependencies={"pay": SOON, "mail": SOON},
            failures={PayDown: outage(of="pay")},
        )
        self.down = True
        self.failed = 0
        self.done: list[Any] = []
        self.add("busy", self.charge)

    def charge(self, payload: Any) -> None:
        if self.down:
            self.failed += 1
            raise PayDown
        self.done.append(payload)

    def add(
        self,
        name: str,
        handle: Callable[[Any], None],
        *,
        source: str = "",
        asynchronous: bool = False,
        **rules: Any,
    ) -> None:
        source = source or f"sqlite:///{self.directory}/{name}.db?synchronous=OFF"
        rules = {"policy": POLICY, "contract": None, "depends_on": ["pay"], **rules}

        def in_threads(payload: Any) -> None:
            handle(payload)

        async def in_asyncio(payload: Any) -> None:
            handle(payload)

        function = in_asyncio if asynchronous else in_threads
        self.app.consumer(source, name=name, **rules)(function)

    def goes_down_and_comes_back(self, probes: int = 3) -> None:
        send(self.app, "busy", *range(8))
        until(lambda: self.app.board.down)
        failed = self.failed
        until(lambda: self.failed >= failed + probes)
        self.down = False
        until(lambda: sorted(self.done) == list(range(8)))
        until(lambda: not self.app.board.down)


@pytest.mark.req("OU-13")
@pytest.mark.parametrize("kind", ["threads", "asyncio", "redis", "two"])
def test_a_consumer_without_messages_keeps_nobody_from_probing(kind: str, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with ExitStack() as servers:
        rules: dict[str, Any] = {"asynchronous": kind == "asyncio"}
        if kind == "redis":
            rules["source"] = f"{servers.enter_context(redis_server()).url}/idle"
        if kind == "two":
            rules["depends_on"] = ["mail", "pay"]
        shop.add("idle", print, **rules)
        with running(shop.app):
            shop.goes_down_and_comes_back()


@pytest.mark.req("OU-13")
@pytest.mark.parametrize("kind", ["order", "group", "batch"])
def test_consumers_with_a_contract_probe_and_keep_nobody_from_it(kind: str, tmp_path: Path) -> None:
    """Two of them: each is at first idle while the other probes."""
    shop = Shop(tmp_path)
    failed, done, down = Counter[str](), Counter[str](), {"first", "second"}

    def work(name: str) -> None:
        if name in down:
            failed[name] += 1
            raise PayDown
        done[name] += 1

    for name in ("first", "second"):
        more = {"order_by": "n"} if kind == "order" else {"commit": "group"} if kind == "group" else {}

        def of_one(payload: dict, session: Any, *, name: str = name) -> None:  # type: ignore[type-arg]
            work(name)

        def of_batch(payloads: list[dict], session: Any, *, name: str = name) -> None:  # type: ignore[type-arg]
            for _ in payloads:
                work(name)

        shop.app.consumer(
            f"sqlite:///{tmp_path}/{name}.db",
            name=name,
            policy=POLICY,
            contract=Contract(
                consumer_id=name,
                event_types=["*"],
                owner_team="tests",
                idempotency_mechanism="record and row together",
            ),
            depends_on=["pay"],
            **more,
        )(of_batch if kind == "batch" else of_one)
    with running(shop.app):
        for name in ("first", "second"):
            send(shop.app, name, *({"n": number} for number in range(4)))
            until(lambda: shop.app.board.down)
            before = failed[name]
            until(lambda name=name, before=before: failed[name] >= before + 2)
            down.discard(name)
            until(lambda name=name: done[name] == 4)
            until(lambda: not shop.app.board.down)


@pytest.mark.req("OU-13")
@pytest.mark.parametrize("limit", [Limit(rate="1/h"), Limit(concurrency=1)], ids=["rate", "concurrency"])
def test_a_consumer_that_waits_for_its_limit_keeps_nobody_from_probing(limit: Limit, tmp_path: Path) -> None:
    shop, begun, over = Shop(tmp_path), threading.Event(), threading.Event()

    def handle(_: Any) -> None:
        begun.set()
        if limit.concurrency:
            over.wait(60)

    shop.add("limited", handle, limit=limit)
    with running(shop.app):
        send(shop.app, "limited", "first", "second")
        until(begun.is_set)
        try:
            shop.goes_down_and_comes_back()
        finally:
            over.set()


@pytest.mark.req("OU-13")
def test_a_message_that_is_not_tried_after_all_gives_its_probe_back(tmp_path: Path) -> None:
    """Here a handler asks for a later delivery, so nothing is known about what is down."""
    shop = Shop(tmp_path)
    asked: list[Any] = []

    def later(payload: Any) -> None:
        asked.append(payload)
        raise RetryLater(after="100ms")

    shop.add("other", later)
    with running(shop.app):
        send(shop.app, "busy", 100, 101)
        until(lambda: shop.app.board.down)
        send(shop.app, "other", "x")
        until(lambda: asked)
        failed = shop.failed
        until(lambda: shop.failed >= failed + 2)
        shop.down = False
        until(lambda: sorted(shop.done) == [100, 101])


@pytest.mark.req("OU-13")
def test_a_consumer_that_is_paused_keeps_nobody_from_probing(tmp_path: Path) -> None:
    from onceward.failures import records
    from onceward.inbox import Inbox
    from onceward.storage.database import BlockingStoragePorts, Sql

    shop = Shop(tmp_path)
    shop.add("idle", print)
    engine = shop.app.create_engine()
    Inbox(engine).migrate()
    ports = BlockingStoragePorts(engine)
    run_blocking(ports.transact(records.pause, Sql("sqlite"), ("idle", "idle"), "anna", ""))
    engine.dispose()
    with running(shop.app):
        send(shop.app, "idle", *range(5))
        shop.goes_down_and_comes_back()


@pytest.mark.req("OU-10")
def test_a_probe_that_finds_something_else_down_says_so(tmp_path: Path) -> None:
    """`pay` is up again and `mail` is down: the consumer that needs both does not blame `pay`."""
    shop = Shop(tmp_path)
    mail_is_down = False

    def both(payload: Any) -> None:
        shop.charge(payload)
        if mail_is_down:
            shop.done.remove(payload)
            raise MailDown("no mail")

    shop.app.consumers.clear()
    shop.add("both", both, depends_on=["pay", "mail"], failures={MailDown: outage(of="mail", after=2)})
    with running(shop.app):
        send(shop.app, "both", *range(8))
        until(lambda: "dependency:pay" in shop.app.board.down)
        mail_is_down, shop.down = True, False
        down = until(lambda: len(shop.app.board.down) == 2 and dict(shop.app.board.down))
        assert "MailDown" not in down["dependency:pay"].reason
        assert "MailDown" in down["dependency:mail"].reason
        mail_is_down = False
        until(lambda: sorted(shop.done) == list(range(8)))
        until(lambda: not shop.app.board.down)


@pytest.mark.req("OU-10")
def test_a_rule_of_the_app_holds_a_consumer_that_does_not_name_the_dependency_alone(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.app.consumers.clear()
    shop.add("unaware", shop.charge, depends_on=["mail"])
    shop.add("named", shop.done.append)
    with running(shop.app):
        send(shop.app, "unaware", *range(8))
        until(lambda: shop.app.board.down)
        assert [shown(each) for each in shop.app.board.down] == ["unaware"]
        send(shop.app, "named", "x")
        until(lambda: shop.done == ["x"])
        shop.down = False
        until(lambda: len(shop.done) == 9)
        until(lambda: not shop.app.board.down)


@pytest.mark.req("OU-10")
def test_apps_that_share_a_database_may_have_consumers_of_the_same_name(tmp_path: Path) -> None:
    shop, billing = Shop(tmp_path), Onceward("billing", database=f"sqlite:///{tmp_path}/shop.db")
    shop.app.consumers.clear()
    shop.add("charge", shop.charge, depends_on=[])
    billed: list[Any] = []
    source = f"sqlite:///{tmp_path}/billing.db?synchronous=OFF"

    @billing.consumer(source, contract=None, policy=POLICY)
    def charge(payload: Any) -> None:
        billed.append(payload)

    with running(shop.app), running(billing):
        send(shop.app, "charge", *range(8))
        until(lambda: billing.board.down)
        failed = shop.failed
        send(billing, "charge", *range(20))
        until(lambda: len(billed) == 20)
        until(lambda: shop.failed >= failed + 3)
        assert [each.probes >= 2 for each in billing.board.down.values()] == [True], (
            "one outage, that goes on"
        )
        shop.down = False
        until(lambda: len(shop.done) == 8)
