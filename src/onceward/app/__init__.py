"""Consumers and producers as plain functions.

    app = Onceward("shop", database="sqlite:///shop.db")

    @app.consumer("sqlite:///orders.db")
    def charge(order: Order) -> None: …

    onceward run shop:app

The same engine as under the task classes; functions stay functions, and can be called and tested as such.
"""

from onceward.app.app import Onceward

__all__ = ["Onceward"]
