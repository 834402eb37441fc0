"""Starts an engine: reads the model, sizes the KV cache, warms the kernels up, and serves until told to stop."""

import gc
import logging
import math
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from maitred.core.clock import SystemClock
from maitred.core.errors import ConfigInvalid
from maitred.core.ports import ModelCard
from maitred.core.service import ServiceWeights
from maitred.engine.accelerator import free_bytes_beside, graphed
from maitred.engine.bed import ModelBed
from maitred.engine.config import EngineConfig
from maitred.engine.encoder.build import build_encoder
from maitred.engine.encoder.shape import is_encoder
from maitred.engine.engine import Engine
from maitred.engine.grammar.compiler import GrammarCompiler
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.grammar.vocabulary import load_vocabulary
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.swap import SwapSpace
from maitred.engine.lanes import Lanes
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.digest import digest_of
from maitred.engine.models.host_blocks import HostBlocks
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.load import load_model
from maitred.engine.models.token_major import make_cache
from maitred.engine.precision import Precision
from maitred.engine.runner import Forward, ModelRunner
from maitred.engine.sampling.sampler import Sampler
from maitred.engine.scheduler.batching_window import BatchingWindow
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.step_times import TimedStep
from maitred.engine.server import EngineServer, Steps
from maitred.engine.slumber import Slumber
from maitred.engine.speculate.build import load_draft_model, make_speculator
from maitred.engine.target import Target, kv_bytes_on_cpu
from maitred.engine.threads import step_threads
from maitred.engine.trials.first_steps import Bounds, known_steps, steps_key
from maitred.engine.trials.notes import Notes
from maitred.engine.weights_cache.kept import cache_folder
from maitred.wire.address import TcpAddress, UnixAddress, parse_address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import engine_credentials

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True)
class KVPlan:
    """How large the KV cache is, and so how long a sequence can be."""

    blocks: int
    context_tokens: int


