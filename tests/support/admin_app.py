"""The administration's routes behind real HTTP, on a real SQLite file, in the test's own event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from sqlalchemy import text

from maitred.admission.budgets import budget_usage
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.routes import admin_routes
from maitred.api.config import ServerConfig
from maitred.api.http.server import HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.api.openapi import describe
from maitred.api.routes import RouteTable
from maitred.app.address import bind, format_url
from maitred.app.admin.cache import CacheAdmin
from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.app.admin.pins import PinAdmin
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.admin.scaling import ScalingAdmin
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.workers.admin import WorkerAdmin
from maitred.cache.backend import MemoryBackend
from maitred.cache.config import SemanticConfig
from maitred.core.clock import SystemClock
from maitred.core.errors import Conflict, StoreUnavailable, Unauthenticated
from maitred.core.tenancy import ApiKey, KeySecret, Principal, Scope, Tenant
from maitred.core.usage import UsageEvent
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.residency.manager import ModelManager
from maitred.identity.directory import Directory
from maitred.identity.identity import DirectoryRefresher, Identity
from maitred.identity.keys import hash_secret, parse
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import PoolConfig
from maitred.routing.pools.names import NameResolver
from maitred.routing.rollout.live import LiveRollouts
from maitred.store.config import StoreConfig
from maitred.store.counters.memory import MemoryCounters
from maitred.store.database import Database, open_database
from maitred.store.directory import DirectoryStore
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.rollouts import RolloutStore
from maitred.store.semantic import SemanticStore
from maitred.store.usage import UsageQueries
from tests.support.applications import make_app
from tests.support.dispatchers import DispatchSetup
from tests.support.stores import DEADLINE_S

ADMIN_KEY = "sk-mtd-admin00000000000-" + "a" * 43
ADMIN_ID = "admin00000000000"


_descriptions: dict[frozenset[tuple[str, str]], Any] = {}


def described(routes: Sequence[Any]) -> Any:
    """The API's description of itself, which takes longer than a request; the same routes have the same."""
    key = frozenset((route.method, route.path) for route in routes)
    if key not in _descriptions:
        _descriptions[key] = json.loads(describe(routes))
    return _descriptions[key]


class NoModels:
    """A system that answers no inference; the administration needs none."""

    async def rate_limit_status(self, context: object) -> None:
        return None


