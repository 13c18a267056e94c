"""An answer of HTTP/1.1, read as it arrives."""

from __future__ import annotations

from httptools import HttpParserError, HttpResponseParser

LARGEST_HEAD = 64 * 1024
"""Bytes, with those of preliminary answers."""
LARGEST = 64 * 1024 * 1024
"""Bytes. A page has half of that at most."""


class BadAnswer(Exception):
    """This is not HTTP/1.1, or not from a boundary."""


class HttpAnswer:
    """`take` what arrives until it says that this is all. The parser calls what begins with `on_`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.keeps_open = False
        self._http_parser: HttpResponseParser | None = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._taken = 0
        self._has_head = False
        self._is_whole = False

    def take(self, data: bytes) -> bool:
        """Take what has arrived, and return whether this is all."""
        assert self._http_parser is not None
        self._taken += len(data)
        try:
            self._http_parser.feed_data(data)
        except HttpParserError as error:
            if not self._is_whole:
                raise BadAnswer(f"invalid HTTP: {error}") from error
            self.keeps_open = False  # more than was asked for
        if self._is_whole:
            self.body = b"".join(self._parts)
            self._http_parser = None  # which refers to this object
        elif self._taken > (LARGEST if self._has_head else LARGEST_HEAD):
            raise BadAnswer("invalid HTTP: an answer without an end")
        return self._is_whole

    def has(self, name: str, value: str) -> bool:
        """Whether this header has this value, and the body is not compressed."""
        found = dict(self.headers)
        return found.get(name) == value and found.get("content-encoding", "identity") in ("", "identity")

    def ends_here(self) -> bool:
        """Whether the end of the connection is the end of the answer. A message without a length may have been cut, and
        then it looks like one with less in it: no offset, or no gap."""
        if not self._has_head or self.status == 200:
            return False
        self.body = b"".join(self._parts)
        return not {"content-length", "transfer-encoding"} & dict(self.headers).keys()

    def on_message_begin(self) -> None:
        self.keeps_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # otherwise it is a trailer
            self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._http_parser is not None and not self._is_whole:
            self.status = self._http_parser.get_status_code()
            self._has_head = True

    def on_body(self, data: bytes) -> None:
        if not self._is_whole:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._is_whole or self._http_parser is None:
            return
        if self.status < 200:  # another one follows
            self.headers, self._has_head = [], False
        else:
            self._is_whole, self.keeps_open = True, self._http_parser.should_keep_alive()
