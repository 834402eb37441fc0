"""Suspicious settings, which are allowed but hardly ever intended.

Settings that cannot work are rejected when the configuration is read (`maitred.config.checks`). A suspicious setting
works until its case occurs: each rule reads the settings and says what will happen then, with the figures.
"""

from collections.abc import Iterator
from pathlib import Path

from maitred.config.tree import BUNDLED_MODEL, Config
from maitred.core.errors import ConfigInvalid
from maitred.core.limits import LimitKind
from maitred.engine.config import EngineConfig
from maitred.engine.models.config import ModelConfig as ShapeConfig
from maitred.fleet.ray.traps import RayTrap, config_traps
from maitred.fleet.residency.footprint import Footprint, estimate_footprint
from maitred.identity.declared_config import LimitsConfig, ModelLimitsConfig
from maitred.observe.diagnosis.diagnosis import sort_findings
from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.store.location import database_url
from maitred.wire.loopback import is_loopback

_MAX_OVERBOOKING = 16
"""Sequences for each full context in the KV cache.

Requests use a part of their context, so slots are overbooked on purpose, but hardly so many times.
"""
_MIN_PROMPT_TOKENS = 32
_PROXY_TIMEOUT_S = 30.0
_MIN_STEP_S = 0.01
_ON_DEMAND_DIALECTS = ("ollama", "llamacpp")
_UPSTREAM_LOAD_S = 60.0
"""Time to load a model of some gigabytes from a disk."""
_UNBOUNDED_BYTES = 1 << 62
_RAY_WEIGHT = 0.7


def suspicious_settings(config: Config, *, cores: int) -> list[DiagnosisFinding]:
    """Finds all suspicious settings, the worst first.

    Args:
        config: The settings.
        cores: CPU cores of this machine.
    """
    return sort_findings([finding for rule in _RULES for finding in rule(config, cores)])


