"""What a gateway stands on: opened before it is put together, and closed after it has ended."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from maitred.admission.grammars.validator import GrammarValidator
from maitred.app.access import AccessServices, open_access
from maitred.app.encoder import EncoderModels, open_encoders
from maitred.app.local import LocalModel, local_model
from maitred.app.models.on_demand import OnDemandModelSet, open_local_models
from maitred.app.request.escalation import open_schemas
from maitred.app.stores import GatewayStores, open_stores
from maitred.app.tracing import open_traces
from maitred.app.upstreams import Upstreams, open_upstreams
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.fleet.engines import LocalEngines
from maitred.observe.traces import TraceObserver
from maitred.routing.escalation.schemas import Schemas
from maitred.store.orphan_journal import NOTHING, SurvivingWork


@dataclass(frozen=True, slots=True)
class GatewayResources:
    """Made by `open_ground`.

    Attributes:
        traces: None: nobody traces.
        stores: Tenants, usage, counters.
        access: Who may call.
        upstreams: Servers of others.
        local: The model that is always there, on engines of ours; None: there is none.
        on_demand: Models of ours that come and go.
        encoders: For embeddings.
        schemas: Judges answers by their schemas.
        grammars: Compiles what answers have to look like.
    """

    traces: TraceObserver | None
    stores: GatewayStores
    access: AccessServices
    upstreams: Upstreams
    local: LocalModel | None
    on_demand: OnDemandModelSet
    encoders: EncoderModels
    schemas: Schemas
    grammars: GrammarValidator


@asynccontextmanager
async def open_ground(
    config: Config,
    engines: LocalEngines | None,
    clock: Clock,
    show_key: Callable[[str], None],
    outlived: SurvivingWork = NOTHING,
) -> AsyncIterator[GatewayResources]:
    """Opens all of it. Engines begin to start, those of the `model` section have begun, and none is waited for.

    Args:
        config: The settings.
        engines: Of the `model` section; None where only others run any model.
        clock: The time.
        show_key: Told the first key, when one had to be made.
        outlived: See `open_stores`.

    Raises:
        ConfigInvalid: No model is where the configuration says, or a setting names what cannot be used.
    """
    on_demand = open_local_models(config, clock)
    local = None if engines is None else local_model(config, engines)
    async with (
        open_traces(config.traces, clock) as traces,
        open_stores(config, clock, outlived) as stores,
        open_access(config, stores.directory, clock, show_key) as access,
        open_upstreams(config.models, config.health) as upstreams,
        open_encoders(config, local.name if local else "", clock) as encoders,
        open_schemas(config.routing.auto) as schemas,
        GrammarValidator(config.admission.grammars) as grammars,
    ):
        yield GatewayResources(traces, stores, access, upstreams, local, on_demand, encoders, schemas, grammars)
