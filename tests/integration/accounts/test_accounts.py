"""Keys, limits, budgets and the ledger of a real `maitred serve`, as tenants, operators and crashes meet them."""

import re
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from maitred.identity.keys import make_key
from maitred.testing.server_process import serving

SLOW = '{"step_s": 0.02}'
BODY = {"model": "maitred-tiny", "prompt": "one two three", "max_tokens": 8}
LIMIT_S = 300.0

CONFIG = """
admission:
  lease_s: 2
  prices:
    "*": {prompt: 1000, output: 2000}
tenants:
  acme:
    limits: {usd_total: 1}
    teams:
      search:
        keys:
          one: {secret: {env: SEARCH_KEY}}
  busy:
    limits: {requests_per_minute: 3, tokens_per_minute: 100000}
    keys:
      one: {secret: {env: BUSY_KEY}}
  house:
    keys:
      admin: {secret: {env: ADMIN_KEY}, scopes: [admin, metrics]}
"""


@pytest.fixture
def keys():
    return {name: make_key().plaintext for name in ("SEARCH_KEY", "BUSY_KEY", "ADMIN_KEY")}


@contextmanager
def installation(folder, keys, config=CONFIG, script="{}", **settings):
    """A gateway whose data outlives it, in `folder`."""
    path = folder / "maitred.yaml"
    path.write_text(config)
    with serving(
        "--script",
        script,
        "--config",
        str(path),
        settings={"server.allow_unauthenticated": "false"} | {k.replace("__", "."): v for k, v in settings.items()},
        environment={
            "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}",
            "MAITRED__STORE__FOLDER": str(folder / "data"),
            **keys,
        },
        program=("-m", "tests.support.scripted_gateway"),
    ) as server:
        yield server


def complete(server, key, path="/v1/completions", **fields):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.url + path, json={**BODY, **fields}, headers=headers, timeout=LIMIT_S)


