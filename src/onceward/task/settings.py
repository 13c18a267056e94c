"""Settings of the engine, as opposed to the policies of one call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onceward.task.mixins.policies import Policy, Seconds


class EngineSettings(Policy):
    """How the engine behaves, whatever the policy. Set `settings` on a task class, or pass it to a task.

    Loads from the environment as policies do: `EngineSettings.from_env("ONCEWARD_ENGINE__")` reads the variables an
    app reads.
    """

    stuck_grace: Seconds = Field(
        default=30.0,
        description="Seconds a timed-out attempt has to end before its slot counts as stuck.",
    )
    io_guard: Literal["off", "warn", "raise"] = Field(
        default="off", description="What to do if a task itself opens a socket, file or process."
    )
    telemetry_fields: tuple[str, ...] = Field(
        default=(),
        description='Fields that spans may show, for example "payload.order_id" or "result.total".',
    )
    interrupt: Literal["cancel", "raise"] = Field(
        default="cancel",
        description="How a timed-out attempt in a thread is stopped. cancel: it is asked to stop. raise: "
        "AttemptInterrupted is raised in it, wherever it is. Dangerous: a lock that it was just taking or releasing, "
        "of logging, a pool or a client, may stay taken forever.",
    )
