"""The boundary's connection to NATS JetStream: it raises the boundary's errors."""

from onceward._nats.connection import NatsConnection
from onceward.boundary.errors import Backpressure, Unavailable


class JetStreamConnection(NatsConnection):
    user = "onceward boundary"
    unavailable = Unavailable
    full = Backpressure
    refused = Unavailable
