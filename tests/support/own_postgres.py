"""A PostgreSQL for one test, which may kill it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg

from onceward.testing.servers import make_socket_directory, start_postgres
from tests.support.wait import until


class OwnPostgres:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = start_postgres(folder)
        self.plain_url: str = self._server.get_uri()
        """The URL for psycopg; the other one is for SQLAlchemy."""
        self.url = self.plain_url.replace("postgresql://", "postgresql+psycopg://", 1)

    def control(self, *command: str) -> None:
        program = str(self._server.bin_path / "pg_ctl")
        subprocess.run(
            [program, "-w", "-s", "-D", str(self.folder), "-l", str(self.folder / "log"), *command],
            check=True,
            user=self._server.system_user,
            timeout=60,
        )

    def start(self) -> None:
        self.control("start", "-o", f'-h "" -k {self.folder}')

    def allow(self, connections: int) -> None:
        """Restart it with room for so many connections; it has 100 by default."""
        with closing(psycopg.connect(self.plain_url, autocommit=True)) as connection:
            connection.execute(f"ALTER SYSTEM SET max_connections = {connections}")
        self.control("stop", "-m", "fast")
        self.start()

    def kill_a_backend(self) -> None:
        """SIGKILL: the postmaster cannot know what it left behind, so it ends all others and recovers from its log."""
        query = "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        with closing(psycopg.connect(self.plain_url, autocommit=True)) as connection:
            [pid, *_] = until(lambda: connection.execute(query).fetchall())  # clients may be connecting again
        os.kill(pid[0], signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the server and to all its backends, as if the machine froze or went on."""
        server = int((self.folder / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for each in (server, *map(int, children)):
            with suppress(ProcessLookupError):  # a backend may have ended meanwhile
                os.kill(each, number)

    def close(self) -> None:
        self._server.cleanup()


@contextmanager
def own_postgres() -> Iterator[OwnPostgres]:
    folder = make_socket_directory("onceward-pg-")
    server = OwnPostgres(folder)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
