"""Prometheus metrics of a boundary. Each is there twice: as `onceward_boundary_…`, and as `bsfg_…`, the name in the
boundary's public specification, which is deprecated here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


PREFIX, OLD_PREFIX = "onceward_boundary_", "bsfg_"


class OldNames:
    """Collects the metrics of a registry under the names that they had before."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            name = family.name.replace(PREFIX, OLD_PREFIX, 1)
            old = Metric(name, f"deprecated, use {family.name}", family.type, family.unit)
            old.samples = [
                each._replace(name=each.name.replace(PREFIX, OLD_PREFIX, 1)) for each in family.samples
            ]
            yield old


class BoundaryMetrics:
    """One set per server, so two servers in one process do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.appends = self._counter(
            "onceward_boundary_append_requests", "facts to append, in AppendFact and AppendFacts calls"
        )
        self.append_failures = self._counter("onceward_boundary_append_failures", "facts refused", ["reason"])
        self.duplicates = self._counter("onceward_boundary_append_duplicates", "facts appended again")
        self.conflicts = self._counter(
            "onceward_boundary_append_conflicts", "existing ids sent with different content"
        )
        self.fetches = self._counter("onceward_boundary_fetch_requests", "FetchFacts calls")
        self.fetched = self._counter("onceward_boundary_fetched_facts", "facts delivered")
        self.confirms = self._counter("onceward_boundary_confirm_requests", "ConfirmReceipt calls")
        self.objects = self._counter("onceward_boundary_put_object_requests", "PutObject calls")
        self.refused = self._counter(
            "onceward_boundary_refused_requests", "calls refused", ["operation", "code"]
        )
        self.expired = self._counter("onceward_boundary_expired_facts", "facts removed because they expired")
        self.dropped = self._counter("onceward_boundary_dropped_facts", "facts removed to make room")
        self.expiry_halted = self._gauge(
            "onceward_boundary_expiry_halted", "1 while no fact expires because the clock may be wrong"
        )
        self.lost = self._counter(
            "onceward_boundary_expired_unconfirmed",
            "times facts expired before a consumer confirmed them",
            ["consumer"],
        )
        self.auth_failures = self._counter(
            "onceward_boundary_auth_failures", "calls refused because of who made them", ["reason"]
        )
        self.limited = self._counter(
            "onceward_boundary_limited_requests", "calls refused because of a limit", ["limit"]
        )
        self.handshake_errors = self._counter(
            "onceward_boundary_tls_handshake_errors", "TLS handshakes that failed"
        )
        self.append_latency = Histogram(
            "onceward_boundary_append_latency_seconds",
            "AppendFact and AppendFacts calls, until the facts are durable",
            registry=self.registry,
            buckets=LATENCIES,
        )
        self.latency = Histogram(
            "onceward_boundary_rpc_latency_seconds",
            "calls",
            ["operation"],
            registry=self.registry,
            buckets=LATENCIES,
        )
        self.store_up = self._gauge(
            "onceward_boundary_store_up", "1 if the store has answered this request, 0 if not"
        )
        self.frontier = self._gauge("onceward_boundary_frontier_offset", "the last offset of the log")
        self.backlog = self._gauge(
            "onceward_boundary_consumer_backlog", "facts not confirmed by a consumer", ["consumer"]
        )
        self.consumer_lag = self._gauge(
            "onceward_boundary_consumer_lag_seconds",
            "age of the first fact not confirmed by a consumer",
            ["consumer"],
        )
        self.expiring = self._gauge(
            "onceward_boundary_consumer_facts_expiring",
            "1 while facts that a consumer has not confirmed are about to expire",
            ["consumer"],
        )
        self.fill = self._gauge("onceward_boundary_store_buffer_fill_percent", "how full the store is")
        self.lag = self._gauge(
            "onceward_boundary_replication_lag_seconds", "age of the oldest fact not yet forwarded", ["link"]
        )
        self.lag_high = self._gauge(
            "onceward_boundary_replication_lag_high_watermark", "the highest lag so far", ["link"]
        )
        self.link_up = self._gauge("onceward_boundary_link_up", "1 while the link makes progress", ["link"])
        self.link_stopped = self._gauge(
            "onceward_boundary_link_stopped",
            "1 while a fact blocks the link until an operator decides",
            ["link"],
        )
        self.link_frontier = self._gauge(
            "onceward_boundary_link_frontier_offset",
            "the source's offset up to which everything has arrived",
            ["link"],
        )
        self.link_backlog = self._gauge(
            "onceward_boundary_link_backlog",
            "facts that the link has seen waiting; the source may have more",
            ["link"],
        )
        self.link_facts = self._counter(
            "onceward_boundary_link_facts",
            "facts that the link has processed, by outcome",
            ["link", "outcome"],
        )
        self.link_missed = self._counter(
            "onceward_boundary_link_missed_facts",
            "facts that expired at the source before the link took them",
            ["link"],
        )
        self.certificate_expiry = self._gauge(
            "onceward_boundary_certificate_expiry_seconds",
            "seconds until this server's own certificate, and the last of its CAs, expires",
            ["certificate"],
        )

    def forget_link(self, name: str) -> None:
        """Remove the gauges of a link. Its counters stay."""
        gauges = (
            self.lag,
            self.lag_high,
            self.link_up,
            self.link_stopped,
            self.link_frontier,
            self.link_backlog,
        )
        for gauge in gauges:
            gauge.remove(name)

    def forget_consumer(self, name: str) -> None:
        for metric in (self.backlog, self.consumer_lag, self.expiring, self.lost):
            with suppress(KeyError):
                metric.remove(name)

    def forget_store(self) -> None:
        """The store does not answer: what it had when it last did is not known to be true any more."""
        self.store_up.set(0)
        self.frontier.set(math.nan)
        self.fill.set(math.nan)
        self.forget_cursors()

    def forget_cursors(self) -> None:
        self.backlog.clear()
        self.consumer_lag.clear()

    def text(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(self.deprecated)

    @property
    def deprecated(self) -> OldNames:
        """The same numbers under their old names."""
        return OldNames(self.registry)

    def _counter(self, name: str, description: str, labels: list[str] | None = None) -> Counter:
        return Counter(name, description, labels or (), registry=self.registry)

    def _gauge(self, name: str, description: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(name, description, labels or (), registry=self.registry)
