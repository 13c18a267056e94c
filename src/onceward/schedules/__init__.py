"""Recurring messages: one for each slot of a schedule, sent through the outbox, once across all processes.

`@app.every("5m")` and `@app.cron("0 3 * * *", tz="Europe/Berlin")` decorate consumers and producers. The relay of the
outbox publishes their slots.
"""

from onceward.schedules.schedule import CatchUp, Schedule

__all__ = ["CatchUp", "Schedule"]
