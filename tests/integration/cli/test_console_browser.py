"""The console in a real browser: what people see and do, and what it never says to its own log."""

import json
import re
import subprocess
import sys

import httpx
import msgspec
import pytest

from maitred.wire.admin.scaling import ScalingBody
from maitred.wire.admin.semantic import SemanticScopeBody
from tests.support.console_server import (
    PATIENCE_MS,
    PHONE,
    WIDE,
    accessibility_violations,
    consoled,
    log_in,
    opening,
    serious_violations,
    wait_until_drawn,
)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install 'maitred[dev]'"
)
expect = playwright.expect
expect.set_options(timeout=PATIENCE_MS)

PAGES = (
    *("live", "playground", "use", "tenants", "tenants/acme", "keys", "usage", "models", "rollouts", "scaling"),
    *("requests", "feedback", "cache"),
)


@pytest.fixture(scope="module")
def system():
    """A gateway with the small model that comes with maitred, in an engine that takes four at once."""
    with consoled(engine__threads=1, engine__max_sequences=4) as running:
        running.key("acme")
        running.put("limits/acme", {"subject": "tenant:acme", "kind": "concurrent_requests", "value": 24})
        yield running


@pytest.fixture
def opened(browser, system):
    with opening(browser, system.url) as open_:
        yield open_


NOW = 1_800_000_000
SPARSE_SERIES = {
    "none": [],
    "one": [0.2],
    "two": [0.2, 0.4],
    "equal": [0.3] * 60,
    "zeros": [0] * 60,
    "gaps": [None if second % 10 else 0.5 for second in range(601)],
    "one between gaps": [0.5 if second == 300 else None for second in range(601)],
    "all gaps": [None] * 60,
    "not a number": [0.5, "NaN", 0.4, "NaN", "Infinity"],
    "one huge": [1e12 if second == 30 else 0.5 for second in range(60)],
    "tiny": [4e-6] * 60,
}


def draw_chart(page, values):
    """Draws the values, one a second, as a chart of the console; says how it looks: how many pixels have the line's
    colour, the labels that stand on the vertical axis and where labels are drawn beyond the canvas."""
    points = [{"at": NOW - len(values) + number + 1, "v": value} for number, value in enumerate(values)]
    return page.evaluate(
        """async (points) => {
        const { Chart } = await import("/console/charts.js");
        const { span } = await import("/console/format.js");
        const box = document.createElement("section");
        document.querySelector("main").replaceChildren(box);
        const texts = [], beyond = [], write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
          const at = this.getTransform().transformPoint(new DOMPoint(x, y)), width = this.measureText(text).width;
          const left = { left: 0, center: width / 2, right: width }[this.textAlign];
          if (at.x - left < -1 || at.x - left + width > this.canvas.width + 1) beyond.push(text);
          texts.push(text);
          return write.call(this, text, x, y, ...rest);
        };
        const of = (point) => (point.v === null ? null : Number(point.v));
        const chart = new Chart("Waits", [{ name: "median", colour: "accent", of }], span);
        box.append(chart.node);
        chart.set(points);
        await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 100));
        CanvasRenderingContext2D.prototype.fillText = write;
        const canvas = box.querySelector("canvas"), probe = document.createElement("i");
        probe.className = "swatch accent";
        box.append(probe);
        const tone = getComputedStyle(probe).backgroundColor.match(/[0-9]+/g).map(Number);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let coloured = 0;
        for (let at = 0; at < pixels.length; at += 4) {
          const far = tone.reduce((sum, part, number) => sum + Math.abs(part - pixels[at + number]), 0);
          coloured += pixels[at + 3] > 200 && far < 30;
        }
        const hint = box.querySelector(".hint");
        return {
          coloured, texts, beyond, empty: !hint.hidden && hint.textContent,
          label: box.querySelector("[role=img]").getAttribute("aria-label"),
          fits: document.documentElement.scrollWidth <= innerWidth,
          latest: box.querySelector(".legend b").textContent,
        };
      }""",
        points,
    )


