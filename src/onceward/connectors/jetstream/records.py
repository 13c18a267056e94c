"""What the connector keeps beside a stream, in a stream of its own, because JetStream has no place for it.

Its subjects, each with at most one message, after `onceward.STREAM.CONSUMER.`:

    state.BEGUN.SEQ    of a message that was delivered more than once, failed or given back: see `MessageState`
    body.BEGUN.SEQ     the bytes of a dead letter, unchanged
    dead.BEGUN.SEQ     a dead letter: see `KeptLetter`
    moved.BEGUN.SEQ    a dead letter that was moved to a database
    held.OWNER.NAME    the deliveries that a connector of a worker has, to be given back if the worker dies

SEQ is the message's sequence in the stream. BEGUN is when the consumer was created, so a stream or a consumer that was
deleted and created again does not find records of the one before it.

Each change of a state is conditional: it names the message that it replaces, and JetStream refuses it if there is
another. So of two deliveries of a message only one can record its outcome: the newer one.
"""

from __future__ import annotations

import msgspec

MOST_HISTORY = 100_000
"""Characters of failures that are kept. The oldest are left out first."""
MOST_ERROR = 5_000
"""Characters of one failure."""


class MessageState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a message's deliveries so far."""

    number: int = 0
    """Of its newest delivery that was served."""
    ended: int = 0
    """The last delivery whose outcome is recorded here."""
    returned: int = 0
    """Deliveries that were given back, which do not count."""
    failures: int = 0
    history: str = ""
    """A line for each failure, as `describe_failure` returns it."""
    done: bool = False
    """It is done, and only has to be acknowledged."""
    reason: str = ""
    """It is a dead letter for this reason, and only has to be terminated."""
    error: str = ""
    died_at: float = 0.0


class KeptLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dead letter, without its bytes."""

    reason: str
    deliveries: int
    enqueued_at: float
    died_at: float
    transaction_id: str | None = None
    error: str = ""
    history: str = ""


encode = msgspec.json.encode
read_state = msgspec.json.Decoder(MessageState).decode
read_letter = msgspec.json.Decoder(KeptLetter).decode


class JetStreamRecords:
    """Names of the records of one consumer."""

    def __init__(self, stream: str, consumer: str) -> None:
        self.source = stream
        self.consumer = consumer
        self.stream = f"{stream}-onceward-{consumer}"
        self.prefix = f"onceward.{stream}.{consumer}."
        self.begun = ""

    def state(self, seq: int) -> str:
        return f"{self.prefix}state.{self.begun}.{seq}"

    def letter(self, key: str) -> str:
        return f"{self.prefix}dead.{key}"

    def body(self, key: str) -> str:
        return f"{self.prefix}body.{key}"

    def moved(self, key: str) -> str:
        return f"{self.prefix}moved.{key}"

    def holdings(self, owner: str, connector: str) -> str:
        return f"{self.prefix}held.{owner}.{connector}"

    def key(self, seq: int) -> str:
        """Identifies a dead letter."""
        return f"{self.begun}.{seq}"

    def key_of(self, subject: str) -> str:
        """Of the dead letter with this subject."""
        return ".".join(subject.split(".")[-2:])


def begin_of(created: str) -> str:
    """When a consumer was created, as a part of a subject."""
    return "".join(filter(str.isalnum, created))


def shorten(line: str) -> str:
    """Return a line of history that is not too long to be kept."""
    if len(line) <= MOST_ERROR:
        return line
    parts = msgspec.json.decode(line)
    parts["error"] = f"{parts.get('error', '')[:MOST_ERROR]}…"
    return msgspec.json.encode(parts).decode() + "\n"


def add_line(history: str, line: str) -> str:
    """Append a line, and leave out the oldest if there are too many."""
    lines = [*filter(None, history.split("\n")), line.rstrip("\n")]
    while len(lines) > 1 and sum(map(len, lines)) > MOST_HISTORY:
        del lines[0]
    return "\n".join(lines) + "\n"
