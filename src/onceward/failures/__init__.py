"""Failure rules: which failures are the message's, which are worth another delivery, and which are an outage."""

from onceward.failures.rules import Refuse, RetryLater, business, outage, retry

__all__ = ["Refuse", "RetryLater", "business", "outage", "retry"]