def test_a_chat_streams_with_its_tokens_and_times(opened):
    page = opened("#playground")
    page.get_by_label("Max tokens").fill("120")
    page.get_by_label("Your message").fill("Once upon a time")
    # The page itself notes how long the answer is, whenever it changes: a busy machine looks seldom.
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const look = () => {
                const text = [...document.querySelectorAll(".turn.model .text")].at(-1);
                if (text) window.lengths.add(text.textContent.length);
            };
            new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.get_by_label("Your message").press("Enter")
    expect(page.locator(".turn.model .facts")).to_contain_text("ended by length")
    assert page.evaluate("window.lengths.size") > 3, "the answer came at once"
    facts = page.locator(".turn.model .facts")
    for fact in ("first token", "in all", "answer 120 tokens", "pace", "ended by length"):
        expect(facts).to_contain_text(fact)


def test_two_answers_stand_side_by_side_and_can_be_stopped(browser):
    endless = {"answers": [{"fault": "stall", "fault_after": 8}]}
    with consoled(program=("-m", "tests.support.scripted_gateway", "--script", json.dumps(endless))) as running:
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{running.url}/console#playground")
        page.get_by_label("Compare two models").check()
        page.get_by_label("Max tokens").fill("100")
        page.get_by_label("Your message").fill("Tell me a long story")
        page.get_by_role("button", name="Send").click()
        for side in ("A", "B"):
            log = page.get_by_role("log", name=f"Conversation {side}")
            expect(log.locator(".turn.model .text").last).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.")).to_have_count(2)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.close()


def test_a_flood_is_seen_as_it_happens(opened, system):
    page = opened()
    log_in(page, system.admin_key)
    expect(page.locator(".pill")).to_have_text("Live")
    queued = page.locator(".stage.queued b")
    expect(queued).to_have_text("0")
    flood = [sys.executable, "-m", "tests.support.concurrent_users", system.url, system.key("acme"), "40"]
    with subprocess.Popen(flood) as running:
        try:
            expect(queued).not_to_have_text("0")
            tenants = page.get_by_role("region", name="Tenants")
            expect(tenants.get_by_role("row", name="acme")).to_contain_text("Concurrent requests: 24 of 24")
            refusals = page.get_by_role("region", name="Last refusals")
            expect(refusals.get_by_role("row", name="acme").first).to_contain_text("rate_limit_exceeded")
            expect(page.locator(".queue .tenants")).to_contain_text("acme")
            expect(page.locator(".engine .facts")).to_contain_text("4 of 4")
            expect(page.locator(".map .t1").first).to_be_attached()
            expect(page.get_by_role("img", name="Time to first token")).to_have_attribute(
                "aria-label", re.compile(r"Now: median [\d.]+ m?s")
            )
        finally:
            running.kill()
    expect(queued).to_have_text("0")
    expect(page.locator(".stage.decoding b")).to_have_text("0")


def test_what_holds_requests_up_is_named_as_the_doctor_names_it(opened, system):
    pages = [opened(viewport=PHONE, color_scheme=scheme) for scheme in ("light", "dark")]
    regions = [page.get_by_role("region", name="What holds requests up") for page in pages]
    for page, found in zip(pages, regions, strict=True):
        log_in(page, system.admin_key)
        expect(found).to_contain_text("Nothing does.")
    flood = [sys.executable, "-m", "tests.support.concurrent_users", system.url, system.key("acme"), "20"]
    with subprocess.Popen(flood) as running:
        try:
            for page, found in zip(pages, regions, strict=True):
                # A machine with others on it has the engine waiting for a core: then it is the size of the batch.
                either = page.get_by_role("heading", name=re.compile("^(Compute|Queue) maitred-tiny"))
                batch = found.get_by_role("listitem").filter(has=either)
                expect(batch).to_have_count(1)
                expect(batch.locator(".hint").first).to_contain_text("wait beside")
                expect(batch.locator(".remedy")).to_contain_text(re.compile("replicas|max_sequences"))
                assert [violation["id"] for violation in accessibility_violations(page, ".findings")] == []
                assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            command = ["maitred", "doctor", "--url", system.url, "--key", system.admin_key, "--for", "2"]
            doctor = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
            assert re.search(r"\. (compute|queue) \(maitred-tiny\)", doctor.stdout), doctor.stdout + doctor.stderr
        finally:
            running.kill()
    for found in regions:
        expect(found).to_contain_text("Nothing does.")


