"""The engine protocol over TCP, with secrets and certificates, right and wrong ones: real sockets on both sides."""

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
from contextlib import contextmanager, suppress

import msgspec
import pytest

from maitred.core.clock import SystemClock
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, FinishReason, ModelFingerprint, SamplingParams, TokenDelta
from maitred.core.secret import Secret
from maitred.engine.server import MAX_PENDING_HANDSHAKES, EngineServer
from maitred.fleet.remote import FingerprintCheck, RemoteEngine
from maitred.load.chaos.link import TcpLink
from maitred.replica.engine.client import EngineClient
from maitred.testing.script import SCRIPTED_CARD, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.address import TcpAddress, UnixAddress
from maitred.wire.frames import TokenOutput
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import dialer_credentials, listener_credentials
from maitred.wire.link.handshake import MAGIC, NONCE_BYTES, DialerHandshake
from tests.support.certificates import Authority

LIMIT_S = 300.0
SECRET = Secret("correct horse battery staple", "{env: A}")
OTHER = Secret("incorrect horse battery staple", "{env: B}")
OPENING_BYTES = len(MAGIC) + NONCE_BYTES


class Counting:
    """Steps without a model: every token is followed by its successor."""

    def __init__(self):
        self.running = {}
        self.prompt_tokens = 0

    @property
    def occupied(self):
        return bool(self.running)

    def submit(self, owner, request):
        self.prompt_tokens += len(request.prompt)
        self.running[owner, request.id] = (request.prompt[-1], request.sampling.max_tokens)

    def cancel(self, owner, request_id, index):
        self.running.pop((owner, request_id), None)

    def pause(self, owner, request_id, *, paused):
        pass

    def rejections(self):
        return []

    def cancel_owner(self, owner):
        self.running = {key: value for key, value in self.running.items() if key[0] is not owner}

    def step(self):
        outputs = {}
        for (owner, request_id), (token, left) in list(self.running.items()):
            finish = FinishReason.LENGTH if left == 1 else None
            outputs.setdefault(owner, []).append(TokenOutput(request_id, TokenDelta(0, [token + 1], finish)))
            self.running[owner, request_id] = (token + 1, left - 1)
            if finish:
                del self.running[owner, request_id]
        return outputs

    def load(self):
        return LoadReport(running=len(self.running), prompt_tokens=self.prompt_tokens)

    def block_update(self, *, whole=False):
        return None

    def max_idle_s(self):
        return 0 if self.running else None


