"""Celery with Redis, 8 threads in one process."""

from __future__ import annotations

import os
import sys
import time

from celery import Celery

from bench.peers.sink import note

app = Celery("peers", broker=os.environ.get("PEER_URL", "redis://localhost"))
app.conf.task_ignore_result = True


@app.task
def handle(sent_at):
    note(sent_at)


def send_one(url, count):
    for _ in range(count):
        handle.delay(time.time())


send_many = send_one


def worker(url):
    return [
        sys.executable, "-m", "celery", "-A", "bench.peers.celery_peer", "worker", "--pool", "threads",
        "--concurrency", "8", "--without-gossip", "--without-mingle", "--loglevel", "error",
    ]  # fmt: skip
