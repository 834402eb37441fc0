"""Tokens beside Ray Serve and tokens through Ray Serve, of the same engine on the same cluster, in one run.

A Ray cluster of two nodes runs on this machine. Two ways lead to an engine of ours that a replica of Serve owns: a
gateway with the backend `ray`, to which the engine sends its tokens itself, and an application of the form of Ray
Serve's own for language models, whose deployments hand the tokens on through a handle and Serve's HTTP proxy
(`benchmarks.support.ray.stream_app`). Callers ask one way and then the other, in turns, with the same prompts; each
asks again as soon as it has its answer. Beside time, the processor time of all processes on the way is counted, without
that of the engines.

Then one gateway's backend watches: how long after the SIGKILL of an engine, or of its actor, it knows; how long until
it serves again; what it takes from an order to a ready engine, and from an order to none.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.support.ray.cluster import RayCluster, ray_cluster
from benchmarks.support.report import Report
from benchmarks.support.requirements import require_packages
from maitred.core.clock import SystemClock
from maitred.core.secret import Secret
from maitred.fleet.backend import BackendFacts
from maitred.fleet.ray.backend import RayBackend
from maitred.fleet.ray.config import RayConfig, RayReplicaConfig
from maitred.scaling.replica_status import ReplicaPhase
from maitred.testing.server_process import free_port, serving
from maitred.wire.link.config import LinkConfig

SEED = 0
CALLERS = (1, 8)
ROUNDS, QUICK_ROUNDS = 7, 2
ANSWERS, QUICK_ANSWERS = 4, 2
"""Answers that each caller asks for in a round."""
TOKENS = 64
KILLS, QUICK_KILLS = 5, 1
LIMIT_S = 300.0
_ENGINE = {"kv_memory_bytes": 32 << 20, "max_sequences": 16}
_LINK = {"secret": {"env": "MAITRED_LINK_SECRET"}, "allow_plaintext": True}


class Route:
    """One route to an engine, with what was measured on it.

    Args:
        url: Where completions are asked for.
        processes: Returns the processes on it, without the engine.

    Attributes:
        handle_requests: Requests that have gone through handles of Serve.
    """

    def __init__(self, url: str, processes: Callable[[], list[psutil.Process]]) -> None:
        self.url = url
        self.handle_requests = 0
        self._processes = processes
        self.ttft_ms: dict[int, list[float]] = {callers: [] for callers in CALLERS}
        self.tokens_per_s: dict[int, list[float]] = {callers: [] for callers in CALLERS}
        self.cpu_ms_per_token: dict[int, list[float]] = {callers: [] for callers in CALLERS}

    async def round(self, client: aiohttp.ClientSession, callers: int, answers: int) -> None:
        """Lets some callers ask, each for some answers."""
        before_s, began_s = self._cpu_s(), time.perf_counter()
        ttfts_s = await asyncio.gather(*(self._ask(client, number, answers) for number in range(callers)))
        seconds = time.perf_counter() - began_s
        tokens = callers * answers * TOKENS
        self.ttft_ms[callers] += [ttft_s * 1e3 for some in ttfts_s for ttft_s in some]
        self.tokens_per_s[callers].append(tokens / seconds)
        self.cpu_ms_per_token[callers].append((self._cpu_s() - before_s) / tokens * 1e3)

    async def _ask(self, client: aiohttp.ClientSession, number: int, answers: int) -> list[float]:
        ttfts_s = []
        for turn in range(answers):
            body = {
                **{"model": "maitred-tiny", "prompt": f"{number} animals met {turn} times in the wood. The fox said:"},
                **{"max_tokens": TOKENS, "stream": True, "temperature": 0.0, "ignore_eos": True},
                "cache": {"no-cache": True},
            }
            began_s, first_s, text = time.perf_counter(), None, ""
            async with client.post(self.url, json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        first_s = first_s or time.perf_counter()
                        choices = json.loads(line[6:])["choices"]
                        text += choices[0]["text"] if choices else ""
            assert first_s is not None
            assert text, "an answer without text"
            ttfts_s.append(first_s - began_s)
        return ttfts_s

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)

    def figures(self) -> dict[str, Any]:
        """Medians by the number of callers."""
        return {
            f"{callers} callers": {
                "ttft_ms": round(statistics.median(self.ttft_ms[callers]), 2),
                "ttft_p95_ms": round(statistics.quantiles(self.ttft_ms[callers], n=20)[-1], 2),
                "tokens_per_s": round(statistics.median(self.tokens_per_s[callers]), 1),
                "cpu_ms_per_token": round(statistics.median(self.cpu_ms_per_token[callers]), 3),
            }
            for callers in CALLERS
        }


async def compare(cluster: RayCluster, rounds: int, answers: int) -> dict[str, Route]:
    """Measures both routes in turns."""
    port, http_port = free_port(), free_port()
    arguments = {
        **{"first_port": free_port(), "num_cpus": 1, "settings": {"engine": _ENGINE, "engine_link": _LINK}},
    }
    application = {
        **{"name": "streamed", "route_prefix": "/", "import_path": "benchmarks.support.ray.stream_app:app"},
        "args": arguments,
    }
    headers = {"Authorization": f"Bearer {cluster.token}"}
    body = {
        **{"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": http_port}},
        "applications": [application],
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as client:
        url = f"{cluster.dashboard}/api/serve/applications/"
        async with client.put(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        while (state := await _status(client, url, headers, "streamed"))["status"] != "RUNNING":
            assert state["status"] != "DEPLOY_FAILED", state["message"]
            await asyncio.sleep(0.2)
        settings = {
            **{"model.backend": "ray", "ray.address": cluster.dashboard, "ray.token.env": "RAY_TOKEN"},
            **{"ray.replica.max_replicas": 1, "ray.replica.first_port": port, "engine_link.allow_plaintext": "true"},
            **{"engine_link.secret.env": "MAITRED_LINK_SECRET"},
            **{f"engine.{name}": value for name, value in _ENGINE.items()},
        }
        environment = {"RAY_TOKEN": cluster.token, "MAITRED_LINK_SECRET": cluster.secret}
        with serving(settings=settings, environment=environment) as gateway:
            ours = psutil.Process(gateway.process.pid)
            routes = {
                "beside": Route(f"{gateway.url}/v1/completions", lambda: [ours]),
                "through": Route(f"http://127.0.0.1:{http_port}/", lambda: serve_processes(cluster)),
            }
            for route in routes.values():  # both are warm before either is measured
                await Route(route.url, list).round(client, CALLERS[-1], 1)
            for number in range(rounds):
                for callers in CALLERS:
                    for route in list(routes.values())[:: 1 if number % 2 else -1]:
                        await route.round(client, callers, answers)
        asked = CALLERS[-1] + rounds * answers * sum(CALLERS)
        while (requests := await asyncio.to_thread(cluster.handle_requests))["streamed"] < asked:  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.5)  # the cluster counts some seconds late
        for route, name in zip(routes.values(), ("maitred", "streamed"), strict=True):
            route.handle_requests = requests[name]
    return routes


async def _status(client: aiohttp.ClientSession, url: str, headers: dict[str, str], name: str) -> dict[str, Any]:
    async with client.get(url, headers=headers) as response:
        found: dict[str, Any] = (await response.json())["applications"].get(name, {"status": "", "message": ""})
        return found


def serve_processes(cluster: RayCluster) -> list[psutil.Process]:
    """Returns the processes of Serve that tokens of the rival pass: its proxy and the replicas of its deployments."""
    children = psutil.Process(cluster.pid).children(recursive=True)
    return [child for child in children if child.name().startswith(("ray::ProxyActor", "ray::ServeReplica:str"))]


@asynccontextmanager
async def watched_backend(cluster: RayCluster) -> AsyncIterator[RayBackend]:
    """Opens a backend over an application of its own, and stops what it has started."""
    config = RayConfig(
        address=cluster.dashboard,
        token=Secret(cluster.token, "{env: RAY_TOKEN}"),
        application="watched",
        replica=RayReplicaConfig(max_replicas=3, first_port=free_port(), num_cpus=0.5),
    )
    link = LinkConfig(secret=Secret(cluster.secret, "{env: MAITRED_LINK_SECRET}"), allow_plaintext=True)
    settings = {"engine": _ENGINE, "engine_link": _LINK}
    backend = RayBackend(config, link, lambda card: None, settings, BackendFacts(max_replicas=3), SystemClock())
    async with backend:
        yield backend
        for name in list(backend.replicas()):
            backend.stop(name)
        while backend.replicas():  # noqa: ASYNC110 - the end of the measurement
            await asyncio.sleep(0.01)


async def watch(cluster: RayCluster, kills: int) -> dict[str, Any]:
    """Measures starts, stops and deaths as a backend sees them, in seconds and milliseconds."""
    figures: dict[str, Any] = {}
    async with watched_backend(cluster) as backend:
        changed = asyncio.Event()
        backend.on_change(changed.set)

        async def until(condition: Callable[[], bool]) -> float:
            began_s = time.perf_counter()
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    changed.clear()
                    await changed.wait()
            return time.perf_counter() - began_s

        def serving_() -> int:
            return sum(replica.phase is ReplicaPhase.SERVING for replica in backend.replicas().values())

        backend.start("engine-0")
        figures["zero_to_one_s"] = round(await until(lambda: serving_() == 1), 2)
        phases = backend.replicas()["engine-0"].start_phases
        figures["zero_to_one_phases_s"] = {phase.name: round(phase.seconds, 2) for phase in phases}
        backend.start("engine-1")
        backend.start("engine-2")
        figures["one_to_three_s"] = round(await until(lambda: serving_() == 3), 2)
        backend.stop("engine-1")
        backend.stop("engine-2")
        figures["three_to_one_s"] = round(await until(lambda: len(backend.replicas()) == 1), 2)
        for victim in ("engine", "actor"):
            deaths = []
            for _ in range(kills):
                engine = engine_of(cluster, backend)
                process = engine if victim == "engine" else engine.parent()
                assert process is not None
                killed_s = time.perf_counter()
                process.kill()
                await until(lambda: not serving_())
                seen_ms = (time.perf_counter() - killed_s) * 1e3
                deaths.append({"seen_ms": seen_ms, "back_s": await until(lambda: serving_() == 1)})
            figures[f"{victim}_deaths"] = {
                name: [round(death[name], 1) for death in deaths] for name in ("seen_ms", "back_s")
            }
    return figures


def engine_of(cluster: RayCluster, backend: RayBackend) -> psutil.Process:
    """Returns the process of the one engine of a backend."""
    engine = backend.replicas()["engine-0"].engine
    assert engine is not None
    address = str(engine.client.address)
    children = psutil.Process(cluster.pid).children(recursive=True)
    return next(child for child in children if child.is_running() and address in child.cmdline())


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and one death of each kind")
    quick = parser.parse_args().quick
    require_packages("ray")
    report = Report("ray_serve", seed=SEED, quick=quick)
    with ray_cluster() as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds, answers = (QUICK_ROUNDS, QUICK_ANSWERS) if quick else (ROUNDS, ANSWERS)
        routes = runner.run(compare(cluster, rounds, answers))
        watched = runner.run(watch(cluster, QUICK_KILLS if quick else KILLS))
    report.figures = {
        **{name: route.figures() for name, route in routes.items()},
        "handle_requests": {name: route.handle_requests for name, route in routes.items()},
        "watched": watched,
    }
    for name, route in routes.items():
        print(f"{name:8} {json.dumps(route.figures())}")
    print(json.dumps(watched))
    beside, through = (route.figures() for route in routes.values())
    for callers in map("{} callers".format, CALLERS):
        for name, better in (("ttft_ms", "at_most"), ("tokens_per_s", "at_least"), ("cpu_ms_per_token", "at_most")):
            ratio = beside[callers][name] / through[callers][name]
            report.require(f"{name} with {callers}, times that through Ray", ratio, **{better: 1.0})
    report.require("requests through handles of Serve", routes["beside"].handle_requests, at_most=0)
    for victim in ("engine", "actor"):
        seen_ms = statistics.median(watched[f"{victim}_deaths"]["seen_ms"])
        report.require(f"death of the {victim} seen, ms after SIGKILL", seen_ms, at_most=100.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
