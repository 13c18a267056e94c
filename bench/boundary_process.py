"""A boundary served by another process, so its work does not count as the client's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceward.boundary.server import envoy
from onceward.cli.main import main


@contextmanager
def serve_boundary(place: Path, application: str = envoy.APPLICATION) -> Iterator[str]:
    """Serve a boundary, and yield its URL. `application` is what Envoy runs, as `module:name`."""
    arguments = ["boundary", "serve", "--listen", "127.0.0.1:0", "--data", str(place), "--log-level", "error"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.boundary_process", application, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


if __name__ == "__main__":
    envoy.APPLICATION = sys.argv.pop(1)
    main()