def test_what_the_cache_has_saved_is_shown(opened, system):
    page = opened(viewport=PHONE, color_scheme="dark")
    log_in(page, system.admin_key)
    expect(page.locator(".pill")).to_have_text("Live")
    key = system.key("acme")
    for _ in range(3):
        body = {"model": "maitred-tiny", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
        httpx.post(
            f"{system.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=300
        ).raise_for_status()
    facts = page.get_by_role("region", name="Cache of answers").locator(".facts div")
    expect(facts.filter(has_text="from the cache")).to_contain_text("2")
    expect(facts.filter(has_text="saved tokens")).not_to_contain_text("saved tokens0")
    assert [violation["id"] for violation in accessibility_violations(page, ".cache")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_answers_are_removed_by_what_they_have(opened, system):
    page = opened()
    log_in(page, system.admin_key)
    keys = {}
    for tenant in ("kept", "one-gone", "all-gone"):
        caller = {"authorization": f"Bearer {system.key(tenant)}"}
        for prompt in ("One", "Two"):
            body = {"model": "maitred-tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
            answered = httpx.post(f"{system.url}/v1/completions", json=body, headers=caller, timeout=300)
            keys[tenant, prompt] = answered.raise_for_status().headers["x-maitred-cache-key"]
    page.get_by_role("link", name="Cache").click()
    rows = {tenant: page.get_by_role("row", name=f"{tenant} maitred-tiny – 2") for tenant, _ in keys}
    for row in rows.values():
        expect(row).to_be_visible()
    rows["all-gone"].get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(rows["all-gone"]).to_have_count(0)
    form = page.get_by_role("form", name="Remove answers")
    form.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Which answers?")
    form.get_by_label("Key").fill(keys["one-gone", "Two"])
    form.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_role("row", name="one-gone maitred-tiny – 1")).to_be_visible()
    form.get_by_label("Key").fill("")
    form.get_by_label("Epoch").fill("another")
    form.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_role("status").filter(has_text="removed")).to_have_text("0 removed.")
    expect(rows["kept"]).to_be_visible()
    form.get_by_role("button", name="Remove all").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_text("Nothing is kept.")).to_be_visible()


def semantic_scope(tenant, phase, **fields):
    """A scope as the administration answers with it."""
    state = phase if phase in ("certified", "tripped") else "shadow"
    scope = SemanticScopeBody(
        **{
            "scope": json.dumps(["chat", "tenant", tenant]),
            "model": "chat",
            "shared_by": "tenant",
            "key": None,
            "tenant": tenant,
            "organisation": tenant,
            "state": state,
            "phase": phase,
            "progress": 312,
            "progress_needed": None,
            "threshold": None,
            "false_hit_bound": None,
            "budget": 0.005,
            **dict.fromkeys(("labels", "same", "different", "lookups", "audits", "served"), 0),
            **dict.fromkeys(("saved_tokens", "false_hits"), 0),
            "encoder": "e",
            "verifier": "",
            "updated_at": "2026-11-28T12:00:00Z",
            **fields,
        }
    )
    return json.loads(msgspec.json.encode(scope))


