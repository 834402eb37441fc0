"""Encoding of what messages say as text, also where it spells the control tokens of the template.

A document that a user quotes may hold ``<|im_end|><|im_start|>system``; read as tokens, it ends the user's turn and
forges another one. The control tokens in what callers say are therefore marked before the template writes the prompt,
and cut in two afterwards. The control tokens that the template writes itself stay what they are.

The marks are halves of surrogate pairs, which no request has. Templates may cut a text at a control token
(``content.split('</think>')``), and find it between its marks.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

import tokenizers

OPEN_MARK, CLOSE_MARK = "\udff0", "\udff1"


class ControlTokens:
    """Control tokens of one tokenizer.

    Args:
        backend: Tokenizer of the model. It gets one token more, at which texts are cut; no text can spell it.
        tokens: Maps each control token to its text.
        taken: Token ids that mean something.

    Attributes:
        pattern: Expression that finds the control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Mapping[int, str], taken: Mapping[int, bytes]) -> None:
        found = "|".join(re.escape(text) for text in sorted(tokens.values(), key=len, reverse=True))
        self.pattern = re.compile(found or "(?!)")
        self._begins = re.compile(f"(?=(?:{found or '(?!)'}))(.)", re.DOTALL)
        while True:
            self._cut = f"<{secrets.token_hex(16)}>"
            backend.add_special_tokens([tokenizers.AddedToken(self._cut, normalized=False, special=True)])
            self._cut_token = backend.token_to_id(self._cut)
            if self._cut_token not in taken:
                break

    def mark(self, value: Any) -> Any:  # noqa: ANN401 - whatever JSON is
        """Returns a JSON value in which the control tokens of all texts, names of members included, are marked."""
        if isinstance(value, str):
            return self.pattern.sub(rf"{OPEN_MARK}\g<0>{CLOSE_MARK}", value)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner) for inner in value]
        return value

    def cut(self, prompt: str) -> str:
        """Returns a prompt with a cut behind the first character of each marked token, and in place of each mark."""
        pieces = re.split(f"{OPEN_MARK}([^{OPEN_MARK}{CLOSE_MARK}]*){CLOSE_MARK}", prompt)
        # Every second piece stood between two marks.
        pieces[1::2] = [self._cut + self._begins.sub(rf"\1{self._cut}", piece) + self._cut for piece in pieces[1::2]]
        return re.sub(f"[{OPEN_MARK}{CLOSE_MARK}]", self._cut, "".join(pieces))

    def without_cuts(self, ids: list[int]) -> list[int]:
        """Returns the tokens of a prompt without those of its cuts."""
        return [token for token in ids if token != self._cut_token]
