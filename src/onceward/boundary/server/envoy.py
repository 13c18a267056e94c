"""The configuration of Envoy, which speaks the protocols: HTTP/1.1 and HTTP/2 with trailers on one port, TLS 1.3.

It comes from pyvoy, which runs our ASGI application inside Envoy. What is added here are limits, certificates, and what
a boundary needs to know of a peer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyvoy import PyvoyServer

from onceward.boundary.server.limits import Limits

APPLICATION = "onceward.boundary.server.worker:application"
STREAMS = 100
"""Calls at once on one HTTP/2 connection; clients wait with more."""
STREAM_WINDOW = 256 * 1024
CONNECTION_WINDOW = 1024 * 1024
BUFFER = 128 * 1024
"""Bytes that Envoy holds of a connection which is faster than its reader."""
BACKLOG = 1024
IDENTITY, TRUST = "identity", "trust"
"""The secrets of a server: its certificate and key, and its CA. Envoy watches a file for each."""
_TYPES = "type.googleapis.com/envoy"


def envoy_config(
    host: str, port: int, limits: Limits, runtime: Path, form: str, handshakes: int | None
) -> dict[str, Any]:
    """`runtime` is a private directory. `handshakes` is the file that ends of connections are reported to, or None
    for a server without TLS."""
    server = PyvoyServer(APPLICATION, address=host, port=port, lifespan=True, worker_threads=1)
    config: dict[str, Any] = server.get_envoy_config()
    config["node"] = {"id": "onceward-boundary", "cluster": "onceward-boundary"}
    config["admin"] = {"address": {"pipe": {"path": str(runtime / "admin"), "mode": 0o600}}}
    config["application_log_config"] = {"log_format": _LOG_FORMS[form]}
    config["overload_manager"] = {
        "resource_monitors": [
            {
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.resource_monitors.downstream_connections.v3"
                    ".DownstreamConnectionsConfig",
                    "max_active_downstream_connections": limits.connections,
                },
            }
        ]
    }
    resets = {
        # Envoy counts calls, and closes the connection when half of these were reset.
        "overload.premature_reset_total_stream_count": 2 * limits.resets,
        "overload.premature_reset_min_stream_lifetime_seconds": 1,
    }
    config["layered_runtime"] = {"layers": [{"name": "limits", "static_layer": resets}]}
    [listener] = config["static_resources"]["listeners"]
    listener |= {
        "enable_reuse_port": False,  # two servers must not share a port
        "tcp_backlog_size": BACKLOG,
        "per_connection_buffer_limit_bytes": BUFFER,
    }
    [chain] = listener["filter_chains"]
    [manager] = [each["typed_config"] for each in chain["filters"]]
    manager |= _http(manager, limits)
    if handshakes is None:
        listener |= _first_byte(limits)
    else:
        listener["access_log"] = [_end_of_connection(handshakes)]
        chain["transport_socket"] = _tls(runtime)
        chain["transport_socket_connect_timeout"] = _duration(limits.headers)
        manager |= {
            "forward_client_cert_details": "SANITIZE_SET",
            "set_current_client_cert_details": {"cert": True},
        }
    return config


def identity_secret(certificate: bytes, key: bytes) -> dict[str, Any]:
    return _secret(
        IDENTITY,
        "tls_certificate",
        {
            "certificate_chain": {"inline_string": certificate.decode()},
            "private_key": {"inline_string": key.decode()},
        },
    )


def trust_secret(ca: bytes) -> dict[str, Any]:
    return _secret(TRUST, "validation_context", {"trusted_ca": {"inline_string": ca.decode()}})


def secret_file(runtime: Path, name: str) -> Path:
    return runtime / f"{name}.json"


def _secret(name: str, kind: str, value: dict[str, Any]) -> dict[str, Any]:
    secret = {"@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.Secret", "name": name, kind: value}
    return {"resources": [secret]}


def _http(manager: dict[str, Any], limits: Limits) -> dict[str, Any]:
    return {
        "request_headers_timeout": _duration(limits.headers),
        "stream_idle_timeout": _duration(limits.idle),
        "common_http_protocol_options": {"idle_timeout": _duration(limits.idle)},
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "boundary"},
        "http2_protocol_options": {
            "max_concurrent_streams": STREAMS,
            "initial_stream_window_size": STREAM_WINDOW,
            "initial_connection_window_size": CONNECTION_WINDOW,
        },
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,  # peers are not proxies: what they say of others is not believed
        "skip_xff_append": True,
        "http_filters": [_no_escapes(), *manager["http_filters"]],
    }


def _no_escapes() -> dict[str, Any]:
    """No path of ours has an escape such as %ff, and one that is not UTF-8 would never be answered by pyvoy."""
    escaped = {"url_path": {"path": {"safe_regex": {"regex": ".*%.*"}}}}
    policy = {"permissions": [escaped], "principals": [{"any": True}]}
    return {
        "name": "envoy.filters.http.rbac",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.filters.http.rbac.v3.RBAC",
            "rules": {"action": "DENY", "policies": {"escaped": policy}},
        },
    }


def _first_byte(limits: Limits) -> dict[str, Any]:
    """Without TLS, the deadline of the headers begins with their first byte. This is the deadline for that."""
    inspector = {
        "name": "envoy.filters.listener.http_inspector",
        "typed_config": {"@type": f"{_TYPES}.extensions.filters.listener.http_inspector.v3.HttpInspector"},
    }
    return {"listener_filters": [inspector], "listener_filters_timeout": _duration(limits.headers)}


def _end_of_connection(handshakes: int) -> dict[str, Any]:
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": f"/dev/fd/{handshakes}",
            "log_format": {
                "json_format": {
                    "peer": "%DOWNSTREAM_REMOTE_ADDRESS%",
                    "shown": "%DOWNSTREAM_PEER_FINGERPRINT_256%",
                    "reason": "%DOWNSTREAM_TRANSPORT_FAILURE_REASON%",
                    "end": "%CONNECTION_TERMINATION_DETAILS%",
                }
            },
        },
    }


def _tls(runtime: Path) -> dict[str, Any]:
    def watched(name: str) -> dict[str, Any]:
        source = {
            "path_config_source": {"path": str(secret_file(runtime, name))},
            "resource_api_version": "V3",
        }
        return {"name": name, "sds_config": source}

    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": True,
            # Every connection must show its certificate.
            "disable_stateless_session_resumption": True,
            "disable_stateful_session_resumption": True,
            "common_tls_context": {
                "tls_params": {
                    "tls_minimum_protocol_version": "TLSv1_3",
                    "tls_maximum_protocol_version": "TLSv1_3",
                },
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_certificate_sds_secret_configs": [watched(IDENTITY)],
                "validation_context_sds_secret_config": watched(TRUST),
            },
        },
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s"


_LOG_FORMS: dict[str, dict[str, Any]] = {
    "json": {
        "json_format": {"time": "%Y-%m-%dT%T.%e%z", "level": "%l", "message": "%j", "logger": "envoy.%n"}
    },
    "console": {"text_format": "%Y-%m-%dT%T.%e%z %l envoy: %v"},
}