def scaled_model(model, *, override=None, decision=None, outcomes=(), **fields):
    forecast = {"low": 1.5, "mean": 2.5, "high": 4.25, "coverage": 0.91}
    decided = {
        **dict.fromkeys(("waiting", "running", "ready", "coming", "asleep"), 0),
        **dict.fromkeys(("predicted_ttft_s", "predicted_ttft_with_one_less_s", "predicted_itl_s"), None),
        **dict.fromkeys(("utilisation", "replica_requests_per_s", "hold_until"), None),
        **{"at": "2026-11-28T12:00:00Z", "desired": 2, "reason": "steady", "text": "It <b>meets</b> the objectives."},
        **{"changed": True, "epoch": 1, "forecast": forecast, "lead_time_s": 30.0, "limits": [], **(decision or {})},
    }
    objectives = {"ttft_s": 2.0, "itl_s": 0.1, "min_replicas": 1, "max_replicas": 4, "sleeping_replicas": 0}
    scaling = {
        **{"model": model, "desired": 2, "asleep": 0, "actual": {"serving": 1, "starting": 1}, "reachable": True},
        **{"override": override, "decision": decided, "deciding": True, "owner": "here", "epoch": 1},
        "objectives": {
            **{**objectives, "target_utilisation": 0.85, "gpus_per_replica": 0.0, "max_gpus": None},
            **{"usd_per_hour": 0.0, "max_usd_per_hour": None},
        },
        **{"replicas": [], "starts": [], "outcomes": list(outcomes), **fields},
    }
    return json.loads(msgspec.json.encode(msgspec.convert(scaling, ScalingBody)))


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_replicas_are_shown_with_the_reason_of_their_number(opened, system, size, scheme):
    outcome = {"at": "2026-11-28T12:00:00Z", "predicted_s": 0.75, "measured_s": 0.5, "requests": 9}
    models = [
        scaled_model("chat", override={"replicas": 2, "until": "2026-11-28T13:00:00Z"}, outcomes=[outcome]),
        scaled_model("code", asleep=1, decision={"reason": "unreachable", "text": "No number is enough."}),
    ]
    ended = []

    def answer(route):
        data = models
        if route.request.method == "DELETE":
            ended.append(route.request.url)
            models[0] = scaled_model("chat", outcomes=[outcome])
        elif "/decisions" in route.request.url:
            data = [models[0]["decision"]]
        route.fulfill(json={"object": "list", "data": data, "has_more": False, "next": None})

    page = opened(viewport=size, color_scheme=scheme)
    log_in(page, system.admin_key)
    panel = page.get_by_role("heading", name="Scaling")
    expect(page.get_by_role("heading", name="Replicas")).to_be_visible()
    expect(panel).to_be_hidden()
    page.route("**/admin/v1/scaling**", answer)
    page.reload()
    expect(panel).to_be_visible()
    rows = page.locator("section:has(> .head > #panel-scaling) tr")
    chat, code = rows.filter(has_text="chat"), rows.filter(has_text="code")
    for text in ("1 serving, 1 starting", "It <b>meets</b> the objectives.", "2.5/s", "1.5 to 4.25 in 30.0 s", "91 %"):
        expect(chat).to_contain_text(text)
    expect(chat).to_contain_text("500 ms predicted 750 ms, objective 2.00 s")
    expect(code.locator(".badge.warn")).to_have_text("Unreachable")
    expect(code).to_contain_text("2 and 1 asleep")
    assert serious_violations(page, "section:has(> .head > #panel-scaling)") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.get_by_role("button", name="Decisions on chat").click()
    expect(page.get_by_role("dialog").get_by_role("listitem")).to_contain_text("It <b>meets</b> the objectives.")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="End override of chat").click()
    expect(page.get_by_role("button", name="End override of chat")).to_be_hidden()
    assert [url.partition("?")[2] for url in ended] == ["model=chat"]


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_scopes_of_similar_questions_are_shown_and_reset(opened, system, size, scheme):
    scopes = [
        semantic_scope("acme", "certified", false_hit_bound=0.0041, same=1200, served=200, saved_tokens=54321),
        semantic_scope("other", "learning", progress_needed=1000),
        semantic_scope("third", "certifying", false_hit_bound=0.02),
    ]
    asked = []

    def answer(route):
        request, data = route.request, scopes
        if request.method == "POST":
            asked.append(request.post_data_json)
            scopes[:] = [semantic_scope("acme", "training", progress_needed=1000), *scopes[1:]]
        elif "/labels" in request.url:
            text = "Where is my <b>card</b>?"
            compared = {"scope": "s", "asked": text, "cached": "Where is my money?", "same": False}
            data = [{**compared, "created_at": "2026-11-28T12:00:00Z"}]
        route.fulfill(json={"object": "list", "data": data, "has_more": False, "next": None})

    page = opened(viewport=size, color_scheme=scheme)
    log_in(page, system.admin_key)
    page.goto(f"{system.url}/console#cache")
    expect(page.get_by_role("form", name="Remove answers")).to_be_visible()
    panel = page.get_by_role("heading", name="Similar questions")
    expect(panel).to_be_hidden()
    page.route("**/admin/v1/cache/semantic**", answer)
    page.reload()
    expect(panel).to_be_visible()
    rows = page.locator("tr")
    acme = rows.filter(has_text="tenant acme")
    expect(acme.locator(".badge.good")).to_have_text("certified")
    for text in ("0.41 % of 0.50 %", "1,200", "200", "54.3K"):
        expect(acme).to_contain_text(text)
    expect(rows.filter(has_text="tenant other")).to_contain_text("learning: 312 of 1,000 labels")
    expect(rows.filter(has_text="tenant third")).to_contain_text("cannot pass any more")
    assert serious_violations(page, ".panel:has(.bound)") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.get_by_role("button", name="Labels of chat, tenant acme").click()
    compared = page.get_by_role("dialog").get_by_role("listitem")
    expect(compared).to_contain_text("Where is my <b>card</b>?")
    expect(compared.locator(".badge")).to_have_text("different")
    assert serious_violations(page, "dialog") == []
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Reset chat, tenant acme").click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
    page.get_by_role("button", name="Reset chat, tenant acme").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep labels").click()
    expect(acme).to_contain_text("training: 312 of 1,000 labels")
    assert asked == [{"scope": scopes[0]["scope"], "keep_labels": True}]


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_a_chart_shows_whatever_values_there_are(opened, size, scheme):
    page = opened("#use", viewport=size, color_scheme=scheme)
    expect(page.get_by_role("region", name="Limits")).to_be_visible()  # Drawn, and not drawn again by itself.
    for name, values in SPARSE_SERIES.items():
        known = [value for value in values if isinstance(value, float | int)]
        drawn = draw_chart(page, values)
        assert (drawn["coloured"] >= 8) == bool(known), (name, drawn)
        assert drawn["empty"] == (False if known else "No values in the last ten minutes."), name
        assert drawn["label"].startswith("Waits"), name
        assert drawn["fits"], name
        assert drawn["beyond"] == [], name
        times = {text for text in drawn["texts"] if re.fullmatch(r"\d\d:\d\d", text)}
        levels = set(drawn["texts"]) - times
        assert times, f"{name}: the time axis has no label"
        assert len(levels) > 1, f"{name}: the vertical axis has one label or none"
        assert all(re.fullmatch(r"[\d.,]+[KMBT]? (µs|ms|s|min|h|d)", level) for level in levels), (name, levels)
        assert drawn["latest"] == ("–" if values[-1:] != known[-1:] or not known else drawn["latest"]), name


