"""Upstreams through the proxies of the environment: a real proxy process, a tunnel with TLS in it, refusals."""

import asyncio
import datetime
import logging
import ssl
from contextlib import asynccontextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from maitred.config.tree import TextModelConfig
from maitred.core.secret import Secret
from maitred.replica.upstream.config import UpstreamConfig
from maitred.testing.scripted_media import ScriptedMedia
from tests.integration.upstream.test_upstream_media import media_gateway
from tests.support.servers.http_proxy import http_proxy

NAME = "upstream.example"
"""A name that no name server knows: only the proxy can lead there."""


@pytest.fixture
def certificate(tmp_path):
    """A server's certificate for that name, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "server.pem"
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*private))
    return file


@asynccontextmanager
async def far_server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with ScriptedMedia(tls=context) as server:
        yield server


def far_model(url, certificate=None):
    key = None if certificate is None else Secret("sk-far-0123456789", "{env: FAR}")
    upstream = UpstreamConfig(url=url, api_key=key, ca_file=certificate and str(certificate), probe_every_s=0.05)
    return {"far-vectors": TextModelConfig(mode="embedding", upstreams=[upstream])}


def address(server):
    return server.url.partition("//")[2].partition("/")[0]


async def test_a_server_with_tls_is_reached_through_a_tunnel(certificate, monkeypatch):
    async with far_server(certificate) as server, http_proxy(address(server), "us%er:p@ss") as (port, process):
        monkeypatch.setenv("HTTPS_PROXY", f"http://us%25er:p%40ss@127.0.0.1:{port}")
        async with media_gateway(further_models=far_model(f"https://{NAME}/v1", certificate)) as (_, near, client):
            answer = await client.embeddings.create(model="far-vectors", input="x", encoding_format="float")
            assert answer.data[0].embedding == [0.5, -0.25, 0]
            (asked,) = server.asked
            assert asked.headers["authorization"] == "Bearer sk-far-0123456789"
            assert "proxy-authorization" not in asked.headers
            assert (await process.stdout.readline()).decode().startswith(f"CONNECT {NAME}:443")
            # A large form goes through it as well, and this machine's server without it.
            await client.audio.transcriptions.create(model="ears", file=("a.mp3", bytes(300_000)))
            assert near.asked


async def test_a_server_without_tls_gets_its_requests_passed_on(monkeypatch):
    async with ScriptedMedia() as server, http_proxy(address(server), "user:pass") as (port, process):
        monkeypatch.setenv("http_proxy", f"user:pass@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")  # the client that asks the gateway reads these as well
        async with media_gateway(further_models=far_model(f"http://{NAME}:8080/v1")) as (_, _, client):
            await client.embeddings.create(model="far-vectors", input="x", encoding_format="float")
            assert server.asked[0].headers["host"] == f"{NAME}:8080"
            assert "proxy-authorization" not in server.asked[0].headers
            async with asyncio.timeout(300):
                line = ""
                while not line.startswith(f"POST http://{NAME}:8080/v1/embeddings "):
                    line = (await process.stdout.readline()).decode()  # those before are of the health checks


@pytest.mark.parametrize(
    ("name", "proxy", "words"),
    [
        (
            "forbidden.example",
            "http://user:right-one@127.0.0.1:{port}",
            "refuses a tunnel to forbidden.example:443: 403",
        ),
        (NAME, "http://user:wrong-one@127.0.0.1:{port}", "wants a user and a password (407)"),
        (NAME, "http://127.0.0.1:1", "through the proxy 127.0.0.1:1"),
    ],
)
async def test_what_the_proxy_refuses_is_in_the_log_without_its_password(name, proxy, words, monkeypatch, caplog):
    async with ScriptedMedia() as server, http_proxy(address(server), "user:right-one") as (port, _):
        monkeypatch.setenv("HTTPS_PROXY", proxy.format(port=port))
        with caplog.at_level(logging.INFO):
            async with media_gateway(further_models=far_model(f"https://{name}/v1"), up=False) as (system, _, _client):
                replica = system.dispatchers[-1].core.endpoint_states[0].endpoint.replica
                await system.wait_until(lambda: words in (replica.status.reason or ""))
                body = {"model": "far-vectors", "input": "x"}
                answer = await system.client.post("/v1/embeddings", json=body)
                assert answer.status_code == 503
                assert "-one" not in answer.text + replica.status.reason
        assert "right-one" not in caplog.text


async def test_a_proxy_that_says_nothing_ends_with_the_time_to_connect(monkeypatch):
    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    upstream = UpstreamConfig(url=f"https://{NAME}/v1", connect_timeout_s=0.05, probe_every_s=0.05)
    models = {"far-vectors": TextModelConfig(mode="embedding", upstreams=[upstream])}
    async with silent, media_gateway(further_models=models, up=False) as (system, _, _client):
        replica = system.dispatchers[-1].core.endpoint_states[0].endpoint.replica
        await system.wait_until(lambda: "in 0.05 s" in (replica.status.reason or ""))
