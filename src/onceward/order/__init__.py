"""Order without numbers: events of one key run one after another, in the order of their arrival.

`@app.consumer(…, order_by="customer_id")` says what the key is. See `onceward.order.middleware`.
"""

from onceward.order.rule import OnDead, OrderBy, OrderRule

__all__ = ["OnDead", "OrderBy", "OrderRule"]