def test_a_key_is_made_shown_once_used_and_revoked(opened, system):
    page = opened("#keys")
    log_in(page, system.admin_key)
    page.goto(f"{system.url}/console#keys")
    form = page.get_by_role("form", name="New key")
    form.get_by_label("Tenant").fill("newcomers")
    form.get_by_label("Name").fill("of the browser")
    form.get_by_role("button", name="Create key").click()
    key = page.get_by_role("dialog").get_by_label("Key").input_value()
    page.get_by_role("dialog").get_by_role("button", name="I have it").click()
    assert key.startswith("sk-mtd-")
    assert key not in page.content()
    with httpx.Client(base_url=system.url, headers={"authorization": f"Bearer {key}"}, trust_env=False) as caller:
        assert caller.get("/v1/models").status_code == 200
        row = page.get_by_role("row", name="of the browser")
        expect(row).to_contain_text("active")
        row.get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(row).to_contain_text("revoked")
        assert caller.get("/v1/models").status_code == 401


def test_a_limit_is_set_changed_and_deleted(opened, system):
    page = opened()
    log_in(page, system.admin_key)
    page.get_by_role("link", name="Keys and limits").click()
    form = page.get_by_role("form", name="New limit")
    form.get_by_label("Who").fill("tenant:operators")
    form.get_by_label("Kind").select_option("requests_per_minute")
    form.get_by_label("Value").fill("40")
    form.get_by_role("button", name="Set limit").click()
    row = page.get_by_role("row", name="tenant:operators")
    expect(row).to_contain_text("40")
    row.get_by_role("button", name="Change").click()
    page.get_by_label("New value").fill("70")
    page.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("70")
    limits = {item["subject"]: item["value"] for item in system.admin.get("/admin/v1/limits").json()["data"]}
    assert limits["tenant:operators"] == 70
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)


