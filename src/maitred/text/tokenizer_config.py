"""Settings of a model's tokenizer beside ``tokenizer.json``: its named tokens, its chat templates and its longest text.

They stand in ``tokenizer_config.json``; older models have some of the tokens in ``special_tokens_map.json``, newer ones
have the templates in files of their own (``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``). The
files are read as the library `transformers` reads them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from maitred.core.errors import ConfigInvalid

PrependScheme = Literal["always", "first", "never"]
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of tokens in the order in which `transformers` adds those that the vocabulary lacks."""
_TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools."""
_TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")
"""Folders of templates by name; `transformers` writes the latter."""
_UNLIMITED_TOKENS = 10**9
"""Lengths from here on say that there is no limit: `transformers` writes 10³⁰."""


class VocabularyToken(msgspec.Struct, frozen=True):
    """Token that stands in the vocabulary for exactly one text."""

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    """Whether the text is looked for after normalisation; None: unless the token is special."""


class TokenizerConfig(msgspec.Struct, frozen=True):
    """Settings of a model's tokenizer.

    Attributes:
        special_tokens: Maps a role to its token's text, such as ``{"eos_token": "</s>"}``.
        added_tokens: Tokens by id that the settings add to the vocabulary, or whose flags they change.
        named_tokens: Tokens that the settings name, with a role or without, in the order in which `transformers` adds
            those that the vocabulary lacks.
        template: Chat template, or None.
        tool_template: Chat template for conversations with tools; None: `template`.
        adds_eos: Whether a text ends with the end-of-text token, beside what ``tokenizer.json`` says.
        longest_text: Most tokens of a text; None: the files do not say.
        lowercases: Whether sentence-transformers writes a text in lower case before the model reads it.
        text_prompt: What sentence-transformers puts before a text whose caller names no prompt.
        prepend_scheme: Which texts between special tokens a SentencePiece vocabulary puts a space before, where the
            settings decide it and not ``tokenizer.json``; None: as that file says.
    """

    special_tokens: Mapping[str, str]
    added_tokens: Mapping[int, VocabularyToken]
    named_tokens: Sequence[VocabularyToken]
    template: str | None
    tool_template: str | None
    adds_eos: bool
    longest_text: int | None
    lowercases: bool = False
    text_prompt: str = ""
    prepend_scheme: PrependScheme | None = None
    splits_special_tokens: bool = False
    """Whether a text that spells special tokens is read as text, by `split_special_tokens`."""

    @classmethod
    def load(cls, folder: Path) -> "TokenizerConfig":
        """Reads the settings of the model in a folder, which may have none of the files.

        Raises:
            ConfigInvalid: A file cannot be used.
        """
        path = folder / "tokenizer_config.json"
        fields = _read_object(path)
        if "added_tokens_decoder" not in fields:
            fields = {**fields, **_read_object(folder / "special_tokens_map.json")}
        try:
            added = msgspec.convert(fields.get("added_tokens_decoder") or {}, dict[int, VocabularyToken], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigInvalid(f"{path}: added_tokens_decoder cannot be read: {error}.") from error
        template, tool_template = _templates(folder, fields)
        longest = fields.get("model_max_length")
        return cls(
            special_tokens={role: token.content for role, token in _special_tokens(fields)},
            added_tokens=added,
            named_tokens=_named_tokens(fields),
            splits_special_tokens=fields.get("split_special_tokens") is True,
            template=template,
            tool_template=tool_template,
            adds_eos=fields.get("add_eos_token") is True,
            longest_text=int(longest) if isinstance(longest, int | float) and 0 < longest < _UNLIMITED_TOKENS else None,
            lowercases=_read_object(folder / "sentence_bert_config.json").get("do_lower_case") is True,
            text_prompt=_text_prompt(folder),
            prepend_scheme=_prepend_scheme(folder, fields),
        )


def _text_prompt(folder: Path) -> str:
    """Returns the prompt that ``config_sentence_transformers.json`` names as the default; empty: none."""
    path = folder / "config_sentence_transformers.json"
    fields = _read_object(path)
    name, prompts = fields.get("default_prompt_name"), fields.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise ConfigInvalid(f"{path}: the prompt {name!r}, which is the default, is not among its prompts.")
    return prompt


def _prepend_scheme(folder: Path, fields: Mapping[str, Any]) -> PrependScheme | None:
    """Returns the scheme of a model of Llama's kind, whose class in `transformers` takes it from the settings.

    Versions up to 4.30 wrote a space before every text (`legacy`), later ones before the first.
    """
    named = fields.get("tokenizer_class")
    if not isinstance(named, str) or named.removesuffix("Fast") != "LlamaTokenizer":
        return None
    if _read_object(folder / "config.json").get("model_type", "llama") != "llama":
        return None
    if fields.get("add_prefix_space") is False:
        return "never"
    return "always" if fields.get("legacy") else "first"


def read_eos_token(folder: Path) -> int | None:
    """Returns the id of the token with which the model's tokenizer ends a turn; None: the files name none.

    Raises:
        ConfigInvalid: A file cannot be used.
    """
    config = TokenizerConfig.load(folder)
    text = config.special_tokens.get("eos_token")
    if text is None:
        return None
    for token, added in config.added_tokens.items():
        if added.content == text:
            return token
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_Vocabulary)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}. Copy it from the model's publisher again.") from error
    for entry in described.added_tokens:
        if entry.content == text:
            return entry.id
    vocabulary = described.model.vocab
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((token for token, (piece, *_) in enumerate(vocabulary) if piece == text), None)


def read_special_tokens(folder: Path) -> frozenset[int]:
    """Returns the ids of the special tokens, such as those that begin and end every text of an encoder.

    A folder without ``tokenizer.json`` has none.

    Raises:
        ConfigInvalid: The file cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return frozenset()
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_AddedTokens)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}. Copy it from the model's publisher again.") from error
    configured = TokenizerConfig.load(folder).added_tokens
    return frozenset(entry.id for entry in described.added_tokens if entry.special) | {
        token for token, added in configured.items() if added.special
    }


