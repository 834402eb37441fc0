"""Models that come and go, as real processes: the residence with scripted engines, then the whole server."""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.cli.app import app
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.clock import SystemClock
from maitred.core.errors import Conflict, ModelHeld, ModelLoadFailed, QueueFull, ResourceNotFound
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.request import EngineRequest, SamplingParams, WaitCause
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import DispatchRequest
from maitred.fleet.backend import BackendFacts
from maitred.fleet.local import LocalEngine
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.model_residency import ModelResidency, ResidencyPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.process import process_memory_bytes
from maitred.fleet.residency.manager import ModelManager, OnDemandModel
from maitred.scaling.startup_times import StartKind, StartupTimes
from maitred.testing.server_process import serving
from maitred.testing.variants import make_variant

LIMIT_S = 300.0
BYTES = 1 << 30
"""Configured memory of each model: more than a scripted engine is measured to take."""
PROMPT = [5, 6, 7]


def scripted(address, **script):
    module = "maitred.testing.scripted_engine"
    return [sys.executable, "-m", module, "--listen", address, "--script", json.dumps(script)]


def broken(address):
    return [sys.executable, "-c", "import sys; sys.exit('no such weights')"]


def engine_of(command, check_process, name):
    engine = LocalEngine(command, stop_grace_s=2.0)
    engine.check_process = check_process
    return engine


class Machine:
    """A manager of on-demand models, with their queues."""

    def __init__(self, commands, *, places, turn_loads=1.0, dispatch=None, pinned=()):
        clock = SystemClock()
        self.residents = ResidencyPolicy(
            [ModelResidency(name, BYTES, is_pinned=name in pinned, load_s=1.0) for name in commands],
            places * BYTES,
            turn_loads,
        )
        self.manager = ModelManager(self.residents, clock)
        self.models, self.queues = self.manager.models, {}
        facts = BackendFacts(max_replicas=1, start_kind=StartKind.WEIGHTS_CACHED, can_sleep=True)
        config = dispatch or DispatchConfig()
        for name, command in commands.items():
            make_engine = partial(engine_of, command, partial(self.manager.check_process, name))
            pool = ReplicaPool(
                LocalBackend(make_engine, facts, lambda number: "local", clock),
                DesiredReplicas(0),
                StartupTimes({StartKind.WEIGHTS_CACHED: 1.0}),
                clock,
                partial(self.manager.refusal, name),
            )
            queue = Dispatcher(
                *(name, pool.endpoints(), config, clock), on_wanted=partial(self.manager.mark_wanted, name)
            )
            pool.on_endpoints(lambda pool=pool, queue=queue: queue.reconfigure(pool.endpoints(), config, None))
            self.manager.add_model(OnDemandModel(name, pool, queue))
            self.queues[name] = queue

    def pid(self, name):
        return next((engine.pid for engine in self.models[name].pool.engines.values()), None)

    def is_open(self, name):
        return self.models[name].pool.desired.serving and self.models[name].pool.is_ready

    def request(self, name="r", **fields):
        return DispatchRequest(
            **{
                **{"id": name, "organisation": "acme", "flow": Flow((FlowLevel("acme"),), PriorityClass.STANDARD)},
                **{"prompt_tokens": 3, "prompts": [PROMPT], "max_tokens": 4, "choices": 1},
                **{"arrived_s": SystemClock.monotonic_s(), **fields},
            }
        )

    async def ask(self, name, held=None):
        """One request, from the check to the last token; what it was predicted to wait, and why it waited."""
        queue = self.queues[name]
        place = queue.load_shedder.check(self.request(), SystemClock().monotonic_s())
        async with queue.enqueue(self.request()) as entry:
            endpoint = await entry.wait_dispatched()
            async with endpoint.replica.generate(
                EngineRequest("r", PROMPT, SamplingParams(max_tokens=4, seed=0))
            ) as stream:
                entry.on_submitted()
                tokens = [token async for deltas in stream for delta in deltas for token in delta.tokens]
                if held is not None:
                    await held.wait()
        return place, entry.waited_ms, tokens

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - there is no event for all of them
                await asyncio.sleep(0.01)


@asynccontextmanager
async def living(machine):
    tasks = [asyncio.create_task(machine.manager.run())]
    tasks += [asyncio.create_task(queue.run()) for queue in machine.queues.values()]
    try:
        async with asyncio.timeout(LIMIT_S):
            yield machine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(work):
    return asyncio.run(work)


