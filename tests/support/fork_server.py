"""Processes that start at once: they are forked from a clean one that has imported what they need.

They are processes of their own all the same, and SIGKILL ends them as it ends any other. A process of the suite has one
that forks, and only its first user could choose what it imports; so there is one list for all.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
PRELOADED = (
    "tests.crash.boundary.zones_process", "tests.crash.connectors.boundary_worker",
    "tests.crash.connectors.jetstream_worker", "tests.crash.deadletters.worker", "tests.crash.inbox.worker",
    "tests.support.boundary.server", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.aiosqlite",
)  # fmt: skip
FORKED.set_forkserver_preload(list(PRELOADED))
