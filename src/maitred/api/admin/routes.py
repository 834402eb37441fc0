"""All routes under ``/admin/v1``, put together."""

from collections.abc import Callable

from maitred.api.admin.budgets import BudgetRoutes, Budgets
from maitred.api.admin.config import ConfigRoutes, ConfigService
from maitred.api.admin.directory_admin import DirectoryAdmin, Refresh
from maitred.api.admin.keys import KeyRoutes
from maitred.api.admin.limits import LimitRoutes
from maitred.api.admin.live import LiveRoutes, LiveService
from maitred.api.admin.models import LoadableRoutes, OnDemandModels, SleepableModels
from maitred.api.admin.pins import PinRoutes, PinService
from maitred.api.admin.replicas import ReplicaRoutes, ReplicaService
from maitred.api.admin.requests import RequestRoutes, TimelineStore
from maitred.api.admin.rollouts import RolloutRoutes, RolloutService
from maitred.api.admin.tenants import TenantRoutes
from maitred.api.admin.usage import UsageRoutes
from maitred.api.admin.workers import WorkerRoutes, WorkerService
from maitred.api.routes import Route
from maitred.core.clock import Clock
from maitred.core.tenancy import Principal
from maitred.store.directory import DirectoryStore
from maitred.store.usage import UsageQueries


def administration(
    book: DirectoryStore,
    usage: UsageQueries,
    budgets: Budgets,
    refresh: Refresh,
    replicas: ReplicaService,
    rollouts: RolloutService,
    loadables: OnDemandModels,
    sleepers: SleepableModels,
    pins: PinService,
    stories: TimelineStore,
    live: LiveService,
    configuration: ConfigService,
    workers: WorkerService,
    holds: Callable[[Principal], bool],
    clock: Clock,
) -> list[Route]:
    """The routes. Each needs the scope admin, but for the live state, of which others see a part.

    Args:
        book: Where tenants, keys and limits are kept.
        usage: What was used.
        budgets: How the budgets of a subject stand.
        refresh: Makes this gateway apply what has changed in the store, now; called after every change.
        replicas: Where models run.
        rollouts: New versions of models on trial.
        loadables: The models that are loaded on demand.
        sleepers: The models that can sleep.
        pins: The prefixes that stay.
        stories: What happened to the last requests.
        live: What goes on.
        configuration: The settings of this gateway.
        workers: Its processes that speak HTTP, if there are several.
        holds: Whether who was let in still would be.
        clock: For expiry, and for times such as ``-7d``.
    """
    office = DirectoryAdmin(book, refresh, clock)
    return [
        *TenantRoutes(office).routes(),
        *KeyRoutes(office).routes(),
        *LimitRoutes(office).routes(),
        *BudgetRoutes(office, budgets).routes(),
        *UsageRoutes(office, usage).routes(),
        *ReplicaRoutes(office, replicas).routes(),
        *RolloutRoutes(office, rollouts).routes(),
        *LoadableRoutes(office, loadables, sleepers).routes(),
        *PinRoutes(office, pins).routes(),
        *RequestRoutes(office, stories).routes(),
        *LiveRoutes(office, live, holds).routes(),
        *ConfigRoutes(office, configuration).routes(),
        *WorkerRoutes(office, workers).routes(),
    ]
