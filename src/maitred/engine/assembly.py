"""Assembly of an engine without its socket: model, KV cache, scheduler, speculator and sleep control."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from maitred.core.clock import Clock, SystemClock
from maitred.core.flow import ServiceWeights
from maitred.core.replica import ModelCard
from maitred.engine.block_table_rows import BlockTableRows
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice, PrecisionPlan, step_threads
from maitred.engine.engine import Engine
from maitred.engine.grammar.compiler import GrammarCompiler, load_vocabulary
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.kv.blocks import BlockPool, WindowPool
from maitred.engine.kv.plan import KVCachePlan, plan_kv
from maitred.engine.kv.swap import SwapSpace
from maitred.engine.loader import ModelLoader
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.digest import WeightsCheck
from maitred.engine.models.host_blocks import HostBlocks
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.progress import StageProgress
from maitred.engine.runner import ForwardModel, ModelRunner
from maitred.engine.sampling.sampler import Sampler
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.step_times import TimedStep
from maitred.engine.sleep import LoadedModelMemory, ModelMemory, SleepController
from maitred.engine.speculate.build import find_draft_model, make_speculator
from maitred.engine.speculate.draft_model import DraftModel
from maitred.engine.trials.cache import StepTimeCache
from maitred.engine.trials.first_steps import StepBounds, known_steps, steps_key
from maitred.engine.weights_cache.cached import cache_folder

logger = logging.getLogger("maitred.engine")


def build(
    model: Path,
    config: EngineConfig,
    weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
    *,
    target: ComputeDevice | None = None,
    clock: Clock | None = None,
) -> tuple[Engine, ModelCard]:
    """Builds the engine of a model that generates text, and its model card.

    Args:
        model: Folder with the model.
        config: The `engine` section.
        weights: Service that the fair queue charges per token.
        target: Device of the engine; None: the device in the settings.
        clock: Clock that measures the steps; None: the system clock.

    Raises:
        ConfigInvalid: The model or the device is not available; the message says what to do.
    """
    target = target or ComputeDevice.of(config.device)
    precision = PrecisionPlan.of(config, target.device)
    loader = ModelLoader(config, target, precision if target.accelerated else precision.with_bf16_products())
    torch.set_num_threads(step_threads(config.threads, config.machine_share))
    clock = clock or SystemClock()
    began_s = time.perf_counter()
    check = WeightsCheck(model)
    loaded = loader.model(model)
    load_s = time.perf_counter() - began_s
    shape, decoder = loaded.config, loaded.decoder
    logger.info("Matrix products: %s", ", ".join(f"{count} {form}" for form, count in decoder.forms.items()))
    draft_folder = find_draft_model(model, config.speculation)
    draft = None if draft_folder is None else loader.model(draft_folder)
    sampler = Sampler(shape.vocab_size, target.device, accelerated=target.accelerated)
    block_bytes = loader.block_bytes(shape, *([] if draft is None else [draft.config]))
    kv = plan_kv(config, shape, block_bytes=block_bytes, free_bytes=int(loader.free_bytes(decoder, sampler)))
    warm_up = StageProgress(f"Warming up {model.name}")
    warm_up.report(0.0)
    forward, cache = loader.with_cache(decoder, kv)
    warm_up.report(0.5)
    slots = config.swap_bytes // sum(block_bytes)
    host_blocks = HostBlocks(cache, slots) if slots else None
    compiler = GrammarCompiler(partial(load_vocabulary, model, shape.vocab_size, shape.eos_token_ids))
    constraints = Constraints(compiler, shape.vocab_size, shape.eos_token_ids)
    rows = (config.max_sequences + config.most_overcommit_slots, kv.context_tokens, config.block_tokens)
    lanes = BlockTableRows(*rows)
    window_lanes = BlockTableRows(*rows, of_window=True) if kv.window_blocks else None

    def runner_of(forward: ForwardModel) -> ModelRunner:
        return ModelRunner(
            *(forward, cache, sampler, lanes),
            block_tokens=config.block_tokens,
            eos_token_ids=shape.eos_token_ids,
            constraints=constraints,
            host_blocks=host_blocks,
            window_lanes=window_lanes,
        )

    runner = runner_of(forward)
    scheduler = Scheduler(
        make_pool(kv, shape.window, slots),
        config,
        context_tokens=kv.context_tokens,
        eos_token_ids=shape.eos_token_ids,
        weights=weights,
        known_steps=_try_steps(model, loader, kv, decoder, cache, runner, runner_of),
        block_copy_s=math.inf if host_blocks is None else host_blocks.seconds_per_block(cache, block=0),
    )

    warm_up.report(1.0)

    def reload() -> None:
        """Restores the model. With other weights the engine ends: the card that gateways have names the old ones."""
        runner.reload(*loader.with_cache(loader.model(model).decoder, kv))
        check.run()

    models = [LoadedModelMemory(runner.drop, reload)]
    author = None
    if draft is not None and draft_folder is not None:
        drafting = loader.warmed_up(draft.decoder, kv.blocks)
        author = DraftModel(
            *drafting, sampler=sampler, constraints=constraints, clock=clock, vocab_size=shape.vocab_size
        )
        models.append(LoadedModelMemory(author.drop, partial(_restore_draft, author, loader, draft_folder, kv)))
    engine = Engine(
        *(scheduler, runner, clock),
        vocab_size=shape.vocab_size,
        max_choices=config.max_sequences,
        constraints=constraints,
        speculator=make_speculator(config.speculation, author, constraints, clock),
        sleep_controller=SleepController(ModelMemory(models, scheduler), clock, load_s),
    )
    card = ModelCard(
        name=model.name,
        context_tokens=kv.context_tokens,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        max_sequences=config.max_sequences,
        kv_capacity_tokens=kv.blocks * config.block_tokens,
        max_choices=config.max_sequences,
        dtype=str(loader.precision),
        device=str(target.device),
    )
    return engine, card


def make_pool(kv: KVCachePlan, window: int, slots: int) -> BlockPool:
    """Makes the pool of all blocks, with that of the layers with a window if they have blocks of their own."""

    def swap() -> SwapSpace | None:
        return SwapSpace(slots) if slots else None

    if not kv.window_blocks:
        return BlockPool(kv.blocks, swap())
    return BlockPool(kv.blocks, swap(), WindowPool(BlockPool(kv.window_blocks, swap()), window, kv.window_pin_blocks))


def _restore_draft(author: DraftModel, loader: ModelLoader, folder: Path, kv: KVCachePlan) -> None:
    author.reload(*loader.warmed_up(loader.model(folder).decoder, kv.blocks))


def _try_steps(
    model: Path,
    loader: ModelLoader,
    kv: KVCachePlan,
    decoder: Decoder,
    cache: KVCache,
    runner: ModelRunner,
    runner_of: Callable[[ForwardModel], ModelRunner],
) -> list[TimedStep]:
    """Returns measured step times, from trial steps or from the cache of earlier trials."""
    config, target = loader.config, loader.target
    if config.bake_off == "off":
        return []
    bounds = StepBounds(
        config.max_sequences,
        config.step_tokens,
        kv.context_tokens,
        kv.blocks,
        block_tokens=config.block_tokens,
        window_blocks=kv.window_blocks,
    )

    def with_layers(layers: int) -> ModelRunner:
        if target.accelerated:
            return runner
        cache.touch(layers, bounds.tried_blocks)
        return runner_of(decoder.shallow(layers))

    kept = config.weights_cache
    notes = StepTimeCache(cache_folder(kept) / "steps" if kept.enabled else None, list[TimedStep])
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # A model that is captured in CUDA graphs is tried with all its layers
    layers = 1 if target.accelerated else decoder.config.layers
    return known_steps(notes, steps_key(model, str(loader.precision), name, bounds), with_layers, layers, bounds)
