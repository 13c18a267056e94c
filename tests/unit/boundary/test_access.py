"""The guard of a boundary: what no rule names is refused."""

from __future__ import annotations

import contextvars

import pytest

from onceward.boundary.errors import PermissionDenied
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.access import CERTIFICATE, Certificate, Guard, Peer, Peers
from onceward.boundary.v1 import boundary_pb as pb

HQ = Certificate(
    {"subject": ((("commonName", "hq-bsfg"),),), "notAfter": "Jan  1 00:00:00 2099 GMT"}, "hq:4711"
)


def check(request: object) -> None:
    CERTIFICATE.set(HQ)
    Guard(Peers([Peer(identity="hq-bsfg", zone="hq")]), BoundaryMetrics()).check("Call", request)


def test_a_request_that_no_rule_names_is_refused() -> None:
    class PurgeRequest: ...

    with pytest.raises(PermissionDenied, match="no rule allows Call"):
        contextvars.copy_context().run(check, PurgeRequest())


@pytest.mark.parametrize("request_type", [pb.PutObjectRequest, pb.GetObjectRequest])
def test_objects_are_open_to_known_peers(request_type: type[object]) -> None:
    contextvars.copy_context().run(check, request_type())
