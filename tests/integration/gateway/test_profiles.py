"""Every profile starts, and serves."""

import httpx
import pytest

from maitred.config.profiles import PROFILES
from maitred.testing.server_process import serving


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_serves(profile: str) -> None:
    with serving("--profile", profile, settings={"engine.kv_memory_bytes": "64MiB", "engine.threads": 1}) as server:
        asked = {"model": "maitred-tiny", "prompt": "Once upon a time", "max_tokens": 8}
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for priority in ("interactive", "background"):
                answer = client.post("/v1/completions", json=asked, headers={"x-maitred-priority": priority})
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 8
                assert answer.headers["x-maitred-priority"] == priority
        assert server.stop() == 0
