"""Continuation of an answer at another replica after its replica has failed: by text, or by token ids.

Engines of this gateway continue with the same token ids; see `TokenContinuation`. Upstream servers take text. The new
server may tokenise the text differently and samples with a new random state. So this must be enabled for the model
(`reprompts`), and the first delta of the new server has `continued`. It must be enabled once more for another model to
continue (`continues_at_fallback`), which then gets the text as the `AnswerPrefix` of a request of its own.

The new server must reach the same state as the old one from the text alone. Reasoning can be handed on only to engines
of this gateway, whose prompts are tokens (`AnswerFormat.prefix_tokens`). `_CONTINUABLE_FIELDS` lists the request
fields for which this is certain. A request with any other field (tools, a grammar, log-probabilities, penalties that
count only the answer) is not continued: its answer ends with an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.core.text_replica import TextRequest
from maitred.wire.openai.responses import REASONING_FIELDS


def _is_any(value: object) -> bool:
    return True


def _is_unset(value: object) -> bool:
    return not value


def _is_one(value: object) -> bool:
    return value == 1


_CONTINUABLE_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("model", "messages", "prompt", "stream", "stream_options", "max_tokens"), _is_any),
    **dict.fromkeys(("max_completion_tokens", "min_tokens", "priority", "service_tier", "user", "metadata"), _is_any),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "store", "temperature", "top_p", "top_k"), _is_any),
    # A repetition penalty also counts the prompt. The other two penalties count only the answer, so the new server
    # would miss its first part.
    **dict.fromkeys(("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"), _is_any),
    **dict.fromkeys(("repetition_penalty", "verbosity", "thinking", "reasoning_effort"), _is_any),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "include_reasoning"), _is_any),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logprobs", "echo", "tools"), _is_unset),
    **dict.fromkeys(("n", "best_of"), _is_one),
}
"""Request field -> predicate: whether an answer can be continued with this value."""


class TextContinuation:
    """Text of one upstream stream so far, to continue it at another server.

    Args:
        request: The request that the first server got.
        prompt_count: The number of its prompts.
        text: Text that another model has sent before.
        at_own_servers: Whether a server of the same model may continue the answer.
        at_fallback: Whether another model may continue it.
    """

    def __init__(
        self,
        request: TextRequest,
        prompt_count: int,
        text: str = "",
        *,
        at_own_servers: bool = True,
        at_fallback: bool = False,
    ) -> None:
        self.at_own_servers = at_own_servers
        self.at_fallback = at_fallback
        self._request = request
        self._text = [text]
        self._thought: list[str] = []
        self._can_continue = prompt_count == 1 == request.choices and _fields_are_continuable(request.fields)

    def on_delta(self, parts: Iterable[TextDelta]) -> None:
        """Adds deltas that are sent to the client."""
        for part in parts:
            if part.extra is not None and not self._is_thought(part):
                self._can_continue = False  # a started tool call cannot be passed on
            self._text.append(part.text)
            # Blocks that only the Messages API has cannot be passed on as text.
            self._can_continue = self._can_continue and part.scores is None and part.block is None

    def _is_thought(self, part: TextDelta) -> bool:
        """Adds the reasoning of a delta; returns False if it has anything else, or follows a text."""
        thoughts = {*(part.extra or {}).values()} if (part.extra or {}).keys() <= {*REASONING_FIELDS} else set()
        if len(thoughts) != 1 or any(self._text):
            return False
        self._thought += thoughts
        return True

    def prefix(self, tokens: int, *, estimated: bool) -> AnswerPrefix | None:
        """Returns what another model continues; None: the answer cannot be continued.

        Args:
            tokens: The number of output tokens so far.
            estimated: Whether they are estimated.
        """
        text, thought = "".join(self._text), "".join(self._thought)
        if (text or thought) and self._may_continue(text, tokens):
            return AnswerPrefix(text, tokens, estimated, thought)
        return None

    def remaining_request(self, tokens: int) -> TextRequest | None:
        """Returns the request that continues the answer at another server; None: it cannot be continued.

        Args:
            tokens: The number of output tokens so far.
        """
        request, text = self._request, "".join(self._text)
        if not text or self._thought or not self._may_continue(text, tokens):
            return None
        fields = dict(request.fields)
        remaining_tokens = None if request.max_tokens is None else request.max_tokens - tokens
        if fields.get("min_tokens"):
            fields["min_tokens"] = max(0, fields["min_tokens"] - tokens)
        return replace(request, fields=fields, max_tokens=remaining_tokens, given=text)

    def _may_continue(self, text: str, tokens: int) -> bool:
        request = self._request
        if not self._can_continue or (request.max_tokens is not None and request.max_tokens <= tokens):
            return False
        # Chat templates strip trailing white space of a message, so the next word would be joined to the last one.
        if request.chat and text[-1:].isspace():
            return False
        return not _may_end_inside_stop_string(text, request.fields.get("stop"))


def _fields_are_continuable(fields: Mapping[str, Any]) -> bool:
    if any(name not in _CONTINUABLE_FIELDS or not _CONTINUABLE_FIELDS[name](value) for name, value in fields.items()):
        return False
    if "messages" in fields:
        return bool(fields["messages"][-1]["role"] != "assistant")  # the client already sends an assistant prefix
    return isinstance(fields.get("prompt"), str)


def _may_end_inside_stop_string(text: str, stop: str | Sequence[str] | None) -> bool:
    """Whether the text ends with a proper prefix of a stop string, which the next server would not detect."""
    stops = [stop] if isinstance(stop, str) else stop or ()
    return any(text.endswith(string[:length]) for string in stops for length in range(1, len(string)))


class TokenContinuation:
    """Token ids of every unfinished choice, to resume the choices at another engine.

    Sampling depends on the seed, the choice and the token position, not on the replica. So a request that is
    resubmitted with its output so far (`EngineRequest.resumes`) gives the same answer as without the failure:
    penalties, `min_tokens`, `max_tokens` and positions count from its real beginning (see
    `core.request.EngineRequest.resumes`).

    Tokens that were on their way when a replica was lost are not missed: they were never noted here, so they are
    generated again. Tokens that were noted have gone to the client, and are not generated again. Where an answer must
    follow a grammar, the state of the grammar follows from the output too, so nothing more than this needs to be kept.

    Args:
        requests: The original engine requests, one for each prompt.
        now_s: The time from which their `deadline_in_s` counts.
    """

    def __init__(self, requests: Sequence[EngineRequest], now_s: float) -> None:
        self._requests = requests
        self._created_s = now_s
        self._unfinished_outputs: list[dict[int, list[int]]] = []
        for request in requests:
            self._unfinished_outputs.append({index: [] for index in range(request.sampling.n)})

    @property
    def unfinished_prompts(self) -> list[int]:
        """The indexes of the unfinished prompts."""
        return [prompt for prompt, choices in enumerate(self._unfinished_outputs) if choices]

    @property
    def answer_by_s(self) -> float | None:
        """The deadline on the monotonic clock; None: no deadline."""
        deadline_in_s = self._requests[0].deadline_in_s
        return None if deadline_in_s is None else self._created_s + deadline_in_s

    def on_delta(self, prompt: int, delta: TokenDelta) -> None:
        """Adds output tokens of a choice that are sent to the client."""
        self._unfinished_outputs[prompt][delta.index] += delta.tokens

    def on_end(self, prompt: int, index: int) -> None:
        """Removes a choice that has ended, at its replica or by a stop string here."""
        del self._unfinished_outputs[prompt][index]

    def remaining_requests(self, now_s: float) -> dict[int, EngineRequest]:
        """Returns the engine request that resumes each unfinished prompt, by prompt index."""
        remaining = {}
        for prompt, choices in enumerate(self._unfinished_outputs):
            if choices:
                request = self._requests[prompt]
                deadline_in_s = request.deadline_in_s
                resumes, sampling = None, request.sampling
                if self._has_output(prompt):
                    resumes = {index: [*output] for index, output in choices.items()}
                    if sampling.prompt_logprobs is not None:  # they came before the output
                        sampling = replace(sampling, prompt_logprobs=None)
                remaining[prompt] = replace(
                    request,
                    sampling=sampling,
                    resumes=resumes,
                    deadline_in_s=None if deadline_in_s is None else deadline_in_s - (now_s - self._created_s),
                )
        return remaining

    def deadline_deltas(self) -> tuple[int, list[TokenDelta]]:
        """Returns the final deltas (`FinishReason.DEADLINE`) of all unfinished choices of one prompt."""
        prompt = self.unfinished_prompts[0]
        has_output = self._has_output(prompt)
        return prompt, [
            TokenDelta(index, [], FinishReason.DEADLINE, begun=has_output) for index in self._unfinished_outputs[prompt]
        ]

    def _has_output(self, prompt: int) -> bool:
        """Whether a choice of the prompt has output or has ended."""
        choices = self._unfinished_outputs[prompt]
        return len(choices) < self._requests[prompt].sampling.n or any(choices.values())