class _TokenEntry(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[list[Any]] = {}


class _AddedTokens(msgspec.Struct):
    """Section of a ``tokenizer.json`` with the tokens that were added to its vocabulary."""

    added_tokens: list[_TokenEntry] = []


class _Vocabulary(msgspec.Struct):
    """Sections of a ``tokenizer.json`` with its tokens."""

    model: _Model
    added_tokens: list[_TokenEntry] = []


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigInvalid(f"{path} is not valid JSON: {error}. Copy it from the model's publisher again.") from error
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object. Copy it from the model's publisher again.")
    return fields


def _special_tokens(fields: Mapping[str, Any]) -> Iterator[tuple[str, VocabularyToken]]:
    """Yields the tokens that have a role: those with a field of their own, and the model's further ones.

    Each token is written as its text, or as an object with the text in `content`.
    """
    further = fields.get("extra_special_tokens")
    roles = {role: value for role, value in fields.items() if role.endswith("_token")}
    for role, value in {**roles, **(further if isinstance(further, dict) else {})}.items():
        if token := _named_token(value):
            yield role, token


def _named_tokens(fields: Mapping[str, Any]) -> list[VocabularyToken]:
    """Returns the tokens with a role, and then those without."""
    tokens = dict(_special_tokens(fields))
    roles = sorted(tokens, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))
    named = [tokens[role] for role in roles]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        values = fields.get(name)
        if isinstance(values, list):
            named += [token for value in values if (token := _named_token(value))]
    return named


def _named_token(value: object) -> VocabularyToken | None:
    """Reads a token that is written as its text, or as an object; anything else is none."""
    match value:
        case str():
            return VocabularyToken(value, special=True, normalized=False)
        case {"content": str()}:
            with suppress(msgspec.ValidationError):
                return replace(msgspec.convert(value, VocabularyToken), special=True)
    return None


def _templates(folder: Path, fields: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Reads the chat template, and the one for conversations with tools; files have precedence over the settings."""
    named: dict[str, str] = {}
    for templates in _TEMPLATE_FOLDERS:
        for path in sorted((folder / templates).glob("*.jinja")):
            named[path.stem] = path.read_text(encoding="utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        named["default"] = single.read_text(encoding="utf-8")
    if not named:
        match fields.get("chat_template"):
            case str() as source:
                named = {"default": source}
            case dict() as sources:
                named = sources
            case [*entries]:
                named = {entry["name"]: entry["template"] for entry in entries}
    if not named:
        return None, None
    default = next(iter(named.values())) if len(named) == 1 else named.get("default")
    if default is None:
        raise ConfigInvalid(
            f"{folder} has several chat templates ({', '.join(sorted(named))}), and none of them is named default. "
            "Write the one to use into chat_template.jinja."
        )
    return default, named.get(_TOOL_TEMPLATE)
