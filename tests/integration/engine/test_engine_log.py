"""What an engine's process logs of a request carries the ids that its client knows."""

import json

import httpx
import pytest

from maitred.testing.server_process import serving

SECRET = "my grandmother's maiden name is Featherstonehaugh"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SMALL = {"engine.threads": 1, "engine.kv_memory_bytes": 64 << 20}


def ask(server, request_id, **fields):
    body = {"model": "maitred-tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True, **fields}
    headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300).raise_for_status()


@pytest.mark.parametrize("shape", ["text", "json"])
def test_its_lines_are_lines_of_the_gateways_log(shape):
    settings = {"log.level": "debug", "log.format": shape, "traces.endpoint": "http://127.0.0.1:9/v1/traces"}
    with serving(settings={**SMALL, **settings}) as server:
        ask(server, "logged-1", n=2)
        server.stop()
        log = server.log.read_text()
    lines = [line for line in log.splitlines() if "ended by length" in line]
    assert len(lines) == 2, log
    for line in lines:
        if shape == "json":
            record = json.loads(line)
            assert (record["level"], record["logger"]) == ("debug", "maitred.engine")
            assert (record["request_id"], record["trace_id"]) == ("logged-1", TRACE_ID)
        else:
            assert " DEBUG   maitred.engine  engine " in line
            assert line.endswith(f"[logged-1 {TRACE_ID}]")
    assert "ready on unix:" in log, "what is about no request is logged, too"
    assert "Featherstonehaugh" not in log


def test_by_default_nothing_is_logged_of_successful_requests():
    with serving(settings=SMALL) as server:
        ask(server, "logged-2")
        server.stop()
        log = server.log.read_text()
    assert " INFO    maitred.engine  engine " in log
    assert "logged-2" not in log
