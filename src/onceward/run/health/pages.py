"""What the health pages of a run say: for probes, scrapers and people with curl."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from onceward.errors import ConfigurationError
from onceward.run.health.probes import JSON, HealthPage
from onceward.run.health.series import TYPE, Series, Workers, consumers
from onceward.run.protocol import ConsumerStatus, Flight, WorkerState
from onceward.run.samples import Samples
from onceward.run.supervisor import Supervisor, WorkerSlot

SILENCE = 3.0
"""Seconds without a status line that mean nothing yet: workers report once a second."""


class Pages:
    """Answers each request from what the workers last reported."""

    def __init__(self, supervisor: Supervisor, stalled_after: float, samples: Samples | None = None) -> None:
        self.supervisor = supervisor
        self._stalled_after = stalled_after
        workers = Workers(
            supervisor, lambda place: not self.stalls(place), lambda place: not self._unready(place)
        )
        self._series = Series(workers, samples)
        self.by_path: dict[str, Callable[[], HealthPage]] = {
            "/livez": self.livez,
            "/readyz": self.readyz,
            "/progress": self.progress,
            "/metrics": self.metrics,
        }

    def livez(self) -> HealthPage:
        """503 if a worker with work in flight or a fetch open makes no progress. Idle is alive, and so is an outage."""
        return verdict([problem for place in self.supervisor.places for problem in self.stalls(place)])

    def readyz(self) -> HealthPage:
        """200 if every consumer of every worker has had an answer from its source and is not stopping, and the database
        answers. A consumer that is paused, or waits for what it needs, is ready but degraded: another process could not
        do better, so nothing may be restarted for it or taken out of service."""
        places = self.supervisor.places
        degraded = [
            f"worker {place.number}: {consumer.name} is {consumer.held}"
            for place in places
            for consumer in consumers(place)
            if consumer.held is not None
        ]
        return verdict([problem for place in places for problem in self._unready(place)], degraded=degraded)

    def progress(self) -> HealthPage:
        """Without code, what comes from payloads, and names of people: it may be open to all who can probe."""
        return HealthPage(200, JSON, json.dumps(_for_everybody(self.state())))

    def state(self) -> dict[str, Any]:
        """What `/progress` says, where the code of long work is, and who ends a process."""
        workers = [self._worker(place) for place in self.supervisor.places]
        return {
            "host": socket.gethostname(),
            "stage": self.supervisor.stage.name.lower(),
            "workers": workers,
        }

    def metrics(self) -> HealthPage:
        return HealthPage(200, TYPE, self._series.page())

    # ── one worker ──────────────────────────────────────────────────────────────────────────────────────

    def stalls(self, place: WorkerSlot) -> list[str]:
        process, now = place.process, time.monotonic()
        if process is None:
            return []
        if now - process.heard_at >= max(self._stalled_after, SILENCE):
            return [
                f"worker {place.number} (pid {process.pid}) has reported nothing for {now - process.heard_at:.0f} s"
            ]
        stalled = []
        for consumer in consumers(place):
            since = consumer.standing_still_since()
            if since is not None and now - since >= self._stalled_after:
                holds = f"has {consumer.in_flight} in flight" if consumer.in_flight else "waits for a fetch"
                stalled.append(
                    f"worker {place.number} (pid {process.pid}): {consumer.name} {holds} and has made no progress for "
                    f"{now - since:.0f} s"
                )
        return stalled

    def _unready(self, place: WorkerSlot) -> list[str]:
        if place.process is None:
            return [
                f"worker {place.number} is not running" + (f": it {place.problem}" if place.problem else "")
            ]
        if place.process.status is None:
            return [f"worker {place.number} is starting"]
        database = place.process.status.database
        return [f"worker {place.number}: {database}"] * (database is not None) + [
            f"worker {place.number}: {consumer.name} is {consumer.state}"
            + (f": {consumer.problem}" if consumer.problem else "")
            for consumer in consumers(place)
            if consumer.state is not WorkerState.CONSUMING
        ]

    def _worker(self, place: WorkerSlot) -> dict[str, Any]:
        now, process = time.monotonic(), place.process
        return {
            "worker": place.number,
            "pid": None if process is None else process.pid,
            "process": None if process is None else process.name,
            "ending": None if place.ending is None else place.ending._asdict(),
            "starting": process is not None and process.status is None,
            "running_seconds": None if process is None else round(now - process.started_at, 3),
            "restarts": place.restarts,
            "last_end": place.problem,
            "live": not self.stalls(place),
            "ready": not self._unready(place),
            "consumers": [_describe(consumer, now) for consumer in consumers(place)],
            "earlier": {
                name: {"succeeded": each.succeeded, "failed": each.failed}
                for name, each in place.past.items()
            },
            "were_stuck": [
                {
                    "consumer": each.consumer,
                    "pid": each.pid,
                    "at": each.at,
                    **_flight(each.flight, each.seen_at),
                }
                for each in place.were_stuck
            ],
        }


def _describe(consumer: ConsumerStatus, now: float) -> dict[str, Any]:
    return {
        "consumer": consumer.name,
        "state": consumer.state,
        "processed": consumer.succeeded + consumer.failed,
        "succeeded": consumer.succeeded,
        "failed": consumer.failed,
        "returned": consumer.returned,
        "in_flight": consumer.in_flight,
        "oldest_in_flight_seconds": _age(consumer.oldest_since, now),
        "last_progress_seconds": _age(consumer.progress_at, now),
        "stuck": consumer.stuck,
        "problem": consumer.problem,
        "held": consumer.held,
        "paused": consumer.paused,
        "down_since": consumer.down_since,
        "limited": consumer.limited,
        "limited_seconds": _age(consumer.limited_since, now),
        "flights": [_flight(each, now) for each in consumer.flights],
    }


def _for_everybody(state: dict[str, Any]) -> dict[str, Any]:
    for worker in state["workers"]:
        del worker["ending"]
        for flight in (
            *worker["were_stuck"],
            *(each for one in worker["consumers"] for each in one["flights"]),
        ):
            del flight["key"], flight["stack"]
    return state


def _flight(flight: Flight, now: float) -> dict[str, Any]:
    return {
        "id": flight.id,
        "seconds": _age(flight.since, now),
        "step": flight.step,
        "attempt": flight.attempt,
        "attempt_seconds": _age(flight.attempt_since, now),
        "stuck": flight.stuck,
        "key": flight.key,
        "stack": flight.stack,
    }


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else round(max(now - since, 0.0), 3)


def verdict(problems: list[str], **more: list[str]) -> HealthPage:
    body = {"ok": not problems, "problems": problems, **more}
    return HealthPage(503 if problems else 200, JSON, json.dumps(body))


def parse_address(health: str, option: str = "--health") -> tuple[str, int]:
    """Parse HOST:PORT; port 0 means any free port."""
    host, _, port = health.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"{option} must be HOST:PORT, not {health!r}; use 127.0.0.1:8080 for this machine, 0.0.0.0:8080 for all"
        )
    return host.strip("[]"), int(port)
