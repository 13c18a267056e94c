"""Run one role of one peer, in its environment: `python -m bench.peers ROLE NAME URL COUNT`. Prints messages a second.

The roles are send_one, send_many, ping (one message after a pause, COUNT times) and worker, which prints its command.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

PAUSE = 0.3
"""Seconds between the messages to an idle worker."""


def main() -> None:
    role, name, url, count = sys.argv[1:]
    peer = importlib.import_module(f"bench.peers.{name}_peer")
    if role == "worker":
        print(json.dumps(peer.worker(url)))
        return
    if role == "ping":
        for _ in range(int(count)):
            peer.send_one(url, 1)
            time.sleep(PAUSE)
        return
    getattr(peer, role)(url, 100)  # connects
    began = time.perf_counter()
    getattr(peer, role)(url, int(count))
    print(int(count) / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
