"""Bodies of requests for images, sound and moderations, as far as the gateway reads them.

All other fields of OpenAI's API, and those of the server that is asked, are passed on.
"""

from typing import Any

import msgspec


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/images/generations`."""

    model: str
    prompt: str
    n: int = 1
    size: str | None = None
    quality: str | None = None
    user: str | None = None
    priority: int | None = None


class ImageForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of `POST /v1/images/edits` and `/v1/images/variations`, beside its files."""

    model: str
    image: Any
    prompt: str | None = None
    n: int = 1
    size: str | None = None
    quality: str | None = None


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/audio/speech`."""

    model: str
    input: str
    voice: Any = None
    response_format: str | None = None
    priority: int | None = None


class SoundForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of `POST /v1/audio/transcriptions` and `/v1/audio/translations`, beside its file."""

    model: str
    file: Any
    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None


class ModerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/moderations`."""

    model: str
    input: Any
    priority: int | None = None