def test_a_request_loads_its_model_and_waits_for_it_with_a_prediction():
    async def work():
        async with living(Machine({"a": scripted}, places=1)) as machine:
            assert machine.pid("a") is None
            place, waited_ms, tokens = await machine.ask("a")
            assert place.wait_s == pytest.approx(1.0, abs=0.1)
            assert waited_ms[WaitCause.COLD_START] > 0
            assert len(tokens) == 4
            again, waited_ms, _ = await machine.ask("a")
            assert again.wait_s == 0
            assert WaitCause.COLD_START not in waited_ms
            assert machine.models["a"].loads == 1

    run(work())


def test_the_process_of_an_unloaded_model_is_gone_and_its_answers_were_complete():
    async def work():
        async with living(Machine({"a": scripted, "b": scripted}, places=1)) as machine:
            held = asyncio.Event()
            first = asyncio.create_task(machine.ask("a", held))
            await machine.until(lambda: machine.models["a"].loads == 1)
            pid = machine.pid("a")
            other = asyncio.create_task(machine.ask("b"))
            await machine.until(lambda: not machine.is_open("a"))
            assert psutil.pid_exists(pid)  # somebody still reads
            held.set()
            await first
            _, waited_ms, tokens = await other
            assert not psutil.pid_exists(pid)
            assert len(tokens) == 4
            assert waited_ms[WaitCause.COLD_START] > 0
            assert machine.models["a"].unloads == 1
            assert machine.residents["a"].phase is ResidencyPhase.UNLOADED

    run(work())


def test_alternating_callers_are_all_served_with_few_loads():
    async def work():
        names = ["a", "b", "c"]
        async with living(Machine(dict.fromkeys(names, scripted), places=2, turn_loads=2.0)) as machine:

            async def caller(number):
                for turn in range(8):
                    place, _, tokens = await machine.ask(names[(number + turn) % 3])
                    assert len(tokens) == 4
                    assert place.wait_s >= 0

            await asyncio.gather(*(caller(number) for number in range(12)))
            loads = sum(model.loads for model in machine.models.values())
            assert 3 <= loads <= 24  # in the order of the calls every third would have been a load: 32 and more

    run(work())


def test_a_model_that_cannot_be_loaded_says_so_and_stops_nobody():
    async def work():
        async with living(Machine({"bad": broken, "good": scripted}, places=1)) as machine:
            with pytest.raises(ModelLoadFailed) as failure:
                await machine.ask("bad")
            assert 0 < failure.value.retry_after_s <= 2.0
            with pytest.raises(ModelLoadFailed):
                machine.queues["bad"].load_shedder.check(machine.request(), SystemClock().monotonic_s())
            _, _, tokens = await machine.ask("good")
            assert len(tokens) == 4
            assert machine.models["bad"].failures == 1
            assert machine.pid("bad") is None

    run(work())


def test_a_model_that_turns_out_too_large_is_ended_again():
    async def work():
        machine = Machine({"a": scripted}, places=1)
        machine.residents.budget_bytes = 1 << 20
        machine.residents["a"].estimated_bytes = 1 << 10
        async with living(machine):
            with pytest.raises(ModelLoadFailed):
                await machine.ask("a")
            assert machine.pid("a") is None
            assert machine.residents.used_bytes == 0

    run(work())


def test_a_request_that_cannot_wait_for_a_load_gets_retry_after_and_then_finds_it_loaded():
    async def work():
        config = DispatchConfig(max_wait_s={PriorityClass.STANDARD: 0.5})
        async with living(Machine({"a": scripted}, places=1, dispatch=config)) as machine:
            with pytest.raises(QueueFull) as refusal:
                machine.queues["a"].load_shedder.check(machine.request(), SystemClock().monotonic_s())
            assert refusal.value.retry_after_s >= 0.9
            await machine.until(lambda: machine.models["a"].loads == 1)
            place, _, tokens = await machine.ask("a")
            assert place.wait_s == 0
            assert len(tokens) == 4

    run(work())


def test_a_pinned_model_is_there_from_the_start_and_nothing_is_left_at_the_end():
    async def work():
        async with living(Machine({"a": scripted, "b": scripted}, places=2, pinned={"a"})) as machine:
            await machine.until(lambda: machine.is_open("a"))
            await machine.ask("b")
            pids = [machine.pid(name) for name in machine.models]
            assert all(process_memory_bytes(pid) > 1 << 20 for pid in pids)
        assert not any(psutil.pid_exists(pid) for pid in pids)

    run(work())


