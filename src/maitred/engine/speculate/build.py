"""Assembly of the speculator from its settings."""

from pathlib import Path

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.engine.config import SpeculationConfig, speculation_faults
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.models.source import find_model
from maitred.engine.speculate.draft_model import DraftModel
from maitred.engine.speculate.ngram import NgramDrafter
from maitred.engine.speculate.speculator import Speculator
from maitred.engine.speculate.vocabulary import check_same_vocabulary


def find_draft_model(model: Path, speculation: SpeculationConfig) -> Path | None:
    """Returns the folder of the draft model; None: no draft model is configured.

    Args:
        model: Folder of the target model.
        speculation: The `engine.speculation` section.

    Raises:
        ConfigInvalid: A required draft model is missing, its folder does not exist, or its vocabulary differs.
    """
    for key, fault in speculation_faults(speculation):
        raise ConfigInvalid(f"{key}: {fault}")
    if speculation.draft_model is None:
        return None
    folder = find_model(speculation.draft_model)
    check_same_vocabulary(model, folder)
    return folder


def make_speculator(
    config: SpeculationConfig, author: DraftModel | None, constraints: Constraints, clock: Clock
) -> Speculator | None:
    """Makes the speculator; returns None if speculation is off.

    Args:
        config: The `engine.speculation` section.
        author: Draft model that writes drafts; None: there is no draft model.
        constraints: Grammar states of the engine's sequences.
        clock: Clock of the engine.
    """
    if config.method == "none":
        return None
    drafter = NgramDrafter() if config.method in ("ngram", "auto") else None
    return Speculator(drafter, config.most_tokens, clock, constraints=constraints, author=author)
