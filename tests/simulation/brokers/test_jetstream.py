"""The model of JetStream against a real server: the same messages, in any order, get the same answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import nats
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nats.aio.msg import Msg

from onceward._nats.wire import nats_loop
from onceward.testing import servers
from tests.simulation.brokers.jetstream import EXPECTED, NANOSECONDS, ModelJetStream

LEASE = 60.0
"""Seconds; far more than a run takes. What is to come back is given back."""
QUIET = 0.3
"""Seconds after which the server is not going to answer."""
STREAMS = st.sampled_from(["", "R"])
"""What follows the name: the stream of messages, or of records."""
Reply = tuple[str, Any]
"""The subject that it carries, without times, and its data or status."""


class Both:
    """Sends messages to both, and compares."""

    def __init__(self, url: str) -> None:
        self.name = f"both{uuid4().hex}"
        self._ahead = 0.0
        self._model = ModelJetStream(lambda: time.time() + self._ahead)
        self._nats = self._run(nats.connect(url))

    def close(self) -> None:
        for stream in (self.name, f"{self.name}R"):
            self._run(self._nats.request(f"$JS.API.STREAM.DELETE.{stream}", b""))
        self._run(self._nats.close())

    def send(
        self, subject: str, data: bytes = b"", headers: Mapping[str, str] | None = None, **limits: Any
    ) -> list[Any]:
        ours: list[tuple[str, bytes, Mapping[str, str]]] = []
        self._model.execute("test", subject, data, headers or {}, lambda *answer: ours.append(answer))
        theirs = self._run(self._send(subject, data, headers, **limits))
        self._ahead += limits.get("waits", 0.0)
        self._model.advance()
        shown = [_show(*each) for each in ours]
        assert shown == [_show(each.reply, each.data, each.headers or {}) for each in theirs], subject
        return [(reply, each.reply) for (reply, _, _), each in zip(ours, theirs, strict=True) if reply]

    def answer(self, delivery: tuple[str, str], word: bytes) -> None:
        ours, theirs = delivery
        answers: list[Any] = []
        self._model.execute("test", ours, word, {}, lambda *answer: answers.append(answer))
        assert len(answers) == len(self._run(self._send(theirs, word))), word

    async def _send(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        most: int = 1,
        waits: float = 0.0,
    ) -> list[Msg]:
        got: list[Msg] = []
        over = asyncio.Event()

        async def take(message: Msg) -> None:
            got.append(message)
            if len(got) >= most or (message.headers or {}).get("Status"):
                over.set()

        inbox = self._nats.new_inbox()
        received = await self._nats.subscribe(inbox, cb=take)
        await self._nats.publish(subject, data, reply=inbox, headers=dict(headers) if headers else None)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), QUIET + waits)
        await received.unsubscribe()
        return got

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, nats_loop()).result(30)


def _show(reply: str, data: bytes, headers: Mapping[str, str]) -> Reply:
    if "Status" in headers:
        return "", headers["Status"]
    tokens = reply.split(".")
    if len(tokens) == 9:  # without its time
        return ".".join([*tokens[:7], tokens[8]]), data
    return "", _known(msgspec.json.decode(data)) if data else b""


def _known(answer: Any) -> Any:
    """What the model has of an answer."""
    if "error" in answer:
        return answer["error"]["err_code"]
    if "message" in answer:
        return {name: answer["message"].get(name) for name in ("seq", "subject", "data")}
    if "delivered" in answer:
        return (
            answer["delivered"]["stream_seq"],
            answer["ack_floor"]["stream_seq"],
            answer["num_ack_pending"],
            answer["num_pending"],
        )
    if "state" in answer:
        state = answer["state"]
        return state["messages"], state["first_seq"], state["last_seq"], state.get("subjects") or None
    return {name: answer.get(name) for name in ("seq", "purged", "streams")}


class JetStreamMachine(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.both = Both(self.url)
        name = self.name = self.both.name
        self.held: list[tuple[str, str]] = []
        for stream, most in ((name, -1), (f"{name}R", 1)):
            self._ask(f"STREAM.INFO.{stream}")
            self._ask(
                f"STREAM.CREATE.{stream}",
                name=stream,
                subjects=[f"{stream}.>"],
                storage="memory",
                max_msgs_per_subject=most,
            )
        durable = {
            "durable_name": "c", "ack_policy": "explicit", "ack_wait": int(LEASE * NANOSECONDS),
            "max_deliver": -1, "max_ack_pending": -1,
        }  # fmt: skip
        self._ask(f"CONSUMER.INFO.{name}.c")
        self._ask(f"CONSUMER.CREATE.{name}.c", stream_name=name, config=durable, action="create")

    def _ask(self, what: str, **request: Any) -> None:
        self.both.send(f"$JS.API.{what}", msgspec.json.encode(request))

    @rule(stream=STREAMS, subject=st.sampled_from("ab"), last=st.sampled_from([None, 0, 1, 2]))
    def publish(self, stream: str, subject: str, last: int | None) -> None:
        headers = {} if last is None else {EXPECTED: str(last)}
        self.both.send(f"{self.name}{stream}.{subject}", b'{"x":1}', headers)

    @rule(subject=st.sampled_from("ab"))
    def purge(self, subject: str) -> None:
        self._ask(f"STREAM.PURGE.{self.name}R", filter=f"{self.name}R.{subject}")

    @rule(size=st.integers(1, 3))
    def pull(self, size: int) -> None:
        request = {"batch": size, "no_wait": True, "expires": int(0.05 * NANOSECONDS)}
        self.held += self.both.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.c", msgspec.json.encode(request), most=size, waits=0.1
        )

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        word=st.sampled_from([b"+ACK", b"-NAK", b'-NAK {"delay": 60000000000}', b"+TERM", b"+WPI"]),
    )
    def answer(self, data: st.DataObject, word: bytes) -> None:
        """Of any delivery, also an older one, and again."""
        self.both.answer(data.draw(st.sampled_from(self.held)), word)

    @rule(stream=STREAMS, pattern=st.sampled_from([">", "*", "a"]))
    def look(self, stream: str, pattern: str) -> None:
        name = f"{self.name}{stream}"
        self._ask(f"STREAM.INFO.{name}", subjects_filter=f"{name}.{pattern}")
        self._ask("STREAM.NAMES", subject=f"{name}.a")
        self._ask(f"STREAM.MSG.GET.{name}", last_by_subj=f"{name}.{pattern}")
        self._ask(f"STREAM.MSG.GET.{name}", seq=2, next_by_subj=f"{name}.{pattern}")

    @invariant()
    def they_are_the_same(self) -> None:
        self._ask(f"CONSUMER.INFO.{self.name}.c")

    def teardown(self) -> None:
        self.both.close()


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with servers.nats_server() as server:
        yield server.url


@pytest.mark.hypothesis
@pytest.mark.req("ST-18")
def test_the_model_is_like_the_server(nats_url: str) -> None:
    machine = type("Machine", (JetStreamMachine,), {"url": nats_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=20))  # type: ignore[arg-type]