# --- by hand ---


def admin_of(machine):
    return OnDemandModelAdmin(machine.manager, SystemClock())


def states(machine):
    return {item.model: item.state for item in admin_of(machine).all().data}


def test_a_model_can_be_loaded_ahead_and_its_memory_had_back():
    async def work():
        async with living(Machine({"a": scripted, "b": scripted}, places=2)) as machine:
            status = admin_of(machine).load("a")
            assert (status.state, status.loads, status.idle_s) == ("waiting", 0, None)
            assert status.ready_in_s == pytest.approx(1.0, abs=0.1)
            await machine.until(lambda: states(machine)["a"] == "serving")
            place, waited_ms, _ = await machine.ask("a")
            assert place.wait_s == 0
            assert WaitCause.COLD_START not in waited_ms
            pid, held = machine.pid("a"), asyncio.Event()
            running = asyncio.create_task(machine.ask("a", held))
            await machine.until(lambda: machine.queues["a"].core.running == 1)
            admin_of(machine).unload("a", hold=False)
            assert states(machine)["a"] == "draining"
            waiting = asyncio.create_task(machine.ask("a"))
            await asyncio.sleep(0.3)
            assert psutil.pid_exists(pid)  # somebody still reads
            held.set()
            assert len((await running)[2]) == 4
            assert len((await waiting)[2]) == 4  # it was loaded again for who waited
            assert not psutil.pid_exists(pid)
            (one,) = (item for item in admin_of(machine).all().data if item.model == "a")
            assert (one.loads, one.unloads, one.state, one.running) == (2, 1, "serving", 0)
            assert one.measured_bytes
            assert one.idle_s < LIMIT_S

    run(work())


def test_a_model_that_is_held_refuses_until_it_is_loaded_by_hand():
    async def work():
        async with living(Machine({"a": scripted, "b": scripted}, places=1)) as machine:
            await machine.ask("a")
            held = asyncio.Event()
            running = asyncio.create_task(machine.ask("a", held))
            await machine.until(lambda: machine.queues["a"].core.running == 1)
            admin_of(machine).unload("a", hold=True)
            await machine.until(lambda: not machine.is_open("a"))
            with pytest.raises(ModelHeld, match="operator") as refusal:
                await machine.ask("a")
            assert refusal.value.retry_after_s == 10.0
            assert not machine.queues["a"].serving
            held.set()
            await running
            await machine.until(lambda: states(machine)["a"] == "held")
            assert machine.pid("a") is None
            await machine.ask("b")
            assert states(machine)["a"] == "held"
            admin_of(machine).load("a")
            _, _, tokens = await machine.ask("a")
            assert len(tokens) == 4

    run(work())


def test_a_pinned_model_stays_and_an_error_names_what_prevents_a_load():
    async def work():
        async with living(Machine(dict.fromkeys("abc", scripted), places=2)) as machine:
            admin = admin_of(machine)
            assert admin.pin("a").pinned
            with pytest.raises(Conflict, match="With b pinned, c could never be loaded: it takes 1,024 MiB, and 0 MiB"):
                admin.pin("b")
            with pytest.raises(Conflict, match="a is pinned"):
                admin.unload("a", hold=False)
            admin.unload("c", hold=True)
            admin.pin("b")
            with pytest.raises(Conflict, match=r"c takes 1,024 MiB.* beside what is pinned: a \(1,024 MiB\), b"):
                admin.load("c")
            with pytest.raises(ResourceNotFound, match="no model 'd' that is loaded on demand"):
                admin.load("d")
            await machine.until(lambda: states(machine) == {"a": "serving", "b": "serving", "c": "held"})
            admin.unpin("a")
            admin.load("c")
            await machine.until(lambda: states(machine) == {"a": "out", "b": "serving", "c": "serving"})

    run(work())


def test_a_load_that_failed_can_be_tried_again_at_once():
    async def work():
        mended = []
        async with living(
            Machine({"a": lambda address: (scripted if mended else broken)(address)}, places=1)
        ) as machine:
            with pytest.raises(ModelLoadFailed):
                await machine.ask("a")
            mended.append(True)
            admin_of(machine).load("a")
            _, _, tokens = await machine.ask("a")
            assert len(tokens) == 4

    run(work())


