"""Every replica there is, put to `exercise_replica`; and broken ones, which it must catch."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import pytest
import uvloop

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.request import ModelFingerprint
from maitred.core.secret import Secret
from maitred.engine.config import EngineConfig
from maitred.fleet.local import LocalEngine, engine_command
from maitred.fleet.remote import FingerprintCheck, make_remote_engine
from maitred.replica.engine.client import EngineClient
from maitred.testing.replica_conformance import ReplicaUnderTest, exercise_replica
from maitred.testing.script import AnswerFault, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.address import parse_address
from maitred.wire.link.config import LinkConfig
from tests.integration.engine.test_remote_engines import SECRET, engine
from tests.support.certificates import Authority


def linked_to(answers):
    """A link to a scripted engine in this process."""

    @asynccontextmanager
    async def make():
        async with ScriptedEngine(answers) as engine:
            link = EngineClient(engine.address)
            await link.connect(5)

            async def kill():
                engine.close()

            yield ReplicaUnderTest(link, kill)
            assert link.open_streams == 0
            link.close()

    return make


def local(command):
    """An engine process; killing it is killing it."""

    @asynccontextmanager
    async def make():
        async with LocalEngine(command, environment={"OMP_NUM_THREADS": "1"}) as engine:
            await engine.wait_started()

            async def kill():
                os.kill(engine.pid, signal.SIGKILL)
                await engine.client.wait_lost()

            yield ReplicaUnderTest(engine.client, kill)
            assert engine.client.open_streams == 0

    return make


def remote(folder):
    """`maitred engine` behind TCP, with TLS, a secret and certificates on both ends; killing it is killing it."""
    authority = Authority(folder)
    own, ours = authority.issue("engine"), authority.issue("gateway")
    link_config = LinkConfig(
        secret=Secret(SECRET, "{env: ENGINE_SECRET}"),
        ca_file=authority.file,
        certificate_file=ours.certificate,
        key_file=ours.key,
    )

    @asynccontextmanager
    async def make():
        tls = ("--cert-file", own.certificate, "--key-file", own.key, "--ca-file", authority.file)
        async with (
            engine(*tls) as (port, process),
            make_remote_engine(
                parse_address(f"tcp://127.0.0.1:{port}"), link_config, FingerprintCheck(ModelFingerprint()).check
            ) as there,
        ):
            await there.wait_started()

            async def kill():
                process.kill()
                await there.client.wait_lost()

            yield ReplicaUnderTest(there.client, kill)
            assert there.client.open_streams == 0

    return make


# The gateway runs on uvloop; whoever embeds a link may run on asyncio's own loop.
on_every_loop = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@on_every_loop
def test_a_link_to_a_scripted_engine(loop_factory):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(exercise_replica(linked_to([ScriptedAnswer()])))


@on_every_loop
def test_a_link_to_a_scripted_engine_in_another_process(loop_factory):
    module = "maitred.testing.scripted_engine"
    command = lambda address: [sys.executable, "-m", module, "--listen", address]  # noqa: E731
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(exercise_replica(local(command)))


@pytest.mark.parametrize(
    ("answer", "check"),
    [
        (ScriptedAnswer(tokens=[1, 2]), "answers_completely"),
        (ScriptedAnswer(fault=AnswerFault.DROP, fault_after=3), "answers_completely"),
        (ScriptedAnswer(fault=AnswerFault.REJECT), "answers_completely"),
    ],
)
async def test_a_replica_that_breaks_its_promises_is_caught(answer, check):
    with pytest.raises(Exception) as caught:
        await exercise_replica(linked_to([answer]))
    assert caught.value.__notes__ == [f"in the replica check {check}"]


async def test_the_engine_itself():
    await exercise_replica(local(engine_command(BUNDLED_MODEL, EngineConfig(threads=1, kv_memory_bytes=1 << 26))))


async def test_the_engine_on_another_machine(tmp_path):
    await exercise_replica(remote(tmp_path))
