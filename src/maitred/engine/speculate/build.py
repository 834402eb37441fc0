"""Makes what speculates, as configured."""

from pathlib import Path

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.load import LoadedModel, load_model
from maitred.engine.models.source import find_model
from maitred.engine.precision import Precision
from maitred.engine.sampling.sampler import Sampler
from maitred.engine.speculate.draft_model import DraftModel
from maitred.engine.speculate.ngram import NgramDrafter
from maitred.engine.speculate.speculator import Speculator
from maitred.engine.speculate.vocabulary import check_same_vocabulary
from maitred.engine.target import Target


def load_draft_model(model: Path, config: EngineConfig, precision: Precision, target: Target) -> LoadedModel | None:
    """Reads the draft model, in the model's own types of numbers; None: none is configured.

    Args:
        model: Folder of the model that it drafts for.
        config: The `engine` section.
        precision: The model's.
        target: Where both run.

    Raises:
        ConfigInvalid: There is none where one is needed, it does not exist, or its vocabulary is another.
    """
    speculation = config.speculation
    _check(speculation)
    if speculation.draft_model is None:
        return None
    folder = find_model(speculation.draft_model)
    check_same_vocabulary(model, folder)
    return load_model(
        folder,
        dtype=precision.dtype,
        device=target.device,
        scheme=precision.quantization,
        accelerated=target.accelerated,
        attention=config.gpu.attention,
        cache=config.weights_cache,
    )


def make_speculator(
    config: SpeculationConfig,
    draft: LoadedModel | None,
    draft_cache: KVCache | None,
    sampler: Sampler,
    constraints: Constraints,
    clock: Clock,
    vocab_size: int,
) -> Speculator | None:
    """Makes who speculates; None: nobody.

    Args:
        config: The `engine.speculation` section.
        draft: The draft model, if there is one...
        draft_cache: ...and its keys and values.
        sampler: Of the model.
        constraints: Of the engine.
        clock: Of the engine.
        vocab_size: Of the model.
    """
    if config.method == "none":
        return None
    drafter = NgramDrafter() if config.method in ("ngram", "auto") else None
    author = None
    if draft is not None and draft_cache is not None:
        draft.decoder.warm_up(draft_cache)
        author = DraftModel(draft.decoder, draft_cache, sampler, constraints, clock, vocab_size)
    return Speculator(drafter, config.most_tokens, clock, constraints=constraints, author=author)


def _check(speculation: SpeculationConfig) -> None:
    written = speculation.method in ("draft_model", "auto")
    if written and speculation.draft_model is None:
        raise ConfigInvalid(
            f"engine.speculation.method is {speculation.method}, but no draft model is named. Set "
            "engine.speculation.draft_model to the folder of a smaller model with the same vocabulary, or the method "
            "to ngram."
        )
    if not written and speculation.draft_model is not None:
        raise ConfigInvalid(
            f"engine.speculation.draft_model is set, but engine.speculation.method is {speculation.method}, which "
            "does not use it. Set the method to draft_model or auto, or draft_model to null."
        )
