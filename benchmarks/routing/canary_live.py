"""Canaries with planted faults in a real gateway, which aborts them by itself while it serves.

    callers -> maitred serve -> scripted servers, two for each of four rollouts: a stable and a new version
                 the new ones are slow, failing, wrong, and sound

Each server is a process of its own whose times are drawn from the same distribution; only what is planted differs. The
slow canary is 30 % slower, the failing one answers one request in twenty with an error, and of the wrong one, which
gets copies only, every fifth answer has another word in it; the sound one gets some copies, too. Callers ask greedily,
each time for one of the names whose rollouts are not over, until all are or the time is: so the load of those that are
left grows, which is no fault of theirs. Then the gateway is started again, and must know what it has decided.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop

from benchmarks.support.installation import Key, Organisation, declared
from benchmarks.support.report import Report
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261122
SESSIONS = 2_000
CALLERS = 16
LONGEST_S, QUICK_S = 110.0, 40.0
TTFT = DelayDistribution(mean_s=0.05, cv=0.4)
ITL = DelayDistribution(mean_s=0.006, cv=0.3)


def script(seed: int, *, slower: float = 1.0, failing: float = 0.0, wrong: float = 0.0) -> ServerScript:
    """How a version behaves."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": {"content": " but"}, "finish_reason": None}
    return ServerScript(
        ttft=DelayDistribution(mean_s=TTFT.mean_s, cv=TTFT.cv, factor=slower),
        itl=DelayDistribution(mean_s=ITL.mean_s, cv=ITL.cv, factor=slower),
        faults=[
            ScriptedFault(kind=FaultKind.STATUS, status=500, share=failing),
            ScriptedFault(kind=FaultKind.EVENT, share=wrong, text=json.dumps({**chunk, "choices": [choice]})),
        ],
        seed=seed,
    )


CANARIES = {
    "slow": script(1, slower=1.3),
    "failing": script(2, failing=0.05),
    "wrong": script(3, wrong=0.2),
    "sound": script(4),
}
SHARES = {
    "slow": {"weight": 0.5},
    "failing": {"weight": 0.5},
    "wrong": {"shadow": 1.0},
    "sound": {"weight": 0.5, "shadow": 0.1},
}
RIGHT = {
    "slow": ("aborted", {"ttft", "itl"}),
    "failing": ("aborted", {"errors"}),
    "wrong": ("aborted", {"disagreement"}),
}


@contextmanager
def gateway(folder: Path, urls: dict[str, str], key: Key) -> Iterator[ServerProcess]:
    """Starts it with its rollouts; its store stays in the folder."""
    environment: dict[str, str] = {}
    rollouts: dict[str, Any] = {
        name: {
            **{"stable": f"{name}-v1", "canary": f"{name}-v2", "sticky": "session", "automatic": "promote"},
            **SHARES[name],
        }
        for name in CANARIES
    }
    config = {
        "log": {"level": "warning"},
        "models": {name: {"upstreams": [{"url": f"{url}/v1"}]} for name, url in urls.items()},
        "routing": {"rollouts": rollouts},
        "tenants": declared({"bench": Organisation({"bench": key})}, environment),
    }
    file = folder / "maitred.yaml"
    file.write_text(json.dumps(config))
    environment["MAITRED__STORE__FOLDER"] = str(folder / "data")
    with serving("--config", str(file), environment=environment) as server:
        yield server


class Callers:
    """Callers of all names, each request of another session.

    Args:
        client: With a key for inference and administration.
        url: Of the gateway.
        seconds: At most.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, seconds: float) -> None:
        self._client = client
        self._url = url
        self._end_s = time.monotonic() + seconds
        self._chance = random.Random(SEED)
        self.open = set(CANARIES)
        self.sent: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.over: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        """Until each rollout is over, or the time is."""

        async def one() -> None:
            while self.open and time.monotonic() < self._end_s:
                await self.ask(self._chance.choice(sorted(self.open)))

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            await asyncio.gather(*(one() for _ in range(CALLERS)))
            watching.cancel()

    async def ask(self, name: str) -> str:
        """One request, read to its end; the side that it was on."""
        self.sent[name] += 1
        body = {
            **{"model": name, "temperature": 0, "max_tokens": self._chance.randrange(8, 33)},
            "messages": [{"role": "user", "content": "one two three"}],
        }
        headers = {"x-session-id": f"session-{self._chance.randrange(SESSIONS)}"}
        async with self._client.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            self.statuses[response.status] += 1
            return response.headers.get("x-maitred-rollout", "")

    async def rollouts(self) -> dict[str, dict[str, Any]]:
        """How each stands."""
        async with self._client.get(f"{self._url}/admin/v1/rollouts") as response:
            return {item["name"]: item for item in (await response.json())["data"]}

    async def _watch(self) -> None:
        while True:
            for name, stands in (await self.rollouts()).items():
                if stands["phase"] != "running" and name in self.open:
                    self.open.discard(name)
                    self.over[name] = {**stands, "requests": self.sent[name]}
                    print(f"{name}: {stands['phase']} ({stands['why']})", flush=True)
            await asyncio.sleep(0.2)


async def measure(seconds: float, report: Report) -> None:
    """One run, and what is known of it after a restart."""
    key = Key(scopes=("inference", "admin"))
    headers = {"Authorization": f"Bearer {key.secret}"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="maitred-canary-")))
        urls = {}
        for number, (name, behaviour) in enumerate(CANARIES.items()):
            urls[f"{name}-v1"] = stack.enter_context(scripted_openai(script(10 + number))).url
            urls[f"{name}-v2"] = stack.enter_context(scripted_openai(behaviour)).url
        async with aiohttp.ClientSession(headers=headers) as client:
            with gateway(folder, urls, key) as server:
                callers = Callers(client, server.url, seconds)
                await callers.run()
                after = {name: {await callers.ask(name) for _ in range(10)} for name in CANARIES}
                copies = server.metrics().get("maitred_rollout_copies_total", 0.0)
            with gateway(folder, urls, key) as server:
                again = await Callers(client, server.url, 0.0).rollouts()
    right, restarts = 0, 0
    for name in CANARIES:
        stands = callers.over.get(name, {"phase": "running", "faults": [], "requests": callers.sent[name]})
        phase, faults = RIGHT.get(name, ("promoted", set()))
        side = "stable" if phase == "aborted" else "canary"
        as_it_should = (
            stands["phase"] == phase and set(stands["faults"]) <= faults and after[name] == {f"{name}={side}"}
        )
        right += as_it_should
        restarts += (again[name]["phase"], again[name]["weight"]) == (phase, float(phase == "promoted"))
        kept = ("phase", "why", "faults", "stable_requests", "canary_requests", "requests")
        report.figures[name] = {field: stands.get(field) for field in kept}
    report.figures |= {"copies": copies, "statuses": {str(status): n for status, n in callers.statuses.items()}}
    served = callers.statuses[200] / callers.statuses.total()
    report.require("verdicts as planted, of 4", right, at_least=4)
    report.require("known after a restart, of 4", restarts, at_least=4)
    # The stable version follows a canary that fails.
    report.require("requests answered", round(served, 4), at_least=1.0)


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="in under 45 s; the sound one may not be promoted by then")
    options = parser.parse_args()
    report = Report("canary_live", seed=SEED, quick=options.quick)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(QUICK_S if options.quick else LONGEST_S, report))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