@dataclass
class Administered:
    """Everything that a test may want to look at."""

    url: str
    client: httpx.AsyncClient
    store: DirectoryStore
    directory: Directory
    identity: Identity
    database: Database
    ledger: UsageLedger
    folder: Path
    routes: Sequence[Any]
    gate: InFlightLimiter
    clock: SystemClock
    refresher: DirectoryRefresher
    answers: MemoryBackend
    scopes: SemanticStore
    changed_scopes: list[str] = field(default_factory=list)
    refresh_fails: bool = False

    async def call(
        self, method: str, path: str, body: object = None, *, query: Any = None, headers: Any = None
    ) -> httpx.Response:
        """Sends a request as an administrator."""
        content = {} if body is None else {"json": body}
        return await self.client.request(method, f"/admin/v1/{path}", params=query, headers=headers, **content)

    async def done(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """What a request that must succeed is answered."""
        response = await self.call(method, path, body, **more)
        assert response.status_code == 200, response.text
        self._validate(method, path, body, response.json())
        return response.json()

    def _validate(self, method: str, path: str, body: object, answer: object) -> None:
        """Holds request and answer against the API's description of itself."""
        route, _ = RouteTable(self.routes).find(method, f"/admin/v1/{path}")
        api = described(self.routes)
        operation = api["paths"][route.path][method.lower()]
        content = operation["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator({**content, "components": api["components"]}).validate(answer)
        if body is not None:
            content = operation["requestBody"]["content"]["application/json"]["schema"]
            Draft202012Validator({**content, "components": api["components"]}).validate(body)

    async def refused(self, method: str, path: str, status: int, body: object = None, **more: Any) -> Any:
        """The error of a request that must fail."""
        response = await self.call(method, path, body, **more)
        assert response.status_code == status, response.text
        return response.json()["error"]

    async def caller(self, key: str) -> Principal | None:
        """Who comes in with a key."""
        try:
            return await self.identity.identify(lambda name: f"Bearer {key}" if name == b"authorization" else None)
        except Unauthenticated:
            return None

    async def record(self, events: Sequence[UsageEvent]) -> None:
        """Writes usage to the ledger."""
        for event in events:
            self.ledger.begin(event)
            self.ledger.record(event)
        await self.ledger.flush()

    async def contents(self) -> dict[str, list[tuple[object, ...]]]:
        """Every row of the directory and of the ledger."""
        tables = ("directory_version", "tenants", "keys", "key_secrets", "limits", "usage", "admin_replies")
        async with self.database.begin_read() as connection:
            return {
                table: sorted(map(tuple, (await connection.execute(text(f"SELECT * FROM {table}"))).all()), key=repr)
                for table in tables
            }

    def stored_text(self) -> str:
        """Every byte that lies on the disk."""
        return "".join(path.read_bytes().decode("latin-1") for path in self.folder.rglob("*") if path.is_file())

    def operations(self) -> list[tuple[str, str]]:
        """Method and path of every route."""
        return [(route.method, route.path) for route in self.routes]


@asynccontextmanager
async def administered(folder: Path, store_config: StoreConfig | None = None) -> AsyncIterator[Administered]:
    """Starts it, with one admin key; on SQLite in the folder, or on a database that other gateways share."""
    clock = SystemClock()
    config = ServerConfig(port=0)
    async with open_database(store_config or StoreConfig(folder=str(folder), deadline_s=DEADLINE_S)) as database:
        store = DirectoryStore(database, clock)
        _, secret = parse(ADMIN_KEY) or ("", "")
        key = ApiKey(id=ADMIN_ID, tenant="operators", scopes=(Scope.ADMIN,), secrets=(KeySecret(hash_secret(secret)),))
        with suppress(Conflict):  # another gateway has made them
            await store.create_tenant(Tenant(id="operators"))
            await store.create_key(key)
        directory = Directory()
        refresher = DirectoryRefresher(store, directory, clock)
        await refresher.load()
        identity = Identity(directory, clock)
        ledger = UsageLedger(database, Journal(folder / "journal"), clock)
        counters = MemoryCounters(clock, ledger.spent)

        async def refresh() -> None:
            if system.refresh_fails:
                raise StoreUnavailable
            await refresher.load()

        async def on_scope_change(scope: str) -> None:
            system.changed_scopes.append(scope)

        setup = DispatchSetup(replicas=2)
        names = NameResolver(
            RoutingConfig(aliases={"other": "m"}).make_routes_config({"m": PoolConfig(), "m2": PoolConfig()})
        )
        rollouts = RolloutAdmin(RolloutStore(database, clock), LiveRollouts(), names, clock)
        await rollouts.open({})
        loadables = OnDemandModelAdmin(ModelManager(ResidencyPolicy([], 0, 1.0), clock), clock)
        answers = MemoryBackend(1 << 20, clock)
        scopes = SemanticStore(database, clock)
        routes = admin_routes(
            DirectoryAdmin(store, refresh, clock, identity.holds),
            UsageQueries(database),
            lambda subject: budget_usage(subject, directory, counters, clock),
            ReplicaAdmin(
                {"m": setup.dispatcher, "n": DispatchSetup().dispatcher},
                {},
                clock,
                ScalingAdmin({}, clock),
            ),
            rollouts,
            SleepableModelAdmin(loadables, {}),
            PinAdmin({}, clock),
            CacheAdmin(answers, RecentTraffic(clock), scopes, SemanticConfig, on_scope_change),
            TimelineBuffer(8, clock),
            None,
            None,
            WorkerAdmin(tuple, None),
        )
        listener = bind(config)
        gate = InFlightLimiter(100)
        edge = make_app(config, NoModels(), identity, gate, clock, further=routes)
        server = HttpServer(edge)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=format_url(listener), timeout=300, headers=headers) as client:
            system = Administered(
                format_url(listener),
                client,
                store,
                directory,
                identity,
                database,
                ledger,
                folder,
                routes,
                gate,
                clock,
                refresher,
                answers,
                scopes,
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            try:
                yield system
            finally:
                server.stop(at_once=True)
                await serving
                await ledger.close()
