"""Rules between settings. Each rule names the settings it reads, what is wrong, and why that matters."""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from maitred.admission.degradation import ladder_faults
from maitred.cache.config import cache_faults
from maitred.config.tree import Config, ServedModelConfig, TextModelConfig
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.config import dispatch_faults
from maitred.engine.config import EngineConfig, engine_faults
from maitred.identity.faults import declaration_faults
from maitred.identity.providers import provider_faults
from maitred.observe.config import slo_faults, trace_faults
from maitred.replica.upstream.config import continuation_faults, upstream_faults
from maitred.routing.pools.config import PoolConfig, RoutesConfig
from maitred.routing.pools.faults import route_faults
from maitred.scaling.config import autoscaling_faults
from maitred.wire.address import parse_tcp
from maitred.wire.link.credentials import link_faults, listener_fault
from maitred.wire.link.handshake import AGENT_LINK
from maitred.wire.loopback import is_loopback


class ConfigConflict(Struct, frozen=True):
    """Conflict of settings that are valid alone but not together; a report points at the first key."""

    keys: tuple[str, ...]
    message: str


def find_conflicts(config: Config) -> Iterator[ConfigConflict]:
    """Yields all conflicts between the settings of a configuration."""
    engine = config.engine
    if engine.step_tokens < engine.max_sequences:
        yield ConfigConflict(
            ("engine.step_tokens", "engine.max_sequences"),
            f"{engine.step_tokens} is less than engine.max_sequences, {engine.max_sequences}. Each running sequence "
            "takes one token of a step, so some would stand still. Raise step_tokens or lower max_sequences.",
        )
    yield from _engine_conflicts(config.model)
    yield from _agent_conflicts(config)
    yield from _kubernetes_conflicts(config)
    yield from _ray_conflicts(config)
    yield from (ConfigConflict((key,), message) for key, message in route_faults(_route_table(config)))
    for key, message in (
        *declaration_faults(config.tenants, config.identity),
        *provider_faults(config.identity.oidc),
        *engine_faults(engine),
        *dispatch_faults(config.dispatch),
        *link_faults(config.engine_link),
        *slo_faults(config.slos),
        *trace_faults(config.traces),
        *cache_faults(config.cache, has_encoder=bool(config.encoder.path)),
        *ladder_faults(config.model.degradation, "model.degradation"),
        *autoscaling_faults(
            config.model.autoscaling,
            config.model.replicas,
            gpus_per_replica=_gpus_per_replica(config),
            is_attached=bool(config.model.attached),
        ),
        *(
            fault
            for name, model in config.models.items()
            for fault in (
                *(upstream_faults(model.upstreams, f"models.{name}.upstreams") if model.path is None else ()),
                *(
                    continuation_faults(model.upstreams, f"models.{name}.upstreams")
                    if model.continuation == "reprompt"
                    else ()
                ),
                *_local_faults(model, f"models.{name}"),
                *_mode_faults(model, f"models.{name}"),
                *ladder_faults(model.degradation, f"models.{name}.degradation"),
            )
        ),
    ):
        yield ConfigConflict((key,), message)


def _mode_faults(model: TextModelConfig, key_prefix: str) -> Iterator[tuple[str, str]]:
    """Yields settings that do not fit a model whose requests are passed on as they are."""
    if model.mode == "chat":
        return
    if model.path is not None:
        yield (
            f"{key_prefix}.mode",
            "Only servers of others are asked for this. Leave `mode` out: an engine of ours generates text, and "
            "embeddings are those of the section `encoder`.",
        )
    for index, upstream in enumerate(model.upstreams):
        if upstream.kind == "anthropic":
            yield (
                f"{key_prefix}.upstreams[{index}].kind",
                f"Anthropic's API has no requests of the mode `{model.mode}`. Name a server with OpenAI's API.",
            )
    if model.continuation != "none":
        yield f"{key_prefix}.continuation", "Only texts are continued elsewhere. Leave it out, or the `mode`."
    if model.degradation:
        yield f"{key_prefix}.degradation", "Only requests for text are degraded. Leave it out, or the `mode`."


