"""`maitred serve` as a process: how it starts, what signals do, and what becomes of it when its engine dies."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.server_process import serving

BODY = {"model": "maitred-tiny", "messages": [{"role": "user", "content": "Hello"}]}
SLOW = '{"step_s": 0.05}'

pytestmark = pytest.mark.usefixtures("new_interpreters")


@contextmanager
def scripted(script="{}", **settings):
    names = {key.replace("__", "."): value for key, value in settings.items()}
    with serving(
        "--script",
        script,
        settings=names,
        environment={"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}"},
        program=("-m", "tests.support.scripted_gateway"),
    ) as server:
        yield server


class Reader(threading.Thread):
    """Reads a stream in the background, as a client in another process would."""

    def __init__(self, url, **fields):
        super().__init__(daemon=True)
        self.url, self.fields = url, fields
        self.begun = threading.Event()
        self.text = ""
        self.broken = False
        self.start()

    def run(self):
        body = {**BODY, "stream": True, **self.fields}
        try:
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=300) as response:
                for text in response.iter_text():
                    self.text += text
                    self.begun.set()
        except httpx.RemoteProtocolError:
            self.broken = True

    def done(self):
        self.join(300)
        assert not self.is_alive()
        return self


def until_draining(server):
    """Returns once the server has heard the signal."""
    deadline_s = time.monotonic() + 300
    while httpx.get(f"{server.url}/health/ready").status_code != 503:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_sigterm_lets_answers_finish_and_exits_with_0():
    refused = None
    for tokens in (40, 400):  # a busy machine may ask again when the shorter answer is over
        with scripted(SLOW) as server:
            reader = Reader(server.url, max_tokens=tokens)
            assert reader.begun.wait(300)
            server.process.send_signal(signal.SIGTERM)
            with suppress(httpx.ConnectError):
                until_draining(server)
                refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
            assert reader.done().text.endswith("data: [DONE]\n\n")
            assert server.process.wait(300) == 0
        if refused is not None:
            break
    assert refused is not None
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert "retry-after" in refused.headers


def test_answers_that_outlive_the_grace_period_end_with_an_error_event():
    with scripted(SLOW, server__drain_grace_s=0.5) as server:
        reader = Reader(server.url, max_tokens=3000)
        assert reader.begun.wait(300)
        server.process.send_signal(signal.SIGTERM)
        last = json.loads(reader.done().text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "draining"
        assert reader.broken
        assert server.process.wait(300) == 0


def test_a_second_signal_ends_at_once():
    with scripted(SLOW) as server:
        reader = Reader(server.url, max_tokens=3000)
        assert reader.begun.wait(300)
        server.process.send_signal(signal.SIGINT)
        until_draining(server)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(300) == 0
        assert "[DONE]" not in reader.done().text


def test_a_killed_engine_is_replaced_and_its_streams_are_broken_off_if_they_may_not_go_on():
    with scripted(SLOW, dispatch__recoveries=0) as server:
        reader = Reader(server.url, max_tokens=3000)
        assert reader.begun.wait(300)
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        assert '"code":"replica_lost"' in reader.done().text
        assert reader.broken
        deadline_s = time.monotonic() + 300
        while httpx.get(f"{server.url}/health/ready").status_code != 200:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert httpx.post(f"{server.url}/v1/chat/completions", json={**BODY, "max_tokens": 2}).status_code == 200
        assert server.metrics()["maitred_engine_restarts_total"] == 1
        assert server.stop() == 0


def test_what_the_operator_sees():
    with scripted() as server:
        deadline_s = time.monotonic() + 300  # The server answers a moment before it says so.
        while "Ctrl-C" not in (printed := server.log.read_text()):
            assert time.monotonic() < deadline_s, printed
            time.sleep(0.02)
        assert f"Ready at {server.url}" in printed
        assert "65,536 KV tokens" in printed
        command = printed[printed.index("curl") : printed.index("Ctrl-C")]
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
        assert answer.stdout.endswith("data: [DONE]\n\n"), answer


@pytest.mark.parametrize("flags", [["--help"], ["--port", "{taken}"], ["/no/such/folder"]])
def test_what_cannot_start_says_so_in_a_sentence(flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [flag.format(taken=taken.getsockname()[1]) for flag in flags]
        done = subprocess.run(
            [sys.executable, "-m", "maitred", "serve", *flags], capture_output=True, text=True, timeout=300
        )
    assert "Traceback" not in done.stderr
    if flags == ["--help"]:
        assert done.returncode == 0
    else:
        assert done.returncode == 2
        assert ("is in use" if "--port" in flags else "does not exist") in done.stderr


def test_an_engine_that_cannot_start_ends_the_server_with_its_last_words(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.scripted_gateway", "--script", "{not json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "The engine did not start" in done.stderr


def test_what_is_found_wrong_while_the_engine_starts_ends_both(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "tokenizer.json").write_text("{not json")
    run = subprocess.run(
        [sys.executable, "-m", "maitred", "serve", str(model), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2
    assert "tokenizer.json" in run.stderr
    assert "Traceback" not in run.stderr
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(model) in (process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_a_server_that_was_stopped_while_it_imported(sent):
    command = [sys.executable, "-m", "maitred", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        server, until_s = psutil.Process(run.pid), time.monotonic() + 60
        while not (engines := server.children()):
            assert time.monotonic() < until_s, "no engine is started"
        run.send_signal(sent)
        _, errors = run.communicate(timeout=300)
        assert run.returncode == (130 if sent == signal.SIGINT else -sent)
        assert "Traceback" not in errors
        assert not psutil.wait_procs(engines, timeout=300)[1]


def test_a_server_that_still_loads_says_so_and_can_be_stopped():
    command = [sys.executable, "-m", "tests.support.scripted_gateway", "--script", '{"load_s": 60}']
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        url = run.stdout.readline().split()[2].rstrip(";")
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=5)) as client:
            assert client.get("/health/live").status_code == 200
            assert client.get("/health/ready").json() == {"status": "no_replica"}
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["maitred-tiny"]
            refused = client.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        engines = psutil.Process(run.pid).children()
        run.send_signal(signal.SIGTERM)
        assert run.wait(300) == 0
        assert not psutil.wait_procs(engines, timeout=300)[1]


@contextmanager
def loading_for_ever(**settings):
    """The address of a gateway whose engine never comes to an end with its start."""
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tests.support.scripted_gateway", "--script", '{"load_s": 3600}', *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        yield next(line for line in run.stdout if line.startswith("Listening")).split()[2].rstrip(";")
        run.send_signal(signal.SIGTERM)
        assert run.wait(300) == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_requests_wait_for_the_first_replica_of_a_scaled_model(workers, tmp_path):
    settings = {"model.autoscaling.enabled": "true", "server.workers": workers, "store.folder": tmp_path / "data"}
    transport = httpx.AsyncHTTPTransport(retries=5)
    with loading_for_ever(**settings) as url:
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=300) as client:
            hurried = {"x-maitred-deadline-ms": "100"}
            refused = await client.post("/v1/chat/completions", json=BODY, headers=hurried)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_unmeetable")
            assert int(refused.headers["retry-after"]) >= 1
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
            waits = 'maitred_dispatch_waiting{class="standard",model="maitred-tiny"} 1.0'
            while waits not in (await client.get("/metrics")).text:
                assert not waiting.done(), waiting.result().text
            assert (await client.get("/health/ready")).json() == {"status": "no_replica"}
            waiting.cancel()
            await asyncio.wait([waiting])