def admin(server, keys, path, **query):
    answer = httpx.get(f"{server.url}/admin/v1/{path}", params=query, headers={"x-api-key": keys["ADMIN_KEY"]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def eventually(condition, what):
    """Waits until it holds; the ledger is written in batches, and leases end by themselves."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)
    return found


def budget_of_acme(server, keys):
    (budget,) = admin(server, keys, "budgets", subject="tenant:acme")["data"]
    return budget


def test_without_a_key_nothing_is_served_and_nothing_is_disclosed(tmp_path, keys):
    with installation(tmp_path, keys) as server:
        key = keys["SEARCH_KEY"]
        wrong = [None, "none", key[:-1] + ("a" if key[-1] != "a" else "b"), make_key().plaintext, "sk-mtd-" + "x" * 60]
        answers = [complete(server, key) for key in wrong]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.json()["error"]["message"] for answer in answers[1:]}) == 1
        assert complete(server, keys["ADMIN_KEY"]).status_code == 403
        assert httpx.get(f"{server.url}/admin/v1/tenants", headers={"x-api-key": key}).status_code == 403
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        for header in ("authorization", "x-api-key", "api-key"):
            value = f"Bearer {key}" if header == "authorization" else key
            assert httpx.get(f"{server.url}/v1/models", headers={header: value}).status_code == 200


def test_a_budget_is_clamped_to_its_last_token_and_then_refuses_for_good(tmp_path, keys):
    with installation(tmp_path, keys) as server:
        key = keys["SEARCH_KEY"]
        prompt = complete(server, key, max_tokens=1).json()["usage"]["prompt_tokens"]  # some tokens at $0.001 each
        spent = prompt * 0.001 + 1 * 0.002
        clamped = complete(server, key, max_tokens=3000)
        allowed = int(clamped.headers["x-maitred-max-tokens-clamped"])
        assert clamped.json()["choices"][0]["finish_reason"] == "length"
        assert clamped.json()["usage"]["completion_tokens"] == allowed
        spent += prompt * 0.001 + allowed * 0.002
        assert 1 - 0.002 < spent <= 1
        refused = complete(server, key)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert (error["limit"]["scope"], error["limit"]["limit"]) == ("tenant:acme", "usd_total")
        assert refused.headers["x-should-retry"] == "false"
        budget = budget_of_acme(server, keys)
        assert budget["charged_usd"] == pytest.approx(spent)
        assert budget["reserved_usd"] == 0
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=5)
        asked = []
        client._client.event_hooks = {"request": [asked.append]}
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(**BODY)
        assert raised.value.code == "insufficient_quota"
        assert len(asked) == 1, "the SDK must not try again what cannot help"


def test_rate_limits_are_in_the_headers_of_every_answer_and_every_rejection(tmp_path, keys):
    with installation(tmp_path, keys) as server:
        began_s = time.monotonic()
        left = []
        for _ in range(3):
            answer = complete(server, keys["BUSY_KEY"])
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [2, 1, 0]
        refused = complete(server, keys["BUSY_KEY"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        wait_ms = int(refused.headers["retry-after-ms"])
        passed_ms = (time.monotonic() - began_s) * 1000
        assert 20_000 - passed_ms <= wait_ms < 24_000  # a request each 20 s, less what has passed, and a little jitter
        assert int(refused.headers["retry-after"]) * 1000 >= wait_ms
        bad = complete(server, keys["BUSY_KEY"], max_tokens=-1)
        assert bad.status_code == 400
        assert bad.headers["x-ratelimit-remaining-requests"] == "0"


def test_budgets_and_usage_survive_a_kill(tmp_path, keys):
    with installation(tmp_path, keys, script=SLOW) as server:
        whole = complete(server, keys["SEARCH_KEY"]).json()["usage"]
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**BODY, "max_tokens": 300, "stream": True},
            headers={"x-api-key": keys["SEARCH_KEY"]},
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            held = budget_of_acme(server, keys)["reserved_usd"]
            assert held >= 0.6
            server.process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        server.process.wait()
    with installation(tmp_path, keys) as server:
        budget = budget_of_acme(server, keys)
        assert budget["charged_usd"] == pytest.approx(
            whole["prompt_tokens"] / 1e3 + whole["completion_tokens"] * 2 / 1e3
        )
        assert budget["reserved_usd"] == 0
        lines = eventually(lambda: admin(server, keys, "usage/events")["data"], "the ledger has no lines")
        assert sorted(line["outcome"] for line in lines) == ["failed", "finished"]
        assert sum(line["cost_usd"] for line in lines) == pytest.approx(budget["charged_usd"])


WITH_BURST = f"""{CONFIG}
  burst:
    limits:
      requests_per_minute: 20
      output_tokens_per_minute: 60
      burst: {{requests_per_minute: 8, output_tokens_per_minute: 1000}}
    keys:
      one: {{secret: {{env: BURST_KEY}}}}
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_restart_gives_no_second_burst(tmp_path, keys, killed):
    keys["BURST_KEY"] = make_key().plaintext
    began_s = time.monotonic()
    passed = 0
    with installation(tmp_path, keys, config=WITH_BURST) as server:
        while (refused := complete(server, keys["BURST_KEY"])).status_code == 200:
            passed += 1
        if killed:
            server.process.kill()
            server.process.wait()
    with installation(tmp_path, keys, config=WITH_BURST) as server:
        while (refused := complete(server, keys["BURST_KEY"])).status_code == 200:
            passed += 1
        assert 8 <= passed <= 8 + (time.monotonic() - began_s) / 3, "one each three seconds, as if it had lived on"
        assert refused.status_code == 429
        assert refused.json()["error"]["limit"]["limit"] == "requests_per_minute"
        wait_s = int(refused.headers["retry-after-ms"]) / 1000
        assert wait_s < 5, "times are rounded up to a second"
        time.sleep(wait_s)
        assert complete(server, keys["BURST_KEY"]).status_code == 200


def test_what_runs_when_a_gateway_is_killed_counts_whole(tmp_path, keys):
    keys["BURST_KEY"] = make_key().plaintext
    with installation(tmp_path, keys, config=WITH_BURST, script=SLOW) as server:
        began_s = time.monotonic()
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**BODY, "max_tokens": 900, "stream": True},
            headers={"x-api-key": keys["BURST_KEY"]},
        ) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()  # kept: the connection is closed with it
            next(lines)
            server.process.kill()
            server.process.wait()  # it may run on for an instant, and must not see the client leave first
    with installation(tmp_path, keys, config=WITH_BURST) as server:
        assert "1 of its requests were interrupted" in server.log.read_text()
        left = int(complete(server, keys["BURST_KEY"]).headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 900 - 8 - 1 <= left <= 1000 - 900 - 8 + (time.monotonic() - began_s)


def test_who_leaves_pays_for_what_was_made_and_gets_the_rest_back(tmp_path, keys):
    with installation(tmp_path, keys, script=SLOW) as server:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**BODY, "max_tokens": 300, "stream": True},
            headers={"x-api-key": keys["SEARCH_KEY"]},
        ) as stream:
            for _, line in zip(range(6), stream.iter_lines(), strict=False):
                assert line is not None
        eventually(lambda: budget_of_acme(server, keys)["reserved_usd"] == 0, "the reservation stays")
        charged = budget_of_acme(server, keys)["charged_usd"]
        assert 0 < charged < 0.2
        (line,) = eventually(lambda: admin(server, keys, "usage/events")["data"], "no line")
        assert (line["outcome"], line["cost_usd"]) == ("cancelled", pytest.approx(charged))


