"""A NATS server with a configuration of its own: users, permissions, TLS."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceward.testing.servers import Server, free_port


@contextmanager
def configured_nats(directory: Path, config: str, *, jetstream: bool = True) -> Iterator[Server]:
    port = free_port()
    store = f"jetstream {{ store_dir: {directory / 'store'} }}\n" if jetstream else ""
    (directory / "nats.conf").write_text(f"listen: 127.0.0.1:{port}\n{store}{config}\n")
    command = [
        str(Path(sysconfig.get_path("scripts")) / "nats-server"),
        "--config",
        str(directory / "nats.conf"),
    ]
    server = Server(f"nats://127.0.0.1:{port}", command, port, b"INFO")
    server.start()
    try:
        yield server
    finally:
        server.stop()
