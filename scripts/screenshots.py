"""Takes the pictures of the console: ``python -m scripts.screenshots`` those that the documentation shows.

``python -m scripts.screenshots FOLDER`` takes every page in light, dark and on a phone, to look at. A gateway with the
small model that comes with maitred, the same as a new version of it, an encoder, some tenants with limits, and many
users: what is in the pictures happened. They are rounded to 256 colours, which nobody sees and which makes them a
third as large.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from maitred.config.tree import BUNDLED_MODEL
from tests.support.console_server import CHROMIUM, Consoled, consoled, log_in
from tests.support.models import make_encoder, save_words

SHOWN = Path(__file__).resolve().parents[1] / "docs" / "images"
PAGES = (
    *("live", "playground", "use", "tenants", "tenants/acme", "keys", "usage", "models", "rollouts", "scaling"),
    *("requests", "requests/req-5f0e2c", "feedback", "cache"),
)
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
LOOKS = {"light": ("light", WIDE), "dark": ("dark", WIDE), "phone": ("light", PHONE)}
WATCHED_MS = 45_000
DRAWN_MS = 700
COLOURS = 256
EXPLAINED = "req-5f0e2c"


def main() -> None:
    """Takes those of the documentation, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="takes every page in light, dark and on a phone")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as models, consoled(**settings(Path(models))) as system:
        keys = {tenant: system.key(tenant) for tenant in ("acme", "research", "night-shift")}
        prepare(system, keys)
        with sync_playwright() as drivers:
            browser = drivers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            if folder is None:
                take_shown(browser, system, keys)
            else:
                take_all(browser, system, folder)
            browser.close()


def settings(models: Path) -> dict[str, object]:
    """Settings of the gateway; makes the models that it has beside the small one."""
    for name in ("chat-v2", "code"):
        shutil.copytree(BUNDLED_MODEL, models / name)
    encoder = models / "tiny-encoder"
    encoder.mkdir()
    save_words(encoder)
    make_encoder(encoder)
    return {
        **{"model.path": BUNDLED_MODEL, "model.served_name": "maitred-tiny", "region": "eu"},
        **{"engine.threads": 1, "engine.max_sequences": 12, "encoder.path": encoder, "encoder.threads": 1},
        **{f"models.{name}.path": models / name for name in ("chat-v2", "code")},
        **{"residency.memory_bytes": "3GiB", "routing.rollouts.chat.stable": "maitred-tiny"},
        **{"routing.rollouts.chat.canary": "chat-v2", "routing.rollouts.chat.weight": 0.4},
        **{"routing.rollouts.chat.sticky": "request", "routing.rollouts.chat.automatic": "none"},
        **{"admission.prices.*.prompt": 1.0, "admission.prices.*.output": 3.0},
    }


