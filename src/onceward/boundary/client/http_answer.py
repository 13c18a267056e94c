"""An answer of HTTP/1.1, read as it arrives."""

from __future__ import annotations

import re

LARGEST_HEAD = 64 * 1024
"""Bytes."""


class BadAnswer(Exception):
    """This is not HTTP/1.1."""


class Answer:
    """`take` what arrives until it says that this is all."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = bytearray()
        self.keeps_open = True
        self._arrived = bytearray()
        self._has_head = False
        self._is_chunked = False
        self._missing: int | None = None
        """Bytes of the body, or of a chunk, that have not arrived. None: up to the end of the connection."""

    def take(self, data: bytes) -> bool:
        """Take what has arrived, and return whether this is all."""
        self._arrived += data
        while not self._has_head:
            end = self._arrived.find(b"\r\n\r\n")
            if end < 0:
                if len(self._arrived) > LARGEST_HEAD:
                    raise BadAnswer("invalid HTTP: its headers have no end")
                return False
            self._read_head(bytes(self._arrived[:end]))
            del self._arrived[: end + 4]
        return self._take_chunks() if self._is_chunked else self._take_plainly()

    def ends_here(self) -> bool:
        """Whether the end of the connection is the end of the answer."""
        return self._has_head and not self._is_chunked and self._missing is None

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1\.([01]) (\d{3})(?: .*)?", first)
        if status is None:
            raise BadAnswer(f"invalid HTTP: {first!r:.80}")
        self.status = int(status[2])
        self.headers = [
            (name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
        ]
        if self.status < 200:  # another one follows
            return
        self._has_head = True
        found = dict(self.headers)
        close = found.get("connection", "").lower()
        self.keeps_open = close != "close" and (status[1] == "1" or close == "keep-alive")
        self._is_chunked = found.get("transfer-encoding", "").lower() == "chunked"
        length = found.get("content-length")
        if self._is_chunked:
            self._missing = 0
        elif length is not None:
            if not length.isdecimal():
                raise BadAnswer(f"invalid HTTP: content-length {length!r:.80}")
            self._missing = int(length)
        elif self.status in (204, 304):
            self._missing = 0
        else:
            self.keeps_open = False

    def _take_plainly(self) -> bool:
        taken = self._arrived if self._missing is None else self._arrived[: self._missing]
        self.keeps_open = self.keeps_open and len(taken) == len(self._arrived)
        self.body += taken
        self._arrived = bytearray()
        if self._missing is None:
            return False
        self._missing -= len(taken)
        return self._missing == 0

    def _take_chunks(self) -> bool:
        """Take the chunks that are complete. What follows the last one, up to an empty line, are trailers."""
        at, arrived = 0, self._arrived
        while (end := arrived.find(b"\r\n", at)) >= 0:
            digits = bytes(arrived[at:end]).partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
                raise BadAnswer(f"invalid HTTP: a chunk of size {digits!r:.80}")
            size = int(digits, 16)
            if size == 0:
                if arrived.startswith(b"\r\n", end + 2):
                    self.keeps_open = self.keeps_open and len(arrived) == end + 4
                    return True
                if arrived.find(b"\r\n\r\n", end + 2) >= 0:
                    self.keeps_open = False
                    return True
                break
            if len(arrived) < end + 2 + size + 2:
                break
            self.body += arrived[end + 2 : end + 2 + size]
            at = end + 2 + size + 2
        del arrived[:at]
        return False
