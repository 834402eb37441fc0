"""Answers that callers share, within a process and among processes: whoever leaves, fails or dies, and whenever."""

import asyncio
from collections import Counter, deque
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.app.workers.answer_peers import ControllerPeers, WorkerPeers
from maitred.app.workers.controller_client import ControllerClient
from maitred.cache.backend import MemoryBackend
from maitred.cache.config import CacheConfig
from maitred.core.clock import SystemClock
from maitred.core.context import Outcome
from maitred.core.errors import ReplicaLost
from maitred.core.inference import CacheControl
from maitred.wire.worker_protocol import ControllerSnapshot
from tests.support.admission_services import ALICE, BOB, AdmissionSetup, limit
from tests.unit.app.request.test_coalescing import GatedReplica, Gateway, greedy
from tests.unit.app.request.test_pipeline import text_of

WHOLE = "one two three"
LIMIT_S = 300.0
"""Ends a run that hangs."""


class Link:
    """One end of a connection between two processes. What is sent arrives in order, when the link is not held."""

    def __init__(self):
        self.deliver = None
        self._sent = deque()
        self.is_held = False

    def send(self, message):
        self._sent.append(message)
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self):
        while self._sent and not self.is_held and self.deliver is not None:
            self.deliver(self._sent.popleft())

    def cut(self):
        self.deliver = None
        self._sent.clear()


class Process:
    """A process of the gateway, with the callers that are connected to it."""

    def __init__(self, peers, backend, books, bill):
        config = CacheConfig(coalesced_bill=bill)
        self.gateway = Gateway(GatedReplica(WHOLE), config, backend=backend, peers=peers, books=books)
        self.readers = peers.serve(self.gateway.sharing)
        self.callers = []

    def ask(self, prompt, *, is_slow, no_store, principal):
        pace = asyncio.Semaphore(0) if is_slow else None
        request = greedy(f"Hi {prompt}", cache=CacheControl(no_store=no_store))
        self.callers.append((self.gateway.start(request, principal, pace=pace), pace))

    def kill(self):
        """Ends all that runs here, which tells nobody."""
        for task, _ in self.callers:
            task.cancel()
        self.readers.leave_all()
        self.gateway.replica.let()


class Worker(Process):
    def __init__(self, *shared):
        self.client = ControllerClient(1, 2, Path("nowhere"), lambda _: None)
        super().__init__(WorkerPeers(self.client), *shared)
        self.up = self.down = Link()

    def connect(self, controller):
        self.up, self.down = Link(), Link()
        up, down = self.up, self.down
        up.deliver = lambda message: controller.handle(down, message)
        down.deliver = self.client._on_message
        self.client._connection = up
        down.send(ControllerSnapshot(1, frozenset(), {}, {}))

    def disconnect(self):
        self.up.cut()
        self.down.cut()


class Fleet:
    """All processes of one gateway; they have one admission, which remembers all over the death of a controller."""

    def __init__(self, workers, bill):
        limits = [
            limit("key:alice", kind, 1_000_000_000)
            for kind in ("usd_total", "tokens_per_minute", "concurrent_requests")
        ]
        self.books = AdmissionSetup(*limits)
        self.shared = MemoryBackend(1 << 20, SystemClock()), self.books, bill
        self.dead = []
        self.controller = Process(ControllerPeers(), *self.shared)
        self.workers = [Worker(*self.shared) for _ in range(workers)]
        for worker in self.workers:
            worker.connect(self.peers)

    @property
    def peers(self):
        return self.controller.gateway.sharing._peers

    @property
    def processes(self):
        return [self.controller, *self.workers]

    def kill_worker(self, number):
        worker = self.workers[number]
        down = worker.down
        worker.disconnect()
        worker.kill()
        self.peers.on_disconnect(down)
        self.dead.append(worker)
        self.workers[number] = Worker(*self.shared)
        self.workers[number].connect(self.peers)

    def kill_controller(self):
        for worker in self.workers:
            worker.disconnect()
        self.controller.kill()
        self.dead.append(self.controller)
        self.controller = Process(ControllerPeers(), *self.shared)
        for worker in self.workers:
            worker.client._on_disconnect()
            worker.connect(self.peers)


WEIGHTS = {"ask": 12, "leave": 4, "let": 3, "read": 2, "hold": 2, "free": 2, "break": 0.3, "kill": 0.5, "restart": 0.3}
FATAL = {"break", "kill", "restart"}


def steps_of(random):
    """Draws what happens, and how many turns of the event loop later the next thing does."""
    allowed = {name: weight for name, weight in WEIGHTS.items() if name == "ask" or random.random() < 0.7}
    prompts = random.choice([1, 1, 2])
    keeps = random.random() < 0.5
    for name in random.choices([*allowed], [*allowed.values()], k=random.randint(5, 40)):
        facts = {
            "ask": lambda: (
                random.randrange(prompts),
                random.random() < 0.3,
                not keeps and random.random() < 0.5,
                random.choice([ALICE, BOB]),
            ),
            "hold": lambda: (random.random() < 0.5,),
            "let": lambda: (random.randint(1, 2),),
            "break": lambda: (random.randrange(4),),
        }.get(name, lambda: (random.randrange(10),))()
        yield (name, random.randrange(3), *facts), random.choice([0, 1, 2, 3, 5, 8, 20, 20])


