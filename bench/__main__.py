"""Run the named benchmarks, or all, and print a table, or JSON with --json."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import platform
from collections.abc import Iterator

from bench.measure import Line

# Memory first: the peak is that of the process's whole life.
PARTS = (
    "memory",
    "engine",
    "telemetry",
    "sqlite",
    "queue",
    "redis_streams",
    "postgresql_queue",
    "jetstream",
    "inbox",
    "inbox_groups",
    "order",
    "inbox_identity",
    "inbox_migration",
    "inbox_purge",
    "outbox",
    "boundary",
    "boundary_rpc",
    "boundary_postgresql",
    "boundary_jetstream",
    "wake",
    "run_idle",
    "boundary_zones",
    "start",
    "send",
    "scale",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"one or more of {', '.join(PARTS)}; default all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    logging.disable(logging.CRITICAL)
    if not arguments.json:
        print(
            f"Python {platform.python_version()}, {os.cpu_count()} cores; best of 5 or more, bare and ours in turn\n"
        )
        print(f"{'':<52}{'bare':>10}{'ours':>10}   {'result':>10}   {'target':<12}")
    for line in measure([part for part in PARTS if part in (arguments.parts or PARTS)]):
        if arguments.json:
            print(json.dumps(dataclasses.asdict(line), ensure_ascii=False), flush=True)
        else:
            verdict = "met" if line.met else "NOT MET"
            print(
                f"{line.what:<52}{line.bare:>7.2f} {line.unit}{line.ours:>7.2f} {line.unit}"
                f"   {line.shown:>10}   {line.target:<12}{verdict}",
                flush=True,
            )


def measure(parts: list[str]) -> Iterator[Line]:
    for part in parts:
        yield from importlib.import_module(f"bench.{part}").lines()


if __name__ == "__main__":
    main()
