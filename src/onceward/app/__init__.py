"""Consumers and producers as plain functions.

    app = Onceward("shop", database="sqlite:///shop.db")

    @app.consumer("sqlite:///orders.db")
    def charge(order: Order) -> None: …

    onceward run shop:app

Runs on the same engine as the task classes. Decorated functions stay plain functions: call and test them as usual.
"""

from onceward.app.app import Onceward

__all__ = ["Onceward"]
