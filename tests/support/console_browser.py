"""Pages of the console in a real browser, which complain of nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.console_server import Complaints, accessibility_violations

PATIENCE_MS = 300_000
"""Longest wait: whatever takes longer does not come."""
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 780}


@contextmanager
def opening(browser, server_url: str, refusals: Sequence[int] = ()) -> Iterator[Callable[..., Any]]:
    """Opens pages, and holds at the end that none of them complained or asked anybody else.

    A browser itself writes down every refused request; those with the status of one of `refusals` are expected.
    """
    complaints, contexts = Complaints(server_url), []

    def open_(where="", *, url=server_url, **options):
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints.watch(page)
        page.goto(f"{url}/console{where}")
        return page

    yield open_
    for context in contexts:
        context.close()
    expected = [f"the server responded with a status of {status}" for status in refusals]
    assert [said for said in complaints.messages if not any(part in said for part in expected)] == []


def serious_violations(page, where: str | None = None) -> list[dict[str, object]]:
    """What axe finds on a page that keeps somebody from using it."""
    return [each for each in accessibility_violations(page, where) if each["impact"] in ("serious", "critical")]


def wait_until_drawn(page) -> None:
    """Waits until a page shows what the server has told it."""
    page.locator("main:not([aria-busy])").wait_for()


def log_in(page, key: str) -> None:
    """Logs in with a key."""
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")
    page.get_by_role("button", name="Log out").wait_for()
