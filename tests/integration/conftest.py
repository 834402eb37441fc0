"""The servers and folders that integration tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.console_server import CHROMIUM
from tests.support.servers.postgres_server import postgres_server, postgres_url
from tests.support.stores import store_config

__all__ = ["postgres_server", "postgres_url", "store_config"]

UNUSED_FEATURES = (
    *("HttpsUpgrades", "MediaRouter", "OptimizationHints", "PaintHolding"),  # by Playwright, whose list this replaces
    # Processes for what no page of a test shows
    *("AimEnabled", "SpareRendererForSitePerProcess", "WebUIOmniboxAimPopup", "WebUIOmniboxPopup"),
)


@pytest.fixture(scope="module")
def browser():
    """A browser without a window."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install 'maitred[dev]'"
    )
    if CHROMIUM is None:
        pytest.skip("There is no chromium on the path: scripts/services.sh has it.")
    with playwright.sync_playwright() as drivers:
        one = drivers.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-dev-shm-usage", f"--disable-features={','.join(UNUSED_FEATURES)}"],
        )
        yield one
        one.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty one whose name leaves room for that of a socket; a system takes some hundred characters of both."""
    with tempfile.TemporaryDirectory(prefix="maitred-test-") as folder:
        yield Path(folder)
