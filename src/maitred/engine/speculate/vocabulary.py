"""Check that a draft model has the same token ids as the target model."""

from pathlib import Path
from typing import Any

import msgspec

from maitred.core.errors import ConfigInvalid

_FILE = "tokenizer.json"


def check_same_vocabulary(model: Path, draft: Path) -> None:
    """Compares the vocabularies of both models, unless one has no tokenizer file.

    Raises:
        ConfigInvalid: The vocabularies differ; the message names a token.
    """
    paths = model / _FILE, draft / _FILE
    if not all(path.is_file() for path in paths):
        return
    contents = [path.read_bytes() for path in paths]
    if contents[0] == contents[1]:
        return
    own, other = (_tokens(content) for content in contents)
    differing = sorted((token for token in own if other.get(token) != own[token]), key=lambda token: own[token])
    if differing:
        token = differing[0]
        there = f"is number {other[token]}" if token in other else "does not exist"
        raise ConfigInvalid(
            f"engine.speculation.draft_model {draft} has another vocabulary than the model {model}: the token "
            f"{token!r} is number {own[token]} in the model and {there} in the draft model ({len(differing)} tokens "
            "differ). Take a smaller model of the same family, or set engine.speculation.method to ngram."
        )


def _tokens(content: bytes) -> dict[str, int]:
    """Returns token -> id; a file of unknown form gives no tokens."""
    try:
        fields: Any = msgspec.json.decode(content)
        listed = fields["model"]["vocab"]
        vocabulary = listed if isinstance(listed, dict) else {entry[0]: place for place, entry in enumerate(listed)}
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in fields.get("added_tokens", ())}}
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, IndexError):
        return {}
