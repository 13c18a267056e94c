"""The list of public names, and that importing them loads no driver."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import onceward

NAMES = {
    "onceward": [
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
    ],
    "onceward.outbox": ["AsyncOutboxSender", "Delayed", "Outbox", "OutboxError", "OutboxSender"],
    "onceward.boundary": [
        "Appended",
        "ArtifactError",
        "ArtifactMissingError",
        "AsyncBoundaryClient",
        "AsyncBoundaryConsumer",
        "BadReferenceError",
        "BoundaryClient",
        "BoundaryConsumer",
        "BoundaryError",
        "Envelope",
        "Fact",
        "Gap",
        "IntegrityError",
        "ObjectRef",
        "Page",
        "StoredFact",
        "envelope_for",
        "fact_of",
        "message_id_for",
    ],
    "onceward.connectors.boundary": ["AsyncBoundaryConnector", "BoundaryConnector"],
    "onceward.connectors.postgresql": [
        "AsyncPostgreSqlConnector",
        "PostgreSqlConnector",
        "append_in",
        "creation_script",
    ],
    "onceward.connectors.jetstream": ["AsyncJetStreamConnector", "JetStreamConnector"],
    "onceward.connectors.sqlite": [
        "AsyncSqliteConnector",
        "DatabaseBusyError",
        "SqliteConnector",
        "append_in",
    ],
    "onceward.connectors.redis_streams": ["AsyncRedisStreamsConnector", "RedisStreamsConnector"],
    "onceward.db": [
        "AsyncDbSession",
        "DbSession",
        "LockTimeoutError",
        "OptimisticConflict",
        "RetryRefusedError",
        "RowError",
        "SessionError",
    ],
    "onceward.console": ["Access", "Role", "User", "UsersFile", "create"],
    "onceward.deadletters": [
        "AsyncDeadLetters",
        "Burial",
        "Category",
        "DeadLetter",
        "DeadLetters",
        "EditRefusedError",
        "Failure",
        "Filter",
        "LetterGroup",
        "Rca",
        "Redrive",
        "RedriveRefusedError",
        "Status",
    ],
    "onceward.inbox": [
        "AsyncInbox",
        "AsyncInboxSession",
        "Breach",
        "Busy",
        "ClockDoubtError",
        "Contract",
        "ContractError",
        "DatabaseUnavailableError",
        "Done",
        "EffectError",
        "EffectInDoubtError",
        "EffectRefused",
        "Event",
        "Handling",
        "Inbox",
        "InboxSession",
        "LeaseLostError",
        "Parked",
        "PurgeInProgressError",
        "PurgeReport",
        "Result",
        "UnprovenConsumerError",
        "UnregisteredConsumerError",
        "days",
        "hours",
        "minutes",
    ],
    "onceward.middleware": ["Middleware", "SourceCalls", "sleep"],
    "onceward.queue": [
        "AsyncQueueConsumer",
        "AsyncRedisStreamsQueue",
        "BacklogStats",
        "QueueConfig",
        "QueueConsumer",
        "QueueError",
        "QueueMessage",
        "QueuePayloadError",
        "RedisStreamsQueue",
        "UndecodableEntryError",
    ],
    "onceward.task.exceptions": [
        "ConsumerLoopTimeoutException",
        "ExceptionCategory",
        "FetchException",
        "FetchTimeoutException",
        "ProducerLoopTimeoutException",
        "TransactionException",
    ],
    "onceward.task.mixins.policies": [
        "BatchPolicy",
        "ConcurrencyPolicy",
        "ConsumerLoopPolicy",
        "ConsumerPolicy",
        "ConsumerSteps",
        "EmptyQueuePolicy",
        "ExceptionPolicy",
        "FetchPolicy",
        "ProcessPolicy",
        "ProducePolicy",
        "ProducerLoopPolicy",
        "ProducerPolicy",
        "ProducerSteps",
        "RetryPolicy",
        "SuccessPolicy",
    ],
    "onceward.task.mixins.consumer": ["AsyncConsumerMixin", "ConsumerMixin"],
    "onceward.task.mixins.producer": ["AsyncProducerMixin", "ProducerMixin"],
    "onceward.task.mixins.utils": [
        "compute_backoff",
        "run_with_timeout",
        "run_with_timeout_async",
        "with_context",
        "with_context_async",
    ],
    "onceward.task.report": ["Report", "StopReason"],
    "onceward.task.settings": ["EngineSettings"],
}


PACKAGES = [
    "onceward",
    "onceward.connectors.postgresql",
    "onceward.connectors.jetstream",
    "onceward.connectors.redis_streams",
    "onceward.db",
    "onceward.deadletters",
    "onceward.inbox",
    "onceward.queue",
]
"""Packages whose `__all__` is complete."""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_public_names_are_exactly_these_and_sorted(package: str) -> None:
    names = [name for name in importlib.import_module(package).__all__ if not name.isupper()]
    assert names == sorted(names) == NAMES[package]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module]])
def test_the_name_is_where_it_is_promised(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    assert callable(value)
    assert getattr(value, "__name__", None) == name


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PACKAGES for name in NAMES[package]]
)
def test_every_public_name_says_what_it_is_for(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    assert value.__doc__ if inspect.isfunction(value) else vars(value).get("__doc__")


@pytest.mark.parametrize("name", NAMES["onceward.task.mixins.utils"])
def test_the_asynchronous_helpers_are_awaited_and_the_others_are_not(name: str) -> None:
    module = importlib.import_module("onceward.task.mixins.utils")
    assert callable(getattr(module, name))
    if name.startswith("run_with_timeout"):
        assert inspect.iscoroutinefunction(getattr(module, name)) is name.endswith("_async")


PAIRS = [
    ("onceward", "ConsumerTask"),
    ("onceward", "ProducerTask"),
    ("onceward", "HybridTask"),
    ("onceward.connectors.jetstream", "JetStreamConnector"),
    ("onceward.connectors.redis_streams", "RedisStreamsConnector"),
    ("onceward.db", "DbSession"),
    ("onceward.deadletters", "DeadLetters"),
    ("onceward.inbox", "Inbox"),
    ("onceward.inbox", "InboxSession"),
    ("onceward.queue", "QueueConsumer"),
    ("onceward.queue", "RedisStreamsQueue"),
]


@pytest.mark.parametrize(("package", "name"), PAIRS)
def test_sync_and_async_classes_have_the_same_methods_with_the_same_parameters(
    package: str, name: str
) -> None:
    def methods(cls: type) -> dict[str, list[str]]:
        return {
            name.removesuffix("_async"): list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    module = importlib.import_module(package)
    assert methods(getattr(module, name)) == methods(getattr(module, f"Async{name}"))


@pytest.mark.parametrize("name", ["HybridTask", "AsyncHybridTask"])
def test_a_hybrid_task_both_consumes_and_produces(name: str) -> None:
    assert {"consume_transactions", "produce_transactions"} <= set(dir(getattr(onceward, name)))


HEAVY = ["redis", "psycopg", "nats", "connectrpc", "starlette", "sqlalchemy", "typer", "opentelemetry.sdk"]


def test_importing_the_package_imports_no_driver_no_database_layer_and_no_command_line() -> None:
    code = f"import sys, onceward; print([name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_public_module_can_be_imported_first(module: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {module}"], timeout=60, check=True)
