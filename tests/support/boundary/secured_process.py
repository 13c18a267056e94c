"""A server that checks its files all the time: `python -m tests.support.boundary.secured_process CONFIG DATA`."""

from __future__ import annotations

import sys
from pathlib import Path

from onceward.boundary.server.config import read_config
from onceward.boundary.server.launch import Launch, become_server

CHECK_EVERY = 0.05

if __name__ == "__main__":
    path, data = sys.argv[1:]
    config = read_config(Path(path))
    become_server(
        Launch(
            config=config,
            path=path,
            kept_in=data,
            shown=data,
            host="127.0.0.1",
            port=0,
            limits=config.limits.read(),
            check_every=CHECK_EVERY,
        )
    )
