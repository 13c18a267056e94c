"""What a file's own fsync does not do: a new name in a directory is durable only when the directory is."""

from __future__ import annotations

import os


def sync_directory(directory: str | os.PathLike[str]) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
