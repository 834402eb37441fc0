"""What goes through to another server and back as it is, and what never goes out."""

import datetime
import ipaddress
import json
import ssl
from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from maitred.core.secret import Secret
from tests.support.upstream_gateway import upstream_gateway

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "How is the weather?"}]


def chunk(finish=None, **delta):
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


CALLS = [
    chunk(role="assistant", content=None),
    chunk(reasoning_content="I should ask."),
    chunk(
        tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}]
    ),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"place": '}}]),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Graz"}'}}]),
    chunk(finish="tool_calls"),
    {"id": "x", "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39}},
]


class Server:
    """Plays one answer, and keeps what it was asked."""

    def __init__(self, events):
        self.events = events
        self.bodies, self.heads, self.paths = [], [], []

    async def answer(self, request):
        self.paths.append(request.path_qs)
        self.heads.append(dict(request.headers))
        if request.method == "GET":
            return web.json_response({"data": [{"id": "far", "max_model_len": 4096}]})
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running(handler, tls=None):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        (socket,) = site._server.sockets
        yield f"{'https' if tls else 'http'}://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        await runner.cleanup()


def client(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


async def test_tools_pass_in_requests_and_answers_whole_and_streamed():
    server = Server(CALLS)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="openai") as system:  # noqa: SIM117
        async with client(system) as sdk:
            whole = await sdk.chat.completions.create(model="far", messages=USER, tools=TOOLS, tool_choice="required")
            (choice,) = whole.choices
            (call,) = choice.message.tool_calls
            assert (call.id, call.function.name, call.function.arguments) == ("call_1", "weather", '{"place": "Graz"}')
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert choice.message.reasoning_content == "I should ask."
            assert whole.usage.completion_tokens == 9
            # The official client's own way to put a stream together agrees.
            async with sdk.chat.completions.stream(model="far", messages=USER, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.tool_calls[0].function.arguments == '{"place": "Graz"}'
            history = [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
                {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
            ]
            await sdk.chat.completions.create(model="far", messages=history, tools=TOOLS)
    assert (server.bodies[0]["tools"], server.bodies[0]["tool_choice"]) == (TOOLS, "required")
    sent = server.bodies[2]["messages"][1]
    assert sent["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"place": "Graz"}'}
    assert "temperature" not in server.bodies[0]


@pytest.mark.parametrize(
    ("said", "told", "kept"),
    [
        ({"stop_reason": "END"}, ("stop_sequence", "END"), {}),
        ({"matched_stop": "END"}, ("stop_sequence", "END"), {"matched_stop": "END"}),
        ({"stop_reason": 128001}, ("end_turn", None), {"native_stop_reason": 128001}),
        ({"stop_reason": 0}, ("end_turn", None), {"native_stop_reason": 0}),
        ({"matched_stop": 128001}, ("end_turn", None), {"matched_stop": 128001}),
        ({"stop_reason": None}, ("end_turn", None), {}),
        ({"stop_reason": "set at the server"}, ("end_turn", None), {"native_stop_reason": "set at the server"}),
    ],
)
async def test_what_ended_the_answer_of_a_server_is_told_to_clients_of_messages(said, told, kept):
    ended = chunk(finish="stop")
    ended["choices"][0] |= said
    server = Server([chunk(content="Hi"), ended])
    asked = {"model": "far", "max_tokens": 9, "messages": USER, "stop_sequences": ["STOP", "END"]}
    headers = {"anthropic-version": "2023-06-01"}
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="vllm") as system:
        whole = (await system.client.post("/v1/messages", json=asked, headers=headers)).json()
        streamed = await system.client.post("/v1/messages", json={**asked, "stream": True}, headers=headers)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    for end in (whole, delta):
        assert (end["stop_reason"], end["stop_sequence"]) == told
        assert {name: end[name] for name in ("matched_stop", "native_stop_reason") if name in end} == kept


async def test_credentials_go_in_the_header_that_the_dialect_wants_and_nowhere_else():
    server, key = Server(CALLS), Secret("sk-very-secret", "{env: KEY}")
    async with running(server.answer) as url:
        async with upstream_gateway(f"{url}/v1", dialect="azure", api_key=key, headers={"X-Team": "a"}) as system:
            await system.chat()
        async with upstream_gateway(f"{url}/v1?api-version=1", dialect="openai", api_key=key) as system:
            answer = await system.chat()
    azure, bearer = server.heads[0], server.heads[-1]
    assert (azure["api-key"], azure["X-Team"], "Authorization" in azure) == ("sk-very-secret", "a", False)
    assert bearer["Authorization"] == "Bearer sk-very-secret"
    assert server.paths[-1] == "/v1/chat/completions?api-version=1"
    assert "sk-very-secret" not in answer.text + json.dumps(server.bodies)


async def test_the_window_is_the_one_that_the_server_tells():
    server = Server(CALLS)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        (entry,) = (await system.client.get("/v1/models")).json()["data"]
        assert entry["max_model_len"] == 4096
        refused = await system.chat(max_tokens=5_000)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        # About 3,000 tokens of prompt and 1,000 of answer: the server knows better than an estimate.
        messages = [{"role": "user", "content": "abcd" * 3_300}]
        assert (await system.chat(messages=messages, max_tokens=1_000)).status_code == 200


async def test_redirects_are_not_followed():
    asked = []

    async def elsewhere(request):
        asked.append(request.path)
        if request.method == "GET":
            return web.json_response({"data": []})
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async with running(elsewhere) as url, upstream_gateway(f"{url}/v1") as system:
        refused = await system.chat()
        assert refused.status_code == 503
        assert "/elsewhere" not in asked


def certificate(folder):
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "there")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.parametrize("trusted", [True, False])
async def test_certificates_are_verified(tmp_path, trusted):
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    server = Server(CALLS)
    async with running(server.answer, tls) as url:
        settings = {"ca_file": str(cert)} if trusted else {}
        async with upstream_gateway(f"{url}/v1", up=trusted, probe_every_s=0.2, **settings) as system:
            if trusted:
                assert (await system.chat()).status_code == 200
            else:
                await system.wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in system.upstream.status.reason)
                assert (await system.chat()).status_code == 503
                assert server.paths == []
