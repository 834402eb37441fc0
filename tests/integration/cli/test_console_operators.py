"""The console's pages for operators in a real browser: what they show is so, and what they order is done."""

import csv
import shutil
from pathlib import Path

import httpx
import pytest

from maitred.config.tree import BUNDLED_MODEL
from tests.support.console_server import (
    PATIENCE_MS,
    PHONE,
    WIDE,
    consoled,
    log_in,
    opening,
    serious_violations,
    wait_until_drawn,
)
from tests.support.models import make_encoder, save_words

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install 'maitred[dev]'"
)
expect = playwright.expect
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """A gateway with the small model, the same again on demand and as the new version of `chat`, and an encoder."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(BUNDLED_MODEL, folder / "later")
    encoder = folder / "tiny-encoder"
    encoder.mkdir()
    save_words(encoder)
    make_encoder(encoder)
    settings = {
        **{"model.path": BUNDLED_MODEL, "model.served_name": "maitred-tiny", "models.later.path": folder / "later"},
        **{"residency.memory_bytes": "3GiB", "encoder.path": encoder, "encoder.threads": 1, "region": "eu"},
        **{"engine.threads": 1, "engine.max_sequences": 4, "cache.mode": "off"},
        **{"routing.rollouts.chat.stable": "maitred-tiny", "routing.rollouts.chat.canary": "later"},
        **{"routing.rollouts.chat.weight": 0, "admission.prices.*.prompt": 100.0, "admission.prices.*.output": 300.0},
    }
    with consoled(**settings) as running:
        yield running


@pytest.fixture
def opened(browser, system):
    with opening(browser, system.url) as open_:
        yield open_


@pytest.fixture
def refused(browser, system):
    """Opens pages that are refused something, which they say."""
    with opening(browser, system.url, refusals=(400, 404, 409)) as open_:
        yield open_


def administer(page, system, name):
    """Logs in and goes to a page."""
    log_in(page, system.admin_key)
    page.goto(f"{system.url}/console#{name}")
    return page


def ask(system, key, *, model="maitred-tiny", request_id=None):
    """Asks a model for a few tokens; returns the response."""
    headers = {"authorization": f"Bearer {key}", **({"x-request-id": request_id} if request_id else {})}
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Tell me a story."}]}
    return httpx.post(f"{system.url}/v1/chat/completions", json=body, headers=headers, timeout=300, trust_env=False)


def confirm(page, button):
    page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()


def usable(page, size):
    """Whether a page can be used by everybody, and scrolls down only."""
    wait_until_drawn(page)
    assert serious_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_a_tenant_is_made_gets_a_key_is_blocked_and_its_key_ends(opened, system):
    page = administer(opened(), system, "tenants")
    form = page.get_by_role("form", name="New tenant")
    for id_, parent in (("fresh", ""), ("fresh-team", "fresh")):
        form.get_by_label("Id").fill(id_)
        form.get_by_label("Team of").fill(parent)
        form.get_by_role("button", name="Create tenant").click()
        expect(page.get_by_role("link", name=id_, exact=True).first).to_be_visible()
    assert system.admin.get("/admin/v1/tenants/fresh-team").json()["parent"] == "fresh"
    system.put("limits/fresh", {"subject": "tenant:fresh", "kind": "usd_per_month", "value": 1})

    page.get_by_role("link", name="fresh", exact=True).first.click()
    expect(page.get_by_role("region", name="Teams")).to_contain_text("fresh-team")
    form = page.get_by_role("form", name="New key")
    expect(form.get_by_label("Tenant")).to_have_value("fresh")
    form.get_by_label("Name").fill("of the tenant")
    form.get_by_role("button", name="Create key").click()
    key = page.get_by_role("dialog").get_by_label("Key").input_value()
    confirm(page, "I have it")
    assert key not in page.content()
    assert ask(system, key).status_code == 200

    page.reload()
    budget = page.get_by_role("row", name="USD per month").filter(has_text="tenant fresh")
    expect(budget).to_contain_text("of $1.00")
    (state,) = system.admin.get("/admin/v1/budgets", params={"subject": "tenant:fresh"}).json()["data"]
    assert state["charged_usd"] + state["reserved_usd"] > 0
    expect(budget).not_to_contain_text("$0.00 of $1.00")

    page.get_by_role("button", name="Block fresh").click()
    confirm(page, "Cancel")
    assert ask(system, key).status_code == 200
    page.get_by_role("button", name="Block fresh").click()
    confirm(page, "Block")
    expect(page.get_by_text("blocked").first).to_be_visible()
    assert ask(system, key).status_code in (401, 403)
    page.get_by_role("button", name="Unblock fresh").click()
    confirm(page, "Unblock")
    expect(page.get_by_role("button", name="Block fresh", exact=True)).to_be_visible()
    assert ask(system, key).status_code == 200

    page.get_by_role("button", name="Revoke of the tenant").click()
    confirm(page, "Revoke")
    expect(page.get_by_role("row", name="of the tenant")).to_contain_text("revoked")
    assert ask(system, key).status_code == 401


def test_a_tenant_that_is_taken_is_said_in_clear_words(refused, system):
    page = administer(refused(), system, "tenants")
    form = page.get_by_role("form", name="New tenant")
    form.get_by_label("Id").fill("operators")
    with page.expect_response("**/admin/v1/tenants") as answered:
        form.get_by_role("button", name="Create tenant").click()
    assert answered.value.status == 409
    expect(page.get_by_role("alert").filter(has_text="operators")).to_be_visible()


def test_use_of_all_is_sorted_and_taken_away_as_csv(opened, system):
    for tenant, asked in (("seldom", 1), ("often", 3)):
        key = system.key(tenant)
        for _ in range(asked):
            assert ask(system, key).status_code == 200
    query = {"group_by": "organisation,model", "start": "-30d", "format": "csv"}
    while "often,maitred-tiny,3" not in system.admin.get("/admin/v1/usage", params=query).text:
        pass  # The ledger has a request within half a second of its end.
    page = administer(opened(), system, "usage")
    organisations = page.get_by_role("region", name="Usage").locator("tbody td:first-child")
    expect(organisations.filter(has_text="seldom")).to_have_count(1)
    for heading in ("Requests", "Cost"):
        page.get_by_role("button", name=heading, exact=True).click()
        expect(page.locator(f"th:has-text('{heading}')").first).to_have_attribute("aria-sort", "descending")
        names = organisations.all_inner_texts()
        assert names.index("often") < names.index("seldom"), heading
    page.get_by_label("Sorted by").select_option("organisation")
    names = organisations.all_inner_texts()
    assert names == sorted(names)
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Download CSV").click()
    assert downloaded.value.suggested_filename == "usage-organisation-model.csv"
    with Path(downloaded.value.path()).open() as file:
        rows = {(row["organisation"], row["model"]): row["requests"] for row in csv.DictReader(file)}
    assert rows["often", "maitred-tiny"] == "3"
    said = system.admin.get("/admin/v1/usage", params=query).text
    assert said.count("\n") == len(rows) + 1
    page.get_by_label("Day").check()
    page.get_by_label("Organisation").last.uncheck()
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("columnheader", name="Day")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Organisation")).to_have_count(0)


def state_of(system, model):
    return {one["model"]: one["state"] for one in system.admin.get("/admin/v1/models/sleep").json()["data"]}[model]


def test_models_are_loaded_put_to_sleep_woken_and_unloaded(opened, system):
    page = administer(opened(), system, "models")
    chat, encoders = (page.get_by_role("region", name=name) for name in ("Chat models", "Encoders"))
    expect(encoders.get_by_role("row", name="tiny-encoder")).to_contain_text("dimensions")
    expect(chat.get_by_role("row", name="tiny-encoder")).to_have_count(0)
    expect(page.get_by_role("region", name="Other names").get_by_role("row", name="chat")).to_be_visible()

    resident = chat.get_by_role("row", name="maitred-tiny")
    expect(resident.locator(".badge")).to_have_text("awake")
    resident.get_by_role("button", name="Sleep").click()
    confirm(page, "Cancel")
    assert state_of(system, "maitred-tiny") == "awake"
    resident.get_by_role("button", name="Sleep").click()
    confirm(page, "Sleep")
    expect(resident.locator(".badge")).to_have_text("asleep")
    assert state_of(system, "maitred-tiny") == "asleep"
    resident.get_by_role("button", name="Wake").click()
    confirm(page, "Wake")
    expect(resident.locator(".badge")).to_have_text("awake")

    later = chat.get_by_role("row", name="later")
    for verb, done in (("Load", "serving"), ("Sleep", "asleep"), ("Wake", "serving"), ("Unload", "out")):
        later.get_by_role("button", name=verb, exact=True).or_(
            later.get_by_role("button", name=f"{verb} later", exact=True)
        ).click()
        confirm(page, verb)
        expect(later.locator(".badge")).to_have_text(done)
        loadable = system.admin.get("/admin/v1/models").json()["data"]
        assert {one["model"]: one["state"] for one in loadable}["later"] == done
    later.get_by_role("button", name="Pin later").click()
    confirm(page, "Pin")
    expect(later).to_contain_text("pinned")
    expect(later.get_by_role("button", name="Unload later")).to_have_count(0)
    later.get_by_role("button", name="Unpin later").click()
    confirm(page, "Unpin")
    expect(later.get_by_role("button", name="Unload later")).to_be_visible()


def test_a_replica_is_drained_and_resumed(opened, system):
    page = administer(opened(), system, "models")
    row = page.get_by_role("region", name="Replicas").get_by_role("row").filter(has_text="maitred-tiny")
    row.get_by_role("button", name="Drain").click()
    confirm(page, "Drain")
    expect(row.get_by_role("button", name="Resume")).to_be_visible()

    def states():
        replicas = system.admin.get("/admin/v1/replicas").json()["data"]
        return {one["model"]: one["state"] for one in replicas}

    assert states()["maitred-tiny"] != "serving"
    row.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    expect(row.get_by_role("button", name="Drain")).to_be_visible()
    assert states()["maitred-tiny"] == "serving"


def test_a_rollout_gets_another_share_is_promoted_and_rolled_back(refused, system):
    key = system.key("callers")
    assert ask(system, key, model="chat").headers["x-maitred-rollout"] == "chat=stable"
    page = administer(refused(), system, "rollouts")

    def rollout():
        (one,) = system.admin.get("/admin/v1/rollouts").json()["data"]
        return one

    share = page.get_by_label("Share of the canary of chat in percent")
    share.fill("25")
    page.get_by_role("button", name="Set share").click()
    expect(page.get_by_role("heading", name="Canary: later").locator("..")).to_contain_text("25 %")
    assert rollout()["weight"] == 0.25
    current = page.locator(".steps [aria-current]")
    expect(current).to_have_text("On trial")
    page.get_by_role("button", name="Promote chat").click()
    confirm(page, "Promote")
    expect(current).to_have_text("Promoted")
    assert rollout()["phase"] == "promoted"
    assert ask(system, key, model="chat").headers["x-maitred-rollout"] == "chat=canary"
    page.get_by_role("button", name="Roll back chat").click()
    confirm(page, "Roll back")
    expect(current).to_have_text("Rolled back")
    assert ask(system, key, model="chat").headers["x-maitred-rollout"] == "chat=stable"
    form = page.get_by_role("form", name="New rollout")
    form.get_by_label("Name").fill("chat")
    form.get_by_label("Canary").fill("later")
    form.get_by_label("Share in %").fill("0")
    form.get_by_role("button", name="Start rollout").click()
    expect(current).to_have_text("On trial")
    form.get_by_label("Canary").fill("nobody")
    form.get_by_role("button", name="Start rollout").click()
    expect(page.get_by_role("alert").filter(has_text="nobody")).to_be_visible()


def test_pools_are_shown_with_their_replicas_and_scaled(opened, system):
    page = administer(opened(), system, "scaling")
    expect(page.get_by_text("follows the demand: model.autoscaling.enabled")).to_be_visible()
    pool = page.get_by_role("region", name="Replicas of maitred-tiny")
    expect(pool.get_by_role("row", name="serving")).to_have_count(1)
    expect(page.get_by_role("region", name="Regions").get_by_role("row", name="eu")).to_contain_text("maitred-tiny")
    # The number of replicas of a model that is loaded on demand follows from what is in memory.
    expect(page.get_by_role("button", name="Set replicas of later")).to_have_count(0)
    for number in ("2", "1"):
        page.get_by_label("Replicas of maitred-tiny that serve").fill(number)
        page.get_by_role("button", name="Set replicas of maitred-tiny").click()
        confirm(page, "Set")
        expect(page.locator("article").filter(has_text="maitred-tiny").locator("h3")).to_contain_text(
            f"{number} to serve"
        )
        pools = {one["model"]: one["serving"] for one in system.admin.get("/admin/v1/replicas/pools").json()["data"]}
        assert pools["maitred-tiny"] == int(number)


def test_what_happened_to_a_request_is_told(refused, system):
    assert ask(system, system.key("teller"), request_id="tell-me").status_code == 200
    page = administer(refused(), system, "requests")
    page.get_by_role("link", name="tell-me").click()
    happened = page.get_by_role("region", name="What happened")
    for part in ("Arrival", "Limits", "Queue", "Choice of replica", "Prefill", "Decode", "Cost"):
        expect(happened.locator("b").filter(has_text=part).first).to_be_visible()
    told = system.admin.get("/admin/v1/requests/tell-me").json()
    facts = page.get_by_role("region", name="Request", exact=True)
    expect(facts).to_contain_text("finished 200")
    expect(facts.locator(".facts div").filter(has_text="answer")).to_contain_text(f"{told['output_tokens']} tokens")
    assert page.locator(".span").count() >= len(told["chapters"])
    page.get_by_label("Request id").fill("never-was")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("alert").filter(has_text="No request of that id is known")).to_be_visible()


def test_why_a_replica_was_chosen_is_told_for_each_that_could_be(opened, system):
    told = {
        **{
            "id": "two",
            "object": "request",
            "trace_id": None,
            "time": "2026-11-28T12:00:00Z",
            "route": "/v1/completions",
        },
        **{"organisation": "a", "tenant": "a", "key": "k", "asked": "m", "model": "m", "parameters": {}},
        **{"priority": "standard", "outcome": "finished", "status": 200, "error": None, "refused_by": None},
        **{"duration_ms": 100.0, "ttft_ms": 20.0, "waited_ms": {}, "prompt_tokens": 9, "cached_tokens": 0},
        **{"output_tokens": 4, "finish_reasons": ["stop"], "cost_usd": 0.01, "degraded": [], "fallbacks": []},
        **{"escalated": [], "recoveries": 1, "cache": None, "rollout": None},
        "chapters": [
            {"name": "attempt", "at_ms": 1.0, "took_ms": 40.0, "error": "replica_lost", "facts": {"replica": "b"}},
            {
                **{"name": "routing", "at_ms": 42.0, "took_ms": 0.0},
                "facts": {
                    "replica": "<b>a</b>",
                    "spill": "no_replica",
                    "candidates": [
                        {"replica": "<b>a</b>", "predicted_ttft_s": 0.01, "held_tokens": 16, "weight": 1},
                        {"replica": "c", "predicted_ttft_s": 0.02, "wait_s": 0.01, "weight": 0.5},
                    ],
                },
            },
        ],
    }
    page = opened()
    page.route("**/admin/v1/requests/two", lambda route: route.fulfill(json=told))
    administer(page, system, "requests/two")
    happened = page.get_by_role("region", name="What happened")
    expect(happened.get_by_text("failed: replica_lost")).to_be_visible()
    expect(happened).to_contain_text("ran elsewhere because no replica here was ready")
    expect(happened.get_by_role("row", name="<b>a</b> taken")).to_contain_text("16 tokens")
    expect(happened.get_by_role("row").filter(has_text="50 %")).to_contain_text("20 ms")
    expect(page.get_by_role("region", name="Request", exact=True)).to_contain_text("continued after a loss")


def test_a_thumb_is_noted_and_operators_see_it(opened, system):
    page = administer(opened(), system, "playground")
    options = page.get_by_label("Model A").locator("option")
    expect(options.filter(has_text="maitred-tiny")).to_have_count(1)
    assert "tiny-encoder" not in options.all_inner_texts()
    page.get_by_label("Model A").select_option("maitred-tiny")
    page.get_by_label("Max tokens").fill("6")
    page.get_by_label("Your message").fill("Once upon a time")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Good answer").click()
    expect(page.get_by_role("button", name="Good answer")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Bad answer").click()
    expect(page.get_by_role("button", name="Bad answer")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("button", name="Good answer")).to_have_attribute("aria-pressed", "false")
    page.get_by_label("What about it?").fill("It is about <b>nothing</b>.")
    page.get_by_role("button", name="Say so").click()
    expect(page.get_by_text("Noted.")).to_be_visible()
    (line,) = system.admin.get("/admin/v1/usage/events", params={"feedback": "any"}).json()["data"]
    assert (line["feedback"]["score"], line["feedback"]["text"]) == (0.0, "It is about <b>nothing</b>.")

    page.goto(f"{system.url}/console#feedback")
    row = page.get_by_role("row", name=line["request_id"])
    expect(row).to_contain_text("It is about <b>nothing</b>.")
    expect(row.locator(".badge")).to_have_text("bad")
    page.get_by_label("Verdict").select_option("good")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(row).to_have_count(0)
    page.get_by_label("Verdict").select_option("bad")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("link", name=line["request_id"]).click()
    expect(page.get_by_role("region", name="Request", exact=True)).to_contain_text("It is about")


def test_a_long_list_comes_in_pages(opened, system):
    tenants = [
        {
            **{"id": f"t{number:03}", "object": "tenant", "parent": None, "name": "", "weight": 1.0, "models": None},
            **{"priority_ceiling": None, "regions": [], "tags": [], "disabled": False},
        }
        for number in range(230)
    ]
    asked = []

    def answer(route):
        query = dict(httpx.URL(route.request.url).params)
        asked.append(query)
        start = int(query.get("after", "0"))
        page = tenants[start : start + int(query["limit"])]
        following = start + len(page)
        more = following < len(tenants)
        route.fulfill(json={"object": "list", "data": page, "has_more": more, "next": str(following) if more else None})

    page = opened()
    page.route("**/admin/v1/tenants?**", answer)
    administer(page, system, "tenants")
    rows = page.locator("tbody tr")
    for number in (100, 200, 230):
        expect(rows).to_have_count(number)
        if number < 230:
            page.get_by_role("button", name="Show more").click()
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()
    assert [query.get("after") for query in asked] == [None, "100", "200"]


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "dark"), (PHONE, "light")], ids=["wide", "phone"])
def test_operators_pages_are_usable_by_everybody(opened, system, size, scheme):
    ask(system, system.key("everybody"), request_id="for-everybody")
    page = opened(viewport=size, color_scheme=scheme)
    log_in(page, system.admin_key)
    for name in ("tenants/everybody", "usage", "models", "rollouts", "scaling", "requests/for-everybody", "feedback"):
        page.evaluate("name => { location.hash = name }", name)
        expect(page.get_by_role("navigation").locator("[aria-current]")).to_have_attribute(
            "href", f"#{name.partition('/')[0]}"
        )
        usable(page, size)
    page.evaluate("location.hash = 'models'")
    page.get_by_role("button", name="Sleep maitred-tiny").click()
    assert serious_violations(page, "dialog") == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