async def play(workers, bill, steps, *, all_leave):
    fleet = Fleet(workers, bill)
    await turn(20)
    for (name, *facts), turns in steps:
        numbers = fleet.processes
        process = numbers[facts[0] % len(numbers)] if facts else None
        match name:
            case "ask":
                _, prompt, is_slow, no_store, principal = facts
                process.ask(prompt, is_slow=is_slow, no_store=no_store, principal=principal)
            case "leave" if process.callers:
                process.callers[facts[1] % len(process.callers)][0].cancel()
            case "let":
                process.gateway.replica.let(facts[1])
            case "read" if process.callers:
                pace = process.callers[facts[1] % len(process.callers)][1]
                if pace is not None:
                    pace.release()
            case "hold" if process is not fleet.controller:
                (process.up if facts[1] else process.down).is_held = True
            case "free" if process is not fleet.controller:
                free(process)
            case "break":
                process.gateway.replica.batches = GatedReplica(WHOLE).batches[: facts[1]]
            case "kill" if process is not fleet.controller:
                fleet.kill_worker(fleet.workers.index(process))
            case "restart":
                fleet.kill_controller()
        await turn(turns)
    await end(fleet, all_leave=all_leave)
    return fleet


async def turn(times):
    for _ in range(times):
        await asyncio.sleep(0)


def free(worker):
    for link in (worker.up, worker.down):
        link.is_held = False
        link.flush()


async def end(fleet, *, all_leave):
    """Lets all callers read to the end, or leave, and all that runs come to rest."""
    everyone = [*fleet.processes, *fleet.dead]
    for worker in fleet.workers:
        free(worker)
    for process in everyone:
        if not all_leave:
            process.gateway.replica.let()
        for task, pace in process.callers:
            if all_leave:
                task.cancel()
            elif pace is not None:
                for _ in range(100):
                    pace.release()
    tasks = [task for process in everyone for task, _ in process.callers]
    async with asyncio.timeout(LIMIT_S):
        if tasks:
            await asyncio.wait(tasks)
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest)
        await turn(20)


def check(fleet, steps):
    names = {name for (name, *_), _ in steps}
    alive = [task for process in fleet.processes for task, _ in process.callers if not task.cancelled()]
    for task in alive:
        failure = task.exception()
        if failure is None:
            assert text_of(task.result()[0]) == WHOLE
        else:
            assert type(failure) is ReplicaLost, failure
            assert "break" in names, "nothing has failed"
    for process in [*fleet.processes, *fleet.dead]:
        gateway = process.gateway
        assert gateway.replica.open == 0
        assert gateway.sharing.coalesced_count == 0
        assert not gateway.sharing._claims
        assert not process.readers._tasks
        assert not process.readers._by_number
    for worker in fleet.workers:
        assert not worker.client._listeners
    for held in (fleet.peers._leaders, fleet.peers._readings, fleet.peers._readers_of, fleet.peers._own):
        assert not held
    check_books(fleet)
    computed = Counter(
        tuple(request.prompt) for process in fleet.processes for request in process.gateway.replica.requests
    )
    kept = all(not step[4] for step, _ in steps if step[0] == "ask")
    if kept and not names & {*FATAL, "leave", "hold"}:
        assert set(computed.values()) <= {1}, "one computes it, for all"


def check_books(fleet):
    """Each request has one line, all lines together have what was computed, and nothing is reserved."""
    lines = fleet.books.ledger.events
    begun = Counter(line.id for line in fleet.books.ledger.begun)
    assert begun == Counter(line.id for line in lines)
    assert set(begun.values()) <= {1}
    replicas = [process.gateway.replica for process in [*fleet.processes, *fleet.dead]]
    assert sum(line.output_tokens for line in lines) == sum(replica.output_tokens for replica in replicas)
    # Who leaves behind the dispatch and before the first token pays for the prompt.
    least, most = (
        sum(replica.prompt_tokens for replica in replicas),
        sum(len(request.prompt) for replica in replicas for request in replica.requests),
    )
    assert least <= sum(line.prompt_tokens for line in lines) <= most
    admission = fleet.books.admission
    assert not admission.leases.active
    assert not admission._books.bills
    for line in lines:
        assert min(line.prompt_tokens, line.output_tokens, line.saved_tokens, line.cost_nusd) >= 0
        if line.cache and line.outcome is not Outcome.FINISHED:
            assert line.cost_nusd == 0


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 2), st.sampled_from(["first", "split"]), st.booleans())
def test_every_reader_gets_the_whole_answer_or_its_failure_and_nothing_is_left(seed, workers, bill, all_leave):
    steps = [*steps_of(Random(seed))]
    fleet = asyncio.run(play(workers, bill, steps, all_leave=all_leave))
    check(fleet, steps)
