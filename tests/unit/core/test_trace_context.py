"""What a request says of the span that sent it, by the rules of W3C Trace Context."""

import pytest

from maitred.core.trace_context import TraceContext, context_in, falls_within

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_what_is_read_is_written_again():
    context = context_in(f"00-{TRACE}-{SPAN}-01", "vendor=opaque,other=1")
    assert context == TraceContext(TRACE, SPAN, sampled=True, state="vendor=opaque,other=1")
    assert context.headers() == {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=opaque,other=1"}
    assert context_in(f"00-{TRACE}-{SPAN}-00").headers() == {"traceparent": f"00-{TRACE}-{SPAN}-00"}


def test_flags_other_than_sampled_are_not_ours():
    assert context_in(f"00-{TRACE}-{SPAN}-02").sampled is False
    assert context_in(f"00-{TRACE}-{SPAN}-03").headers()["traceparent"].endswith("-01")


def test_a_version_to_come_is_read_as_far_as_it_is_known():
    assert context_in(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like") == TraceContext(TRACE, SPAN, sampled=True)
    assert context_in(f"cc-{TRACE}-{SPAN}-01.what-the-future-will-not-be-like") is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_what_breaks_the_rules_is_not_there(header):
    assert context_in(header, "a=1") is None


@pytest.mark.parametrize("state", ["a" * 513, "a=\x01", "a=ü"])
def test_a_state_that_cannot_be_passed_on_is_left_out(state):
    assert context_in(f"00-{TRACE}-{SPAN}-01", state).state == ""


def test_a_share_of_the_traces_is_sampled():
    low, high = f"{'f' * 16}{1 << 62:016x}", f"{'0' * 16}{3 << 62:016x}"
    assert falls_within(low, 0.3)
    assert not falls_within(low, 0.2)
    assert not falls_within(high, 0.3)
    assert falls_within("f" * 32, 1.0)
    assert not falls_within("0" * 32, 0.0)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("", "maitred=usage"),
        ("vendor=7, other=1", "maitred=usage,vendor=7,other=1"),
        ("vendor=7,maitred=usage", "maitred=usage,vendor=7"),
        ("x=" + "y" * 510, "maitred=usage"),
        (",".join(f"v{n}=1" for n in range(32)), ",".join(["maitred=usage", *(f"v{n}=1" for n in range(31))])),
    ],
)
def test_a_child_context_says_that_usage_is_reported(state, expected):
    context = TraceContext(TRACE, SPAN, sampled=True, state=state)
    assert context.accounted == ("maitred=usage" in state)
    below = context.accounting()
    assert below == TraceContext(TRACE, SPAN, sampled=True, state=expected)
    assert below.accounted
    assert below.accounting() == below