def _local_faults(model: TextModelConfig, key_prefix: str) -> Iterator[tuple[str, str]]:
    """Yields settings that do not fit a local model, or a model that upstream servers run."""
    if model.path is not None:
        if model.upstreams:
            yield f"{key_prefix}.upstreams", "The model has a path, so it is loaded here. Leave out one of the two."
        if model.reprompts:
            yield (
                f"{key_prefix}.continuation",
                "Only answers of servers of others are continued by their text. Leave it out.",
            )
        if model.engine.step_tokens < model.engine.max_sequences:
            yield (
                f"{key_prefix}.engine.step_tokens",
                f"{model.engine.step_tokens} is less than its max_sequences, {model.engine.max_sequences}. Each "
                "running sequence takes one token of a step. Raise step_tokens or lower max_sequences.",
            )
        yield from ((f"{key_prefix}.{key}", message) for key, message in engine_faults(model.engine))
    elif model.pinned:
        yield f"{key_prefix}.pinned", "Only a model with a path can be pinned: others run this one."
    elif model.memory_bytes is not None:
        yield f"{key_prefix}.memory_bytes", "Only a model with a path takes memory here: others run this one."
    elif model.engine != EngineConfig():
        yield (
            f"{key_prefix}.path",
            "Only a model with a path has an engine here: others run this one. Leave out `engine`.",
        )


def _route_table(config: Config) -> RoutesConfig:
    """Makes the route table of the model names, as far as they are known before a model is loaded."""
    known = [*config.models]
    if config.has_engine:
        known.append(config.model.served_name or config.model.folder.resolve().name)
    if config.encoder.path:
        known.append(config.encoder.served_name or Path(config.encoder.path).resolve().name)
    return config.routing.make_routes_config(dict.fromkeys(known, PoolConfig()))


def _engine_conflicts(model: ServedModelConfig) -> Iterator[ConfigConflict]:
    """Yields conflicts between the addresses of the engines."""
    if model.engines and model.engine_address is not None:
        yield ConfigConflict(
            ("model.engine_address", "model.engines"),
            "Engines are named in model.engines too. Move this address there.",
        )
    if model.attached and model.replicas > 1:
        yield ConfigConflict(
            ("model.replicas", "model.engines"),
            "Replicas are started here only where no engine is named that runs already. Leave out one of the two.",
        )
    if len(set(model.engines)) < len(model.engines):
        yield ConfigConflict(("model.engines",), "An engine is named twice. Name each once.")


def _agent_conflicts(config: Config) -> Iterator[ConfigConflict]:
    """Yields settings that do not fit engines of agents."""
    if config.model.backend != "agents":
        return
    if config.model.attached:
        yield ConfigConflict(
            ("model.backend", "model.engines"),
            "Agents start the engines, and tell gateways where they are. Leave out their addresses.",
        )
    if config.region and config.model.region and config.region != config.model.region:
        yield ConfigConflict(
            ("model.region", "region"),
            f"A gateway starts engines at agents of its own region, {config.region}, and each agent tells its own "
            "(maitred agent --region). Leave out model.region.",
        )
    link = config.engine_link
    try:
        address = parse_tcp(config.agents.listen)
        fault = listener_fault(address, link, AGENT_LINK)
    except ConfigInvalid as error:
        address, fault = None, error.message
    if fault:
        yield ConfigConflict(("agents.listen", "engine_link.secret"), fault)
    elif address is not None and not is_loopback(address.host) and link.ca_file is None and not link.allow_plaintext:
        yield ConfigConflict(
            ("engine_link.ca_file", "engine_link.allow_plaintext"),
            "Agents on other machines can connect, and this gateway could not connect to their engines: prompts and "
            "answers must be encrypted. Set ca_file, or allow_plaintext if something else encrypts them.",
        )


