"""The gateway of the fault table, and the servers behind it: a real `maitred serve`, real sockets.

Every cell of the table has a model and a tenant of its own, so that none learns from another or pays for it: its own
breaker, its own window of requests, its own budget of retries.
"""

import asyncio
import datetime
import ipaddress
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.support.chaos.fault_cases import RETRIES, Case, Place
from maitred.identity.keys import make_key
from maitred.testing.scripted_openai import DelayDistribution, ScriptedOpenAI, ServerScript, scripted_openai
from maitred.testing.server_process import ServerProcess, free_port, serving

QUICK = {
    "connect_timeout_s": 0.5,
    "first_part_timeout_s": 0.8,
    "idle_timeout_s": 0.5,
    "total_timeout_s": 1.5,
    "probe_timeout_s": 0.5,
    "probe_every_s": 60,  # after it was found, only requests tell
}
PRICE = {"prompt": 1.0, "output": 2.0}
"""US dollars per million tokens."""
CALM = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.03))
"""So slow that what precedes a fault has been passed on before it, also on a machine with much else to do."""


@dataclass(frozen=True)
class Cell:
    """One fault, asked for in one way, with or without a second server."""

    case: Case
    stream: bool
    second: bool

    @property
    def model(self) -> str:
        """What callers ask for."""
        return f"{self.case.name}.{'two' if self.second else 'one'}.{'stream' if self.stream else 'whole'}"


@dataclass(frozen=True)
class Installation:
    """Everything that runs.

    Attributes:
        gateway: Is asked.
        faulty: Answers with faults.
        sound: Answers.
        keys: Those who may ask, by the model of their cell.
        admin: May look into the ledger.
    """

    gateway: ServerProcess
    faulty: ScriptedOpenAI
    sound: ScriptedOpenAI
    keys: Mapping[str, str]
    admin: str


@asynccontextmanager
async def installed(cells: Sequence[Cell], patience: float = 1.0) -> AsyncIterator[Installation]:
    """Starts all servers, and stops them.

    Args:
        cells: Which models there are.
        patience: How many times as long as usual a server may take.
    """
    cases = {cell.case.name: cell.case for cell in cells}.values()
    faults = [msgspec.structs.replace(case.fault, models=[case.name]) for case in cases if case.fault is not None]
    async with AsyncExitStack() as stack:
        faulty = stack.enter_context(scripted_openai(msgspec.structs.replace(CALM, faults=faults)))
        sound = stack.enter_context(scripted_openai(CALM))
        leaving = stack.enter_context(scripted_openai(CALM))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="maitred-faults-")))
        places = {
            Place.NOBODY: f"http://127.0.0.1:{free_port()}",
            Place.NO_NAME: "http://upstream.invalid",  # RFC 2606: never resolves
            Place.NO_TLS: sound.url.replace("http:", "https:"),
            Place.UNTRUSTED: await stack.enter_async_context(_untrusted(folder)),
            Place.UNACCEPTED: stack.enter_context(closing(_Unaccepted())).url,
            Place.GONE: leaving.url,
        }
        keys = {cell.model: make_key().plaintext for cell in cells}
        admin = make_key().plaintext
        environment = {f"KEY_{number}": key for number, key in enumerate([*keys.values(), admin])}
        config = folder / "maitred.yaml"
        config.write_text(json.dumps(_config(cells, faulty.url, sound.url, places, patience)))
        # In a thread: meanwhile, this loop answers those who look at it.
        gateway = await asyncio.to_thread(
            stack.enter_context, serving("--config", str(config), environment=environment)
        )
        await asyncio.sleep(patience)  # every server has been looked at once, those included that let one wait
        leaving.stop()
        yield Installation(gateway, faulty, sound, keys, admin)


def _config(
    cells: Sequence[Cell], faulty: str, sound: str, places: Mapping[Place, str], patience: float
) -> dict[str, Any]:
    quick = {name: value * (patience if name.endswith("timeout_s") else 1) for name, value in QUICK.items()}

    def upstreams(cell: Cell) -> list[dict[str, Any]]:
        case = cell.case
        url = faulty if case.place is None else places[case.place]
        # A dialect that promises a token for every chunk: else nobody can tell that one came twice.
        first = {"name": "first", "url": f"{url}/v1", "model": case.name, "dialect": "sglang", **quick}
        other = {"name": "second", "url": f"{sound}/v1", "model": "sound", "dialect": "sglang", **quick}
        return [first, other] if cell.second else [first]

    return {
        "log": {"level": "error"},
        "server": {"allow_unauthenticated": False},
        "admission": {"prices": {"*": PRICE}},
        "dispatch": {"retries": RETRIES},
        "models": {cell.model: {"upstreams": upstreams(cell)} for cell in cells},
        "tenants": {
            **{f"caller-{n}": {"keys": {"one": {"secret": {"env": f"KEY_{n}"}}}} for n in range(len(cells))},
            "house": {"keys": {"admin": {"secret": {"env": f"KEY_{len(cells)}"}, "scopes": ["admin"]}}},
        },
    }


class _Unaccepted:
    """A port whose queue is full, so that nobody's handshake is answered."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._waiting = [socket.socket() for _ in range(4)]
        for waiting in self._waiting:
            waiting.setblocking(False)
            waiting.connect_ex(self._listener.getsockname())

    def close(self) -> None:
        """Frees the port."""
        for waiting in (*self._waiting, self._listener):
            waiting.close()


@asynccontextmanager
async def _untrusted(folder: Path) -> AsyncIterator[str]:
    """A server that signed its certificate itself."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*_certificate(folder))
    hang_up: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None] = lambda _, writer: writer.close()  # noqa: E731
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=tls) as server:
        yield "https://{}:{}".format(*server.sockets[0].getsockname())


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody you know")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files