def test_a_revoked_key_is_refused(tmp_path, keys):
    with installation(tmp_path, keys) as server:
        operator = {"x-api-key": keys["ADMIN_KEY"]}
        made = httpx.post(f"{server.url}/admin/v1/keys", json={"tenant": "search"}, headers=operator).json()
        assert complete(server, made["key"]).status_code == 200
        httpx.post(f"{server.url}/admin/v1/keys/{made['id']}/revoke", headers=operator).raise_for_status()
        began_s = time.monotonic()
        while complete(server, made["key"]).status_code == 200:
            assert time.monotonic() - began_s < LIMIT_S
        assert complete(server, made["key"]).status_code == 401


def test_what_runs_under_a_revoked_key_is_broken_off_and_billed(tmp_path, keys):
    with installation(tmp_path, keys, script=SLOW) as server:
        operator = {"x-api-key": keys["ADMIN_KEY"]}
        made = httpx.post(f"{server.url}/admin/v1/keys", json={"tenant": "search"}, headers=operator).json()
        body = {**BODY, "max_tokens": 400, "stream": True}  # eight seconds
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers={"x-api-key": made["key"]}, timeout=LIMIT_S
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            httpx.post(f"{server.url}/admin/v1/keys/{made['id']}/revoke", headers=operator).raise_for_status()
            *_, last = [line for line in _until_broken(lines) if line]
        assert '"code":"invalid_api_key"' in last
        assert "was revoked" in last
        (line,) = eventually(lambda: admin(server, keys, "usage/events")["data"], "no line")
        assert line["outcome"] == "cancelled"
        assert 0 < line["output_tokens"] < 400
        assert line["cost_usd"] == pytest.approx(line["prompt_tokens"] * 0.001 + line["output_tokens"] * 0.002)
        eventually(lambda: budget_of_acme(server, keys)["reserved_usd"] == 0, "the reservation stays")


def _until_broken(lines):
    """A stream that is broken off has no end, so that nobody takes it for whole."""
    try:
        yield from lines
    except httpx.RemoteProtocolError:
        return


def test_what_is_no_longer_declared_is_no_longer_served(tmp_path, keys):
    with installation(tmp_path, keys) as server:
        assert complete(server, keys["BUSY_KEY"]).status_code == 200
    without = re.sub(r"  busy:.*?(?=  house:)", "", CONFIG, flags=re.DOTALL)
    with installation(tmp_path, keys, config=without) as server:
        assert complete(server, keys["BUSY_KEY"]).status_code == 401
        assert complete(server, keys["SEARCH_KEY"]).status_code == 200
        assert not admin(server, keys, "limits", subject="tenant:busy")["data"]


def test_the_first_start_shows_an_admin_key_and_no_later_one_does(tmp_path):
    shown = []
    for _ in range(2):
        with installation(tmp_path, {}, config="") as server:
            log = eventually(lambda server=server: "Ctrl-C" in (text := server.log.read_text()) and text, "no banner")
            shown.append(re.findall(r"sk-mtd-\S+", log))
            key = shown[0][0]
            assert httpx.get(f"{server.url}/admin/v1/tenants", headers={"x-api-key": key}).status_code == 200
    assert [len(found) for found in shown] == [1, 0]


