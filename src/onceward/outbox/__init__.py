"""The outbox: messages that a transaction publishes, and the relay that sends them once it has committed.

`app.outbox(connection).send(target, payload)` writes a message in your transaction, `session.send(target, payload)` in
that of a handler. `onceward run` relays them, at least once and with the same id, in order within a key.
"""

from onceward.outbox.errors import OutboxError
from onceward.outbox.outbox import Outbox

__all__ = ["Outbox", "OutboxError"]
