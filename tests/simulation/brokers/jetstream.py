"""A model of NATS with JetStream: streams and pull consumers, as far as the connector uses them.

A request is a subject and bytes; answers are what the server sends. Messages are published one at a time. It takes an
acknowledgment of any delivery, as JetStream does, and does not answer one of a delivery that it does not know of.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Any

import msgspec

NANOSECONDS = 1_000_000_000
NO_MESSAGE, NO_CONSUMER, NO_STREAM, ANOTHER_LAST = 10037, 10014, 10059, 10071
NO_MORE = {"Status": "404", "Description": "No Messages"}
REQUEST_TIMEOUT = {"Status": "408", "Description": "Request Timeout"}
NO_RESPONDERS = {"Status": "503"}
EXPECTED = "Nats-Expected-Last-Subject-Sequence"

Answer = Callable[[str, bytes, Mapping[str, str]], None]
"""Sends a message to the one that asked: the reply subject that it carries, its data and headers."""


@dataclass
class Stored:
    subject: str
    data: bytes
    at: float


@dataclass
class Pulling:
    """A request for messages that is waiting."""

    answer: Answer
    caller: Any
    left: int
    expires: float
    served: bool = False


@dataclass
class Durable:
    """A consumer. `pending` has the messages that were delivered and did not end: when each comes back."""

    config: dict[str, Any]
    created: float
    last: int = 0
    delivered: int = 0
    """Deliveries in all."""
    pending: dict[int, float] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """How often each of them was delivered."""
    again: deque[int] = field(default_factory=deque)
    """Those that are due."""

    def floor(self) -> int:
        return min(self.pending, default=self.last + 1) - 1


@dataclass
class StreamModel:
    config: dict[str, Any]
    messages: dict[int, Stored] = field(default_factory=dict)
    last: int = 0
    consumers: dict[str, Durable] = field(default_factory=dict)


class ModelJetStream:
    """`clock` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.streams: dict[str, StreamModel] = {}
        self._pulls: dict[tuple[str, str], deque[Pulling]] = {}
        self.served: Callable[[Any, str, int, int], None] = lambda *_: None
        """Called with the caller, the stream, a message and its delivery's number."""
        self.acknowledged: Callable[[Any, str, int, bytes], None] = lambda *_: None
        """Called with the caller, the stream, a message and the answer to its delivery, before it is done."""
        self.stored: Callable[[Any, str, bytes], None] = lambda *_: None
        """Called with the caller, a subject and its new message."""

    def snapshot(self) -> dict[str, StreamModel]:
        return copy.deepcopy(self.streams)

    def restart(self, streams: dict[str, StreamModel]) -> None:
        """Come back with these, as `snapshot` has returned them. Nobody waits for messages any more."""
        self.streams = copy.deepcopy(streams)
        self._pulls.clear()

    def leave(self, caller: Any) -> None:
        """The connection of a caller is closed: it waits for nothing."""
        for key, pulls in self._pulls.items():
            self._pulls[key] = deque(each for each in pulls if each.caller is not caller)

    def execute(
        self, caller: Any, subject: str, data: bytes, headers: Mapping[str, str], answer: Answer
    ) -> None:
        """Do what a message asks for. Only the reply subject of a delivery is not empty."""
        if subject.startswith("$JS.ACK."):
            self._take_ack(caller, subject.split("."), data, answer)
        elif subject.startswith("$JS.API.CONSUMER.MSG.NEXT."):
            self._pull(caller, subject.split(".")[5:], msgspec.json.decode(data), answer)
        elif subject.startswith("$JS.API."):
            kind, method, *names = subject.removeprefix("$JS.API.").split(".")
            if method == "MSG":
                method, names = f"msg_{names[0]}", names[1:]
            call = getattr(self, f"_{kind}_{method}".lower())
            reply = call(*names, **msgspec.json.decode(data or b"{}"))
            answer("", msgspec.json.encode(reply), {})
        else:
            self._publish(caller, subject, data, headers, answer)
        self.advance()

    # ── streams ─────────────────────────────────────────────────────────────────────────────────────────

    def _publish(
        self, caller: Any, subject: str, data: bytes, headers: Mapping[str, str], answer: Answer
    ) -> None:
        found = [each for each in self.streams.values() if _takes(each.config["subjects"], subject)]
        if not found:
            answer("", b"", NO_RESPONDERS)
            return
        stream = found[0]
        before = {seq: each for seq, each in stream.messages.items() if each.subject == subject}
        if EXPECTED in headers and int(headers[EXPECTED]) != max(before, default=0):
            answer("", msgspec.json.encode(_problem(ANOTHER_LAST)), {})
            return
        stream.last += 1
        stream.messages[stream.last] = Stored(subject, data, self._clock())
        if stream.config.get("max_msgs_per_subject") == 1:
            for seq in before:
                del stream.messages[seq]
        self.stored(caller, subject, data)
        answer("", msgspec.json.encode({"stream": stream.config["name"], "seq": stream.last}), {})

    def _stream_create(self, name: str, /, **config: Any) -> Any:
        self.streams.setdefault(name, StreamModel(config))
        return self._stream_info(name)

    def _stream_info(self, name: str, subjects_filter: str = "", offset: int = 0) -> Any:
        stream = self.streams.get(name)
        if stream is None:
            return _problem(NO_STREAM)
        state: dict[str, Any] = {
            "messages": len(stream.messages),
            "bytes": sum(len(each.data) for each in stream.messages.values()),
            "first_seq": min(stream.messages, default=stream.last and stream.last + 1),
            "last_seq": stream.last,
        }
        if subjects_filter:
            found = Counter(each.subject for each in stream.messages.values())
            matching = [each for each in found.items() if _takes([subjects_filter], each[0])]
            state["subjects"] = dict(matching[offset:])
        return {"config": stream.config, "state": state}

    def _stream_names(self, subject: str) -> Any:
        return {
            "streams": [
                name for name, each in self.streams.items() if _takes(each.config["subjects"], subject)
            ]
        }

    def _stream_purge(self, name: str, filter: str) -> Any:
        messages = self.streams[name].messages
        gone = [seq for seq, each in messages.items() if _takes([filter], each.subject)]
        for seq in gone:
            del messages[seq]
        return {"success": True, "purged": len(gone)}

    def _stream_msg_get(self, name: str, last_by_subj: str = "", seq: int = 0, next_by_subj: str = "") -> Any:
        messages = self.streams[name].messages
        pattern = [last_by_subj or next_by_subj]
        found = [at for at, each in messages.items() if at >= seq and _takes(pattern, each.subject)]
        if not found:
            return _problem(NO_MESSAGE)
        at = max(found) if last_by_subj else min(found)
        message = messages[at]
        time = datetime.fromtimestamp(message.at, UTC)
        return {"message": {"seq": at, "subject": message.subject, "data": message.data, "time": time}}

    # ── consumers ───────────────────────────────────────────────────────────────────────────────────────

    def _consumer_create(self, stream: str, name: str, *, config: dict[str, Any], **_: Any) -> Any:
        self.streams[stream].consumers.setdefault(name, Durable(config, self._clock()))
        return self._consumer_info(stream, name)

    def _consumer_info(self, stream: str, name: str) -> Any:
        consumer = self.streams[stream].consumers.get(name)
        if consumer is None:
            return _problem(NO_CONSUMER)
        return {
            "created": datetime.fromtimestamp(consumer.created, UTC),
            "config": consumer.config,
            "delivered": {"stream_seq": consumer.last},
            "ack_floor": {"stream_seq": consumer.floor()},
            "num_ack_pending": len(consumer.pending),
            "num_pending": sum(seq > consumer.last for seq in self.streams[stream].messages),
        }

    def _pull(self, caller: Any, names: list[str], request: Mapping[str, Any], answer: Answer) -> None:
        stream, name = names
        if stream not in self.streams or name not in self.streams[stream].consumers:
            answer("", b"", NO_RESPONDERS)
            return
        expires = self._clock() + request["expires"] / NANOSECONDS
        pulls = self._pulls.setdefault((stream, name), deque())
        pulls.append(Pulling(answer, caller, request["batch"], expires))

    def _take_ack(self, caller: Any, subject: list[str], data: bytes, answer: Answer) -> None:
        stream, name, seq = subject[2], subject[3], int(subject[5])
        consumer = self.streams[stream].consumers[name]
        if seq > consumer.last:
            return
        if seq in consumer.pending:
            word, _, options = data.partition(b" ")
            self.acknowledged(caller, stream, seq, word)
            self._end(consumer, seq, word, msgspec.json.decode(options or b"{}"))
        answer("", b"", {})

    def _end(self, consumer: Durable, seq: int, word: bytes, options: Mapping[str, int]) -> None:
        now = self._clock()
        if word in (b"+ACK", b"+TERM"):
            del consumer.pending[seq]
            del consumer.numbers[seq]
            if seq in consumer.again:
                consumer.again.remove(seq)
        elif word == b"-NAK":
            if seq not in consumer.again:
                consumer.pending[seq] = now + options.get("delay", 0) / NANOSECONDS
        elif word == b"+WPI" and seq not in consumer.again:
            consumer.pending[seq] = now + consumer.config["ack_wait"] / NANOSECONDS

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────

    def due(self) -> float:
        """When something happens by itself."""
        times = [each.expires for pulls in self._pulls.values() for each in pulls]
        for consumer in self._consumers():
            times += [at for seq, at in consumer.pending.items() if seq not in consumer.again]
        return min(times, default=inf)

    def _consumers(self) -> Iterator[Durable]:
        for stream in self.streams.values():
            yield from stream.consumers.values()

    def advance(self) -> None:
        """Let leases, delays and waits end that are over, and deliver."""
        now = self._clock()
        for consumer in self._consumers():
            for seq, at in sorted(consumer.pending.items(), key=lambda each: (each[1], each[0])):
                if at <= now and seq not in consumer.again:
                    consumer.again.append(seq)
        for (stream, name), pulls in self._pulls.items():
            self._deliver(stream, name, pulls)
            for each in [each for each in pulls if each.served or each.expires <= now]:
                each.answer("", b"", NO_MORE if each.served else REQUEST_TIMEOUT)
                pulls.remove(each)

    def _deliver(self, stream: str, name: str, pulls: deque[Pulling]) -> None:
        messages, consumer = self.streams[stream].messages, self.streams[stream].consumers[name]
        while pulls:
            fresh = [seq for seq in messages if seq > consumer.last]
            if consumer.again:
                seq = consumer.again.popleft()
            elif fresh:
                seq = consumer.last = min(fresh)
            else:
                return
            now, pull = self._clock(), pulls[0]
            consumer.delivered += 1
            number = consumer.numbers[seq] = consumer.numbers.get(seq, 0) + 1
            consumer.pending[seq] = now + consumer.config["ack_wait"] / NANOSECONDS
            self.served(pull.caller, stream, seq, number)
            at = int(messages[seq].at * NANOSECONDS)
            left = sum(each > consumer.last for each in fresh)
            reply = f"$JS.ACK.{stream}.{name}.{number}.{seq}.{consumer.delivered}.{at}.{left}"
            pull.answer(reply, messages[seq].data, {})
            pull.left -= 1
            pull.served = True
            if not pull.left:
                pulls.popleft()


def _takes(patterns: list[str], subject: str) -> bool:
    return any(_matches(each.split("."), subject.split(".")) for each in patterns)


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    for number, each in enumerate(pattern):
        if each == ">":
            return len(tokens) > number
        if number >= len(tokens) or each not in ("*", tokens[number]):
            return False
    return len(pattern) == len(tokens)


def _problem(code: int) -> dict[str, Any]:
    return {"error": {"err_code": code, "description": f"problem {code}"}}
