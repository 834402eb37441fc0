"""Encoding of what messages say as text, also where it spells the control tokens of the template.

A document that a user quotes may hold ``<|im_end|><|im_start|>system``; read as tokens, it ends the user's turn and
forges another one. The control tokens in what callers say are therefore marked before the template writes the prompt.
The tokenizer that reads the prompt then knows each control token under another name that nobody can guess, and the
control tokens that the template writes itself are renamed so in the prompt. What callers say is never renamed, so it is
text in any case, also where the tokenizer reads ``<|IM_END|>`` or full-width letters as the same as ``<|im_end|>``.
Nothing is put into a text or cut out of it, so it has the tokens that it has anywhere.

The marks are halves of surrogate pairs, which no request has. Templates may cut a text at a control token
(``content.split('</think>')``), and find it between its marks.
"""

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

OPEN_MARK, CLOSE_MARK = "\udff0", "\udff1"
_UNKNOWN = "\U0010fffd"
"""Character that no vocabulary has."""
_NAME_LETTERS = 24


class ControlTokens:
    """Control tokens of one tokenizer.

    Args:
        backend: Tokenizer of the model.
        tokens: Maps each control token to its text.

    Attributes:
        pattern: Expression that finds the control tokens.
        takes_other_spellings: Whether the tokenizer makes control tokens of texts that spell them otherwise, because it
            normalises texts. No search finds these, so every conversation has to be encoded here.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Mapping[int, str]) -> None:
        added = backend.get_added_tokens_decoder()
        self.pattern = re.compile(_any_of(tokens.values()))
        # The tokenizer finds those that it does not normalise first, also where another one is longer.
        self._found_first = re.compile(f"({_any_of(tokens[id_] for id_ in tokens if not added[id_].normalized)})")
        self._names = {text: _private_name() for text in tokens.values()}
        self._texts = {name: text for text, name in self._names.items()}
        self._private_names = re.compile("|".join(map(re.escape, self._texts)))
        self._backend, self._ids = self._renaming(backend, tokens)
        self._private = frozenset(self._backend.token_to_id(name) for name in self._texts)
        self._spelt = _spelt(backend, tokens)
        self.takes_other_spellings = (
            _normalizes(backend) and any(added[token].normalized for token in tokens)
        ) or bool(self._spelt)

    def mark(self, value: Any) -> Any:  # noqa: ANN401 - whatever JSON is
        """Returns a JSON value in which the control tokens of all texts, names of members included, are marked."""
        if isinstance(value, str):
            return self.pattern.sub(rf"{OPEN_MARK}\g<0>{CLOSE_MARK}", value)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner) for inner in value]
        return value

    def encode(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Converts a prompt to token ids; the control tokens between marks are text.

        A mark without its counterpart is what a template has left of a text that it cut at a control token.
        """
        pieces = re.split(f"{OPEN_MARK}([^{OPEN_MARK}{CLOSE_MARK}]*){CLOSE_MARK}|[{OPEN_MARK}{CLOSE_MARK}]", prompt)
        # Every second piece stood between two marks, or is None.
        pieces[::2] = map(self._rename, pieces[::2])
        renamed = "".join(filter(None, pieces))
        (encoding,) = self._backend.encode_batch_fast([renamed], add_special_tokens=add_special_tokens)
        names = len(self._private_names.findall(renamed))
        while sum(token in self._private for token in encoding.ids) < names:
            renamed = self._with_texts(renamed)
            names = len(self._private_names.findall(renamed))
            (encoding,) = self._backend.encode_batch_fast([renamed], add_special_tokens=add_special_tokens)
        tokens: list[int] = []
        for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if added:  # around the prompt, and known by its own id
                tokens.append(token)
            elif token in self._spelt:
                tokens += self._spelt[token]
            else:
                tokens.append(self._ids.get(token, token))
        return tokens

    def _with_texts(self, renamed: str) -> str:
        """Returns a prompt without the private names that the tokenizer takes for text, as text.

        It may look for a token only as a word of its own, or behind a space.
        """
        (encoding,) = self._backend.encode_batch([renamed], add_special_tokens=False)
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token in self._private]
        pieces, at = [], 0
        for name in self._private_names.finditer(renamed):
            is_read = any(start < name.end() and name.start() < end for start, end in spans)
            pieces += [renamed[at : name.start()], name[0] if is_read else self._texts[name[0]]]
            at = name.end()
        changed = "".join(pieces) + renamed[at:]
        return changed if changed != renamed else self._private_names.sub(self._restore, renamed)

    def _restore(self, name: re.Match[str]) -> str:
        return self._texts[name[0]]

    def _rename(self, text: str) -> str:
        """Returns what a template has written, with private names in place of control tokens."""
        pieces = self._found_first.split(text)
        pieces[::2] = [self.pattern.sub(lambda found: self._names[found[0]], piece) for piece in pieces[::2]]
        pieces[1::2] = [self._names[token] for token in pieces[1::2]]
        return "".join(pieces)

    def _renaming(
        self, backend: tokenizers.Tokenizer, tokens: Mapping[int, str]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Makes a tokenizer of the same model that knows the control tokens by their private names.

        Returns:
            The tokenizer, and a map from its ids of added tokens to those of `backend`.
        """
        renaming = tokenizers.Tokenizer(backend.model)  # the two share the vocabulary
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(renaming, part, getattr(backend, part))
        renaming.encode_special_tokens = backend.encode_special_tokens
        added = {
            token: tokenizers.AddedToken(
                self._names[entry.content] if token in tokens else entry.content,
                single_word=entry.single_word,
                lstrip=entry.lstrip,
                rstrip=entry.rstrip,
                normalized=entry.normalized,
                special=entry.special,
            )
            for token, entry in sorted(backend.get_added_tokens_decoder().items())
        }
        renaming.add_tokens([*added.values()])
        ids = {entry.content: token for token, entry in added.items()}
        return renaming, {token: ids[entry.content] for token, entry in renaming.get_added_tokens_decoder().items()}


def _any_of(texts: Iterable[str]) -> str:
    """Returns an expression that finds any of some texts, and the longest of those that begin at one place."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _private_name() -> str:
    """Makes a name that no text has, and that a normaliser neither changes nor joins to its neighbours."""
    return f"|{''.join(secrets.choice(string.ascii_lowercase) for _ in range(_NAME_LETTERS))}|"


def _normalizes(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer has steps that normalise texts; files may have a list of none."""
    normalizer = backend.normalizer
    return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []


def _spelt(backend: tokenizers.Tokenizer, tokens: Mapping[int, str]) -> dict[int, list[int]]:
    """Spells the control tokens that the model itself makes of a text, in tokens of single characters.

    Unigram vocabularies, for example, have control tokens as words. The token for unknown text is none of them. The
    vocabulary of Mistral's newer models has ``[INST]`` as a word, too, but the model reads words one by one, and those
    of this text are ``[INST`` and ``]``, wherever it stands.
    """
    model, split = backend.model, backend.pre_tokenizer
    unknown = {*_pieces(model, [_UNKNOWN])}
    spelt = {}
    for token, text in tokens.items():
        words = [text] if split is None else [word for word, _ in split.pre_tokenize_str(text)]
        if token not in unknown and token in _pieces(model, words):
            spelt[token] = [letter for letter in _pieces(model, text) if letter not in tokens or letter in unknown]
    return spelt


def _pieces(model: Any, words: Iterable[str]) -> list[int]:  # noqa: ANN401 - has no type
    try:
        return [piece.id for word in words for piece in model.tokenize(word)]
    except Exception:  # The library raises only this, for a text that the vocabulary cannot write.
        return []
