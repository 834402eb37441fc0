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

from maitred.core.answer import TextDelta
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
    """Of one stream.

    Args:
        request: As the first server got it.
        prompts: How many it has.
    """

    def __init__(self, request: TextRequest, prompts: int) -> None:
        self._request = request
        self._text: list[str] = []
        self._plain = prompts == 1 == request.choices and _is_safe(request.fields)

    def heard(self, parts: Iterable[TextDelta]) -> None:
        """More of the answer, on its way to the caller."""
        for part in parts:
            self._text.append(part.text)
            # What a tool call or a thought has begun, no text can tell the next server.
            self._plain = self._plain and part.extra is None and part.scores is None

    def rest(self, tokens: int) -> TextRequest | None:
        """What another server is to be asked; None: it could not be told where to go on.

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
    return any(text.endswith(one[:length]) for one in stops for length in range(1, len(one)))
