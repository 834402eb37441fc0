"""Makes what speculates, as configured."""

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
    """The folder of the draft model; None: none is configured.

    Args:
        model: Folder of the model that it drafts for.
        speculation: The `engine.speculation` section.

    Raises:
        ConfigInvalid: There is none where one is needed, it does not exist, or its vocabulary is another.
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
    """Makes who speculates; None: nobody.

    Args:
        config: The `engine.speculation` section.
        author: Writes ahead, if there is a draft model.
        constraints: Of the engine.
        clock: Of the engine.
    """
    if config.method == "none":
        return None
    drafter = NgramDrafter() if config.method in ("ngram", "auto") else None
    return Speculator(drafter, config.most_tokens, clock, constraints=constraints, author=author)
