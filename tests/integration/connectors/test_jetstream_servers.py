"""JetStream as it is configured: users, TLS, streams and consumers of others, durability, and what can be counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from onceward import Transaction
from onceward._nats.connection import NatsUnavailable
from onceward._nats.wire import nats_loop
from onceward.boundary.certs import Authority
from onceward.connectors import ServerUnreachable, Survives
from onceward.connectors.jetstream import JetStreamConnector
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.servers import free_port, nats_server
from onceward.transaction import Settlement, Verdict
from tests.support.nats_config import configured_nats
from tests.support.nats_jwt import operated

BUSINESS = TransactionException("card expired", ExceptionCategory.BUSINESS)


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


@pytest.fixture
def stream() -> str:
    return f"test-{uuid4().hex}"


def on_nats(url: str, work: Callable[[Any], Any], **options: Any) -> Any:
    async def run() -> Any:
        client = await nats.connect(url, **options)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run_coroutine_threadsafe(run(), nats_loop()).result(30)


def round_trip(connector: Any) -> list[str]:
    with connector:
        connector.dispatch_transactions([Transaction("t1")])
        return [each.id for each in connector.fetch_transactions(5)]


# ── users ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-07")
def test_a_password_and_a_token_in_the_url_are_used(tmp_path: Path) -> None:
    with configured_nats(tmp_path, 'authorization { user: ann, password: "a/b@c" }') as server:
        url = server.url.replace("nats://", "nats://ann:a%2Fb%40c@")
        assert round_trip(Address(f"{url}/ORDERS").open(asynchronous=False)) == ["t1"]
        with (
            JetStreamConnector(server.url, "ORDERS") as stranger,
            pytest.raises(Exception, match="Authorization"),
        ):
            stranger.fetch_transactions(1)


@pytest.mark.req("NJ-07")
def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    tls = Authority(tmp_path / "certs", days=2).issue("nats", "nats", ["127.0.0.1"])
    config = f'tls {{ cert_file: "{tls.cert}", key_file: "{tls.key}" }}'
    with configured_nats(tmp_path, config) as server:
        url = server.url.replace("nats://", "tls://")
        assert round_trip(Address(f"{url}/ORDERS?ca={tls.ca}").open(asynchronous=False)) == ["t1"]


@pytest.mark.req("NJ-07")
def test_a_client_certificate_is_shown_to_a_server_that_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    authority = Authority(tmp_path / "certs", days=2)
    tls = authority.issue("nats", "nats", ["127.0.0.1"])
    ours = authority.issue("shop", "shop", ["127.0.0.1"])
    files = f'cert_file: "{tls.cert}", key_file: "{tls.key}", ca_file: "{tls.ca}"'
    with configured_nats(tmp_path, f"tls {{ {files}, verify: true }}") as server:
        url = f"{server.url.replace('nats://', 'tls://')}/ORDERS?ca={tls.ca}"
        whole = f"{url}&cert={ours.cert}&key={ours.key}"
        assert round_trip(Address(whole).open(asynchronous=False)) == ["t1"]
        with (
            Address(url).open(asynchronous=False) as stranger,
            pytest.raises(NatsUnavailable, match=r"cannot be reached|certificate|connection"),
        ):
            stranger.fetch_transactions(1)


@pytest.mark.req("NJ-07")
def test_a_credentials_file_is_used_and_another_users_is_refused(tmp_path: Path) -> None:
    config, creds = operated(tmp_path)
    (tmp_path / "other").mkdir()
    _, others = operated(tmp_path / "other")
    with configured_nats(tmp_path, config) as server:
        url = f"{server.url}/ORDERS?creds="
        assert round_trip(Address(f"{url}{creds}").open(asynchronous=False)) == ["t1"]
        with (
            Address(f"{url}{others}").open(asynchronous=False) as stranger,
            pytest.raises(Exception, match="Authorization"),
        ):
            stranger.fetch_transactions(1)


@pytest.mark.req("NJ-07")
def test_a_file_that_is_not_one_of_credentials_is_refused_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "user.creds").write_text("SUSECRETSEED")
    with pytest.raises(ConfigurationError, match="is not a credentials file of NATS") as refused:
        Address(f"nats://127.0.0.1:1/ORDERS?creds={tmp_path}/user.creds").open(asynchronous=False)
    assert "SUSECRETSEED" not in str(refused.value)


@pytest.mark.req("NJ-07")
def test_a_user_without_permission_is_told_what_is_missing(tmp_path: Path) -> None:
    allowed = '["$JS.API.STREAM.INFO.*", "_INBOX.>"]'
    config = (
        "authorization { users: [{ user: ann, password: secret12, permissions: "
        f'{{ publish: {allowed}, subscribe: ["_INBOX.>"] }} }}] }}'
    )
    with configured_nats(tmp_path, config) as server:
        url = server.url.replace("nats://", "nats://ann:secret12@")
        with (
            Address(f"{url}/ORDERS").open(asynchronous=False) as connector,
            pytest.raises(
                ConfigurationError, match=r"refuses this user: .*STREAM\.CREATE\.ORDERS"
            ) as refused,
        ):
            connector.fetch_transactions(1)
        assert "secret12" not in str(refused.value)


@pytest.mark.req("NJ-07")
def test_a_nats_without_jetstream_is_refused(tmp_path: Path) -> None:
    with (
        configured_nats(tmp_path, "", jetstream=False) as server,
        JetStreamConnector(server.url, "ORDERS") as connector,
        pytest.raises(Exception, match="has no JetStream"),
    ):
        connector.fetch_transactions(1)


# ── streams and consumers of others ─────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-07")
@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"ack_policy": AckPolicy.ALL}, "its ack policy is all; a queue needs explicit"),
        ({"ack_policy": AckPolicy.EXPLICIT, "max_deliver": 3}, "its max_deliver is 3"),
        ({"ack_policy": AckPolicy.EXPLICIT, "ack_wait": 30}, r"its ack wait is 30 s.* add \?lease=30"),
        ({"ack_policy": AckPolicy.EXPLICIT, "ack_wait": 60, "deliver_subject": "x"}, "it is a push consumer"),
        ({"ack_policy": AckPolicy.EXPLICIT, "ack_wait": 60, "headers_only": True}, "delivers no bodies"),
    ],
)
def test_a_consumer_that_cannot_be_used_is_refused(
    nats_url: str, stream: str, config: dict[str, Any], problem: str
) -> None:
    async def make(js: Any) -> None:
        await js.add_stream(name=stream, subjects=[stream])
        await js.add_consumer(stream, ConsumerConfig(durable_name="billing", **config))

    on_nats(nats_url, make)
    with (
        JetStreamConnector(nats_url, stream, "billing") as connector,
        pytest.raises(ConfigurationError, match=f"the consumer billing of stream {stream} .*{problem}"),
    ):
        connector.fetch_transactions(1)


@pytest.mark.req("NJ-07")
def test_a_stream_with_several_subjects_needs_one_to_publish_to(nats_url: str, stream: str) -> None:
    on_nats(nats_url, lambda js: js.add_stream(name=stream, subjects=[f"{stream}.*"]))
    with (
        JetStreamConnector(nats_url, stream) as connector,
        pytest.raises(
            ConfigurationError, match=r"takes the subjects .*; name the one to publish to: add \?subject="
        ),
    ):
        connector.dispatch_transactions([Transaction()])
    with (
        JetStreamConnector(nats_url, stream, subject="elsewhere") as connector,
        pytest.raises(ConfigurationError, match="the subject elsewhere is taken by no stream"),
    ):
        connector.dispatch_transactions([Transaction()])
    assert round_trip(JetStreamConnector(nats_url, stream, subject=f"{stream}.new")) == ["t1"]


@pytest.mark.req("NJ-07")
def test_a_stream_without_atomic_batches_takes_one_transaction_at_a_time(nats_url: str, stream: str) -> None:
    on_nats(nats_url, lambda js: js.add_stream(name=stream, subjects=[stream]))
    with JetStreamConnector(nats_url, stream) as connector:
        with pytest.raises(ConfigurationError, match="set allow_atomic in its configuration"):
            connector.dispatch_transactions([Transaction("a"), Transaction("b")])
        connector.dispatch_transactions([Transaction("c")])
        assert [each.id for each in connector.fetch_transactions(5)] == ["c"]


@pytest.mark.req("NJ-07")
def test_a_work_queue_can_be_consumed_and_a_second_consumer_of_it_is_refused(
    nats_url: str, stream: str
) -> None:
    config = StreamConfig(name=stream, subjects=[stream], retention=RetentionPolicy.WORK_QUEUE)
    on_nats(nats_url, lambda js: js.add_stream(config))
    with JetStreamConnector(nats_url, stream) as connector:
        connector.dispatch_transactions([Transaction("a")])
        [fetched] = connector.fetch_transactions(1)
        connector.settle_transactions([Settlement(fetched, Verdict.FAILED, BUSINESS)])
        assert [each.transaction_id for each in connector.dead_letters()] == ["a"]
        assert on_nats(nats_url, lambda js: js.stream_info(stream)).state.messages == 0
    with (
        JetStreamConnector(nats_url, stream, "other") as second,
        pytest.raises(ConfigurationError, match="is a work queue, which has one consumer"),
    ):
        second.fetch_transactions(1)


# ── explain and balance ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-08")
@pytest.mark.parametrize(
    ("durable", "survives"), [(True, Survives.MACHINE_CRASH), (False, Survives.PROCESS_CRASH)]
)
def test_explain_reads_from_the_servers_monitoring_whether_they_sync(
    durable: bool, survives: Survives
) -> None:
    port = free_port()
    with nats_server(durable=durable, monitoring=port) as server:
        found = Address(f"{server.url}/ORDERS?monitoring={port}").facts()
        assert found.durability is not None
        assert (found.durability.survives, found.redelivers, found.hazards) == (survives, True, ())
        assert "sync_interval: always" in found.durability.why
        assert on_nats(server.url, lambda js: js.streams_info()) == [], "it changes nothing"


@pytest.mark.req("NJ-08")
def test_what_cannot_be_read_is_unknown_and_limits_are_hazards(nats_url: str, stream: str) -> None:
    config = StreamConfig(name=stream, subjects=[stream], max_msgs=10, max_age=60, storage=StorageType.MEMORY)

    async def make(js: Any) -> None:
        await js.add_stream(config)
        await js.add_consumer(
            stream, ConsumerConfig(durable_name="onceward", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=7)
        )

    on_nats(nats_url, make)
    found = Address(f"{nats_url}/{stream}").facts()
    assert found.durability is not None
    assert found.durability.survives is Survives.NOTHING
    assert [each.why.partition(":")[0] for each in found.hazards] == [
        f"the stream {stream} has max_age and max_msgs",
        "the consumer has max_ack_pending 7",
    ]
    unknown = Address(f"{nats_url}/other?monitoring=1").facts().durability
    assert unknown is not None
    assert unknown.survives is None
    assert "not checked" in unknown.why


@pytest.mark.req("NJ-08")
def test_a_server_that_does_not_answer_is_unreachable() -> None:
    address = Address(f"nats://127.0.0.1:{free_port()}/ORDERS")
    assert "cannot be reached" in address.facts().unreachable[0]
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        address.counts()


@pytest.mark.req("NJ-08")
def test_balance_counts_and_lists_what_ended_and_what_did_not(nats_url: str, stream: str) -> None:
    address = Address(f"{nats_url}/{stream}")
    assert address.counts().missing is not None
    with address.open(asynchronous=False) as connector:
        connector.dispatch_transactions([Transaction(f"t{number}") for number in range(6)])
        unread = address.counts()
        assert (unread.appended, unread.pending, unread.untouched, unread.missing) == (6, 6, 6, None)
        fetched = connector.fetch_transactions(4)
        flying = address.counts()
        assert (flying.done, flying.pending, flying.untouched, flying.messages) == (0, 6, 2, None)
        verdicts = [Verdict.DONE, Verdict.DONE, Verdict.FAILED, Verdict.FAILED]
        connector.settle_transactions(
            [Settlement(each, verdict, BUSINESS) for each, verdict in zip(fetched, verdicts, strict=True)]
        )
        dead = {each.transaction_id: each.key for each in connector.dead_letters()}  # they died together
        connector.forget_dead([dead["t2"]])
        rested = address.counts()
        assert (rested.appended, rested.done, rested.pending, rested.dead, rested.moved) == (6, 2, 2, 1, 1)
        assert rested.messages is not None
        assert [each.tracking_id for each in rested.messages.done] == ["t0", "t1"]
        assert [each.tracking_id for each in rested.messages.moved] == ["t2"]
        assert [each.tracking_id for each in rested.messages.others] == ["t3", "t4", "t5"]
    assert "no consumer 'other'" in str(Address(f"{nats_url}/{stream}?consumer=other").counts().missing)


@pytest.mark.req("NJ-08", "CC-071")
def test_what_was_removed_from_the_stream_or_is_filtered_is_not_guessed(nats_url: str, stream: str) -> None:
    address = Address(f"{nats_url}/{stream}")
    with address.open(asynchronous=False) as connector:
        connector.dispatch_transactions([Transaction(f"t{number}") for number in range(3)])
        on_nats(nats_url, lambda js: js.delete_msg(stream, 1))
        unread = address.counts()
        assert sum(unread.dropped.values()) == 1
        assert "1 message is no longer in the stream" in unread.unknown[0]
        assert "it has missed them" in unread.unknown[0]
        connector.fetch_transactions(1)
        counted = address.counts()
        assert "1 message is no longer in the stream" in counted.unknown[0]
        assert counted.messages is None
    filtered = ConsumerConfig(
        durable_name="some", ack_policy=AckPolicy.EXPLICIT, filter_subject=stream, ack_wait=60
    )
    on_nats(nats_url, lambda js: js.add_consumer(stream, filtered))
    some = Address(f"{nats_url}/{stream}?consumer=some").counts()
    assert (some.appended, some.done) == (None, None)
    assert "only some subjects" in some.notes["appended"]