def _gpus_per_replica(config: Config) -> float:
    match config.model.backend:
        case "ray":
            return config.ray.replica.num_gpus
        case "kubernetes":
            return config.kubernetes.gpus_per_replica
    return 0.0


def _kubernetes_conflicts(config: Config) -> Iterator[ConfigConflict]:
    """Yields settings that do not fit engines in pods."""
    if config.model.backend != "kubernetes":
        return
    if config.model.attached:
        yield ConfigConflict(
            ("model.backend", "model.engines"),
            "The engines are the pods of a Deployment, and gateways find them there. Leave out their addresses.",
        )
    autoscaling, most = config.model.autoscaling, config.kubernetes.max_replicas
    for key, wanted in (
        ("model.replicas", config.model.replicas),
        ("model.autoscaling.max_replicas", autoscaling.max_replicas if autoscaling.enabled else 0),
    ):
        if wanted > most:
            yield ConfigConflict(
                (key, "kubernetes.max_replicas"),
                f"{wanted} replicas are more than the {most} that gateways may set. Lower it, or raise max_replicas.",
            )
    if autoscaling.enabled and autoscaling.sleeping_replicas:
        yield ConfigConflict(
            ("model.autoscaling.sleeping_replicas", "model.backend"),
            "Engines in pods cannot sleep, since several gateways use them. Leave it out.",
        )
    if config.engine_link.secret is None:
        yield ConfigConflict(
            ("engine_link.secret",),
            "Engines in pods listen on the addresses of their pods, where a secret keeps others out. Set it to "
            "{env: NAME} or {file: path}, in the pods of the engines too.",
        )
    elif config.engine_link.ca_file is None and not config.engine_link.allow_plaintext:
        yield ConfigConflict(
            ("engine_link.ca_file", "engine_link.allow_plaintext"),
            "Engines are in other pods, so prompts and answers must be encrypted. Set ca_file, or allow_plaintext if "
            "the network of the cluster encrypts them.",
        )


def _ray_conflicts(config: Config) -> Iterator[ConfigConflict]:
    """Yields settings that do not fit engines on Ray."""
    if config.model.backend != "ray":
        return
    if config.model.attached:
        yield ConfigConflict(
            ("model.backend", "model.engines"),
            "Ray Serve starts the engines, and gateways find them there. Leave out their addresses.",
        )
    if config.model.replicas > config.ray.replica.max_replicas:
        yield ConfigConflict(
            ("model.replicas", "ray.replica.max_replicas"),
            f"{config.model.replicas} replicas are more than the {config.ray.replica.max_replicas} that the Serve "
            "application has deployments for. Raise max_replicas.",
        )
    autoscaling = config.model.autoscaling
    if autoscaling.enabled and autoscaling.max_replicas > config.ray.replica.max_replicas:
        yield ConfigConflict(
            ("model.autoscaling.max_replicas", "ray.replica.max_replicas"),
            f"{autoscaling.max_replicas} replicas are more than the {config.ray.replica.max_replicas} that the Serve "
            "application has deployments for. Lower it, or raise ray.replica.max_replicas.",
        )
    if autoscaling.enabled and autoscaling.sleeping_replicas:
        yield ConfigConflict(
            ("model.autoscaling.sleeping_replicas", "model.backend"),
            "Engines on Ray cannot sleep. Leave it out.",
        )
    if config.engine_link.secret is None:
        yield ConfigConflict(
            ("engine_link.secret",),
            "Engines on Ray listen on the addresses of their machines, where a secret keeps others out. Set it to "
            "{env: NAME} or {file: path}, on the machines of the cluster too.",
        )
    elif config.engine_link.ca_file is None and not config.engine_link.allow_plaintext:
        yield ConfigConflict(
            ("engine_link.ca_file", "engine_link.allow_plaintext"),
            "Engines on Ray listen on the addresses of their machines, so prompts and answers must be encrypted. Set "
            "ca_file, or allow_plaintext if something else encrypts them.",
        )
