"""Settings of the engine itself, as opposed to the policies of one call."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from onceward.task.mixins.policies import Policy, Seconds, from_json_text


class EngineSettings(Policy):
    """How an engine behaves whatever its policy. Set as `settings` on a task class, or given to a task.

    Loads from the environment as policies do: `EngineSettings.from_env("ONCEWARD_ENGINE__")`, the variables that an
    app reads, too.
    """

    stuck_grace: Seconds = Field(
        default=30.0,
        description="Seconds a timed-out attempt has to end before its slot is counted as stuck.",
    )
    io_guard: Literal["off", "warn", "raise"] = Field(
        default="off", description="What to do when a task opens a socket, file or process of its own."
    )
    telemetry_fields: Annotated[tuple[str, ...], BeforeValidator(from_json_text)] = Field(
        default=(),
        description='What spans may show of the work, for example "payload.order_id" or "result.total".',
    )
