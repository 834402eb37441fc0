"""Scripts that call LiteLLM's administration go on working at a real gateway that serves LiteLLM's own file."""

import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI, RateLimitError

from maitred.testing.scripted_openai import ServerScript, scripted_openai
from maitred.testing.server_process import serving

MASTER = "sk-1234"
CONFIG = """
model_list:
  - {model_name: a, litellm_params: {model: openai/a, api_key: none, api_base: URL/v1},
     model_info: {input_cost_per_token: 0.001, output_cost_per_token: 0.002}}
  - {model_name: b, litellm_params: {model: openai/b, api_key: none, api_base: URL/v1}}
general_settings: {master_key: sk-1234}
"""


class Proxy:
    """A gateway, called as scripts call LiteLLM."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, body: object = None, *, bearer: str = MASTER, **query: str) -> Any:
        """Returns status, answer and headers."""
        address = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {bearer}"} if bearer else {})
        request = urllib.request.Request(address, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), error.headers

    def send(self, path: str, **body: object) -> Any:
        """Returns the answer to a call that must succeed."""
        status, answer, _ = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def get(self, path: str, **query: str) -> Any:
        status, answer, _ = self.call("GET", path, **query)
        assert status == 200, answer
        return answer

    def refused(self, path: str, status: int, **body: object) -> Any:
        """Returns the error of a call that must fail."""
        found, answer, _ = self.call("POST", path, body)
        assert found == status, answer
        assert answer["error"]["code"] == str(status)
        return answer["error"]

    def ask(self, key: str, model: str = "a") -> Any:
        """Asks a model, as the official client does; returns the answer."""
        with OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0) as client:
            return client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=4,
                extra_body={"cache": {"no-store": True}},
            )


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    file = tmp_path_factory.mktemp("litellm") / "config.yaml"
    with scripted_openai(ServerScript()) as upstream:
        file.write_text(CONFIG.replace("URL", upstream.url))
        with serving("--config", str(file)) as server:
            yield Proxy(server.url)


def test_a_key_lives_as_scripts_expect(proxy: Proxy):
    made = proxy.send("/key/generate", key_alias="ci", models=["a"], rpm_limit=100, duration="30d", aliases={})
    key, token = made["key"], made["token"]
    assert token == hashlib.sha256(key.encode()).hexdigest()
    assert made["key_name"] == f"sk-...{key[-4:]}"
    assert (made["models"], made["rpm_limit"], made["blocked"], made["expires"] is None) == (["a"], 100, False, False)
    assert proxy.ask(key).choices[0].message.content
    with pytest.raises(NotFoundError):
        proxy.ask(key, "b")
    for named in (key, token):
        shown = proxy.get("/key/info", key=named)
        assert (shown["key"], shown["info"]["key_alias"], shown["info"]["models"]) == (named, "ci", ["a"])
        assert key not in json.dumps(shown["info"])
    status, own, _ = proxy.call("GET", "/key/info", bearer=key)
    assert (status, own["info"]["rpm_limit"]) == (200, 100)
    updated = proxy.send("/key/update", key=token, models=["a", "b"], rpm_limit=None, tpm_limit=5000)
    assert (updated["models"], updated["rpm_limit"], updated["tpm_limit"]) == (["a", "b"], None, 5000)
    assert proxy.ask(key, "b").model
    assert proxy.send("/key/block", key=key)["blocked"] is True
    with pytest.raises(AuthenticationError):
        proxy.ask(key)
    assert proxy.send("/key/unblock", key=key)["blocked"] is False
    assert proxy.ask(key).model
    again = proxy.send(f"/key/{token}/regenerate")
    assert (again["key"] != key, again["tpm_limit"], again["key_alias"]) == (True, 5000, "ci")
    with pytest.raises(AuthenticationError):
        proxy.ask(key)
    assert proxy.ask(again["key"]).model
    assert again["token"] in proxy.get("/key/list", size="100")["keys"]
    (row,) = proxy.get("/key/list", key_alias="ci", return_full_object="true")["keys"]
    assert row["token"] == again["token"]
    assert proxy.send("/key/delete", keys=[again["key"]]) == {"deleted_keys": [again["key"]]}
    with pytest.raises(AuthenticationError):
        proxy.ask(again["key"])
    assert proxy.call("GET", "/key/info", key=again["key"])[0] == 404


def test_spend_is_that_of_the_ledger_and_a_budget_ends(proxy: Proxy):
    key = proxy.send("/key/generate", max_budget=1000.0, budget_duration="30d", key="sk-my-own-key-0001")["key"]
    assert key == "sk-my-own-key-0001"
    usage = proxy.ask(key).usage
    cost = usage.prompt_tokens * 0.001 + usage.completion_tokens * 0.002
    info = proxy.get("/key/info", key=key)["info"]
    assert info["spend"] == pytest.approx(cost)
    assert (info["max_budget"], info["budget_duration"], info["budget_reset_at"] is None) == (1000.0, "30d", False)
    proxy.send("/key/update", key=key, max_budget=cost)
    with pytest.raises(RateLimitError):
        proxy.ask(key)
    while not (logs := proxy.get("/spend/logs", api_key=key)):  # the ledger takes them from the journal
        pass
    assert [log["status"] for log in logs if log["spend"]] == ["success"]
    log = next(log for log in logs if log["spend"])
    assert log["spend"] == pytest.approx(cost)
    assert (log["api_key"], log["model"], log["prompt_tokens"]) == (
        *(hashlib.sha256(key.encode()).hexdigest(), "a"),
        usage.prompt_tokens,
    )
    day = log["endTime"][:10]
    (summary,) = proxy.get("/spend/logs", api_key=key, start_date=day, end_date=day)
    assert summary["spend"] == pytest.approx(cost)
    assert proxy.get("/global/spend")["spend"] >= summary["spend"]


def test_teams_users_and_budgets_are_tenants(proxy: Proxy):
    team = proxy.send("/team/new", team_alias="Research", max_budget=50, budget_duration="7d", models=["a"])
    assert (team["team_alias"], team["max_budget"], team["budget_duration"]) == ("Research", 50.0, "7d")
    made = proxy.send("/key/generate", team_id=team["team_id"])
    with pytest.raises(NotFoundError):
        proxy.ask(made["key"], "b")
    shown = proxy.get("/team/info", team_id=team["team_id"])
    assert [key["token"] for key in shown["keys"]] == [made["token"]]
    assert proxy.send("/team/update", team_id=team["team_id"], models=[])["data"]["models"] == []
    assert proxy.ask(made["key"], "b").model
    assert team["team_id"] in [each["team_id"] for each in proxy.get("/team/list")]
    proxy.send("/budget/new", budget_id="Free Tier", max_budget=2.5, rpm_limit=10)
    user = proxy.send("/user/new", user_id="ann@example.com", budget_id="Free Tier")
    assert (user["user_id"], user["max_budget"], user["rpm_limit"]) == ("ann@example.com", 2.5, 10)
    assert proxy.ask(user["key"]).model
    (budget,) = proxy.call("POST", "/budget/info", {"budgets": ["Free Tier"]})[1]
    assert (budget["budget_id"], budget["max_budget"]) == ("Free Tier", 2.5)
    proxy.send("/budget/update", budget_id="Free Tier", max_budget=3.5)
    info = proxy.get("/user/info", user_id="ann@example.com")
    assert (info["user_info"]["max_budget"], len(info["keys"])) == (3.5, 1)
    assert [each["budget_id"] for each in proxy.get("/budget/list")] == ["Free Tier"]
    proxy.send("/budget/delete", id="Free Tier")
    assert proxy.get("/budget/list") == []
    proxy.send("/team/delete", team_ids=[team["team_id"]])
    with pytest.raises(AuthenticationError):
        proxy.ask(made["key"])
    names = {tenant["id"] for tenant in proxy.get("/admin/v1/tenants")["data"]}
    assert "user-ann-example-com" in names


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/key/generate", {"aliases": {"x": "a"}}, "routing.aliases"),
        ("/key/generate", {"allowed_routes": ["/chat"]}, "would not hold"),
        ("/key/generate", {"max_bugdet": 3}, "not known here"),
        ("/key/generate", {"max_budget": 3, "budget_duration": "5h"}, "24h, 7d or 30d"),
        ("/key/generate", {"key": "short"}, "sk-"),
        ("/key/generate", {"rpm_limit": 0}, "block"),
        ("/key/generate", {"duration": "soon"}, "such as 30d"),
        ("/key/update", {"models": ["a"]}, "must name a key"),
        ("/team/new", {"team_id": "Core Team"}, "team_alias"),
        ("/user/new", {"user_role": "proxy_admin"}, "scope admin"),
        ("/budget/info", {"budgets": []}, "at least one"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_to_do(proxy: Proxy, path: str, body: dict[str, object], says: str):
    error = proxy.refused(path, 400, **body)
    assert says in error["message"]
    assert error["type"] == "bad_request_error"


def test_fields_without_effect_are_named(proxy: Proxy):
    status, _, headers = proxy.call("POST", "/key/generate", {"metadata": {"team": "x"}, "tags": ["y"], "aliases": {}})
    assert (status, headers["x-maitred-ignored"]) == (200, "metadata, tags")


def test_only_the_master_key_administers(proxy: Proxy):
    key = proxy.send("/key/generate")["key"]
    other = proxy.send("/key/generate")["token"]
    status, answer, _ = proxy.call("POST", "/key/generate", {}, bearer=key)
    assert (status, answer["error"]["type"]) == (403, "auth_error")
    for path, query in (("/key/info", other), ("/key/info", MASTER)):
        address = f"{path}?{urllib.parse.urlencode({'key': query})}"
        assert proxy.call("GET", address, bearer=key)[0] == 403
    assert proxy.call("GET", "/key/info?key=sk-nothing-there", bearer=key)[0] == 403
    assert proxy.call("GET", "/team/info?team_id=other", bearer=key)[0] == 403
    assert proxy.call("POST", "/key/delete", {"keys": ["sk-nothing-there"]})[0] == 404


def test_headers_are_read_and_sent(proxy: Proxy):
    body = {"model": "a", "messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 4}
    status, answer, headers = proxy.call("POST", "/v1/chat/completions", body)
    assert status == 200
    usage = answer["usage"]
    cost = usage["prompt_tokens"] * 0.001 + usage["completion_tokens"] * 0.002
    assert float(headers["x-litellm-response-cost"]) == pytest.approx(cost)
    assert (headers["x-litellm-model-group"], headers["x-litellm-model-id"]) == ("a", "a")
    assert headers["x-litellm-model-api-base"].startswith("http://127.0.0.1")
    assert headers["x-litellm-call-id"] == headers["x-request-id"]
    assert (headers["x-litellm-attempted-retries"], headers["x-litellm-attempted-fallbacks"]) == ("0", "0")
    assert float(headers["x-litellm-response-duration-ms"]) >= float(headers["x-litellm-overhead-duration-ms"]) >= 0
    said = {"x-litellm-timeout": "90", "x-litellm-num-retries": "1", "x-litellm-tags": "a,b"}
    said["x-litellm-end-user-id"] = "ann"
    with OpenAI(base_url=f"{proxy.url}/v1", api_key=MASTER, max_retries=0, default_headers=said) as client:
        raw = client.chat.completions.with_raw_response.create(**body, stream=True)
        assert (raw.headers["x-maitred-ignored"], raw.headers["x-litellm-model-id"]) == ("x-litellm-tags", "a")
        assert "x-litellm-response-cost" not in raw.headers
        assert [*raw.parse()]
    for name, value in (("x-litellm-timeout", "soon"), ("x-litellm-num-retries", "many")):
        with (
            OpenAI(base_url=f"{proxy.url}/v1", api_key=MASTER, max_retries=0, default_headers={name: value}) as client,
            pytest.raises(BadRequestError, match=f"{name} must be"),
        ):
            client.chat.completions.create(**body)


def test_models_and_health_are_in_its_words(proxy: Proxy):
    models = {each["model_name"]: each["model_info"] for each in proxy.get("/v1/model/info")["data"]}
    assert models == {each["model_name"]: each["model_info"] for each in proxy.get("/model/info")["data"]}
    assert models["a"]["input_cost_per_token"] == pytest.approx(0.001)
    assert proxy.call("GET", "/health/liveliness", bearer="")[1] == "I'm alive!"
    assert proxy.call("GET", "/health/readiness", bearer="")[1]["status"] == "healthy"
    assert proxy.get("/cache/ping")["status"] == "healthy"
    health = proxy.get("/health")
    assert (health["status"], health["healthy_count"], health["unhealthy_count"]) == ("ok", 2, 0)
    assert {each["model"] for each in health["healthy_endpoints"]} == {"a", "b"}


def test_several_workers_have_the_same_calls_and_headers(tmp_path: Path):
    with scripted_openai(ServerScript()) as upstream:
        (tmp_path / "config.yaml").write_text(CONFIG.replace("URL", upstream.url))
        with serving("--config", str(tmp_path / "config.yaml"), "--workers", "2") as server:
            workers = Proxy(server.url)
            made = workers.send("/key/generate", models=["a"])
            body = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            for _ in range(4):
                status, _, headers = workers.call("POST", "/v1/chat/completions", body, bearer=made["key"])
                assert (status, headers["x-litellm-model-id"]) == (200, "a")
                assert float(headers["x-litellm-response-cost"]) > 0
            assert workers.call("GET", "/key/info", bearer=made["key"])[0] == 200


def test_the_switch_is_off_by_default(tmp_path: Path):
    with scripted_openai(ServerScript()) as upstream:
        settings = {"models": {"a": {"upstreams": [{"url": f"{upstream.url}/v1"}]}}}
        (tmp_path / "maitred.yaml").write_text(json.dumps(settings))
        with serving("--config", str(tmp_path / "maitred.yaml")) as server:
            other = Proxy(server.url)
            assert other.call("GET", "/key/info", bearer="")[0] == 404
            assert "healthy_count" not in other.call("GET", "/health", bearer="")[1]
