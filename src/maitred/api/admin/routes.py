"""All routes under ``/admin/v1``, put together."""

from maitred.api.admin.budgets import BudgetRoutes, Budgets
from maitred.api.admin.cache import CacheRoutes
from maitred.api.admin.config import ConfigRoutes
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.keys import KeyRoutes
from maitred.api.admin.limits import LimitRoutes
from maitred.api.admin.live import LiveRoutes
from maitred.api.admin.models import OnDemandModelRoutes
from maitred.api.admin.pins import PinRoutes
from maitred.api.admin.replicas import ReplicaRoutes
from maitred.api.admin.requests import RequestRoutes
from maitred.api.admin.rollouts import RolloutRoutes
from maitred.api.admin.scaling import ScalingRoutes
from maitred.api.admin.service import (
    CacheService,
    ConfigService,
    LiveService,
    PinService,
    ReplicaService,
    RolloutService,
    SleepableModels,
    TimelineStore,
    WorkerService,
)
from maitred.api.admin.tenants import TenantRoutes
from maitred.api.admin.usage import UsageRoutes
from maitred.api.admin.workers import WorkerRoutes
from maitred.api.routes import Route
from maitred.store.usage import UsageQueries


def admin_routes(
    admin: DirectoryAdmin,
    usage: UsageQueries,
    budgets: Budgets,
    replicas: ReplicaService,
    rollouts: RolloutService,
    sleepables: SleepableModels,
    pins: PinService,
    cache: CacheService,
    timelines: TimelineStore,
    live: LiveService,
    configuration: ConfigService,
    workers: WorkerService,
) -> list[Route]:
    """Returns the admin routes.

    Each route needs the scope admin, except the live state, of which other callers see a part.

    Args:
        admin: Reads and changes tenants, keys and limits.
        usage: Queries of the usage ledger.
        budgets: Returns the state of the budgets of a subject.
        replicas: The replicas of this gateway.
        rollouts: The rollouts of new model versions.
        sleepables: The models that can sleep, and those of them that are loaded on demand.
        pins: The pinned prefixes.
        cache: The cache of answers.
        timelines: The timelines of the last requests.
        live: The service of the live state.
        configuration: The configuration of this gateway.
        workers: The API workers of this gateway, if there are several.
    """
    return [
        *TenantRoutes(admin).routes(),
        *KeyRoutes(admin).routes(),
        *LimitRoutes(admin).routes(),
        *BudgetRoutes(admin, budgets).routes(),
        *UsageRoutes(admin, usage).routes(),
        *ReplicaRoutes(admin, replicas).routes(),
        *ScalingRoutes(admin, replicas).routes(),
        *RolloutRoutes(admin, rollouts).routes(),
        *OnDemandModelRoutes(admin, sleepables).routes(),
        *PinRoutes(admin, pins).routes(),
        *CacheRoutes(admin, cache).routes(),
        *RequestRoutes(admin, timelines).routes(),
        *LiveRoutes(admin, live).routes(),
        *ConfigRoutes(admin, configuration).routes(),
        *WorkerRoutes(admin, workers).routes(),
    ]