@contextmanager
def engine(config=LinkConfig(), *, stranger_s=30.0):  # noqa: B008 - frozen
    """An engine on a free port, as `maitred engine` would have it with this configuration."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = TcpAddress("127.0.0.1", listener.getsockname()[1])
    steps = Counting()
    server = EngineServer(
        steps, SCRIPTED_CARD, listener, SystemClock(), listener_credentials(address, config), stranger_s=stranger_s
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield address, steps
    finally:
        server.stop()
        with suppress(OSError):
            socket.create_connection((address.host, address.port), timeout=1).close()  # wakes a server that sleeps
        thread.join(10)
    assert not thread.is_alive()


def link_to(address, config):
    return EngineClient(address, credentials=dialer_credentials(address, config))


async def answer_of(link, prompt=(1, 2, 3), max_tokens=3):
    async with link.generate(EngineRequest("r", list(prompt), SamplingParams(max_tokens=max_tokens, seed=0))) as stream:
        return [token async for deltas in stream for delta in deltas for token in delta.tokens]


async def refusal_of(address, config):
    link = link_to(address, config)
    with pytest.raises(ReplicaUnavailable) as refused:
        await link.connect(5)
    assert not link.is_ready
    return str(refused.value)


async def still_serves(address, config):
    link = link_to(address, config)
    await link.connect(5)
    assert await answer_of(link) == [4, 5, 6]
    link.close()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def tls(issued, **more):
    return LinkConfig(certificate_file=issued.certificate, key_file=issued.key, **more)


# --- what is right ---


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("security", ["plain", "tls", "mutual"])
async def test_an_answer_over_tcp_however_large_the_request_is(authority, secret, security):
    at_engine = at_gateway = LinkConfig(secret=secret)
    if security != "plain":
        at_engine = tls(authority.issue("engine"), secret=secret)
        at_gateway = LinkConfig(secret=secret, ca_file=authority.file)
    if security == "mutual":
        at_engine = msgspec.structs.replace(at_engine, ca_file=authority.file)
        at_gateway = tls(authority.issue("gateway"), secret=secret, ca_file=authority.file)
    prompt = list(range(1_000_000))
    async with asyncio.timeout(LIMIT_S):
        with engine(at_engine) as (address, steps):
            link = link_to(address, at_gateway)
            await link.connect(5)
            assert await answer_of(link, prompt, max_tokens=200) == list(range(1_000_000, 1_000_200))
            assert steps.prompt_tokens == len(prompt)
            answers = await asyncio.gather(*(answer_of(link, [number]) for number in range(50)))
            assert answers == [[number + 1, number + 2, number + 3] for number in range(50)]
            link.close()


# --- the secret ---


async def test_a_gateway_without_the_secret_is_refused_with_the_reason():
    async with asyncio.timeout(LIMIT_S):
        with engine(LinkConfig(secret=SECRET)) as (address, _):
            assert "has another engine_link.secret" in await refusal_of(address, LinkConfig(secret=OTHER))
            assert "asks for a secret" in await refusal_of(address, LinkConfig())
            await still_serves(address, LinkConfig(secret=SECRET))
        with engine() as (address, _):
            assert "asks for no secret" in await refusal_of(address, LinkConfig(secret=SECRET))


async def test_an_engine_that_does_not_know_the_secret_is_refused():
    async def pose(reader, writer):
        writer.write(MAGIC + bytes(NONCE_BYTES))
        answer = await reader.readexactly(NONCE_BYTES + 32)
        writer.write(answer[NONCE_BYTES:])  # the gateway's own proof, sent back
        await reader.read()
        writer.close()

    server = await asyncio.start_server(pose, "127.0.0.1", 0)
    async with asyncio.timeout(LIMIT_S), server:
        address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        assert "does not know the secret" in await refusal_of(address, LinkConfig(secret=SECRET))


async def test_a_recorded_handshake_opens_nothing():
    async with asyncio.timeout(LIMIT_S):
        with engine(LinkConfig(secret=SECRET)) as (address, _):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            recorded = DialerHandshake(SECRET).feed(await reader.readexactly(OPENING_BYTES))
            writer.write(recorded)
            assert len(await reader.readexactly(32)) == 32
            assert await reader.readexactly(4), "the hello follows"
            writer.close()
            reader, writer = await asyncio.open_connection(address.host, address.port)
            await reader.readexactly(OPENING_BYTES)
            writer.write(recorded)
            assert await reader.read() == b""
            writer.close()
            await still_serves(address, LinkConfig(secret=SECRET))


async def test_proofs_cannot_be_passed_on_by_somebody_in_between(authority):
    """Even if he has a certificate that the gateway trusts."""
    between = authority.issue("between")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(between.certificate, between.key)
    trusting = ssl.create_default_context(cafile=authority.file)
    with engine(tls(authority.issue("engine"), secret=SECRET)) as (address, _):

        async def pass_on(reader, writer):
            theirs, to_them = await asyncio.open_connection(address.host, address.port, ssl=trusting)

            async def pump(source, sink):
                with suppress(OSError):
                    while data := await source.read(4096):
                        sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, to_them), pump(theirs, writer))

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
        async with asyncio.timeout(LIMIT_S), server:
            passed_on = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
            config = LinkConfig(secret=SECRET, ca_file=authority.file)
            assert "has another engine_link.secret" in await refusal_of(passed_on, config)
            await still_serves(address, config)


# --- certificates ---


async def test_an_engine_with_a_wrong_certificate_is_refused(authority, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    config = LinkConfig(ca_file=authority.file)
    for issued, says in [
        (stranger.issue("a"), "unable to get local issuer certificate"),
        (authority.issue("b", days=-1), "certificate has expired"),
        (authority.issue("c", self_signed=True), "self-signed certificate"),
        (authority.issue("d", address="127.0.0.2"), "IP address mismatch"),
    ]:
        async with asyncio.timeout(LIMIT_S):
            with engine(tls(issued)) as (address, _):
                refused = await refusal_of(address, config)
                assert "is not accepted" in refused
                assert says in refused


async def test_engines_at_many_addresses_may_share_a_certificate_with_one_name(authority):
    config = LinkConfig(secret=SECRET, ca_file=authority.file, server_name="engines.internal")
    async with asyncio.timeout(LIMIT_S):
        with engine(tls(authority.issue("engine", dns_name="engines.internal"), secret=SECRET)) as (address, _):
            await still_serves(address, config)
            refused = await refusal_of(address, msgspec.structs.replace(config, server_name="others.internal"))
            assert "Hostname mismatch" in refused
            assert "is not accepted" in await refusal_of(address, msgspec.structs.replace(config, server_name=None))


async def test_a_gateway_needs_a_certificate_where_the_engine_asks_for_one(authority, tmp_path):
    asking = tls(authority.issue("engine"), ca_file=authority.file)
    foreign = Authority(tmp_path, "stranger").issue("gateway")
    async with asyncio.timeout(LIMIT_S):
        with engine(asking) as (address, _):
            assert "ended before its hello" in await refusal_of(address, LinkConfig(ca_file=authority.file))
            assert "ended before its hello" in await refusal_of(address, tls(foreign, ca_file=authority.file))
            await still_serves(address, tls(authority.issue("ours"), ca_file=authority.file))


async def test_plain_text_and_tls_do_not_meet(authority):
    async with asyncio.timeout(LIMIT_S):
        with engine(tls(authority.issue("engine"), secret=SECRET)) as (address, _):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n")
            with suppress(ConnectionResetError):
                assert b"HTTP" not in await reader.read()
            writer.close()
            link = link_to(address, LinkConfig(secret=SECRET))
            with pytest.raises(ReplicaUnavailable, match="or it speaks TLS"):
                await link.connect(0.3)
            await still_serves(address, LinkConfig(secret=SECRET, ca_file=authority.file))
        with engine(LinkConfig(secret=SECRET)) as (address, _):
            refused = await refusal_of(address, LinkConfig(secret=SECRET, ca_file=authority.file))
            assert "No TLS could be agreed on" in refused


# --- strangers ---


async def test_garbage_before_the_handshake_costs_its_connection_and_nothing_else():
    config = LinkConfig(secret=SECRET)
    async with asyncio.timeout(LIMIT_S):
        with engine(config, stranger_s=0.3) as (address, _):
            for garbage in (b"\xff" * 64, b"\0\0\0\4\xc1\xc1\xc1\xc1" * 100, b"GET / HTTP/1.1\r\n\r\n", b""):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(garbage)
                with suppress(ConnectionResetError):
                    assert len(await reader.read()) == OPENING_BYTES, "no hello, and an end within the time"
                writer.close()
            await still_serves(address, config)


async def test_many_strangers_do_not_keep_a_gateway_out():
    config = LinkConfig(secret=SECRET)
    async with asyncio.timeout(LIMIT_S):
        with engine(config) as (address, _):
            strangers = [
                await asyncio.open_connection(address.host, address.port) for _ in range(MAX_PENDING_HANDSHAKES + 20)
            ]
            await still_serves(address, config)
            assert len(await strangers[0][0].read()) == OPENING_BYTES, "the one that was there longest had to go"
            for _, writer in strangers:
                writer.close()


# --- silence ---


SILENCE_S = 3.0
"""Much more than what a crowded machine makes an engine wait, and as much as a test can."""


def heard_within(address):
    return RemoteEngine(address, silence_timeout_s=SILENCE_S, hello_timeout_s=5.0)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


async def test_an_engine_that_hangs_is_noticed_within_the_time_and_taken_back_when_it_goes_on(tmp_path):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "maitred.testing.scripted_engine", "--listen", f"unix:{tmp_path}/s"),
        *("--script", '{"step_s": 0.05}'),
    )
    try:
        async with asyncio.timeout(LIMIT_S), heard_within(UnixAddress(f"{tmp_path}/s")) as attached:
            await attached.wait_started()
            # Idle for longer than the time: it is asked, and it answers.
            await asyncio.sleep(1.2 * SILENCE_S)
            assert attached.client.is_ready
            async with attached.client.generate(
                EngineRequest("r", [1], SamplingParams(max_tokens=500, seed=0))
            ) as stream:
                await anext(stream)
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(ReplicaLost):  # without the time, this would never end
                    async for _ in stream:
                        pass
            assert not attached.client.is_ready
            await until(lambda: "hangs" in attached.failure_reason)
            process.send_signal(signal.SIGCONT)
            await until(lambda: attached.client.is_ready)
            assert attached.failure_reason == ""
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_cut_cable_is_noticed_within_the_time():
    async with asyncio.timeout(LIMIT_S), ScriptedEngine([ScriptedAnswer()], step_s=0.02) as far:  # noqa: SIM117 - who lives in whom
        async with TcpLink("127.0.0.1:0", f"127.0.0.1:{far.address.port}") as cable:
            host, _, port = cable.address.rpartition(":")
            async with heard_within(TcpAddress(host, int(port))) as attached:
                await attached.wait_started()
                async with attached.client.generate(
                    EngineRequest("r", [1], SamplingParams(max_tokens=999, seed=0))
                ) as stream:
                    await anext(stream)
                    with cable.blackhole(), pytest.raises(ReplicaLost):
                        async for _ in stream:
                            pass
                await until(lambda: attached.client.is_ready)


# --- the model ---


async def test_an_engine_with_another_model_is_refused_and_says_so(caplog):
    ours = ModelFingerprint("shape", "tokens", "weights")
    card = msgspec.structs.replace(SCRIPTED_CARD, digest=ModelFingerprint("shape", "tokens", "fine-tuned"))
    async with asyncio.timeout(LIMIT_S), ScriptedEngine(card=card) as far:  # noqa: SIM117 - who lives in whom
        async with RemoteEngine(far.address, check_card=FingerprintCheck(ours).check) as attached:
            await until(lambda: "weights differ" in attached.failure_reason)
            assert attached.client.is_rejected
            assert not attached.client.is_ready
            with pytest.raises(ReplicaUnavailable):
                attached.client.card()
            far.card = msgspec.structs.replace(card, digest=ours)
            await attached.wait_started()
            assert attached.client.is_ready
            assert not attached.client.is_rejected
    assert caplog.text.count("cannot be used") == 1
