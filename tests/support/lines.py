"""Transactions in lines by key, for tests of order."""

from __future__ import annotations

from typing import Any

from onceward.transaction import Settlement, Transaction, Verdict


def key_of(transaction: Transaction) -> str | None:
    return transaction.payload.get("key")


def send(connector: Any, *names: str) -> None:
    """`a1` is number 1 of key a."""
    connector.dispatch_transactions([Transaction(payload={"key": name[0], "name": name}) for name in names])


def fetch(connector: Any, size: int = 10) -> dict[str, Transaction]:
    return {each.payload["name"]: each for each in connector.fetch_transactions(size)}


def end(connector: Any, verdict: Verdict, *transactions: Transaction, **more: Any) -> None:
    connector.settle_transactions([Settlement(each, verdict, **more) for each in transactions])
