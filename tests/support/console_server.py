"""A server with a console, as a process of its own, and a browser to look at it."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from maitred.testing.server_process import ServerProcess, serving

PATIENCE_MS = 300_000
"""Longest wait: whatever takes longer does not come."""
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 780}
CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[1] / "vendor" / "axe.min.js"
_AXE_RUN = """async (where) => {
  const found = await axe.run(where ?? document, {resultTypes: ["violations"]});
  return found.violations.map(({id, impact, nodes}) => ({id, impact, html: nodes.map((node) => node.html)}));
}"""


@dataclass
class Consoled:
    """A server, its admin key, and somebody who administers it."""

    server: ServerProcess
    admin_key: str
    admin: httpx.Client

    @property
    def url(self) -> str:
        return self.server.url

    def put(self, path: str, body: object) -> None:
        self.admin.put(f"/admin/v1/{path}", json=body).raise_for_status()

    def key(self, tenant: str, scopes: Sequence[str] = ("inference",)) -> str:
        """A new key of a tenant, which is made if need be."""
        self.admin.post("/admin/v1/tenants", json={"id": tenant})
        made = self.admin.post("/admin/v1/keys", json={"tenant": tenant, "scopes": list(scopes)})
        made.raise_for_status()
        return str(made.json()["key"])


@contextmanager
def consoled(*, program: Sequence[str] = ("-m", "maitred", "serve"), **settings: object) -> Iterator[Consoled]:
    """Starts one. Settings with two underscores for each dot."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    environment = {"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}"}
    with serving(program=program, settings=dotted, environment=environment) as server:
        found = re.search(r"sk-mtd-\S+", server.log.read_text())
        assert found is not None
        with httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {found[0]}"}, timeout=300, trust_env=False
        ) as admin:
            yield Consoled(server, found[0], admin)


def accessibility_violations(page, where: str | None = None) -> list[dict[str, object]]:
    """What axe finds on a page, or in a part of it.

    What it finds in order is left in the browser: that takes seconds to read.
    """
    # A driver's script passes by the page's policy; one that the page loaded would not.
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    return page.evaluate(_AXE_RUN, where)


@dataclass
class Complaints:
    """What a page complains of, and whom it asks beside its own server."""

    url: str
    messages: list[str] = field(default_factory=list)

    def watch(self, page) -> None:
        page.on(
            "console",
            lambda message: self.messages.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(self.url) else self.messages.append(asked.url))


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
