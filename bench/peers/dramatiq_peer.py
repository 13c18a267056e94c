"""Dramatiq with its Redis broker, 8 threads in one process."""

from __future__ import annotations

import os
import sys
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers.sink import note

dramatiq.set_broker(RedisBroker(url=os.environ.get("PEER_URL", "redis://localhost")))


@dramatiq.actor
def handle(sent_at):
    note(sent_at)


def send_one(url, count):
    for _ in range(count):
        handle.send(time.time())


send_many = send_one


def worker(url):
    return [
        sys.executable,
        "-m",
        "dramatiq",
        "bench.peers.dramatiq_peer",
        "--processes",
        "1",
        "--threads",
        "8",
    ]
