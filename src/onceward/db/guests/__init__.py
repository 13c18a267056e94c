"""Lends the transaction of a session to code that speaks SQLAlchemy's ORM, psycopg or sqlite3.

    session (begins and commits) ── Guest ─┬─ an ORM session, on a savepoint of the transaction
                                           └─ a driver's connection

Every statement of a guest is an operation of the session, so time limits, failures and verification see it. A guest
never ends the transaction: what would end it raises, and then the handler has failed, even if it caught the error.
"""

from onceward.db.guests.guest import Kind, Lending, kind_of

__all__ = ["Kind", "Lending", "kind_of"]