def test_a_key_for_inference_gets_the_playground_and_its_own_use(opened, system):
    page = opened()
    log_in(page, system.key("acme"))
    links = page.get_by_role("navigation").get_by_role("link")
    expect(links).to_have_text(["Playground", "My use"])
    page.get_by_role("link", name="My use").click()
    expect(page.get_by_text("Concurrent requests: 0 of 24")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_console_has_no_accessibility_violations(opened, system, scheme):
    page = opened(color_scheme=scheme)
    log_in(page, system.admin_key)
    for name in PAGES:
        page.evaluate("name => { location.hash = name }", name)
        expect(page.get_by_role("navigation").locator("[aria-current]")).to_have_attribute(
            "href", f"#{name.partition('/')[0]}"
        )
        wait_until_drawn(page)
        page.wait_for_timeout(700)  # charts, too
        assert serious_violations(page) == [], name


def test_a_phone_scrolls_down_only(opened, system):
    page = opened(viewport=PHONE)
    log_in(page, system.admin_key)
    for name in PAGES:
        page.evaluate("name => { location.hash = name }", name)
        wait_until_drawn(page)
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_a_long_name_pushes_no_button_off_the_screen(opened, system, size):
    named = {"tenant": "operators", "name": "verylong" * 25}
    system.admin.post("/admin/v1/keys", json=named).raise_for_status()
    page = opened("#keys", viewport=size)
    log_in(page, system.admin_key)
    page.goto(f"{system.url}/console#keys")
    box = page.get_by_role("button", name=f"Revoke {named['name']}").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size["width"]


def test_it_works_by_the_keyboard_alone(opened):
    page = opened()
    expect(page.locator(".pill")).to_have_text("Live")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Playground")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.model .facts")).to_contain_text("tokens")


def test_dark_and_light_are_as_the_system_says_until_one_chooses(opened):
    page = opened(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert light != dark
    switch = page.locator("#theme")
    switch.click()  # light
    switch.click()  # dark
    assert page.evaluate(background) == dark
    page.reload()
    assert page.evaluate(background) == dark


def test_a_server_that_goes_away_is_waited_for(browser, tmp_path):
    with consoled(program=("-m", "tests.support.scripted_gateway")) as first:
        context = browser.new_context(viewport=WIDE)
        page = context.new_page()
        page.goto(f"{first.url}/console")
        expect(page.locator(".pill")).to_have_text("Live")
        first.server.stop()
        expect(page.locator(".pill")).to_have_text("Reconnecting…")
        expect(page.get_by_role("alert").first).to_contain_text("Trying again")
        port = first.url.rpartition(":")[2]
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.scripted_gateway",
                "--port",
                port,
                "--set",
                f"store.folder={tmp_path}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as again:
            try:
                expect(page.locator(".pill")).to_have_text("Live")
                expect(page.get_by_role("alert").first).to_be_hidden()
            finally:
                again.terminate()
        context.close()