def prepare(system: Consoled, keys: dict[str, str]) -> None:
    """Sets limits, and has some answers given and rated."""
    system.admin.patch("/admin/v1/tenants/acme", json={"name": "Acme Inc."}).raise_for_status()
    system.admin.post("/admin/v1/tenants", json={"id": "acme-web", "parent": "acme"}).raise_for_status()
    for number, (subject, kind, value) in enumerate(
        [
            ("acme", "concurrent_requests", 36),
            ("acme", "usd_per_month", 0.2),
            ("research", "tokens_per_minute", 6000),
            ("night-shift", "requests_per_minute", 600),
        ]
    ):
        system.put(f"limits/{number}", {"subject": f"tenant:{subject}", "kind": kind, "value": value})
    opinions = [(1, ""), (0, "The dog is a cat in the second line."), (1, "Just right."), (0.5, "")]
    for number in range(24):
        name, key = list(keys.items())[number % 3]
        id_ = f"{name}-{number}" if number else EXPLAINED
        headers = {"authorization": f"Bearer {key}", "x-request-id": id_}
        body = {
            "model": "chat",
            "max_tokens": 40,
            "messages": [{"role": "user", "content": f"Tell me story {number}."}],
        }
        asked = httpx.post(
            f"{system.url}/v1/chat/completions", json=body, headers=headers, timeout=300, trust_env=False
        )
        asked.raise_for_status()
        if number % 2 == 0:
            score, text = opinions[number // 2 % len(opinions)]
            given = {"request_id": id_, "score": score, "text": text, "tags": ["story"]}
            httpx.post(f"{system.url}/v1/feedback", json=given, headers=headers, trust_env=False).raise_for_status()
    time.sleep(1)  # The ledger has them within half a second.


@contextmanager
def users(system: Consoled, keys: dict[str, str]) -> Iterator[None]:
    """Has many users ask at once."""
    loads = [
        subprocess.Popen([sys.executable, "-m", "tests.support.concurrent_users", system.url, keys[tenant], count])
        for tenant, count in (("acme", "40"), ("research", "6"), ("night-shift", "5"))
    ]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def take_shown(browser: Browser, system: Consoled, keys: dict[str, str]) -> None:
    """Takes those of the documentation."""
    with users(system, keys):
        dark = opened(browser, system, "dark", {"width": 1280, "height": 1080})
        dark.wait_for_timeout(WATCHED_MS)
        keep(dark, SHOWN / "console-live.png")
        dark.close()
    page = opened(browser, system, "light", WIDE)
    converse(page)
    keep(page, SHOWN / "console-playground.png")
    for name, picture in (
        *(("keys", "keys"), ("tenants/acme", "tenant"), ("models", "models"), ("rollouts", "rollouts")),
        (f"requests/{EXPLAINED}", "request"),
    ):
        go(page, name)
        keep(page, SHOWN / f"console-{picture}.png")


def take_all(browser: Browser, system: Consoled, folder: Path) -> None:
    """Takes every page in every look."""
    folder.mkdir(parents=True, exist_ok=True)
    for look, (scheme, size) in LOOKS.items():
        page = opened(browser, system, scheme, size)
        for name in PAGES:
            go(page, name)
            if name == "playground":
                converse(page, compare=size is WIDE)
            keep(page, folder / f"{name.replace('/', '-')}-{look}.png", whole=True)
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > size["width"]:
                print(f"{name} is {wide} pixels wide where there are {size['width']}.", file=sys.stderr)
        page.close()


def converse(page: Page, *, compare: bool = True) -> None:
    """Asks one or two models in the playground, and rates an answer."""
    go(page, "playground")
    if compare:
        page.get_by_label("Compare two models").check()
    for side in "AB"[: 1 + compare]:
        page.get_by_label(f"Model {side}").select_option("maitred-tiny")
    page.get_by_label("Temperature").fill("0.8")
    page.get_by_label("Max tokens").fill("90")
    page.get_by_label("Your message").fill("Tell me a story about a small dog.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.model:not([aria-busy])")).to_have_count(1 + compare, timeout=120_000)
    page.get_by_role("button", name="Good answer").first.click()
    page.get_by_text("Thank you.").wait_for()


def opened(browser: Browser, system: Consoled, scheme: str, size: dict[str, int]) -> Page:
    """Opens the console with an administrator logged in."""
    page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page.goto(f"{system.url}/console")
    log_in(page, system.admin_key)
    page.locator(".pill.ok").wait_for()
    return page


def go(page: Page, name: str) -> None:
    """Goes to a page and waits until it is drawn."""
    page.evaluate("name => { location.hash = name }", name)
    page.locator(f"nav [aria-current][href='#{name.partition('/')[0]}']").wait_for()
    page.locator("main:not([aria-busy])").wait_for()
    page.wait_for_timeout(DRAWN_MS)


def keep(page: Page, path: Path, *, whole: bool = False) -> None:
    """Writes what the window shows, or the whole page."""
    path.parent.mkdir(exist_ok=True)
    page.mouse.move(0, 0)
    picture = Image.open(BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
