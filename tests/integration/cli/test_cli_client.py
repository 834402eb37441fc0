"""The client commands, on real sockets and terminals, against a scripted server that behaves and one that does not."""

import json
import os
import pty
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from maitred.cli.app import app
from maitred.testing.server_process import free_port
from tests.support.certificates import Authority

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "maitred", "max_model_len": 2048}]}
DONE = "data: [DONE]\n\n"
Answer = Callable[[BaseHTTPRequestHandler], None]


def chat_chunk(text: str | None, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}, 'finish_reason': finish}]})}\n\n"


def text_chunk(text: str, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish}]})}\n\n"


def stream(*events: str) -> Answer:
    """An event stream that ends with the connection, as HTTP/1.0 does."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        for event in events:
            handler.wfile.write(event.encode())

    return answer


def body(status: int, content: str, kind: str = "application/json") -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(content.encode())

    return answer


class ScriptedServer:
    """Answers the n-th POST with the n-th script, and lists one model."""

    def __init__(self) -> None:
        self.scripts: list[Answer] = []
        self.requests: list[tuple[str, dict[str, object]]] = []
        self.authorizations: list[str | None] = []
        self.listing: Answer = body(200, json.dumps(MODELS))
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.authorizations.append(self.headers["Authorization"])
                outer.listing(self)

            def do_POST(self) -> None:
                outer.authorizations.append(self.headers["Authorization"])
                length = int(self.headers["Content-Length"])
                outer.requests.append((self.path, json.loads(self.rfile.read(length))))
                outer.scripts.pop(0)(self)

            def log_message(self, *arguments: object) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *arguments: object) -> None: ...  # clients that leave are part of the script

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    thread = threading.Thread(target=scripted.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    scripted.http.shutdown()
    scripted.http.server_close()
    thread.join()


def maitred(*arguments: str, given: str | bytes = "") -> Result:
    """Runs a command in this process, without a terminal."""
    return CliRunner().invoke(app, list(arguments), input=given)


@pytest.mark.parametrize("command", [["models"], ["complete", "x"], ["chat"], ["complete", "x", "--model", "m"]])
def test_where_nothing_listens_the_remedy_is_named(command: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = maitred(*command, "--url", url, given="hello\n")
    assert done.exit_code == 1
    assert done.stderr == f"Nothing answers at {url}. Start a server with `maitred serve`, or pass --url.\n"
    assert done.stdout == ""


def test_where_a_server_speaks_no_tls_the_scheme_is_blamed(server: ScriptedServer) -> None:
    url = server.url.replace("http://", "https://")
    done = maitred("models", "--url", url)
    assert done.exit_code == 1
    assert done.stderr == f"What answers at {url} does not speak TLS. Pass --url with http://.\n"


@pytest.mark.parametrize(
    ("scheme", "says"),
    [("https", "The certificate of {url} is not accepted"), ("http", "{url} closed the connection without an answer.")],
)
def test_a_server_of_tls_is_not_said_to_be_absent(
    server: ScriptedServer, tmp_path: Path, scheme: str, says: str
) -> None:
    issued = Authority(tmp_path).issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.certificate, issued.key)
    server.http.socket = tls.wrap_socket(server.http.socket, server_side=True)
    url = f"{scheme}://127.0.0.1:{server.http.server_port}"
    done = maitred("models", "--url", url)
    assert done.exit_code == 1
    assert done.stderr.startswith(says.format(url=url))


def test_a_key_goes_along_with_every_request(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.scripts = [stream(text_chunk("Yes", "stop"), DONE), stream(chat_chunk("Yes", "stop"), DONE)]
    assert maitred("models", "--url", server.url, "--key", "one").exit_code == 0
    assert maitred("complete", "x", "--url", server.url, "--key", "one").exit_code == 0
    monkeypatch.setenv("MAITRED_API_KEY", "two")
    assert maitred("chat", "--url", server.url, given="hello\n").exit_code == 0
    assert server.authorizations == ["Bearer one"] * 3 + ["Bearer two"] * 2


def test_where_a_key_is_needed_its_place_is_named(server: ScriptedServer) -> None:
    server.listing = body(401, '{"error": {"message": "This API key is not valid here.", "code": "invalid_api_key"}}')
    done = maitred("models", "--url", server.url)
    assert (done.exit_code, done.stderr) == (
        2,
        "The server asks for an API key. Set MAITRED_API_KEY, or pass --key.\n",
    )
    done = maitred("models", "--url", server.url, "--key", "old")
    assert (done.exit_code, done.stderr) == (2, "This API key is not valid here. (HTTP 401, invalid_api_key)\n")
    done = maitred("models", "--url", server.url, "--key", "two\nlines")
    assert (done.exit_code, done.stderr) == (
        2,
        "The key has characters that no key has. Check what MAITRED_API_KEY holds.\n",
    )


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1"])
def test_what_is_no_address_is_the_callers_fault(url: str) -> None:
    done = maitred("models", "--url", url)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "is not an address of a server" in done.stderr


def test_models_are_listed(server: ScriptedServer) -> None:
    done = maitred("models", "--url", server.url + "/v1/")
    assert done.exit_code == 0
    assert done.stdout.split() == ["MODEL", "CONTEXT", "OWNER", "tiny", "2048", "tokens", "maitred"]


def test_complete_streams_the_text_and_nothing_else(server: ScriptedServer) -> None:
    server.scripts = [stream(": waiting\n\n", text_chunk(" a"), text_chunk(" timé", "stop"), DONE)]
    done = maitred("complete", "Once", "--url", server.url, "--temperature", "0.5")
    assert (done.exit_code, done.stdout, done.stderr) == (0, " a timé\n", "")
    assert server.requests == [
        ("/v1/completions", {"model": "tiny", "prompt": "Once", "temperature": 0.5, "max_tokens": 128, "stream": True})
    ]


def test_complete_reads_a_pipe(server: ScriptedServer) -> None:
    server.scripts = [stream(text_chunk("!", "stop"), DONE)]
    assert maitred("complete", "-", "--url", server.url, "--model", "other", given="two\nlines").stdout == "!\n"
    assert (server.requests[0][1]["prompt"], server.requests[0][1]["model"]) == ("two\nlines", "other")


@pytest.mark.parametrize(
    ("command", "given"),
    [(["complete", "-"], b"caf\xe9"), (["chat"], b"caf\xe9\n"), (["complete", "caf\udce9"], b"")],
)
def test_what_is_no_text_is_the_callers_fault(server: ScriptedServer, command: list[str], given: bytes) -> None:
    done = maitred(*command, "--url", server.url, "--model", "tiny", given=given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "The input is not UTF-8 text. Convert it first, for example with iconv.\n"


def break_off(handler: BaseHTTPRequestHandler) -> None:
    """A chunked body whose connection is gone before its last chunk."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    event = text_chunk("half").encode()
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
    handler.close_connection = True


