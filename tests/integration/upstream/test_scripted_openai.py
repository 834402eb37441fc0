"""The scripted server as a process: the official client believes it, and its times are those of the script."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlparse

import openai
import pytest

from maitred.core.parent_watch import LIFELINE_VARIABLE
from maitred.testing.scripted_openai import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ScriptedPause,
    ServedRecord,
    ServerScript,
    scripted_openai,
)

USER = [{"role": "user", "content": "one two three"}]
CHAT = "/v1/chat/completions"
FAST = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.002))


def fast(**fields):
    return ServerScript(ttft=FAST.ttft, itl=FAST.itl, **fields)


@contextmanager
def sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def connect(server):
    address = urlparse(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=300)


def request(path=CHAT, head="", **fields):
    body = json.dumps({"messages": USER, "stream": True, "max_tokens": 5, **fields}).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_all(client):
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def read_answer(client):
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = client.recv(65536)
        assert piece, "the connection ended"
        data += piece
    return data


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


class TestOfficialClient:
    def test_chat_and_completions_whole_and_streamed(self):
        with scripted_openai(FAST) as server, sdk(server) as client:
            assert [model.id for model in client.models.list()] == ["scripted"]
            whole = client.chat.completions.create(model="scripted", messages=USER, max_tokens=4)
            assert whole.choices[0].message.content == "0 1 2 3"
            assert whole.choices[0].finish_reason == "length"
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 4)
            chunks = list(
                client.chat.completions.create(
                    model="scripted",
                    messages=USER,
                    max_completion_tokens=3,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
            )
            assert text_of(chunks) == "0 1 2"
            assert chunks[-1].usage.completion_tokens == 3
            text = client.completions.create(model="scripted", prompt="one two", max_tokens=2)
            assert text.choices[0].text == "0 1"
            streamed = client.completions.create(model="scripted", prompt="one two", max_tokens=2, stream=True)
            assert "".join(chunk.choices[0].text for chunk in streamed) == "0 1"
            truth = server.truth()
        assert [request.end for request in truth.requests] == ["complete"] * 4
        assert [request.stream for request in truth.requests] == [False, True, False, True]

    def test_faults_by_number_reach_the_client(self):
        faults = [
            ScriptedFault(kind=FaultKind.STATUS, requests=[0], status=429, headers={"retry-after-ms": "70"}),
            ScriptedFault(kind=FaultKind.STATUS, requests=[1], status=500, headers={"x-should-retry": "false"}),
            ScriptedFault(kind=FaultKind.CLOSE, requests=[2]),
            ScriptedFault(kind=FaultKind.ERROR_EVENT, requests=[3], after=2),
            ScriptedFault(kind=FaultKind.CUT, requests=[4], after=2),
            ScriptedFault(kind=FaultKind.RESET, requests=[5], after=2),
            ScriptedFault(kind=FaultKind.GARBAGE, requests=[6], after=2),
        ]
        with scripted_openai(fast(faults=faults)) as server, sdk(server) as client:

            def ask():
                return text_of(
                    client.chat.completions.create(model="scripted", messages=USER, max_tokens=4, stream=True)
                )

            with pytest.raises(openai.RateLimitError) as limited:
                ask()
            assert limited.value.response.headers["retry-after-ms"] == "70"
            with pytest.raises(openai.InternalServerError) as failed:
                ask()
            assert failed.value.response.headers["x-should-retry"] == "false"
            with pytest.raises(openai.APIConnectionError):
                ask()
            with pytest.raises(openai.APIError, match="script wants an error"):
                ask()
            for _ in range(2):
                with pytest.raises(openai.APIConnectionError):
                    ask()
            with pytest.raises(json.JSONDecodeError):
                ask()
            assert ask() == "0 1 2 3"
            ends = [request.end for request in server.truth().requests]
        assert ends[:6] == ["status", "status", "close", "error_event", "cut", "reset"]
        assert ends[6] in ("garbage", "client_left")  # the client may leave before the rest
        assert ends[7] == "complete"

    @pytest.mark.parametrize("kind", ["crlf", "split", "pings", "bunched"])
    def test_oddities_change_nothing_for_the_client(self, kind):
        with (
            scripted_openai(fast(faults=[ScriptedFault(kind=FaultKind(kind), share=1)])) as server,
            sdk(server) as client,
        ):
            for tokens in (1, 2, 9):
                stream = client.chat.completions.create(model="scripted", messages=USER, max_tokens=tokens, stream=True)
                assert text_of(stream) == " ".join(map(str, range(tokens)))
            truth = server.truth()
        assert [len(request.sent_s()) for request in truth.requests] == [1, 2, 9]

    def test_a_clean_end_without_done_and_strictness(self):
        script = fast(faults=[ScriptedFault(kind=FaultKind.NO_DONE, requests=[0], after=2)], strict=True)
        with scripted_openai(script) as server, sdk(server) as client:
            stream = client.chat.completions.create(model="scripted", messages=USER, max_tokens=4, stream=True)
            assert text_of(stream) == "0 1"
            with pytest.raises(openai.BadRequestError, match="ignore_eos"):
                client.chat.completions.create(model="scripted", messages=USER, extra_body={"ignore_eos": True})


class TestTimes:
    def test_the_client_sees_the_times_of_the_log_and_the_log_those_of_the_script(self):
        script = ServerScript(ttft=DelayDistribution(mean_s=0.15), itl=DelayDistribution(mean_s=0.03))
        with scripted_openai(script) as server, connect(server) as client:
            asked_s = time.monotonic()
            client.sendall(request(max_tokens=20))
            arrivals_s = []
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                piece = client.recv(65536)
                arrivals_s += [time.monotonic()] * piece.count(b'"content":"')
                data += piece
            (truth,) = server.stop().requests
        due_s, sent_s = truth.due_s(), truth.sent_s()
        arrivals_s = arrivals_s[1:]  # the first is the role's, without text
        assert len(due_s) == len(sent_s) == len(arrivals_s) == 20
        assert asked_s <= truth.received_s <= arrivals_s[0]
        expected_s = [truth.received_s + 0.15 + 0.03 * index for index in range(20)]
        assert list(due_s) == pytest.approx(expected_s, abs=1e-6)
        for due, sent, arrival in zip(due_s, sent_s, arrivals_s, strict=True):
            assert due <= sent <= arrival

    def test_requests_over_the_limit_wait_in_line(self):
        script = ServerScript(ttft=DelayDistribution(mean_s=0.1), itl=DelayDistribution(mean_s=0), max_concurrent=2)
        with scripted_openai(script) as server:
            clients = [connect(server) for _ in range(6)]
            for client in clients:
                client.sendall(request(max_tokens=2))
            for client in clients:
                read_answer(client)
                client.close()
            requests = server.truth().requests
        # By what happened after what: whoever waits begins when another ends, and never do three run.
        ends_s = sorted(each.ended_s for each in requests)
        starts_s = sorted(each.started_s for each in requests)
        for place, started_s in enumerate(starts_s[2:]):
            assert started_s >= ends_s[place]
        for each in requests:
            if sum(other.started_s <= each.received_s < other.ended_s for other in requests) < 2:
                later_s = [other.ended_s for other in requests if other.ended_s > each.received_s]
                assert each.started_s < min(later_s), "a free place is taken at once"

    def test_streams_share_the_capacity(self):
        script = ServerScript(
            ttft=DelayDistribution(mean_s=0.05), itl=DelayDistribution(mean_s=0.001), tokens_per_s=200
        )
        with scripted_openai(script) as server:
            clients = [connect(server) for _ in range(10)]
            for client in clients:
                client.sendall(request(max_tokens=20))
            for client in clients:
                read_answer(client)
                client.close()
            requests = server.truth().requests
        times_s = [sent_s for each in requests for sent_s in each.sent_s()]
        assert len(times_s) == 200
        # The first event of each is outside the capacity, and at the end fewer streams share it.
        due_s = [at_s for each in requests for at_s in each.due_s()]
        apart_s = max(each.received_s for each in requests) - min(each.received_s for each in requests)
        assert 0.7 < max(due_s) - min(due_s) < 1.3 + apart_s

    def test_a_pause_silences_everything(self):
        script = ServerScript(
            ttft=DelayDistribution(mean_s=0.01),
            itl=DelayDistribution(mean_s=0.02),
            pauses=[ScriptedPause(at_s=0.2, for_s=0.5)],
        )
        with scripted_openai(script) as server, connect(server) as client, connect(server) as late:
            client.sendall(request(max_tokens=30))
            while not server.truth().requests:
                time.sleep(0.01)
            pause_s = server.truth().requests[0].received_s + 0.2
            time.sleep(max(0.0, pause_s + 0.1 - time.monotonic()))
            late.sendall(request(max_tokens=1))
            read_answer(client)
            read_answer(late)
            first, second = server.truth().requests
        start_s = first.received_s
        sent_s, due_s = ([at_s - start_s for at_s in times_s] for times_s in (first.sent_s(), first.due_s()))
        assert [at_s for at_s in sent_s if 0.21 < at_s < 0.69] == []
        assert second.received_s - start_s >= 0.7
        meanwhile = [sent for sent, due in zip(sent_s, due_s, strict=True) if 0.2 < due < 0.7]
        assert min(meanwhile) >= 0.69  # all that was due meanwhile comes after it


class TestConnections:
    def test_one_connection_serves_many_requests_and_bodies_may_come_in_pieces(self):
        with scripted_openai(FAST) as server, connect(server) as client:
            words = "word " * 400_000
            large = request(messages=[{"role": "user", "content": words}], head="expect: 100-continue\r\n")
            head, _, body = large.partition(b"\r\n\r\n")
            client.sendall(head + b"\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            client.sendall(body)
            assert b"[DONE]" in read_answer(client)
            small = json.dumps({"messages": USER, "stream": True, "max_tokens": 1}).encode()
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for index in range(0, len(small), 7):
                piece = small[index : index + 7]
                client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            client.sendall(b"0\r\n\r\n")
            assert b"[DONE]" in read_answer(client)
            client.sendall(request(head="connection: close\r\n"))
            assert b"[DONE]" in read_all(client)
            truth = server.truth()
        assert [request.prompt_tokens for request in truth.requests] == [400_004, 7, 7]

    def test_a_client_that_does_not_read_loses_nothing(self):
        with scripted_openai(ServerScript(ttft=DelayDistribution(mean_s=0), itl=DelayDistribution(mean_s=0))) as server:
            with connect(server) as client, connect(server) as other:
                client.sendall(request(max_tokens=60_000))
                time.sleep(0.2)
                other.sendall(request())
                assert b"[DONE]" in read_answer(other)  # nobody else waits for the lazy one
                answer = read_answer(client)
            truth = server.truth()
        assert answer.count(b'"content":"') == 60_000 + 1  # and the role's
        assert b" 59999" in answer
        assert len(truth.requests[0].sent_s()) == 60_000
        assert list(truth.requests[0].sent_s()) == sorted(truth.requests[0].sent_s())

    @pytest.mark.parametrize("reset", [False, True])
    def test_a_client_that_leaves_frees_its_slot(self, reset):
        with scripted_openai(ServerScript(itl=DelayDistribution(mean_s=0.05), max_concurrent=1)) as server:
            with connect(server) as first, connect(server) as second:
                first.sendall(request(max_tokens=1000))
                first.recv(10)
                second.sendall(request(max_tokens=1))
                if reset:
                    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                first.close()
                assert b"[DONE]" in read_answer(second)
            truth = server.truth()
        assert [request.end for request in truth.requests] == ["client_left", "complete"]

    def test_a_stalled_answer_stays_open(self):
        script = fast(faults=[ScriptedFault(kind=FaultKind.STALL, requests=[0], after=2)])
        with scripted_openai(script) as server:
            with connect(server) as client:
                client.sendall(request())
                client.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    read_answer(client)
            with connect(server) as client:
                client.sendall(request())
                assert b"[DONE]" in read_answer(client)
            truth = server.truth()
        assert [request.end for request in truth.requests] == ["stall", "complete"]
        assert len(truth.requests[0].sent_s()) == 2

    def test_it_comes_back_at_the_same_port_with_the_metrics_of_its_script(self):
        page = "sglang:num_running_reqs 500\n"
        with scripted_openai(FAST) as first, pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{first.url}/metrics", timeout=300)
        with scripted_openai(fast(metrics=page), port=urlparse(first.url).port) as second:
            assert second.url == first.url
            with urllib.request.urlopen(f"{second.url}/metrics", timeout=300) as response:
                assert response.read().decode() == page

    def test_what_is_not_http_or_not_a_route(self):
        with scripted_openai(FAST) as server:
            with connect(server) as client:
                client.sendall(b"\x00\x01 hello\r\n\r\n")
                assert client.recv(100) == b""
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(f"{server.url}/v2", timeout=300)
            assert missing.value.code == 404
            missing.value.close()
            with urllib.request.urlopen(f"{server.url}/health", timeout=300) as response:
                assert response.status == 200


class TestProcess:
    COMMAND = (sys.executable, "-m", "maitred.testing.scripted_openai")

    def test_it_writes_its_log_when_it_is_stopped(self, tmp_path):
        log = tmp_path / "truth.json"
        with subprocess.Popen([*self.COMMAND, "--log", str(log)], stdout=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().split()[1]
            urllib.request.urlopen(f"{url}/health", timeout=300).close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert ServedRecord.load(log).requests == []

    def test_it_ends_with_its_parent(self):
        lifeline, kept = os.pipe()
        environment = {**os.environ, LIFELINE_VARIABLE: "1"}
        with subprocess.Popen(self.COMMAND, stdin=lifeline, stdout=subprocess.PIPE, env=environment) as process:
            os.close(lifeline)
            assert process.stdout.readline().startswith(b"ready http://127.0.0.1:")
            os.close(kept)
            assert process.wait(30) == 0

    def test_a_script_with_a_mistake_is_refused_in_one_sentence(self):
        done = subprocess.run([*self.COMMAND, "--script", '{"ttfb": 1}'], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "unknown field `ttfb`" in done.stderr
