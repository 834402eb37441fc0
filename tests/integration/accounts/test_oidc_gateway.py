"""Tokens of an identity provider at a real `maitred serve`: signed by its keys, they are as good as ours."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from maitred.testing.server_process import serving
from tests.support.servers.identity_provider import Provider, jwk

CONFIG = """
identity:
  oidc:
    desk:
      issuer: {issuer}
      audience: maitred
      tenants: {{blue: acme}}
      keys_refetch_s: 0.1
tenants:
  acme:
    limits: {{requests_per_minute: 100}}
  other: {{}}
"""


@pytest.fixture
def provider():
    """A provider that serves its documents on a loopback port."""
    idp = Provider()

    class Documents(BaseHTTPRequestHandler):
        def do_GET(self):
            body = idp.discovery if self.path.endswith("openid-configuration") else idp.key_set
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Documents) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        idp.issuer = f"http://127.0.0.1:{server.server_port}"
        idp.now_s = time.time()
        yield idp
        server.shutdown()
        thread.join()


def test_a_token_is_a_key_of_the_tenant_that_it_names(tmp_path, provider):
    (tmp_path / "maitred.yaml").write_text(CONFIG.format(issuer=provider.issuer))
    with serving(
        "--config",
        str(tmp_path / "maitred.yaml"),
        settings={"server.allow_unauthenticated": "false"},
        environment={"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}"},
        program=("-m", "tests.support.scripted_gateway"),
    ) as server:

        def complete(token):
            body = {"model": "maitred-tiny", "prompt": "one two three", "max_tokens": 4}
            headers = {"authorization": f"Bearer {token}"}
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)

        answer = complete(provider.token(tenant="blue"))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "100"
        wrong = [
            provider.token(tenant="red"),
            provider.token(tenant="blue", aud="somebody else"),
            provider.token(tenant="blue", exp=time.time() - 3600),
            provider.token("r2", tenant="blue"),
            provider.unsigned(tenant="blue"),
            provider.signed_with_the_public_key(tenant="blue"),
        ]
        answers = [complete(token) for token in wrong]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.json()["error"]["message"] for answer in answers}) == 1
        # A rotated key is found without a restart.
        provider.published = [jwk("r2")]
        time.sleep(0.2)  # as often as the keys may be fetched
        assert complete(provider.token("r2", tenant="blue")).status_code == 200
