"""What a WebSocket remembers: the last response of each lane, within a number of bytes."""

from maitred.api.responses.turn import RecentResponses


def test_each_lane_has_its_last_response():
    recent = RecentResponses(max_lanes=2, max_bytes=100)
    recent.keep("a", "first", [b"[1]"])
    recent.keep("b", "other", [b"[2]"])
    recent.keep("a", "second", [b"[1]", b"[3]"])
    assert recent.find("second") == [b"[1]", b"[3]"]
    assert recent.find("other") == [b"[2]"]
    assert recent.find("first") is None


def test_the_lane_that_was_used_longest_ago_goes_first():
    recent = RecentResponses(max_lanes=2, max_bytes=10)
    recent.keep("a", "a1", [b"1234"])
    recent.keep("b", "b1", [b"1234"])
    recent.keep("a", "a2", [b"1234"])
    recent.keep("c", "c1", [b"12"])
    assert [recent.find(found) is not None for found in ("a2", "b1", "c1")] == [True, False, True], "two lanes"
    recent.keep("c", "c2", [b"12345678"])
    assert [recent.find(found) is not None for found in ("a2", "c1", "c2")] == [False, False, True], "ten bytes"


def test_a_conversation_that_is_too_large_is_not_kept_and_drops_no_other():
    recent = RecentResponses(max_lanes=2, max_bytes=10)
    recent.keep("a", "a1", [b"1234"])
    recent.keep("b", "b1", [b"123456", b"12345"])
    assert (recent.find("a1"), recent.find("b1")) == ([b"1234"], None)
    recent.keep("b", "b2", [b"123456"])
    assert recent.find("a1") is not None
    assert recent.find("b2") is not None