@pytest.mark.parametrize("script", [stream(text_chunk("half", "stop")), break_off], ids=["closed", "broken off"])
def test_an_answer_without_its_end_is_called_cut(server: ScriptedServer, script: Answer) -> None:
    server.scripts = [script]
    done = maitred("complete", "x", "--url", server.url)
    assert (done.exit_code, done.stdout) == (1, "half\n")
    assert done.stderr.startswith("The answer was cut: the connection ended")


def test_an_error_in_the_stream_is_repeated(server: ScriptedServer) -> None:
    server.scripts = [
        stream(text_chunk("half"), 'data: {"error": {"message": "The replica\\n\\u001b[2J died."}}\n\n', DONE)
    ]
    done = maitred("complete", "x", "--url", server.url)
    assert (done.exit_code, done.stdout) == (1, "half\n")
    assert done.stderr == "The answer was cut: The replica [2J died.\n"


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        (body(404, '{"error": {"message": "No model.", "code": "not_found"}}'), 2, "No model. (HTTP 404, not_found)"),
        (body(429, '{"error": {"message": "Full.", "code": "saturated"}}'), 1, "Full. (HTTP 429, saturated)"),
        (body(500, "<h1>oops</h1>", "text/html"), 1, "The server answered HTTP 500 without saying why."),
        (body(200, "<h1>hello</h1>", "text/html"), 1, "does not speak OpenAI's API"),
        (stream("data: nonsense\n\n"), 1, "The answer was cut: the server sent something that is no part of one."),
        (lambda handler: handler.connection.close(), 1, "closed the connection without an answer"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(server: ScriptedServer, script: Answer, code: int, message: str) -> None:
    server.scripts = [script]
    done = maitred("complete", "x", "--url", server.url)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert message in done.stderr


def test_a_server_of_another_kind_is_recognised(server: ScriptedServer) -> None:
    server.listing = body(200, '{"hello": 1}')
    assert "does not speak OpenAI's API" in maitred("models", "--url", server.url).stderr
    server.listing = body(200, '{"data": []}')
    assert "serves no model yet" in maitred("complete", "x", "--url", server.url).stderr


def test_whoever_stops_reading_gets_no_traceback(server: ScriptedServer, tmp_path: Path) -> None:
    server.scripts = [stream(*[text_chunk("many words\n")] * 20_000, DONE)]
    command = f"{sys.executable} -m maitred complete x --url {server.url} 2>{tmp_path}/errors | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "many words\n"
    assert (tmp_path / "errors").read_text() == ""


def test_chat_from_a_pipe_is_one_turn_a_line(server: ScriptedServer) -> None:
    server.scripts = [
        stream(chat_chunk(None), chat_chunk("Hel"), chat_chunk("lo."), chat_chunk("", "stop"), DONE),
        stream(chat_chunk("Bye.", "stop"), DONE),
    ]
    done = maitred("chat", "--url", server.url, "--system", "Be brief.", "--max-tokens", "9", given="Hi\n\nGo\n")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello.\nBye.\n", "")
    first, second = (request["messages"] for _, request in server.requests)
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert first == [system, question]
    assert second == [
        system,
        question,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go"},
    ]
    assert server.requests[0][1]["max_tokens"] == 9


def test_chat_from_a_pipe_ends_with_the_first_failure(server: ScriptedServer) -> None:
    server.scripts = [stream(chat_chunk("Half"))]
    done = maitred("chat", "--url", server.url, given="Hi\nGo\n")
    assert (done.exit_code, done.stdout) == (1, "Half\n")
    assert len(server.requests) == 1


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "maitred", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str, *, interrupting: bool = False) -> None:
        """Reads until the text has come up; what is before it is read then.

        Ctrl-C can come between the moment at which readline has written its prompt and that at which it listens, and
        is then noticed with the next key only. A person presses it again; so does `interrupting`.
        """
        deadline_s = time.monotonic() + 300
        while text not in self.seen:
            assert time.monotonic() < deadline_s, f"{text!r} did not come up after {self.seen!r}"
            if interrupting:
                self.process.send_signal(signal.SIGINT)
            if select.select([self.master], [], [], 1)[0]:
                self.seen += os.read(self.master, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_chat_in_a_terminal(server: ScriptedServer) -> None:
    stopped = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        stream(chat_chunk("One \x1b[2Jtwo"))(handler)
        handler.wfile.flush()
        stopped.wait(60)

    server.scripts = [
        endless,
        body(503, '{"error": {"message": "Not now."}}'),
        stream(chat_chunk("Fine", "length"), DONE),
    ]
    terminal = Terminal("chat", "--url", server.url)
    try:
        terminal.until("Talking with tiny.")
        terminal.until("> ")
        terminal.type("Count\n")
        terminal.until("One [2Jtwo")  # the escape sequence lost its escape
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("(stopped)")
        stopped.set()
        terminal.until("> ")
        terminal.type("And?\n")
        terminal.until("Not now. (HTTP 503)")
        terminal.until("> ")
        terminal.type("And now?\n")
        terminal.until("Fine")
        terminal.until("--max-tokens sets it")
        terminal.until("> ")
        terminal.until("Ctrl-D leaves.", interrupting=True)
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        stopped.set()
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    history = server.requests[-1][1]["messages"]
    assert history == [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One \x1b[2Jtwo"},
        {"role": "user", "content": "And now?"},
    ]


def test_an_interrupted_completion_says_so_with_its_code(server: ScriptedServer) -> None:
    reached, release = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        reached.set()
        release.wait(60)

    server.scripts = [hang]
    process = subprocess.Popen(
        [sys.executable, "-m", "maitred", "complete", "x", "--url", server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    release.set()
    assert (process.returncode, out, errors) == (130, b"", b"")
