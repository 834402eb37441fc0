"""The whole tree of settings: one frozen struct per section, each beside the package that it configures."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from maitred.admission.config import AdmissionConfig
from maitred.admission.degradation import DegradationStep
from maitred.api.config import ServerConfig
from maitred.cache.config import IdempotencyConfig
from maitred.config.profiles import ProfileName
from maitred.dispatch.config import DispatchConfig
from maitred.engine.config import EngineConfig
from maitred.engine.encoder.config import EncoderConfig
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import OrganisationConfig
from maitred.observe.config import LogConfig
from maitred.store.config import StoreConfig
from maitred.store.counters.config import CountersConfig

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "bundled" / "maitred-tiny"
"""The small model that comes with maitred, so that it runs without a download."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model is served, and under which name."""

    path: Annotated[
        str,
        Meta(
            description="Folder with `config.json`, `tokenizer.json` and `*.safetensors` in the Hugging Face layout. "
            "Empty: the small model that comes with maitred."
        ),
    ] = ""
    served_name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="The name that clients put into `model`; null takes the name of the folder."),
    ] = None
    engine_address: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="An engine that runs already (`maitred engine --listen ADDRESS`), as `unix:/path` or "
            "`tcp:host:port`. It must run the same model. Null: start one."
        ),
    ] = None
    max_choices: Annotated[
        int,
        Meta(ge=1, le=128, description="Largest `n`, the answers to one prompt, that a request may ask for."),
    ] = 128
    degradation: Annotated[
        list[DegradationStep],
        Meta(
            description="What is tried, in this order, before a request is refused because its turn would come too "
            "late. Empty: it is refused as it is."
        ),
    ] = []

    @property
    def folder(self) -> Path:
        """Where the model lies."""
        return Path(self.path) if self.path else BUNDLED_MODEL


class Config(Struct, frozen=True, kw_only=True):
    """Everything that can be set."""

    profile: Annotated[
        ProfileName | None,
        Meta(
            description="What the installation is for: a set of defaults for one person, for 5 to 20 people, or for "
            "hundreds; see [profiles](profiles.md). Every other setting can still be set. Null: the defaults as they "
            "stand here."
        ),
    ] = None
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    encoder: EncoderConfig = EncoderConfig()
    identity: IdentityConfig = IdentityConfig()
    tenants: Annotated[
        dict[str, OrganisationConfig],
        Meta(
            description="Organisations with their teams, keys and limits, each under its id. They are put into the "
            "store at every start; what is no longer here is disabled or revoked."
        ),
    ] = {}
    admission: AdmissionConfig = AdmissionConfig()
    dispatch: DispatchConfig = DispatchConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    store: StoreConfig = StoreConfig()
    counters: CountersConfig = CountersConfig()
    log: LogConfig = LogConfig()
