"""Engines of their own, over TCP with TLS and a secret, behind one gateway: real processes, hung and cut off."""

import asyncio
import contextlib
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from maitred.load.chaos.link import TcpLink
from maitred.testing.server_process import free_port, serving
from tests.integration.gateway.test_replicas import Midst, all_kinds, settled
from tests.support.certificates import Authority

SECRET = "a secret of sixteen characters and more"
VARIABLE = {"ENGINE_SECRET": SECRET}
SMALL = ("--kv-memory", "32MiB", "--threads", "1")


@asynccontextmanager
async def engine(*arguments, model=()):
    """`maitred engine` on a free port of this machine."""
    port = free_port()
    command = [sys.executable, "-m", "maitred", "engine", *model, "--listen", f"tcp://127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(
        *command, *SMALL, *arguments, "--set=engine_link.secret.env=ENGINE_SECRET", env={**os.environ, **VARIABLE}
    )
    try:
        yield port, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def gateway(*addresses, **settings):
    """`maitred serve` before engines that run already."""
    arguments = [argument for address in addresses for argument in ("--engine", address)]
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    server = serving(*arguments, settings={"engine_link.secret.env": "ENGINE_SECRET", **dotted}, environment=VARIABLE)
    started = await asyncio.to_thread(server.__enter__)
    try:
        yield started
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


async def test_streams_survive_a_cut_connection_and_a_hung_engine_token_by_token(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue("engine")
    own = authority.issue("gateway")
    tls = ("--cert-file", issued.certificate, "--key-file", issued.key, "--ca-file", authority.file)
    async with asyncio.timeout(300), AsyncExitStack() as stack:
        near, hanging = await stack.enter_async_context(engine(*tls))
        far, _ = await stack.enter_async_context(engine(*tls))
        cable = await stack.enter_async_context(TcpLink("127.0.0.1:0", f"127.0.0.1:{far}"))
        server = await stack.enter_async_context(
            gateway(
                *(f"tcp://127.0.0.1:{near}", f"tcp:{cable.address}"),
                engine_link__ca_file=authority.file,
                engine_link__certificate_file=own.certificate,
                engine_link__key_file=own.key,
                engine_link__silence_timeout_s=4.0,
            )
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=300))
        await settled(server)
        undisturbed = await all_kinds(client)

        # An engine may be far ahead of its readers and have ended its part: then what happens to it disturbs nobody.
        recoveries = 0.0
        while not recoveries:
            midst = Midst(10)
            round_ = asyncio.create_task(all_kinds(client, midst))
            await midst.reached.wait()
            with cable.resetting():
                for kind, answer in (await round_).items():
                    assert answer.same_as(undisturbed[kind]), kind
            recoveries = (await settled(server)).get("maitred_recoveries_total", 0.0)

        cut = recoveries
        while recoveries == cut:
            midst = Midst(10)
            round_ = asyncio.create_task(all_kinds(client, midst))
            await midst.reached.wait()
            hanging.send_signal(signal.SIGSTOP)
            for kind, answer in (await round_).items():
                assert answer.same_as(undisturbed[kind]), kind
            hanging.send_signal(signal.SIGCONT)
            recoveries = (await settled(server))["maitred_recoveries_total"]
        assert SECRET not in server.log.read_text()


async def test_an_engine_with_other_weights_serves_nobody(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    from maitred.config.tree import BUNDLED_MODEL

    other = shutil.copytree(BUNDLED_MODEL, tmp_path / "maitred-tiny")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors")
    async with asyncio.timeout(300), AsyncExitStack() as stack:
        right, _ = await stack.enter_async_context(engine())
        wrong, _ = await stack.enter_async_context(engine(model=(str(other),)))
        server = await stack.enter_async_context(gateway(f"tcp:127.0.0.1:{right}", f"tcp:127.0.0.1:{wrong}"))
        while "weights differ" not in server.log.read_text():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            for _ in range(4):
                answer = await client.post("/v1/completions", json={"model": "maitred-tiny", "prompt": "The fox"})
                assert answer.status_code == 200
        assert (await asyncio.to_thread(server.metrics))["maitred_engine_up"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Set engine_link.secret to {env: NAME} or {file: path}"),
        (("--set=engine_link.secret.env=ENGINE_SECRET",), "Set engine_link.certificate_file"),
        (("--set=engine_link.secret.env=SHORT",), "shorter than 16 characters"),
    ],
)
async def test_an_engine_that_strangers_could_use_does_not_start(arguments, says):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "maitred", "engine", "--listen", "tcp:0.0.0.0:0", *arguments),
        env={**os.environ, **VARIABLE, "SHORT": "hunter2"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, printed = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 2
    assert says in " ".join(printed.decode().split())
    assert b"hunter2" not in printed
