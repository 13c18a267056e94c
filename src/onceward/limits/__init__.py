"""Limits: how many messages of a consumer, or of each of its keys, start in a time and run at once."""

from onceward.limits.limit import Limit

__all__ = ["Limit"]
