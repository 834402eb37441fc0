"""Tree of all settings: one frozen struct per section, each beside the package that it configures."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.admission.config import AdmissionConfig
from maitred.admission.degradation import DegradationStep
from maitred.api.config import ServerConfig
from maitred.cache.config import CacheConfig, IdempotencyConfig
from maitred.config.profiles import ProfileName
from maitred.console.config import ConsoleConfig
from maitred.core.text_replica import ModelMode
from maitred.dispatch.config import DispatchConfig
from maitred.engine.config import EngineConfig
from maitred.engine.encoder.config import EncoderConfig
from maitred.fleet.agent.config import AgentConfig
from maitred.fleet.kubernetes.config import KubernetesConfig
from maitred.fleet.ray.config import RayConfig
from maitred.fleet.residency.config import ResidencyConfig
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import OrganisationConfig
from maitred.observe.config import ExplainConfig, LogConfig, MetricsConfig, SloConfig, TracesConfig
from maitred.replica.health.config import HealthConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import Capabilities, Region
from maitred.scaling.config import AutoscalingConfig
from maitred.store.config import StoreConfig
from maitred.store.counters.config import CountersConfig
from maitred.wire.link.config import LinkConfig

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "bundled" / "maitred-tiny"
"""Small model that comes with maitred, so that it runs without a download."""

_MaxChoices = Annotated[
    int, Meta(ge=1, le=128, description="Largest `n`, the answers to one prompt, that a request may ask for.")
]
_ToolParser = Annotated[
    Literal["auto", "none", "hermes", "llama3_json", "mistral"],
    Meta(
        description="How the model writes calls of tools; see [tools](tools.md). `auto`: as its chat template shows. "
        "`none`: it calls none, and requests that bring tools are refused. For models that our own engines run."
    ),
]
_ReasoningParser = Annotated[
    Literal["auto", "none", "think"],
    Meta(
        description="How the model thinks before it answers; see [tools](tools.md#what-a-model-thinks). `auto`: as its "
        "chat template shows. `think`: between `<think>` and `</think>`. `none`: it does not. For models that our own "
        "engines run."
    ),
]
_ControlTokens = Annotated[
    Literal["text", "allow"],
    Meta(
        description="What becomes of the model's control tokens, such as `<|im_end|>`, where a message spells them. "
        "`text`: they are text, so that no document can end a turn or forge one. `allow`: they are tokens. Those that "
        "the chat template writes are tokens in either case, and so are those of a prompt that is no conversation."
    ),
]
_TrustRequestTemplate = Annotated[
    bool,
    Meta(
        description="Whether a request may bring its own `chat_template`. It runs in the gateway, in the sandbox of "
        "the model's template, which does not bound its time: set it only where you trust all who may use the model. "
        "For models that our own engines run; a server of others decides for itself."
    ),
]
_TokenizerCacheBytes = Annotated[
    int,
    Meta(
        ge=0,
        description="Tokens of conversations that each gateway process keeps, so that a turn's tokens are not made "
        "again with each later turn. Only its own organisation finds them. Beside them the tokens of up to 32,768 "
        "short words are kept, for all. 0: none of either.",
        extra={"unit": "bytes"},
    ),
]
_GenerationConfig = Annotated[
    Literal["auto", "none"],
    Meta(
        description="What `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are for requests that do "
        "not name them. `auto`: as the model's `generation_config.json` says. `none`: as OpenAI's API has them. For "
        "models that our own engines run."
    ),
]
_MaxPromptLogprobs = Annotated[
    int,
    Meta(
        ge=0,
        le=1 << 26,
        description="Log-probabilities of prompt tokens in one answer: of each token its own, and those of as many "
        "others as were asked for, of all prompts and choices together. A request for more is refused with 400. Each "
        "takes up to 70 bytes of the answer, and 200 of memory until it is sent.",
        extra={"unit": "log-probabilities"},
    ),
]
_Degradation = Annotated[
    list[DegradationStep],
    Meta(
        description="What is tried, in this order, before a request is refused because its turn would come too late. "
        "Empty: it is refused as it is."
    ),
]


class ServedModelConfig(Struct, frozen=True, kw_only=True):
    """Which model is served, and under which name."""

    path: Annotated[
        str,
        Meta(
            description="Folder with `config.json`, `tokenizer.json` and `*.safetensors` in the Hugging Face layout, a "
            "`.gguf` file, or the id of a model on the hub. Empty: SmolLM2-135M-Instruct if its package is installed, "
            "else the toy that comes with maitred; see [the first run](gguf.md#the-model-of-the-first-run)."
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
            "`tcp:host:port`; see `engine_link` for engines on other machines. It must run the same model. Null: start "
            "one."
        ),
    ] = None
    engines: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(
            description="Several engines that run already, by their addresses, as in `engine_address`. All must run "
            "the same model. `routing.balance` says which of them takes a request; it goes on at another one if that "
            "is lost."
        ),
    ] = []
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Engines of the model to start, each a process of its own. On this machine each gets its part "
            "of the cores and of the memory. If one dies, the others go on with its answers while it is started again.",
            extra={"unit": "engines"},
        ),
    ] = 1
    backend: Annotated[
        Literal["local", "agents", "kubernetes", "ray"],
        Meta(
            description="What starts the engines. `local`: the gateway, on this machine. `agents`: processes on other "
            "machines (`maitred agent`), which connect to the gateway; see the section `agents` and "
            "[agents](agents.md). `kubernetes`: the pods of a Deployment; see the section `kubernetes` and "
            "[Kubernetes](kubernetes.md). `ray`: Ray Serve, on the machines of a cluster; see the section `ray` and "
            "[Ray](ray.md)."
        ),
    ] = "local"
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    region: Annotated[
        str | None,
        Meta(
            description="Where those engines are that do not tell their region. Null: where the gateway is, `region`."
        ),
    ] = None
    tool_parser: _ToolParser = "auto"
    reasoning_parser: _ReasoningParser = "auto"
    control_tokens: _ControlTokens = "text"
    trust_request_chat_template: _TrustRequestTemplate = False
    tokenizer_cache_bytes: _TokenizerCacheBytes = 32 << 20
    generation_config: _GenerationConfig = "auto"
    max_choices: _MaxChoices = 128
    max_prompt_logprobs: _MaxPromptLogprobs = 1 << 18
    degradation: _Degradation = []

    @property
    def attached(self) -> list[str]:
        """Addresses of the engines that run already; empty: engines are started."""
        return self.engines or ([] if self.engine_address is None else [self.engine_address])

    @property
    def starts_here(self) -> bool:
        """Whether the engines are processes that the gateway starts."""
        return self.backend == "local" and not self.attached

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return Path(self.path) if self.path else BUNDLED_MODEL


class TextModelConfig(Struct, frozen=True, kw_only=True):
    """A further model, under the name that clients put into `model`.

    Either servers of others run it (`upstreams`), or it is loaded here when it is needed (`path`; see
    [models](models.md)).
    """

    path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Folder, `.gguf` file or hub id of a model that an engine of our own runs. It is loaded when a "
            "request for it comes, and unloaded when others need its memory (`residency.memory_bytes`)."
        ),
    ] = None
    pinned: Annotated[
        bool, Meta(description="Load it when the server starts, and never unload it. With `path` only.")
    ] = False
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        Meta(
            description="What the model counts against `residency.memory_bytes`; null: estimated from its files and "
            "settings. What it is measured to take counts where that is more. With `path` only.",
            extra={"unit": "bytes"},
        ),
    ] = None
    engine: EngineConfig = EngineConfig()
    tool_parser: _ToolParser = "auto"
    reasoning_parser: _ReasoningParser = "auto"
    control_tokens: _ControlTokens = "text"
    trust_request_chat_template: _TrustRequestTemplate = False
    tokenizer_cache_bytes: _TokenizerCacheBytes = 32 << 20
    generation_config: _GenerationConfig = "auto"
    upstreams: Annotated[list[UpstreamConfig], Meta(description="The servers; each request goes to one of them.")] = []
    mode: Annotated[
        ModelMode,
        Meta(
            description="What its servers are asked for: `chat` (and completions, messages, responses), `embedding`, "
            "`image_generation`, `audio_speech`, `audio_transcription` or `moderation`. All but `chat` are passed on "
            "as they are; see [embeddings, images and sound](upstream-media.md). With `upstreams` only."
        ),
    ] = "chat"
    context_tokens: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(
            description="Longest prompt and answer together; null: as the servers say, if they do. Where it is not "
            "known, an answer without `max_tokens` may count as a million tokens with limits and budgets.",
            extra={"unit": "tokens"},
        ),
    ] = None
    tokenizer: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="The model's `tokenizer.json`, or the folder that has it with `tokenizer_config.json`: prompts "
            "are then counted instead of estimated."
        ),
    ] = None
    continuation: Annotated[
        Literal["none", "reprompt", "fallback"],
        Meta(
            description="What becomes of a stream whose server breaks off in its middle: `none` ends it with an error, "
            "`reprompt` sends prompt and text so far to another server, or to the same one once it is back, and marks "
            "the place; `fallback` then also sends them to the model's fallbacks, so that two models write one answer. "
            "See [upstreams](upstreams.md#in-the-middle-of-an-answer). `reprompt` needs `upstreams` of the dialects "
            "`vllm`, `sglang` and `llamacpp`, or with `continues_answers`."
        ),
    ] = "none"
    max_choices: _MaxChoices = 128
    capabilities: Capabilities = None
    local: Annotated[
        bool | None,
        Meta(
            description="Whether what is sent there stays with you: tenants with the tag `local-only`, and requests "
            "with `x-maitred-local-only: true`, go nowhere else. Null: it does if all addresses are of this machine or "
            "of a private network, which is not known of names."
        ),
    ] = None
    region: Region = None
    degradation: _Degradation = []

    @property
    def reprompts(self) -> bool:
        """Whether a stream that breaks off continues at another server, by its text."""
        return self.continuation != "none"

    @property
    def continues_at_fallback(self) -> bool:
        """Whether such a stream may also continue at a fallback model."""
        return self.continuation == "fallback"


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
    region: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Where this process is, such as `eu`. A gateway prefers engines of its own region; an engine "
            "tells gateways its region. An engine that tells none counts as in the region of `model.region`, or else "
            "as in that of its gateway. See [regions](regions.md)."
        ),
    ] = None
    server: ServerConfig = ServerConfig()
    model: ServedModelConfig = ServedModelConfig()
    models: Annotated[
        dict[str, TextModelConfig],
        Meta(
            description="Name -> a further model. If there is one, the model of the section `model` is served only "
            "where `model.path`, `model.engines` or `model.engine_address` names it."
        ),
    ] = {}
    residency: ResidencyConfig = ResidencyConfig()
    engine: EngineConfig = EngineConfig()
    engine_link: LinkConfig = LinkConfig()
    agents: AgentConfig = AgentConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    ray: RayConfig = RayConfig()
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
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    cache: CacheConfig = CacheConfig()
    store: StoreConfig = StoreConfig()
    counters: CountersConfig = CountersConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    slos: Annotated[
        dict[str, SloConfig],
        Meta(
            description="Service level objectives, each under a name of its own that metrics and alerts bear; see "
            "[observability](observability.md#service-level-objectives)."
        ),
    ] = {}
    explain: ExplainConfig = ExplainConfig()
    console: ConsoleConfig = ConsoleConfig()
    traces: TracesConfig = TracesConfig()

    @property
    def has_engine(self) -> bool:
        """Whether a model runs in an engine of our own."""
        return not self.models or bool(self.model.path or self.model.attached)
