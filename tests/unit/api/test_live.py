"""What of the live state is shown to whom."""

import msgspec

from maitred.api.admin.live import _visible_state
from maitred.wire.admin.live import FindingBody, LiveBody, PathBody, PointBody

POINT = PointBody(at=1, waiting=0, running=0, ended={}, prompt_tokens=0, output_tokens=0, ttft_s=None, itl_s=None)
STATE = LiveBody(
    **{"at": 1.0, "started_at": 0.0, "version": "1", "draining": False, "stores": {}, "point": POINT},
    path=PathBody(arriving=0, queued=0, prefilling=0, decoding=0),
    **{name: [] for name in ("queues", "engines", "replicas", "tenants", "refusals")},
)


def finding(kind, where, *evidence):
    return FindingBody(kind=kind, where=where, weight=0.5, summary="S.", evidence=list(evidence), remedy="R.")


def test_findings_do_not_say_who_ran_into_limits_but_to_administrators():
    found = [finding("limits", "acme", "9 of 10 requests.", "acme: 9 refused."), finding("compute", "m", "Busy.")]
    state = msgspec.structs.replace(STATE, findings=found)
    assert _visible_state(state, whole=True).findings == found
    assert _visible_state(state, whole=False).findings == [finding("limits", "", "9 of 10 requests."), found[1]]


def test_nothing_found_is_not_nothing_known():
    assert _visible_state(STATE, whole=False).findings is None
    assert _visible_state(msgspec.structs.replace(STATE, findings=[]), whole=False).findings == []