# --- the whole server ---

SETTINGS = {
    "engine": {"kv_memory_bytes": "32MiB", "max_sequences": 4},
    "residency": {"memory_bytes": "600MiB", "turn_loads": 1.0},
    "server": {"heartbeat_s": 0.5},
}


def configured(folder, **settings):
    for seed, name in enumerate(("red", "blue")):
        make_variant(BUNDLED_MODEL, folder / name, seed)
    path = folder / "maitred.yaml"
    models = {
        "red": {"path": str(folder / "red")},
        "blue": {"path": str(folder / "blue"), "engine": {"context_tokens": 512}},
    }
    path.write_text(json.dumps({**SETTINGS, "models": models, **settings}))
    return str(path)


@pytest.mark.usefixtures("new_interpreters")  # whose memory is all their own
def test_two_models_share_memory_for_one(tmp_path):
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "cache": {"no-cache": True}}
    with serving("--config", configured(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        listed = {entry["id"]: entry["max_model_len"] for entry in client.get("/v1/models").json()["data"]}
        assert listed == {"red": 2048, "blue": 512}
        first = client.post("/v1/completions", json={"model": "red", **body})
        assert first.status_code == 200
        assert int(first.headers["x-maitred-predicted-wait-ms"]) > 1000
        warm = client.post("/v1/completions", json={"model": "red", **body})
        assert warm.headers["x-maitred-predicted-wait-ms"] == "0"
        with client.stream(
            "POST", "/v1/completions", json={"model": "blue", "stream": True, **body}, headers={"x-request-id": "b"}
        ) as stream:
            lines = stream.iter_lines()
            comment = next(line for line in lines if line.startswith(":"))
            assert "predicted wait" in comment
            assert client.get("/v1/queue/b").json()["predicted_wait_ms"] > 0
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        blue = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1])
        assert blue != first.json()["choices"][0]["text"]
        back = client.post("/v1/completions", json={"model": "red", **body})
        assert back.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        metrics = server.metrics()
        assert metrics["maitred_model_loads_total"] == 3
        assert metrics["maitred_model_unloads_total"] == 2
        assert metrics["maitred_model_resident"] == 1
        assert metrics["maitred_model_reserved_bytes"] <= metrics["maitred_residency_budget_bytes"]
        assert metrics["maitred_model_memory_bytes"] <= metrics["maitred_model_reserved_bytes"]

        key = re.search(r"sk-mtd-\S+", server.log.read_text())[0]

        def maitred(*words):
            done = CliRunner().invoke(
                app, ["models", *words], env={"MAITRED_URL": server.url, "MAITRED_ADMIN_KEY": key}
            )
            assert done.exit_code == 0, done.output
            return done.output

        assert re.search(r"^red +serving +no +", maitred("memory"), re.M)
        assert " of 600 MiB are taken." in maitred("memory")
        assert re.search(r"^red +held +no +", maitred("unload", "red", "--hold", "--wait"), re.M)
        refused = client.post("/v1/completions", json={"model": "red", **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_held")
        assert not client.get("/v1/models/red").json()["ready"]
        (status,) = json.loads(maitred("load", "red", "--wait", "--json"))
        assert (status["state"], status["loads"], status["held"]) == ("serving", 3, False)
        assert 0.5 < status["predicted_load_s"] < 60
        refused = client.post("/admin/v1/models/pin", json={"model": "red"}, headers={"x-api-key": key})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert "With red pinned, blue could never be loaded" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"residency": {"memory_bytes": "64MiB"}}, "models.red can never be loaded: it takes"),
        ({"models": {"m": {"path": "/nowhere"}}}, "The model /nowhere does not exist"),
        ({"models": {"m": {"path": "x", "upstreams": [{"url": "http://127.0.0.1:1/v1"}]}}}, "Leave out one of the two"),
        ({"models": {"m": {"pinned": True, "upstreams": [{"url": "http://127.0.0.1:1/v1"}]}}}, "can be pinned"),
        ({"models": {"m": {"path": "x", "engine": {"max_sequences": 4096}}}}, "Raise step_tokens"),
    ],
)
def test_what_can_never_work_is_refused_at_the_start_with_a_clear_sentence(tmp_path, settings, reason):
    path = configured(tmp_path, **settings)
    done = subprocess.run(
        [sys.executable, "-m", "maitred", "serve", "--config", path, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert reason in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
