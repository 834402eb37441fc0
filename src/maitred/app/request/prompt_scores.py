"""Log-probabilities of a prompt's tokens, which come from the engine step by step, as clients read them.

The engine sends arrays of numbers with each chunk of the prefill. They are turned into texts as they come, so a long
prompt never holds up the event loop, and all choices of a prompt share the result.
"""

import sys
from array import array
from collections.abc import Sequence

from maitred.core.errors import ReplicaLost
from maitred.core.inference import InferenceRequest, PromptLogprob, PromptScores, TokenLogprob, TokenScore
from maitred.core.request import PromptLogprobs
from maitred.text.tokenizer import Detokenizer, Tokenizer


def prompt_top(request: InferenceRequest) -> int | None:
    """Returns how many top log-probabilities of each prompt token the engine must compute; None: it computes none."""
    sampling = request.sampling
    wanted = [] if sampling.prompt_logprobs is None else [sampling.prompt_logprobs]
    if (echoed := _echoed_top(request)) is not None:
        wanted.append(echoed)
    return max(wanted, default=None)


def count_prompt_logprobs(request: InferenceRequest, prompts: Sequence[Sequence[int]]) -> int:
    """Returns the number of log-probabilities of prompt tokens in the whole answer."""
    sampling = request.sampling
    tops = [top for top in (sampling.prompt_logprobs, _echoed_top(request)) if top is not None]
    return sum(map(len, prompts)) * sampling.n * sum(top + 1 for top in tops)


def _echoed_top(request: InferenceRequest) -> int | None:
    """Returns the number of top log-probabilities at each position of an echoed prompt; None: it has none."""
    return request.sampling.top_logprobs if request.echo else None


class PromptScoreReader:
    """Reader of the log-probabilities of one prompt.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Token ids of the prompt.
        request: For what it wants to know of the prompt; see `prompt_top`.

    Attributes:
        result: The scores so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], request: InferenceRequest) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echoed_top = _echoed_top(request)
        self._top = request.sampling.prompt_logprobs
        self.result = PromptScores()
        self._restart()

    @property
    def complete(self) -> bool:
        """Whether no further scores will come."""
        return self._is_given_up or self._known == len(self._prompt)

    def give_up(self) -> None:
        """Notes that the choice that computes the scores has ended before its first token."""
        self._is_given_up = True

    def add(self, part: PromptLogprobs) -> None:
        """Adds the scores of the next tokens; those of the first tokens begin anew, as from another replica.

        Raises:
            ReplicaLost: They are not the scores of the next tokens.
        """
        if part.start == 1:
            self._restart()
        if part.start != self._known or part.start + part.count > len(self._prompt):
            raise ReplicaLost
        logprobs, ranks = _floats(part.logprobs), _integers(part.ranks)
        top_tokens, top_logprobs = _integers(part.top_tokens), _floats(part.top_logprobs)
        for place, token in enumerate(self._prompt[part.start : part.start + part.count]):
            others = slice(place * part.top, (place + 1) * part.top)
            pairs = list(zip(top_tokens[others], top_logprobs[others], strict=True))
            if self.result.echoed is not None:
                self.result.echoed.append(self._score(token, logprobs[place], pairs[: self._echoed_top]))
            if self.result.logprobs is not None:
                self.result.logprobs.append(self._entry(token, logprobs[place], ranks[place], pairs[: self._top]))
        self._known += part.count

    def _restart(self) -> None:
        self._is_given_up = False
        self._known = 1
        self._offset = 0
        """Number of characters of the prompt's text before the next token."""
        self._detokenizer = Detokenizer(self._tokenizer)
        self.result.echoed = None if self._echoed_top is None else [self._score(self._prompt[0], None, [])]
        self.result.logprobs = None if self._top is None else [None]

    def _score(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> TokenScore:
        offset = self._offset
        self._offset += len(self._detokenizer.push((token,)))
        return TokenScore(
            self._to_token_logprob(token, logprob),
            [self._to_token_logprob(other, others) for other, others in top],
            offset,
        )

    def _to_token_logprob(self, token: int, logprob: float | None) -> TokenLogprob:
        return TokenLogprob(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)

    def _entry(
        self, token: int, logprob: float, rank: int, top: Sequence[tuple[int, float]]
    ) -> dict[int, PromptLogprob]:
        text = self._tokenizer.token_text
        entry = {token: PromptLogprob(logprob, rank, text(token))}
        for place, (other, others) in enumerate(top, start=1):
            if other != token:
                entry[other] = PromptLogprob(others, place, text(other))
        return entry


def _floats(data: bytes) -> "array[float]":
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _integers(data: bytes) -> "array[int]":
    numbers = array("i", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