def _unauthenticated_access(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    server = config.server
    if server.allow_unauthenticated and not is_loopback(server.host):
        yield _finding(
            "server.allow_unauthenticated",
            1.0,
            "Whoever reaches the port can use the models, without a key.",
            f"server.host is {server.host}, which others can connect to.",
            "Leave allow_unauthenticated out and give callers keys (`maitred keys create`), or listen on 127.0.0.1 "
            "behind a proxy that decides who may.",
        )


def _kv_cache(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    for key_prefix, footprint, model_context in _footprints(config):
        card, engine = footprint.card, footprint.engine
        context = min(engine.context_tokens or model_context, model_context)
        if card.kv_capacity_tokens < context:
            yield _finding(
                f"{key_prefix}kv_memory_bytes",
                1.0,
                "The KV cache cannot hold one request of full length, and the engine will not start.",
                f"It holds {card.kv_capacity_tokens:,} tokens, and the context is {context:,}.",
                "Raise kv_memory_bytes, or lower context_tokens to what requests need.",
            )
        elif card.kv_capacity_tokens * _MAX_OVERBOOKING < context * engine.max_sequences:
            yield _finding(
                f"{key_prefix}max_sequences",
                0.6,
                "The batch has far more places than the KV cache has room: sequences will push each other out.",
                f"{engine.max_sequences} places share {card.kv_capacity_tokens:,} tokens: "
                f"{card.kv_capacity_tokens // engine.max_sequences:,} each, of a context of {context:,}.",
                f"Raise kv_memory_bytes, or lower max_sequences to {_MAX_OVERBOOKING} times what fits at full "
                f"length: {_MAX_OVERBOOKING * card.kv_capacity_tokens // context}.",
            )


def _step_budget(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    for key_prefix, engine in _engines(config):
        prompt_tokens = engine.step_tokens - engine.max_sequences
        if prompt_tokens < _MIN_PROMPT_TOKENS:
            yield _finding(
                f"{key_prefix}step_tokens",
                0.6,
                "While the batch is full, prompts hardly get on.",
                f"Of the {engine.step_tokens} tokens of a step, {engine.max_sequences} sequences take one each: "
                f"{prompt_tokens} are left for prompts, so one of 1,000 tokens takes "
                + (f"{-(-1000 // prompt_tokens)} steps." if prompt_tokens else "for ever."),
                f"Raise step_tokens to {4 * engine.max_sequences} or more, or lower max_sequences.",
            )


def _threads(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    wanted = config.engine.threads * config.model.replicas
    if config.has_engine and config.model.starts_here and wanted > cores:
        yield _finding(
            "engine.threads",
            0.5,
            "The engines' threads wait for each other's cores, and the gateway for theirs.",
            f"{config.model.replicas} replicas of {config.engine.threads} threads on {cores} cores.",
            "Set engine.threads to 0: each replica then takes its part of the cores.",
        )


def _deadlines(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    dispatch = config.dispatch
    step_s = max(config.engine.itl_objective_s or 0.0, _MIN_STEP_S)
    for key, within_s in (
        *((f"dispatch.ttft_s.{priority}", within_s) for priority, within_s in dispatch.ttft_s.items()),
        *((f"dispatch.tenant_ttft_s.{tenant}", within_s) for tenant, within_s in dispatch.tenant_ttft_s.items()),
    ):
        if within_s < step_s:
            yield _finding(
                key,
                0.9,
                "First tokens are due before one step is over: such requests are refused whenever anything runs.",
                f"{within_s * 1000:g} ms, and a step may take {step_s * 1000:g} ms.",
                "Raise it to several steps, or lower engine.itl_objective_s.",
            )


def _queue_bounds(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    for priority, max_waiting in config.dispatch.max_waiting.items():
        if max_waiting == 0:
            yield _finding(
                f"dispatch.max_waiting.{priority}",
                0.7,
                "Nothing of this class may wait: whatever finds the batch full for a moment is refused.",
                "It is 0.",
                "Set it to some times the batch; dispatch.max_wait_s bounds how long they wait.",
            )
    slots = config.engine.max_sequences * config.model.replicas
    if config.has_engine and config.server.max_in_flight < slots:
        yield _finding(
            "server.max_in_flight",
            0.5,
            "The batch can never be full: the server refuses requests before.",
            f"{config.server.max_in_flight} requests are let in, and the engines have {slots} places.",
            f"Raise it well above {slots}: what waits needs to be let in, too.",
        )


def _model_loads(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    on_demand = {key_prefix for key_prefix, _ in _engines(config) if key_prefix.startswith("models.")}
    for key_prefix, footprint, _ in _footprints(config):
        name = key_prefix.removeprefix("models.").removesuffix(".engine.")
        if key_prefix not in on_demand or config.models[name].pinned:
            continue
        for priority, max_wait_s in config.dispatch.max_wait_s.items():
            if max_wait_s < footprint.load_s:
                yield _finding(
                    f"dispatch.max_wait_s.{priority}",
                    0.6,
                    f"Requests give up before {name} is loaded for them.",
                    f"They wait {max_wait_s:g} s; a first load is expected to take {footprint.load_s:.0f} s.",
                    f"Raise it above {footprint.load_s:.0f} s, or set models.{name}.pinned.",
                )
    for name, model in config.models.items():
        for number, upstream in enumerate(model.upstreams):
            first_part_timeout_s = upstream.first_part_timeout_s
            if first_part_timeout_s is None:
                continue
            if upstream.dialect in _ON_DEMAND_DIALECTS and first_part_timeout_s < _UPSTREAM_LOAD_S:
                yield _finding(
                    f"models.{name}.upstreams.{number}.first_part_timeout_s",
                    0.6,
                    "The first request after a pause fails: the server loads its model while we give up.",
                    f"{first_part_timeout_s:g} s, and {upstream.dialect} loads models when they are asked "
                    "for, which may take a minute.",
                    f"Raise it above {_UPSTREAM_LOAD_S:g} s.",
                )


def _shared_counters(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    if config.counters.url is None and database_url(config.store).get_backend_name() != "sqlite":
        yield _finding(
            "counters.url",
            0.7,
            "Each gateway on this database counts limits for itself: two let through twice as much.",
            "store.url is shared, and counters.url is empty.",
            "Set counters.url to a Redis that the gateways share.",
        )
    if config.counters.url is not None and config.counters.slice_share:
        min_limit = 1 / config.counters.slice_share
        for key, limits in _all_limits(config):
            for kind, value in _configured_limits(limits):
                if kind in ("requests_per_minute", "concurrent_requests") and value < min_limit:
                    yield _finding(
                        f"{key}.{kind}",
                        0.3,
                        "While Redis is away, this limit refuses everything.",
                        f"{value:g} is less than {min_limit:g}, the inverse of counters.slice_share: "
                        "no gateway holds one.",
                        f"Raise the limit to {min_limit:g}, or counters.slice_share to {min(0.5, 1 / value):g}.",
                    )


def _unmeasured_limits(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    priced = any((price.prompt or price.output) for price in config.admission.prices.values())
    for key, limits in _all_limits(config):
        for kind, value in _configured_limits(limits):
            if kind in ("tokens_per_minute", "output_tokens_per_minute", "concurrent_tokens") and (
                config.admission.default_output_tokens is None and limits.output_tokens is None
            ):
                yield _finding(
                    f"{key}.{kind}",
                    0.6,
                    "A request that names no max_tokens counts as a whole window, and few of them fill the limit.",
                    f"{value:,g} tokens, and admission.default_output_tokens is not set.",
                    "Set admission.default_output_tokens to what answers usually need.",
                )
            if kind.startswith("usd_") and not priced:
                yield _finding(
                    f"{key}.{kind}",
                    0.7,
                    "This budget is never used up.",
                    "No model has a price in admission.prices, so tokens cost nothing.",
                    "Give each model a price, or `*` one for all.",
                )


def _heartbeat(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    if config.server.heartbeat_s > _PROXY_TIMEOUT_S:
        yield _finding(
            "server.heartbeat_s",
            0.3,
            "Proxies will cut streams that wait.",
            f"A stream may be silent for {config.server.heartbeat_s:g} s; common proxies give up after 30 to 60 s.",
            "Lower it to 15 s.",
        )


def _engines_of_agents(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    if config.model.backend == "agents" and config.store.url is None:
        yield _finding(
            "model.backend",
            0.3,
            "A second gateway with these settings would give the agents other orders.",
            "Gateways agree by a common database on who gives orders, and this one is SQLite.",
            "With one gateway, leave it. With several, set store.url to a PostgreSQL.",
        )


def _engines_in_pods(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    if config.model.backend == "kubernetes" and config.model.autoscaling.enabled and config.store.url is None:
        yield _finding(
            "model.autoscaling.enabled",
            0.3,
            "With several gateways, the one that scales the Deployment sees its own demand alone.",
            "Gateways add up their demand in a common database, and this one is SQLite.",
            "With one gateway, leave it. With several, set store.url to a PostgreSQL.",
        )


def _engines_on_ray(config: Config, cores: int) -> Iterator[DiagnosisFinding]:
    if config.model.backend == "ray":
        yield from map(ray_finding, config_traps(config.ray))
        if config.model.autoscaling.enabled and config.store.url is None:
            yield _finding(
                "model.autoscaling.enabled",
                0.3,
                "A second gateway with these settings would also decide on the replicas, by another demand.",
                "Gateways of one Ray application agree on who decides by a common database, and this one is SQLite.",
                "With one gateway, leave it. With several, set store.url to a PostgreSQL, or autoscaling for one only.",
            )


_RULES = (
    _unauthenticated_access,
    _engines_of_agents,
    _kv_cache,
    _step_budget,
    _threads,
    _deadlines,
    _queue_bounds,
    _model_loads,
    _shared_counters,
    _unmeasured_limits,
    _heartbeat,
    _engines_in_pods,
    _engines_on_ray,
)


def ray_finding(trap: RayTrap) -> DiagnosisFinding:
    """Makes the finding of a trap of engines on Ray."""
    return _finding(trap.setting, _RAY_WEIGHT, trap.summary, trap.evidence, trap.remedy)


def _finding(where: str, weight: float, summary: str, evidence: str, remedy: str) -> DiagnosisFinding:
    return DiagnosisFinding(
        kind=FindingKind.CONFIG, where=where, weight=weight, summary=summary, evidence=(evidence,), remedy=remedy
    )


def _engines(config: Config) -> Iterator[tuple[str, EngineConfig]]:
    """Yields the settings of local engines, each with the prefix of its keys."""
    if config.has_engine:
        yield "engine.", config.engine
    yield from ((f"models.{name}.engine.", model.engine) for name, model in config.models.items() if model.path)


def _footprints(config: Config) -> Iterator[tuple[str, Footprint, int]]:
    """Yields the memory footprints and contexts of local engines; only for models whose files are on this machine."""
    folders = {"engine.": config.model.path or str(BUNDLED_MODEL)}
    folders |= {f"models.{name}.engine.": model.path for name, model in config.models.items() if model.path}
    for key_prefix, engine in _engines(config):
        try:
            folder = Path(folders[key_prefix])
            yield (
                key_prefix,
                estimate_footprint(folder, engine, _UNBOUNDED_BYTES),
                ShapeConfig.load(folder).context_tokens,
            )
        except (ConfigInvalid, OSError):
            continue  # a model of the hub, or of another machine


def _all_limits(config: Config) -> Iterator[tuple[str, ModelLimitsConfig]]:
    identity = config.identity
    sections: list[tuple[str, LimitsConfig]] = [
        ("identity.limits", identity.limits),
        ("identity.limits_per_tenant", identity.limits_per_tenant),
        ("identity.limits_per_key", identity.limits_per_key),
    ]
    for name, organisation in config.tenants.items():
        for key_prefix, team in (
            (f"tenants.{name}", organisation),
            *((f"tenants.{name}.teams.{entry}", team) for entry, team in organisation.teams.items()),
        ):
            sections.append((f"{key_prefix}.limits", team.limits))
            sections.extend((f"{key_prefix}.keys.{entry}.limits", key.limits) for entry, key in team.keys.items())
    for key_prefix, limits in sections:
        yield key_prefix, limits
        yield from ((f"{key_prefix}.models.{model}", entry) for model, entry in limits.models.items())


def _configured_limits(limits: ModelLimitsConfig) -> Iterator[tuple[str, float]]:
    """Yields the limits that are set."""
    for kind in LimitKind:
        if (value := getattr(limits, kind.value)) is not None:
            yield kind.value, float(value)
