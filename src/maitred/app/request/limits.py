"""Checks of a request against its model: the rules that need more than the request itself."""

from collections.abc import Collection

from maitred.app.request.prompts import text_characters
from maitred.core.answer import InferenceRequest
from maitred.core.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from maitred.core.replica import ModelCard
from maitred.text.tokenizer import Tokenizer
from maitred.wire.openai.structured import CONSTRAINT_FIELDS as STRUCTURED_FIELDS

_MOST_CHOICES = 2_048
"""In one request, so that none can fill the engine's queue alone."""


def check_needs(request: InferenceRequest) -> None:
    """Raises InvalidRequest if it asks for more than our engine can: an answer without it would be a broken promise."""
    field = next((field for field in request.needs if field not in STRUCTURED_FIELDS), None)
    if field is not None:
        raise Unsupported(f"{field} is not supported by this server yet. Remove it.", param=field)


def check_sampling(card: ModelCard, request: InferenceRequest, max_choices: int) -> None:
    """Raises InvalidRequest if the sampling parameters ask for more choices or other tokens than there are."""
    sampling = request.sampling
    max_choices = min(card.max_choices, max_choices)
    if sampling.n > max_choices:
        raise InvalidRequest(f"n must be at most {max_choices} for this model; got {sampling.n}.", param="n")
    if len(request.prompts) * sampling.n > _MOST_CHOICES:
        raise InvalidRequest(
            f"{len(request.prompts):,} prompts with n={sampling.n} are more than {_MOST_CHOICES:,} choices. Send them "
            "in several requests.",
            param=request.prompt_param,
        )
    _check_tokens(card, sampling.logit_bias, "logit_bias")
    _check_tokens(card, sampling.stop_token_ids, "stop_token_ids")


def check_size(card: ModelCard, tokenizer: Tokenizer, request: InferenceRequest) -> None:
    """Refuses text that is too long whatever it says, before seconds are spent on tokenising it.

    Raises:
        ContextLengthExceeded: A prompt cannot fit the model's window.
    """
    fewest = max(tokenizer.fewest_tokens(text_characters(prompt)) for prompt in request.prompts)
    window = _window(card)
    if fewest >= window:
        raise ContextLengthExceeded(
            f"The prompt has at least {fewest:,} tokens, but prompt and answer together may have {window:,}. "
            f"Shorten the prompt to at most {window - 1:,} tokens.",
            param=request.prompt_param,
        )


def check_generates(card: ModelCard, name: str) -> None:
    """Raises InvalidRequest if the model answers with vectors."""
    if card.embedding_dimensions:
        raise InvalidRequest(
            f"The model {name!r} computes embeddings and generates no text. Send texts to /v1/embeddings, or name "
            "another model.",
            param="model",
        )


def check_embeds(card: ModelCard, name: str, dimensions: int | None) -> None:
    """Raises InvalidRequest unless the model answers with vectors, of at least so many dimensions."""
    if not card.embedding_dimensions:
        raise InvalidRequest(
            f"The model {name!r} generates text and computes no embeddings. Name an encoder: GET /v1/models lists what "
            "is served.",
            param="model",
        )
    if dimensions is not None and dimensions > card.embedding_dimensions:
        raise InvalidRequest(
            f"dimensions must be at most {card.embedding_dimensions} for this model; got {dimensions}.",
            param="dimensions",
        )


def check_text(card: ModelCard, text: list[int], param: str) -> None:
    """Whether an encoder can read a text.

    Raises:
        ContextLengthExceeded: It is too long.
        InvalidRequest: It is empty, or not made of this model's tokens.
    """
    if not text:
        raise InvalidRequest(f"{param} has no tokens. Give the model at least one.", param=param)
    _check_tokens(card, text, param)
    window = _window(card)
    if len(text) > window:
        raise ContextLengthExceeded(
            f"{param} has {len(text):,} tokens, but the model reads at most {window:,}. Shorten it, or split it into "
            "several.",
            param=param,
        )


def check_fits(card: ModelCard, prompt: list[int], request: InferenceRequest) -> int:
    """How many tokens may be generated for this prompt.

    Raises:
        ContextLengthExceeded: Prompt and answer are longer than the model's window.
        InvalidRequest: The prompt is empty or not made of this model's tokens, or `min_tokens` cannot be reached.
    """
    if not prompt:
        raise InvalidRequest("The prompt has no tokens. Give the model at least one.", param=request.prompt_param)
    _check_tokens(card, prompt, request.prompt_param)
    window = _window(card)
    left = window - len(prompt)
    if left < 1:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens, but prompt and answer together may have {window:,}. "
            f"Shorten the prompt to at most {window - 1:,} tokens.",
            param=request.prompt_param,
        )
    max_tokens = left if request.max_tokens is None else request.max_tokens
    if max_tokens > left:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens and {request.max_tokens_param} asks for {max_tokens:,} more, but "
            f"together they may have {window:,}. Lower {request.max_tokens_param} to at most {left:,}, or shorten the "
            "prompt.",
            param=request.max_tokens_param,
        )
    if request.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.sampling.min_tokens:,}, but there is room for {max_tokens:,} tokens. Lower it.",
            param="min_tokens",
        )
    return max_tokens


def _window(card: ModelCard) -> int:
    """A KV cache smaller than the context window is the tighter of the two."""
    return min(card.context_tokens, card.kv_capacity_tokens)


def _check_tokens(card: ModelCard, tokens: Collection[int], param: str) -> None:
    if tokens and (max(tokens) >= card.vocab_size or min(tokens) < 0):
        raise InvalidRequest(f"{param}: this model's token ids run from 0 to {card.vocab_size - 1}.", param=param)
