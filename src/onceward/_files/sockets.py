"""Where Unix sockets can be: the system allows only short paths."""

from __future__ import annotations

import os
import tempfile

LONGEST = 60
"""Bytes of a temporary directory that leave room for our names: the path of a socket may have 103 bytes on macOS."""


def place_for_sockets() -> str:
    """Return the usual temporary directory (`TMPDIR`), or `/tmp` if its path is too long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST else "/tmp"
