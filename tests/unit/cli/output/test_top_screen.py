"""What `maitred top` says of a state that no test server is in."""

import io

from rich.console import Console

from maitred.cli.output.top_screen import screen
from maitred.core.limits import LimitKind
from maitred.wire.admin.live import FindingBody, LiveBody, PathBody, PointBody, TenantUseBody, UseBody


def shown(**more):
    nothing = dict.fromkeys(("waiting", "running", "prompt_tokens", "output_tokens"), 0)
    state = LiveBody(
        at=100.0,
        started_at=40.0,
        version="1",
        draining=False,
        stores={},
        path=PathBody(arriving=0, queued=0, prefilling=0, decoding=0),
        point=PointBody(at=100.0, **nothing, ended={}, ttft_s=None, itl_s=None),
        **{"queues": [], "engines": [], "replicas": [], "tenants": [], "refusals": [], **more},
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(state))
    return console.file.getvalue()


def finding(where):
    return FindingBody(
        kind="kv_memory",
        where=where,
        weight=0.7,
        summary="The cache is full.",
        evidence=[],
        remedy="Give it more memory.",
    )


def test_what_holds_requests_up_stands_with_its_remedy_before_the_queues():
    text = shown(findings=[finding("tiny local"), finding("")])
    assert "kv_memory tiny local  The cache is full.\nGive it more memory." in text
    assert text.index("Give it more memory.") < text.index("QUEUE")


def test_without_findings_nothing_is_shown():
    assert shown(findings=[]) == shown(findings=None) == shown()


def test_control_characters_of_a_finding_do_not_reach_the_terminal():
    assert "\x1b" not in shown(findings=[finding("\x1b[2J")])


def test_a_soft_limit_is_marked_unlike_a_hard_one():
    limits = [
        UseBody(
            limit=name, kind=LimitKind("usd_per_month"), model=None, hard=hard, value=10.0, used=5.0, resets_in_s=1.0
        )
        for name, hard in (("one", True), ("two", False))
    ]
    counts = dict.fromkeys(("waiting", "running", "requests", "refused", "prompt_tokens", "output_tokens"), 0)
    lines = shown(tenants=[TenantUseBody(tenant="acme", **counts, limits=limits)]).splitlines()
    budgets = [line.split("50%")[1].strip() for line in lines if "50%" in line]
    assert budgets == ["usd_per_month", "soft usd_per_month"]
