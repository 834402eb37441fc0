"""`maitred serve` with only some of what recognises, limits and bills: the baseline of `gateway_cost`.

Composed like `maitred.app.serve`, from the same parts, so that whatever is not left out costs what it costs there::

    nothing     everybody is known without a look at the headers, and waved through: no grant, no usage, no ledger
    identity    + keys are recognised, from a directory that is kept up with its store
    admission   + every request gets a grant and is settled; nothing is limited, and the ledger forgets
    limits      + counters and budgets, without headers
    headers     + every answer says where its caller stands
    journal     + usage is journaled

One step further, with the ledger's batches, is `maitred serve` itself.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import uvloop

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.limit_plans import LimitPlan, PerRequestLimits
from maitred.admission.policy.claims import make_demand
from maitred.admission.prices import FREE
from maitred.admission.request import AdmissionRequest
from maitred.api.application import api_routes, build_app
from maitred.api.health import ServiceRoutes
from maitred.api.http.server import HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.app.address import bind
from maitred.app.assembly.access import open_access
from maitred.app.assembly.stores import open_stores, running
from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.planner import RequestBounds
from maitred.app.runtime import tune_gc
from maitred.app.shutdown import Shutdown
from maitred.config.loader import load
from maitred.config.tree import Config
from maitred.core.clock import Clock, SystemClock
from maitred.core.context import Outcome
from maitred.core.counters import RequestSize
from maitred.core.ids import new_object_id
from maitred.core.limits import Limit, LimitSource
from maitred.core.request import Usage
from maitred.core.tenancy import Authenticator, Principal, Scope
from maitred.core.usage import Ledger, Settle, UsageEvent
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.engine.models.source import find_model
from maitred.fleet.remote import RemoteEngine
from maitred.observe.logs import RequestLog, configure_logging
from maitred.observe.metrics.registry import Metrics
from maitred.routing.catalog import Catalog, ServedModel
from maitred.store.counters.memory import MemoryCounters
from maitred.store.journal import Journal
from maitred.text.tokenizer import Tokenizer
from maitred.wire.address import parse_address


class Step(IntEnum):
    """How much of it there is."""

    NOTHING = 0
    IDENTITY = 1
    ADMISSION = 2
    LIMITS = 3
    HEADERS = 4
    JOURNAL = 5


@dataclass(frozen=True)
class _Parts:
    """What differs from step to step."""

    identity: Authenticator
    admission: Admission


class _KnowsEverybody:
    _ONE = Principal(key="one", tenants=("team", "organisation"), scopes=frozenset(Scope))

    async def identify(self, header: Callable[[bytes], str | None]) -> Principal:
        return self._ONE

    def is_still_valid(self, principal: Principal, header: Callable[[bytes], str | None]) -> bool:
        return True


class _LimitsNobody:
    edition = 0

    def limits_of(self, subject: str) -> Sequence[Limit]:
        return ()


class _Forgets:
    def begin(self, event: UsageEvent) -> None:
        pass

    def record(self, event: UsageEvent, response: str = "", settle: Settle | None = None) -> bool:
        return False


class _JournalAlone:
    """Takes what is journaled for written at once, so that nothing is left to read or to replay."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def begin(self, event: UsageEvent) -> None:
        self._journal.begin(event)

    def record(self, event: UsageEvent, response: str = "", settle: Settle | None = None) -> bool:
        self._journal.release(self._journal.record(event))
        return False


_FREE_PLAN = LimitPlan(0, 0, PerRequestLimits(), make_demand((), FREE.price, 0), FREE)
_NO_SIZE = RequestSize()


class _Pass(Grant):
    """Owes nothing, so that its plan and its size may be those of any other."""

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        pass

    async def end(self, error: BaseException | None) -> None:
        pass


class _OpenDoor(Admission):
    async def admit(self, admission_request: AdmissionRequest) -> Grant:
        return _Pass(
            new_object_id("use"),
            admission_request,
            _FREE_PLAN,
            _NO_SIZE,
            self._books,
            max_tokens=admission_request.max_tokens or admission_request.window_left,
            clamped=False,
            rate_limits=None,
            readings=(),
            resumed=True,  # so that nothing is written to the ledger
        )


class _SaysNothing(Admission):
    async def admit(self, admission_request: AdmissionRequest) -> Grant:
        grant = await super().admit(admission_request)
        if admission_request.context is not None:
            admission_request.context.rate_limits = None
        return grant


@asynccontextmanager
async def _parts_of(config: Config, step: Step, clock: Clock, folder: Path) -> AsyncIterator[_Parts]:
    nobody = _LimitsNobody()
    if step is Step.NOTHING:
        yield _Parts(_KnowsEverybody(), _OpenDoor(nobody, MemoryCounters(clock), _Forgets(), config.admission, clock))
        return
    async with (
        open_stores(config, clock) as stores,
        open_access(config, stores.directory, clock, lambda _: None) as access,
    ):
        ledger: Ledger = _Forgets()
        book: LimitSource = nobody
        made: type[Admission] = _OpenDoor
        if step >= Step.ADMISSION:
            made = Admission
        if step >= Step.LIMITS:
            book = access.directory
            made = _SaysNothing if step is Step.LIMITS else Admission
        if step >= Step.JOURNAL:
            ledger = _JournalAlone(Journal(folder / "alone"))
        yield _Parts(access.identity, made(book, stores.counters, ledger, config.admission, clock))


async def _serve(config: Config, step: Step, folder: Path) -> None:
    clock = SystemClock()
    model_folder = find_model(config.model.folder)
    listener = bind(config.server)
    assert config.model.engine_address is not None, "a bare gateway attaches to a replica"
    async with (
        RemoteEngine(parse_address(config.model.engine_address)) as engine,
        _parts_of(config, step, clock, folder) as parts,
    ):
        name = config.model.served_name or model_folder.name
        served = ServedModel(name, [engine.client], Tokenizer.load(model_folder))
        dispatcher = Dispatcher(served.name, [Endpoint("local", engine.client)], config.dispatch, clock)
        pipeline = Pipeline(
            Router(Catalog([served])),
            LocalFlowController({served.name: dispatcher}, parts.admission, clock),
            clock=clock,
            bounds=RequestBounds(config.model.max_choices),
        )
        gate = InFlightLimiter(config.server.max_in_flight)
        metrics = Metrics(lambda: gate.count, dict)
        edge = build_app(
            config.server,
            api_routes(config.server, pipeline, ServiceRoutes(pipeline, gate, metrics.render)),
            parts.identity,
            gate,
            [metrics.requests, RequestLog()],
            pipeline.rate_limit_status,
            clock,
        )
        server = HttpServer(edge)
        shutdown = Shutdown(gate, config.server.drain_grace_s)
        async with running(parts.admission.leases.run(), "leases"):
            with shutdown.on_signals():
                serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
                await engine.wait_started()
                tune_gc()
                await shutdown.wait_requested()
                await shutdown.drain()
                server.stop()
                await asyncio.wait([serving])


def main() -> int:
    """Serves until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=[step.name.lower() for step in Step], required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", default="0")
    arguments = parser.parse_args()
    config = load(arguments.config, os.environ, {"server.port": arguments.port}).config
    configure_logging(config.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, Step[arguments.step.upper()], Path(config.store.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
