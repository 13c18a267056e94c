"""onceward: consume messages from anywhere and have every effect happen once, whatever crashes or arrives twice."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.durations import days, hours, minutes
    from onceward.failures import Refuse, RetryLater, business, outage, retry
    from onceward.inbox import AsyncInbox, Contract, EffectRefused, Inbox
    from onceward.limits import Limit
    from onceward.middleware import Middleware
    from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException
    from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
    from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
    from onceward.task.mixins.producer import AsyncHybridTask, AsyncProducerTask, HybridTask, ProducerTask
    from onceward.task.mixins.utils import cancel_requested, on_cancel
    from onceward.task.report import Report
    from onceward.transaction import Transaction

__all__ = [
    "AsyncConsumerTask",
    "AsyncHybridTask",
    "AsyncInbox",
    "AsyncProducerTask",
    "ConsumerPolicy",
    "ConsumerTask",
    "Contract",
    "EffectRefused",
    "ExceptionCategory",
    "HybridTask",
    "Inbox",
    "Limit",
    "Middleware",
    "Onceward",
    "Postponed",
    "ProducerPolicy",
    "ProducerTask",
    "Refuse",
    "Report",
    "RetryLater",
    "RetryPolicy",
    "Transaction",
    "TransactionException",
    "business",
    "cancel_requested",
    "days",
    "hours",
    "minutes",
    "on_cancel",
    "outage",
    "retry",
]

_CONSUMER, _PRODUCER = "onceward.task.mixins.consumer", "onceward.task.mixins.producer"
_ERRORS, _POLICIES = "onceward.task.exceptions", "onceward.task.mixins.policies"
_FAILURES, _INBOX = "onceward.failures", "onceward.inbox"
_HOMES = {
    "AsyncConsumerTask": _CONSUMER,
    "AsyncHybridTask": _PRODUCER,
    "AsyncInbox": _INBOX,
    "AsyncProducerTask": _PRODUCER,
    "ConsumerPolicy": _POLICIES,
    "ConsumerTask": _CONSUMER,
    "Contract": _INBOX,
    "EffectRefused": _INBOX,
    "ExceptionCategory": _ERRORS,
    "HybridTask": _PRODUCER,
    "Inbox": _INBOX,
    "Limit": "onceward.limits",
    "Middleware": "onceward.middleware",
    "Onceward": "onceward.app",
    "Postponed": _ERRORS,
    "ProducerPolicy": _POLICIES,
    "ProducerTask": _PRODUCER,
    "Refuse": _FAILURES,
    "Report": "onceward.task.report",
    "RetryLater": _FAILURES,
    "RetryPolicy": _POLICIES,
    "Transaction": "onceward.transaction",
    "TransactionException": _ERRORS,
    "business": _FAILURES,
    "cancel_requested": "onceward.task.mixins.utils",
    "days": "onceward.durations",
    "hours": "onceward.durations",
    "minutes": "onceward.durations",
    "on_cancel": "onceward.task.mixins.utils",
    "outage": _FAILURES,
    "retry": _FAILURES,
}


def __getattr__(name: str) -> Any:
    """Load names on first use, so you pay only for what you import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