def settled_metrics(server, keys):
    """The metrics once nothing runs any more, neither here nor at the engine."""
    seen = []

    def found():
        text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": keys["ADMIN_KEY"]}).text
        counts = re.findall(r"^(maitred_(?:engine|ledger)_\w+){model=\S+} (\S+)$", text, re.MULTILINE)
        values = {name: float(value) for name, value in counts if "_tokens" in name}
        seen.append((values, 'maitred_leases{state="held"} 0.0' in text))
        time.sleep(0.1)
        return len(seen) > 1 and seen[-1] == seen[-2] == (values, True) and values

    return eventually(found, "something runs on")


def test_the_ledger_agrees_with_the_engine(tmp_path, keys):
    with installation(tmp_path, keys, script=SLOW) as server:
        for n in (1, 2, 3):
            assert complete(server, keys["SEARCH_KEY"], n=n, max_tokens=5 * n).status_code == 200
        assert complete(server, keys["SEARCH_KEY"], prompt=["one two", "three"], n=2, max_tokens=5).status_code == 200
        assert complete(server, keys["SEARCH_KEY"], stream=True, max_tokens=7).status_code == 200
        assert complete(server, keys["SEARCH_KEY"], max_tokens=-1).status_code == 400
        metrics = settled_metrics(server, keys)
        used = 5 + 20 + 45 + 20 + 7
        assert metrics["maitred_engine_output_tokens_total"] == used
        assert metrics["maitred_ledger_output_tokens_total"] == used
        assert metrics["maitred_ledger_drift_tokens"] == 0
        (row,) = eventually(
            lambda: (
                (rows := admin(server, keys, "usage", group_by="tenant")["data"]) and rows[0]["requests"] == 5 and rows
            ),
            "lines are missing",
        )
        assert row["output_tokens"] == used


def test_the_ledger_lacks_only_what_was_sampled_for_nobody(tmp_path, keys):
    with installation(tmp_path, keys, script=SLOW) as server:
        choices = 3
        stopped = complete(server, keys["SEARCH_KEY"], n=choices, stop=" two", max_tokens=200)
        assert {choice["finish_reason"] for choice in stopped.json()["choices"]} == {"stop"}
        leavers = 3
        for _ in range(leavers):
            with httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json={**BODY, "max_tokens": 200, "stream": True},
                headers={"x-api-key": keys["SEARCH_KEY"]},
            ) as stream:
                for _, line in zip(range(6), stream.iter_lines(), strict=False):
                    assert line is not None
        metrics = settled_metrics(server, keys)
        drift = metrics["maitred_ledger_drift_tokens"]
        made, known = metrics["maitred_engine_output_tokens_total"], metrics["maitred_ledger_output_tokens_total"]
        assert drift == made - known
        assert 0 <= drift <= 3 * (choices + leavers), (
            "what runs when the engine gets the cancellation takes a step or two"
        )
        assert complete(server, keys["SEARCH_KEY"], n=2).status_code == 200
        assert settled_metrics(server, keys)["maitred_ledger_drift_tokens"] == drift


def test_an_engine_that_dies_leaves_no_drift(tmp_path, keys):
    dies = '{"answers": [{}, {"fault": "die", "fault_after": 5}], "step_s": 0.01}'
    with installation(tmp_path, keys, script=dies, dispatch__recoveries="0") as server:

        def answered(tokens):
            return complete(server, keys["SEARCH_KEY"], max_tokens=tokens).status_code == 200

        for tokens in (40, 80):
            eventually(lambda tokens=tokens: answered(tokens), "the engine does not come back")
            assert complete(server, keys["SEARCH_KEY"], max_tokens=20).status_code == 502
        eventually(lambda: answered(8), "the engine does not come back")
        metrics = settled_metrics(server, keys)
        assert metrics["maitred_ledger_output_tokens_total"] == 40 + 5 + 80 + 5 + 8
        assert metrics["maitred_ledger_drift_tokens"] == 0
