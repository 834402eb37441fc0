"""Web pages of other origins: what they can do and see in a real browser, of which one is named and one is not."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from maitred.testing.scripted_openai import ServerScript, scripted_openai
from tests.integration.gateway.test_workers import USER, gateway

ASK = """async ({url, key, stream}) => {
  const response = await fetch(url + "/v1/chat/completions", {
    method: "POST",
    headers: {
      authorization: "Bearer " + key, "content-type": "application/json", "x-request-id": "of-a-page",
      "idempotency-key": "page-" + stream + Math.random(),
    },
    body: JSON.stringify({model: "m", stream, messages: [{role: "user", content: "Hello"}]}),
  });
  return {status: response.status, id: response.headers.get("x-request-id"), text: await response.text()};
}"""


class EmptyPage(BaseHTTPRequestHandler):
    """Serves an empty page at every path."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def site():
    """The origin of a web site on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def upstream():
    with scripted_openai(ServerScript()) as running:
        yield running


@pytest.mark.parametrize("workers", [1, 2])
def test_a_page_of_a_named_origin_uses_the_api_and_another_page_cannot(tmp_path, upstream, browser, workers):
    with (
        site() as named,
        site() as other,
        gateway(tmp_path, upstream.url, workers=workers, cors_origins=[named], allow_unauthenticated=False) as server,
    ):
        page = browser.new_page()
        page.goto(named)
        for stream in (False, True):
            seen = page.evaluate(ASK, {"url": server.url, "key": USER, "stream": stream})
            assert (seen["status"], seen["id"]) == (200, "of-a-page")
            assert ("[DONE]" in seen["text"]) == stream
        refused = page.evaluate(ASK, {"url": server.url, "key": "sk-wrong", "stream": False})
        assert refused["status"] == 401
        assert "invalid_api_key" in refused["text"]
        page.goto(other)
        with pytest.raises(Exception, match="Failed to fetch"):
            page.evaluate(ASK, {"url": server.url, "key": USER, "stream": False})
        page.close()
        check_preflights(server.url, named, other)


def check_preflights(url, named, other):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for path in ("/v1/chat/completions", "/v1/models", "/admin/v1/keys"):
        allowed = httpx.options(url + path, headers={"origin": named, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == named
        assert allowed.headers["access-control-allow-methods"] == "POST"
        assert allowed.headers["access-control-allow-headers"] == "authorization"
        refused = httpx.options(url + path, headers={"origin": other, **asked})
        assert refused.status_code == 403
        assert "server.cors_origins" in refused.json()["error"]["message"]
        assert "access-control-allow-origin" not in refused.headers


def test_without_the_setting_no_response_names_an_origin(tmp_path, upstream):
    with gateway(tmp_path, upstream.url, workers=1) as server:
        headers = {"origin": "https://app.example", "authorization": f"Bearer {USER}"}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        asked = httpx.options(f"{server.url}/v1/models", headers={**headers, "access-control-request-method": "GET"})
        assert asked.status_code == 403
        assert httpx.options(f"{server.url}/v1/models", headers=headers).status_code == 405
