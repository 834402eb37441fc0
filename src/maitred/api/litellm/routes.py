"""All routes of LiteLLM's administration, put together."""

from maitred.admission.prices import PriceList
from maitred.api.admin.budgets import Budgets
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import CacheService, ReplicaService
from maitred.api.litellm.accounts import LitellmAccounts
from maitred.api.litellm.keys import LitellmKeyRoutes
from maitred.api.litellm.owners import LitellmOwnerRoutes
from maitred.api.litellm.service import LitellmServiceRoutes, Readiness
from maitred.api.litellm.spend import LitellmSpendRoutes
from maitred.api.routes import Route
from maitred.core.service import InferenceService
from maitred.core.tenancy import Authenticator
from maitred.store.usage import UsageQueries


def litellm_routes(
    admin: DirectoryAdmin,
    usage: UsageQueries,
    budgets: Budgets,
    replicas: ReplicaService,
    *,
    answering: InferenceService,
    prices: PriceList,
    cache: CacheService,
    identity: Authenticator,
    readiness: Readiness,
) -> list[Route]:
    """Returns the routes of LiteLLM's administration, for `server.litellm_compatibility`.

    Args:
        admin: Reads and changes tenants, keys and limits.
        usage: Queries of the usage ledger.
        budgets: Returns the state of the budgets of a subject.
        replicas: The replicas of this gateway.
        answering: The inference service behind the API.
        prices: The prices of all models.
        cache: The cache of answers.
        identity: Identifies callers of `/health`, which needs no key.
        readiness: Tells whether requests can run.
    """
    accounts = LitellmAccounts(admin, usage, budgets)
    return [
        *LitellmKeyRoutes(accounts).routes(),
        *LitellmOwnerRoutes(accounts).routes(),
        *LitellmSpendRoutes(accounts, admin, usage).routes(),
        *LitellmServiceRoutes(
            answering, prices, replicas, cache=cache, identity=identity, readiness=readiness
        ).routes(),
    ]
