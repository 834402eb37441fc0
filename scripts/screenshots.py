"""Takes the pictures of the console that the documentation shows: ``python -m scripts.screenshots``.

A gateway with the small model that comes with maitred, two tenants with limits, and many users: what is in the pictures
happened. They are rounded to 256 colours, which nobody sees and which makes them a third as large.
"""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.console_server import CHROMIUM, Consoled, consoled

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WATCHED_MS = 45_000
COLOURS = 256


def main() -> None:
    """Takes all of them."""
    prices = {"admission.prices.*.prompt": 1.0, "admission.prices.*.output": 3.0}
    with consoled(engine__threads=1, engine__max_sequences=12, **prices) as system:
        keys = {tenant: system.key(tenant) for tenant in ("acme", "research", "night-shift")}
        system.put("limits/1", {"subject": "tenant:acme", "kind": "concurrent_requests", "value": 36})
        system.put("limits/2", {"subject": "tenant:acme", "kind": "usd_per_month", "value": 20})
        system.put("limits/3", {"subject": "tenant:research", "kind": "tokens_per_minute", "value": 6000})
        system.put("limits/4", {"subject": "tenant:night-shift", "kind": "requests_per_minute", "value": 600})
        loads = [
            subprocess.Popen([sys.executable, "-m", "tests.support.concurrent_users", system.url, keys[tenant], users])
            for tenant, users in (("acme", "40"), ("research", "6"), ("night-shift", "5"))
        ]
        try:
            with sync_playwright() as drivers:
                browser = drivers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                take_all(browser, system)
                browser.close()
        finally:
            for load in loads:
                load.kill()
                load.wait()


def take_all(browser: Browser, system: Consoled) -> None:
    """Every picture."""
    dark = opened(browser, system, "dark", 1280, 1080)
    dark.wait_for_timeout(WATCHED_MS)
    keep(dark, "console-live")
    light = opened(browser, system, "light", 1280, 900)
    light.evaluate("location.hash = 'playground'")
    light.get_by_label("Compare two models").check()
    light.get_by_label("Temperature").fill("0.8")
    light.get_by_label("Max tokens").fill("90")
    light.get_by_label("Your message").fill("Tell me a story about a small dog.")
    light.get_by_role("button", name="Send").click()
    expect(light.locator(".turn.model:not([aria-busy])")).to_have_count(2, timeout=60_000)
    keep(light, "console-playground")
    light.evaluate("location.hash = 'keys'")
    light.wait_for_timeout(1000)
    keep(light, "console-keys")


def opened(browser: Browser, system: Consoled, scheme: str, width: int, height: int) -> Page:
    """The console with an administrator logged in."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(f"{system.url}/console")
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("API key").fill(system.admin_key)
    page.get_by_label("API key").press("Enter")
    page.locator(".pill.ok").wait_for()
    return page


def keep(page: Page, name: str) -> None:
    """Writes what the window shows."""
    FOLDER.mkdir(exist_ok=True)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
