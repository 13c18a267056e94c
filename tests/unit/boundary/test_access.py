"""The guard of a boundary: what no rule names is refused."""

from __future__ import annotations

import contextvars

import pytest

from onceward.boundary.errors import PermissionDenied
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.access import CERTIFICATE, Certificate, Guard, Peer, Peers
from onceward.boundary.v1 import boundary_pb as pb

HQ = Certificate(("hq-bsfg",), float("inf"), "hq:4711")


def check(request: object) -> None:
    CERTIFICATE.set(HQ)
    Guard(Peers([Peer(identity="hq-bsfg", zone="hq")]), BoundaryMetrics()).check("Call", request)


def test_a_request_that_no_rule_names_is_refused() -> None:
    class PurgeRequest: ...

    with pytest.raises(PermissionDenied, match="no rule allows Call"):
        contextvars.copy_context().run(check, PurgeRequest())


@pytest.mark.req("BC-38")
@pytest.mark.parametrize(
    "request_type", [pb.FetchFactsRequest, pb.ConfirmReceiptRequest, pb.RemoveConsumerRequest]
)
def test_a_name_that_is_reserved_for_others_is_refused(request_type: type[pb.RemoveConsumerRequest]) -> None:
    def call(name: str) -> None:
        CERTIFICATE.set(HQ)
        peers = [Peer(identity="hq-bsfg", zone="hq"), Peer(identity="lab", zone="lab", consumers=("theirs",))]
        Guard(Peers(peers), BoundaryMetrics()).check("Call", request_type(consumer_name=name))

    contextvars.copy_context().run(call, "open")
    with pytest.raises(PermissionDenied, match="reserved for another peer"):
        contextvars.copy_context().run(call, "theirs")


@pytest.mark.req("BC-25")
@pytest.mark.parametrize(("from_zone", "to_zone"), [("x" * 10**6, "hq"), ("hq", "x" * 10**6)])
def test_a_refused_zone_is_not_repeated_at_length(from_zone: str, to_zone: str) -> None:
    envelope = pb.Envelope(from_zone=from_zone, to_zone=to_zone)
    with pytest.raises(PermissionDenied) as raised:
        contextvars.copy_context().run(check, pb.AppendFactRequest(envelope=envelope))
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("request_type", [pb.PutObjectRequest, pb.GetObjectRequest])
def test_objects_are_open_to_known_peers(request_type: type[object]) -> None:
    contextvars.copy_context().run(check, request_type())
