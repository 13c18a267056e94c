"""Print the table: onceward and its peers, each on a Redis of its own.

python -m bench.peers.table PYTHON [NAME …]      PYTHON is that of the environment with the peers
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onceward.testing.servers import redis_server

PEERS = ("onceward", "faststream", "taskiq", "dramatiq", "celery", "dbos")
ONE, MANY, CONSUMED, PINGS = 1000, 5000, 5000, 20
LONGEST = 120.0
"""Seconds until a peer has failed."""


def table(python: str, *names: str) -> None:
    print("| | send one | send many | consume | idle to handler, p50 |\n|---|---|---|---|---|", flush=True)
    for name in names or PEERS:
        figures = [measured(python, name, figure) for figure in FIGURES]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)


def measured(python: str, name: str, figure: Callable[[Peer], str]) -> str:
    """Return a figure of a peer, on a Redis of its own."""
    with redis_server() as server, tempfile.TemporaryDirectory() as directory:
        try:
            return figure(Peer(python, name, server.url, directory))
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{name}: {error}"[:500], file=sys.stderr)
            return "failed"


class Peer:
    def __init__(self, python: str, name: str, url: str, directory: str) -> None:
        self._python = sys.executable if name == "onceward" else python
        self._name, self._url = name, url
        self._result = Path(directory) / "result.json"
        self._environment = {
            **os.environ,
            "PEER_URL": url,
            "PEER_RESULT": str(self._result),
            "PEER_DATABASE": f"sqlite:///{directory}/peers.db",
            "PYTHONPATH": os.getcwd(),
        }

    def sends(self, role: str, count: int) -> float:
        """Messages a second."""
        return float(self._ask(role, count).splitlines()[-1])

    def consumes(self) -> float:
        """Messages a second of one worker, from the first that its handler sees to the last."""
        self._ask("send_many", CONSUMED)
        arrivals = self._work(CONSUMED, lambda: None)
        return (CONSUMED - 1) / (arrivals[-1][1] - arrivals[0][1])

    def latency(self) -> float:
        """Seconds from the send to the handler of an idle worker, the median."""

        def ping() -> None:
            time.sleep(3.0)  # it is idle
            self._ask("ping", PINGS)

        arrivals = self._work(PINGS, ping)
        return statistics.median(arrived - sent for sent, arrived in arrivals)

    def _ask(self, role: str, count: int) -> str:
        command = [self._python, "-m", "bench.peers", role, self._name, self._url, str(count)]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self._name} {role}: {done.stderr[-400:]}")
        return done.stdout

    def _work(self, count: int, meanwhile: Callable[[], None]) -> list[list[float]]:
        command = json.loads(self._ask("worker", 0).splitlines()[-1])
        process = subprocess.Popen(
            command, env={**self._environment, "PEER_COUNT": str(count)}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            meanwhile()
            until = time.monotonic() + LONGEST
            while not self._result.exists():
                if time.monotonic() > until or process.poll() is not None:
                    raise RuntimeError(f"{self._name}: its worker handled less than {count} messages")
                time.sleep(0.01)
            return json.loads(self._result.read_text())
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


FIGURES: tuple[Callable[[Peer], str], ...] = (
    lambda peer: f"{peer.sends('send_one', ONE):,.0f}/s",
    lambda peer: f"{peer.sends('send_many', MANY):,.0f}/s",
    lambda peer: f"{peer.consumes():,.0f}/s",
    lambda peer: f"{peer.latency() * 1000:.1f} ms",
)

if __name__ == "__main__":
    table(*sys.argv[1:])