def plan_kv(config: EngineConfig, model: ModelConfig, *, block_bytes: int, free_bytes: int) -> KVPlan:
    """Sizes the KV cache.

    A budget that is configured is spent in full. Otherwise the cache gets a share of the free memory, but no more than
    all sequences at full length could use.

    Raises:
        ConfigInvalid: The budget does not hold what was asked for.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    wanted = -(-context // config.block_tokens)
    if config.kv_memory_bytes is not None:
        blocks = config.kv_memory_bytes // block_bytes
    else:
        blocks = min(free_bytes // block_bytes, wanted * config.max_sequences)
    capacity = blocks * config.block_tokens
    if capacity < min(context, config.context_tokens or 256):
        raise ConfigInvalid(
            f"The KV cache would hold {capacity} tokens, fewer than one sequence of {context}. "
            f"Raise engine.kv_memory_bytes (a token takes {block_bytes // config.block_tokens} bytes) "
            "or lower engine.context_tokens."
        )
    return KVPlan(blocks, min(context, capacity))


def serve(
    model: Path,
    config: EngineConfig,
    listen: str,
    weights: ServiceWeights,
    link: LinkConfig = LinkConfig(),  # noqa: B008 - frozen
) -> None:
    """Runs an engine in this process until SIGTERM, or until the parent is gone.

    Args:
        model: Folder with the model.
        config: The `engine` section.
        listen: ``unix:/path`` or ``tcp:host:port``.
        weights: What a token counts when service is shared out.
        link: The `engine_link` section.

    Raises:
        ConfigInvalid: The model, the device or the address cannot be had; the message says what to do.
    """
    start_s = time.perf_counter()
    address = parse_address(listen)
    credentials = engine_credentials(address, link)
    listener = _listen(address)
    try:
        engine, card = _build_steps(model, config, weights)
        card = replace(card, digest=digest_of(model))
        # What the model and its libraries brought stays for good. The collector would walk over all of it again and
        # again, between two tokens of somebody's answer.
        gc.freeze()
        gc.enable()
        server = EngineServer(engine, card, listener, SystemClock(), credentials)
        server.watch_signals()
        listener.listen(128)
        logger.info(
            "%s (%s, %s) ready on %s after %.1f s: %d tokens of KV, %d sequences",
            *(card.name, card.dtype, card.device, _bound(listener, address), time.perf_counter() - start_s),
            *(card.kv_capacity_tokens, card.max_sequences),
        )
        server.run()
        load = engine.load()
        if load.drafted_tokens:
            logger.info("%d of %d drafted tokens were right", load.accepted_tokens, load.drafted_tokens)
    finally:
        listener.close()
        if isinstance(address, UnixAddress):
            Path(address.path).unlink(missing_ok=True)


def _build_steps(model: Path, config: EngineConfig, weights: ServiceWeights) -> tuple[Steps, ModelCard]:
    """Everything but the socket, for a model that generates or for one that encodes."""
    if config.pooling is None and not is_encoder(model):
        return build(model, config, weights)
    if config.quantization != "none":
        raise ConfigInvalid(
            f"engine.quantization is for models that generate, and {model.name} computes embeddings. Set it to none."
        )
    device = Target.of(config.device).device
    torch.set_num_threads(step_threads(config.threads))
    return build_encoder(model, config, dtype=Precision.of(config, device).dtype, device=device)


def build(
    model: Path,
    config: EngineConfig,
    weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
    *,
    target: Target | None = None,
) -> tuple[Engine, ModelCard]:
    """Everything but the socket, for a model that generates.

    Args:
        model: Folder with the model.
        config: The `engine` section.
        weights: What a token counts when service is shared out.
        target: Where it runs; None: where the settings say.

    Raises:
        ConfigInvalid: The model or the device cannot be had; the message says what to do.
    """
    target = target or Target.of(config.device)
    device = target.device
    precision = Precision.of(config, device)
    dtype = precision.dtype
    torch.set_num_threads(step_threads(config.threads, config.machine_share))
    load = partial(
        load_model,
        model,
        dtype=dtype,
        device=device,
        scheme=precision.quantization,
        accelerated=target.accelerated,
        attention=config.gpu.attention,
        cache=config.weights_cache,
    )
    began_s = time.perf_counter()
    loaded = load()
    load_s = time.perf_counter() - began_s
    draft = load_draft_model(model, config, precision, target)
    sampler = Sampler(loaded.config.vocab_size, device, accelerated=target.accelerated)
    logger.info("Matrix products: %s", ", ".join(f"{count} {form}" for form, count in loaded.decoder.forms.items()))
    shapes = [loaded.config] if draft is None else [loaded.config, draft.config]
    block_bytes = sum(KVCache.bytes_per_block(shape, config.block_tokens, precision.kv_dtype) for shape in shapes)
    free_bytes = (
        free_bytes_beside(loaded.decoder, sampler, config, precision.kv_dtype, target)
        if target.accelerated
        else kv_bytes_on_cpu()
    )
    kv = plan_kv(config, loaded.config, block_bytes=block_bytes, free_bytes=int(free_bytes * config.machine_share))

    def cache_of(shape: ModelConfig) -> KVCache:
        return make_cache(
            *(shape, kv.blocks, config.block_tokens, precision.kv_dtype, device), accelerated=target.accelerated
        )

    def beside_cache(decoder: Decoder) -> tuple[Forward, KVCache]:
        cache = cache_of(decoder.config)
        decoder.warm_up(cache)
        return graphed(decoder, cache, config, kv.context_tokens, target) if target.accelerated else decoder, cache

    forward, cache = beside_cache(loaded.decoder)
    slots = config.swap_bytes // block_bytes
    host_blocks = HostBlocks(cache, slots) if slots else None
    guests = config.most_guests
    eos = loaded.config.eos_token_ids
    vocab_size = loaded.config.vocab_size
    compiler = GrammarCompiler(partial(load_vocabulary, model, vocab_size, eos))
    constraints = Constraints(compiler, vocab_size, eos)
    lanes = Lanes(config.max_sequences + guests, kv.context_tokens, config.block_tokens)

    def runner_of(decoder: Forward) -> ModelRunner:
        return ModelRunner(
            *(decoder, cache, sampler, lanes),
            block_tokens=config.block_tokens,
            eos_token_ids=eos,
            constraints=constraints,
            host_blocks=host_blocks,
        )

    runner = runner_of(forward)
    known: list[TimedStep] = []
    if config.bake_off == "auto":
        bounds = Bounds(config.max_sequences, config.step_tokens, kv.context_tokens, kv.blocks, config.block_tokens)

        def with_layers(layers: int) -> ModelRunner:
            if target.accelerated:
                return runner
            cache.touch(layers, bounds.tried_blocks)
            return runner_of(loaded.decoder.shallow(layers))

        key = steps_key(model, str(precision), _device_name(device), bounds)
        layers = 1 if target.accelerated else loaded.config.layers  # what steps are recorded of is tried as a whole
        known = known_steps(_step_notes(config), key, with_layers, layers, bounds)
    pool = BlockPool(kv.blocks, SwapSpace(slots) if slots else None)
    scheduler = Scheduler(
        pool,
        block_tokens=config.block_tokens,
        max_sequences=config.max_sequences,
        guests=guests,
        step_tokens=config.step_tokens,
        context_tokens=kv.context_tokens,
        eos_token_ids=eos,
        prefix_cache=config.prefix_cache,
        line=config.line,
        weights=weights,
        itl_objective_s=config.itl_objective_s,
        min_sequences=config.min_sequences,
        kv_shares=config.kv_shares,
        window=BatchingWindow(config.batching_window_s, config.batching_window_requests),
        known_steps=known,
        block_copy_s=math.inf if host_blocks is None else host_blocks.seconds_per_block(cache, block=0),
        pins=config.pins,
    )
    clock = SystemClock()
    engine = Engine(
        *(scheduler, runner, clock),
        vocab_size=vocab_size,
        max_choices=config.max_sequences,
        constraints=constraints,
        speculator=make_speculator(
            config.speculation,
            draft,
            None if draft is None else cache_of(draft.config),
            sampler,
            constraints,
            clock,
            vocab_size,
        ),
        slumber=Slumber(ModelBed(runner, scheduler, lambda: beside_cache(load().decoder)), clock, load_s),
    )
    card = ModelCard(
        name=model.name,
        context_tokens=kv.context_tokens,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=eos,
        max_sequences=config.max_sequences,
        kv_capacity_tokens=kv.blocks * config.block_tokens,
        max_choices=config.max_sequences,
        dtype=str(precision),
        device=str(device),
    )
    return engine, card


def _step_notes(config: EngineConfig) -> Notes[list[TimedStep]]:
    cache = config.weights_cache
    return Notes(cache_folder(cache) / "steps" if cache.enabled else None, list[TimedStep])


def _listen(address: UnixAddress | TcpAddress) -> socket.socket:
    """Binds before the model is read: a taken address is known at once. Listens, and so accepts, only when ready."""
    try:
        if isinstance(address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(address.path)
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address.host, address.port))
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {address}: {error.strerror or error}. Choose another address with --listen."
        ) from error
    return sock


def _bound(listener: socket.socket, address: UnixAddress | TcpAddress) -> UnixAddress | TcpAddress:
    """The address with the port that the system has picked, if it was to pick one."""
    return address if isinstance(address, UnixAddress) else TcpAddress(address.host, listener.getsockname()[1])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
