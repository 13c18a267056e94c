"""Other task queues, side by side with onceward on the same Redis, or PostgreSQL (`postgresql.py`): `make bench-peers`.

One module per peer on Redis, which runs in an environment of its own (`requirements.txt`). It has

    send_one(url, count)     send `count` messages, one call each
    send_many(url, count)    the same in the way that the peer has for many
    worker(url)              the command of a worker in one process, whose handler calls `sink.note(sent_at)`

A message is a dict with the time at which it was sent: {"sent_at": …}.
"""
