"""The text of a stream as far as it was shown, so that another server can go on with it.

Our own engines go on with the very tokens (see `continuation`). Other servers take text, so what goes on there is
another answer with the same beginning: its tokens can be cut otherwise, and sampling begins anew. That is allowed by
the model's configuration alone and marked where it happens.

A server that only reads the text must come to the same state as the one that wrote it. Where that is not certain, the
answer ends as it does without any of this, with an error: what it asks for is known field by field, and whatever is not
among `_SAFE` (tools, a grammar, log-probabilities, penalties that count the answer alone) cannot be gone on with.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from maitred.core.inference import TextDelta
from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.core.text_replica import TextRequest


def _however(value: object) -> bool:
    return True


def _none(value: object) -> bool:
    return not value


def _one(value: object) -> bool:
    return value == 1


_SAFE: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("model", "messages", "prompt", "stream", "stream_options", "max_tokens"), _however),
    **dict.fromkeys(("max_completion_tokens", "min_tokens", "priority", "service_tier", "user", "metadata"), _however),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "store", "temperature", "top_p", "top_k"), _however),
    # A repetition penalty counts the prompt, too; the other two count the answer, of which a part would be missing.
    **dict.fromkeys(("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"), _however),
    **dict.fromkeys(("repetition_penalty", "verbosity"), _however),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logprobs", "echo", "tools"), _none),
    **dict.fromkeys(("n", "best_of"), _one),
}
"""Fields of a request with which an answer can be gone on with -> for which of their values."""


class TextContinuation:
    """Text of one upstream stream so far, to continue it at another server.

    Args:
        request: As the first server got it.
        prompts: How many it has.
    """

    def __init__(self, request: TextRequest, prompts: int) -> None:
        self._request = request
        self._text: list[str] = []
        self._plain = prompts == 1 == request.choices and _is_safe(request.fields)

    def on_delta(self, parts: Iterable[TextDelta]) -> None:
        """More of the answer, on its way to the caller."""
        for part in parts:
            self._text.append(part.text)
            # What a tool call or a thought has begun, no text can tell the next server.
            self._plain = self._plain and part.extra is None and part.scores is None

    def remaining_request(self, tokens: int) -> TextRequest | None:
        """Returns the request for another server; None: it could not be told where to continue.

        Args:
            tokens: That the text has.
        """
        request, text = self._request, "".join(self._text)
        fields = dict(request.fields)
        left = None if request.max_tokens is None else request.max_tokens - tokens
        if not self._plain or not text or (left is not None and left < 1) or _may_stop(text, fields.get("stop")):
            return None
        # Templates cut white space off the end of a message, and the next word would be glued to the one before.
        if request.chat and text[-1].isspace():
            return None
        if fields.get("min_tokens"):
            fields["min_tokens"] = max(0, fields["min_tokens"] - tokens)
        return replace(request, fields=fields, max_tokens=left, given=text)


def _is_safe(fields: Mapping[str, Any]) -> bool:
    if any(name not in _SAFE or not _SAFE[name](value) for name, value in fields.items()):
        return False
    if "messages" in fields:
        return bool(fields["messages"][-1]["role"] != "assistant")  # a beginning of its own, which it may glue to
    return isinstance(fields.get("prompt"), str)


def _may_stop(text: str, stop: str | Sequence[str] | None) -> bool:
    """Whether a stop string may have begun at the end of the text: the next server would not recognise it."""
    stops = [stop] if isinstance(stop, str) else stop or ()
    return any(text.endswith(string[:length]) for string in stops for length in range(1, len(string)))


class TokenContinuation:
    """The output of every choice that has not ended.

    Sampling depends on the seed, the choice and the position of a token, never on where it runs. So an answer that is
    resubmitted with the output that it has, *as output*, comes to the same end as if nothing had happened: penalties,
    `min_tokens`, `max_tokens` and positions count from its real beginning (see `core.request.EngineRequest.resumes`).

    Tokens that were on their way when a replica was lost are not missed: they were never noted here, so they are
    generated again. Tokens that were noted have gone to the client, and are not generated again. Where an answer must
    follow a grammar, the state of the grammar follows from the output too, so nothing more than this needs to be kept.

    Args:
        requests: As a replica would get them first, one for each prompt.
        now_s: To when their deadlines count.
    """

    def __init__(self, requests: Sequence[EngineRequest], now_s: float) -> None:
        self._requests = requests
        self._made_s = now_s
        self._open: list[dict[int, list[int]]] = [request.begun for request in requests]

    @property
    def prompts(self) -> list[int]:
        """The numbers of those that have not been answered in full."""
        return [prompt for prompt, choices in enumerate(self._open) if choices]

    @property
    def answer_by_s(self) -> float | None:
        """When the answer must be there."""
        deadline_in_s = self._requests[0].deadline_in_s
        return None if deadline_in_s is None else self._made_s + deadline_in_s

    def on_delta(self, prompt: int, delta: TokenDelta) -> None:
        """More of a choice, on its way to the client."""
        self._open[prompt][delta.index] += delta.tokens

    def on_end(self, prompt: int, index: int) -> None:
        """A choice has ended, whether its replica knows it or not."""
        del self._open[prompt][index]

    def remaining_requests(self, now_s: float) -> dict[int, EngineRequest]:
        """Returns what is to be submitted now for each prompt without a complete answer."""
        left = {}
        for prompt, choices in enumerate(self._open):
            if choices:
                request = self._requests[prompt]
                deadline_in_s = request.deadline_in_s
                left[prompt] = replace(
                    request,
                    resumes={index: [*output] for index, output in choices.items()}
                    if self._has_begun(prompt)
                    else None,
                    deadline_in_s=None if deadline_in_s is None else deadline_in_s - (now_s - self._made_s),
                )
        return left

    def cut_off(self) -> tuple[int, list[TokenDelta]]:
        """The end of all choices of one prompt, because the time is over."""
        prompt = self.prompts[0]
        begun = self._has_begun(prompt)
        return prompt, [TokenDelta(index, [], FinishReason.DEADLINE, begun=begun) for index in self._open[prompt]]

    def _has_begun(self, prompt: int) -> bool:
        """Whether anything came of it."""
        choices = self._open[prompt]
        return len(choices) < self._requests[prompt].sampling.n or any(choices.values())
