"""The console's doors, without a browser: who gets in, what a session can do, and what others cannot do with it."""

import json
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from maitred.wire.sse import SSEDecoder
from tests.support.console_server import consoled

SCRIPTED = ("-m", "tests.support.scripted_gateway")


@pytest.fixture(scope="module")
def closed():
    """A server that serves nobody without a key."""
    with consoled(program=SCRIPTED, server__allow_unauthenticated="false", console__viewers=2) as system:
        yield system


@contextmanager
def logged_in(system, key):
    """A client with a session, and the header with the token that goes with it."""
    with httpx.Client(base_url=system.url, timeout=300, trust_env=False) as client:
        response = client.post("/console/session", headers={"authorization": f"Bearer {key}"})
        response.raise_for_status()
        yield client, {"x-maitred-console": response.json()["token"]}


def live_events(response):
    """All events, to the end of the connection, however that comes."""
    decoder = SSEDecoder()
    with suppress(httpx.RemoteProtocolError):  # an answer that is broken off has no proper end
        for data in response.iter_bytes():
            yield from ((event.type, json.loads(event.data)) for event in decoder.feed(data))


def test_pages_are_served_with_a_policy_and_come_again_only_when_they_changed(closed):
    with httpx.Client(base_url=closed.url, trust_env=False) as anybody:
        page = anybody.get("/console")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["x-frame-options"] == "DENY"
        again = anybody.get("/console", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert anybody.get("/console/vendor/uplot.js").headers["content-type"].startswith("text/javascript")
        for missing in (
            "/console/nothing.js",
            "/console/../main.py",
            "/console/%2e%2e/pages.py",
            "/console/vendor/uplot.LICENSE",
        ):
            assert anybody.get(missing).status_code == 404
        assert "/console" not in json.loads(anybody.get("/openapi.json").content)["paths"]


def test_a_browser_at_the_root_is_sent_to_the_console_and_others_learn_the_version(closed):
    with httpx.Client(base_url=closed.url, trust_env=False) as anybody:
        page = anybody.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (page.status_code, page.headers["location"]) == (303, "/console")
        assert anybody.get("/").json() == anybody.get("/version").json()
        assert anybody.head("/").status_code == 200


def test_a_session_stands_for_the_key_only_beside_its_token(closed):
    with logged_in(closed, closed.admin_key) as (client, token):
        cookie = client.cookies.jar
        assert [(item.name, item.path, item.has_nonstandard_attr("HttpOnly")) for item in cookie] == [
            ("maitred_session", "/", True)
        ]
        assert client.get("/admin/v1/keys", headers=token).status_code == 200
        assert client.get("/admin/v1/keys").status_code == 401
        assert client.get("/admin/v1/keys", headers={"x-maitred-console": "guessed"}).status_code == 401
        for forged in ({"origin": "https://evil.test"}, {"sec-fetch-site": "cross-site"}):
            assert client.get("/admin/v1/keys", headers=token | forged).status_code == 401
            assert client.post("/admin/v1/tenants", json={"id": "forged"}, headers=token | forged).status_code == 401
            assert client.post("/console/session", headers=forged).status_code == 403
            assert client.delete("/console/session", headers=forged).status_code == 403
        assert client.get("/console/session").json()["tenant"] == "operators"
        assert client.get("/console/session", headers={"sec-fetch-site": "cross-site"}).json() is None
        assert client.post("/admin/v1/tenants", json={"id": "made"}, headers=token).status_code == 200
        client.delete("/console/session").raise_for_status()
        assert client.get("/admin/v1/keys", headers=token).status_code == 401


def test_the_cookie_is_strict_and_secure_behind_https(closed):
    host = closed.url.removeprefix("http://")
    headers = {"authorization": f"Bearer {closed.admin_key}"}
    set_cookie = httpx.post(f"{closed.url}/console/session", headers=headers, trust_env=False).headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in set_cookie
    assert "Secure" not in set_cookie
    headers["origin"] = f"https://{host}"
    set_cookie = httpx.post(f"{closed.url}/console/session", headers=headers, trust_env=False).headers["set-cookie"]
    assert set_cookie.endswith("HttpOnly; SameSite=Strict; Secure")


def test_nobody_gets_in_without_a_valid_key(closed):
    with httpx.Client(base_url=closed.url, trust_env=False) as anybody:
        assert anybody.get("/console/session").json() is None
        for wrong in (
            {},
            {"authorization": "Bearer sk-mtd-firstadminkey000-" + "x" * 43},
            {"authorization": "Bearer hello"},
        ):
            response = anybody.post("/console/session", headers=wrong)
            assert response.status_code == 401
            assert "set-cookie" not in response.headers


def test_a_key_for_inference_sees_its_own_use_and_no_more(closed):
    key = closed.key("acme")
    closed.put("limits/acme-rate", {"subject": "tenant:acme", "kind": "requests_per_minute", "value": 60})
    closed.put("limits/all", {"subject": "*", "kind": "concurrent_requests", "value": 100})
    with logged_in(closed, key) as (client, token):
        chat = {"model": client.get("/v1/models", headers=token).json()["data"][0]["id"], "max_tokens": 4}
        chat["messages"] = [{"role": "user", "content": "Hello"}]
        assert client.post("/v1/chat/completions", json=chat, headers=token).status_code == 200
        for path in ("/admin/v1/live", "/admin/v1/keys", "/metrics"):
            assert client.get(path, headers=token).status_code == 403
        deadline_s = time.monotonic() + 300
        while not (own := client.get("/console/use", headers=token).json())["models"] and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert [(model["requests"], model["output_tokens"]) for model in own["models"]] == [(1, 4)]
        assert {
            subject: [(limit["kind"], limit["value"]) for limit in limits] for subject, limits in own["limits"].items()
        } == {"tenant:acme": [("requests_per_minute", 60)]}


def test_the_live_state_shows_tenants_to_administrators_alone(closed):
    key = closed.key("shy", ["inference", "metrics"])
    body = {"model": "nothing", "messages": [{"role": "user", "content": "Hello"}]}
    httpx.post(
        f"{closed.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, trust_env=False
    )
    time.sleep(1.1)  # states are a second old at most
    whole = closed.admin.get("/admin/v1/live").json()
    assert "shy" in [tenant["tenant"] for tenant in whole["tenants"]]
    assert [(refusal["code"], refusal["count"]) for refusal in whole["refusals"] if refusal["tenant"] == "shy"] == [
        ("model_not_found", 1)
    ]
    part = httpx.get(f"{closed.url}/admin/v1/live", headers={"authorization": f"Bearer {key}"}, trust_env=False)
    assert "shy" not in part.text
    assert "model_not_found" in part.text
    assert part.json()["replicas"][0]["credits"]["slots"]["total"] > 0


def test_the_stream_begins_with_the_history_and_ends_with_the_key(closed):
    key = closed.key("passing", ["metrics"])
    with logged_in(closed, key) as (client, token):
        with client.stream("GET", "/admin/v1/live", headers=token | {"accept": "text/event-stream"}) as response:
            events = live_events(response)
            kind, history = next(events)
            assert kind == "history"
            assert len(history) >= 1
            states = [next(events) for _ in range(2)]
            assert [kind for kind, _ in states] == ["state", "state"]
            assert states[0][1]["at"] < states[1][1]["at"]
            closed.admin.delete(f"/admin/v1/keys/{key.split('-')[2]}").raise_for_status()
            last = [event for _, event in events][-1]
        assert last["error"]["code"] == "invalid_api_key"
        assert client.get("/admin/v1/live", headers=token).status_code == 401


def test_the_number_of_viewers_is_limited_and_a_viewer_that_leaves_admits_another(closed):
    def watching():
        return closed.admin.stream("GET", "/admin/v1/live", headers={"accept": "text/event-stream"})

    with watching() as first:
        with watching() as second:
            assert (first.status_code, second.status_code) == (200, 200)
            with watching() as third:
                third.read()
            assert (third.status_code, third.json()["error"]["code"]) == (429, "saturated")
            assert closed.admin.get("/admin/v1/live").status_code == 200
        deadline_s = time.monotonic() + 300
        status = 0
        while status != 200 and time.monotonic() < deadline_s:
            with watching() as third:
                status = third.status_code
        assert status == 200


def test_a_server_that_stops_does_not_wait_for_who_watches():
    live = "/admin/v1/live"
    with (
        consoled(program=SCRIPTED, server__drain_grace_s="600") as system,
        system.admin.stream("GET", live, headers={"accept": "text/event-stream"}) as response,
    ):
        assert response.status_code == 200
        assert system.server.stop() == 0  # which waits for less than a drain with work


def test_a_console_that_is_switched_off_is_not_there():
    with consoled(program=SCRIPTED, console__enabled="false") as system:
        assert system.admin.get("/console").status_code == 404
        assert system.admin.get("/admin/v1/live").status_code == 200
