"""Embeddings, images, sound and moderations of another server: passed on, limited, billed, retried, and cancelled."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

import asyncio
import contextlib
import hashlib
import io
import wave
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.api.embeddings import EmbeddingRoutes
from maitred.api.media.passthrough import PassthroughRoutes
from maitred.app.request.passthrough import Passthrough
from maitred.config.tree import TextModelConfig
from maitred.core.clock import SystemClock
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.core.secret import Secret
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.testing.scripted_media import SPEECH, TRANSCRIPT, MediaReply, ScriptedMedia
from tests.support.upstream_gateway import upstream_gateway

pytestmark = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client, of what OpenAI drops

KEY = "sk-of-the-operator-1234"
NAMES = {
    "vectors": ("embedding", "text-embedding-3-small"),
    "pictures": ("image_generation", "dall-e-3"),
    "counted-pictures": ("image_generation", "gpt-image-1"),
    "voice": ("audio_speech", "tts-1"),
    "ears": ("audio_transcription", "whisper-1"),
    "counting-ears": ("audio_transcription", "gpt-4o-transcribe"),
    "judge": ("moderation", "omni-moderation-latest"),
    "talker": ("chat", "gpt-5-mini"),
}
PRICES = {
    "vectors": PriceConfig(prompt=0.02),
    "pictures": PriceConfig(images={"*": 0.04, "1024x1024/hd": 0.08}),
    "counted-pictures": PriceConfig(prompt=5.0, output=40.0),
    "voice": PriceConfig(characters=15.0),
    "ears": PriceConfig(audio_minute=0.006),
    "counting-ears": PriceConfig(prompt=2.5, output=10.0),
}


def model_config(url, mode, name, **settings):
    upstream = UpstreamConfig(url=url, model=name, api_key=Secret(KEY, "{env: KEY}"), **settings)
    return TextModelConfig(mode=mode, upstreams=[upstream])


@asynccontextmanager
async def media_gateway(replies=(), *, limited=(), upload_bytes=64 << 20, further_models=None, routing=None, **options):
    """A gateway before a scripted server that has a model of each kind."""

    def routes(pipeline):
        service = Passthrough(pipeline._router, pipeline._flow_controller, pipeline._retry_policy, SystemClock())
        passthrough = PassthroughRoutes(service, upload_bytes, 60.0)
        return [*passthrough.routes(), *EmbeddingRoutes(None, strict=False, passthrough=passthrough).routes()]

    async with ScriptedMedia(replies) as server:
        models = {name: model_config(server.url, *kind) for name, kind in NAMES.items()}
        async with upstream_gateway(
            server.url,
            models={**models, **(further_models or {})},
            limited=limited,
            admitting=AdmissionConfig(prices=PRICES),
            routing=routing or RoutingConfig(),
            further=routes,
            **options,
        ) as system:
            async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="callers-own", max_retries=0) as client:
                yield system, server, client


def sound(seconds, name="question.wav"):
    """A WAV file of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(8000)
        written.writeframes(bytes(int(16_000 * seconds)))
    return name, file.getvalue()


async def last_event(system):
    await system.wait_until(lambda: system.contexts)
    return system.ledger.events[-1]


async def test_embeddings_are_those_of_the_server_and_billed_by_its_count():
    async with media_gateway() as (system, server, client):
        answer = await client.embeddings.create(
            model="vectors", input=["one", "two"], encoding_format="float", dimensions=3, user="u1"
        )
        assert [entry.embedding for entry in answer.data] == [[0.5, -0.25, 0], [0.5, -0.25, 1]]
        assert (answer.model, answer.usage.prompt_tokens) == ("vectors", 14)
        (asked,) = server.asked
        assert (asked.path, asked.fields["model"]) == ("embeddings", "text-embedding-3-small")
        assert (asked.fields["dimensions"], asked.fields["user"]) == (3, "u1")
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        assert "callers-own" not in str(asked)
        event = await last_event(system)
        assert (event.prompt_tokens, event.output_tokens, event.cost_nusd) == (14, 0, 280)
        assert (event.model, event.route, event.outcome) == ("vectors", "/v1/embeddings", Outcome.FINISHED)
        assert system.nothing_left


async def test_images_are_billed_by_size_and_quality_or_by_tokens():
    async with media_gateway() as (system, server, client):
        answer = await client.images.generate(
            model="pictures", prompt="a door", n=2, size="1024x1024", quality="hd", response_format="b64_json"
        )
        assert [image.b64_json for image in answer.data] == ["aW1hZ2U="] * 2
        await system.wait_until(lambda: len(system.contexts) == 1)
        event = system.ledger.events[-1]
        assert (event.cost_nusd, event.price) == (160_000_000, "2 images at 0.08 USD")
        await client.images.generate(model="counted-pictures", prompt="a door")
        await system.wait_until(lambda: len(system.contexts) == 2)
        event = system.ledger.events[-1]
        assert (event.prompt_tokens, event.output_tokens, event.cost_nusd) == (50, 4160, 250_000 + 166_400_000)
        assert [each.fields["model"] for each in server.asked] == ["dall-e-3", "gpt-image-1"]


async def test_images_are_edited_and_varied_by_forms():
    async with media_gateway() as (_, server, client):
        await client.images.edit(model="pictures", image=("a.png", b"\x89PNG edit"), prompt="add a cat", n=1)
        await client.images.create_variation(model="pictures", image=("a.png", b"\x89PNG vary"), n=3)
        edit, variation = server.asked
        assert (edit.path, edit.fields) == ("images/edits", {"model": "dall-e-3", "prompt": "add a cat", "n": "1"})
        assert edit.files["image"] == hashlib.sha256(b"\x89PNG edit").hexdigest()
        assert (variation.path, variation.fields["n"]) == ("images/variations", "3")


async def test_speech_is_a_file_that_comes_in_pieces():
    async with media_gateway() as (system, server, client):
        async with client.audio.speech.with_streaming_response.create(
            model="voice", voice="alloy", input="Good evening.", response_format="mp3"
        ) as answer:
            assert answer.headers["content-type"] == "audio/mpeg"
            assert await answer.read() == SPEECH
        event = await last_event(system)
        assert (event.cost_nusd, event.price) == (195_000, "13 characters at 15 USD per million")
        assert server.asked[0].fields == {
            "model": "tts-1",
            "voice": "alloy",
            "input": "Good evening.",
            "response_format": "mp3",
        }


@pytest.mark.parametrize(
    ("model", "options", "cost_nusd", "price"),
    [
        ("ears", {}, 900_000, "9.0 s at 0.006 USD a minute"),  # the server says 9 seconds
        ("ears", {"response_format": "text"}, 300_000, "3.0 s at 0.006 USD a minute"),  # the file says 3
        ("counting-ears", {}, 225_000 + 80_000, "2.5/2.5/10 USD per million"),
    ],
)
async def test_sound_is_transcribed_and_billed_by_seconds_or_tokens(model, options, cost_nusd, price):
    async with media_gateway() as (system, server, client):
        answer = await client.audio.transcriptions.create(model=model, file=sound(3), **options)
        assert (answer if isinstance(answer, str) else answer.text).strip() == TRANSCRIPT
        event = await last_event(system)
        assert (event.cost_nusd, event.price) == (cost_nusd, price)
        assert server.asked[0].files["file"] == hashlib.sha256(sound(3)[1]).hexdigest()


async def test_a_transcription_is_streamed_and_a_translation_is_not():
    async with media_gateway() as (system, server, client):
        stream = await client.audio.transcriptions.create(model="counting-ears", file=sound(1), stream=True)
        kinds = [event.type async for event in stream]
        assert kinds == ["transcript.text.delta", "transcript.text.done"]
        event = await last_event(system)
        assert (event.prompt_tokens, event.output_tokens) == (90, 8)
        translation = await client.audio.translations.create(model="ears", file=sound(1))
        assert translation.text == TRANSCRIPT
        assert server.asked[-1].path == "audio/translations"


async def test_texts_are_judged():
    async with media_gateway() as (_, server, client):
        answer = await client.moderations.create(model="judge", input="hello")
        assert (answer.model, answer.results[0].flagged) == ("judge", False)
        assert server.asked[0].fields == {"model": "omni-moderation-latest", "input": "hello"}


async def test_a_large_recording_goes_on_as_it_is():
    async with media_gateway() as (_, server, client):
        recording = bytes(range(251)) * 100_000  # 25 MB, with bytes that no text has
        await client.audio.transcriptions.create(model="ears", file=("long.mp3", recording))
        assert server.asked[0].files["file"] == hashlib.sha256(recording).hexdigest()
        assert server.asked[0].fields["model"] == "whisper-1"


async def test_a_form_that_is_too_large_is_refused_in_a_sentence():
    async with media_gateway(upload_bytes=100_000) as (_, server, client):
        with pytest.raises(openai.APIStatusError, match=r"larger than 100,000 bytes.*max_upload_bytes") as refused:
            await client.audio.transcriptions.create(model="ears", file=("long.mp3", bytes(200_000)))
        assert refused.value.status_code == 413
        assert not server.asked


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "images/generations",
            {"model": "vectors", "prompt": "x"},
            "its mode is `embedding`. Send its requests to /v1/emb",
        ),
        ("embeddings", {"model": "pictures", "input": "x"}, "its mode is `image_generation`"),
        ("chat/completions", {"model": "voice", "messages": [{"role": "user", "content": "x"}]}, "/v1/audio/speech"),
        ("audio/speech", {"model": "talker", "input": "x"}, "its mode is `chat`"),
        ("audio/speech", {"model": "voice"}, "as `input`"),
        ("images/generations", {"model": "pictures", "n": 1000}, "n must be a number of images from 1 to 100"),
        ("images/generations", {"prompt": "x"}, "Name the model"),
        ("images/generations", {"model": "nobody", "prompt": "x"}, "is not served here"),
        ("audio/transcriptions", {"model": "ears"}, "takes a form with files"),
    ],
)
async def test_what_a_model_is_not_for_is_said(path, body, words):
    async with media_gateway() as (system, server, _):
        answer = await system.client.post(f"/v1/{path}", json=body)
        assert 400 <= answer.status_code < 500
        assert words in answer.json()["error"]["message"]
        assert not server.asked
        assert system.nothing_left


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (MediaReply(400, b'{"error": {"message": "Your prompt is too long.", "param": "prompt"}}'), 400, "too long"),
        (MediaReply(404, b'{"detail": "Not Found"}'), 400, "has no /images/generations"),
        (MediaReply(200, b"<html>", "text/html"), 502, ""),
        (MediaReply(200, b"not json"), 502, ""),
        (MediaReply(200, b'{"error": {"message": "no", "code": "invalid_request_error"}}'), 400, "no"),
        (MediaReply(401), 503, "operator"),
        (MediaReply(200, cut=True), 502, ""),
    ],
)
async def test_what_the_server_cannot_do_is_told_and_costs_nothing(reply, status, words):
    async with media_gateway([reply]) as (system, _, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.images.generate(model="pictures", prompt="a door")
        assert refused.value.status_code == status
        assert words in refused.value.message
        await system.wait_until(lambda: system.contexts)
        assert [event.cost_nusd for event in system.ledger.events] in ([], [0])
        assert system.nothing_left


async def test_a_failure_is_tried_again_and_billed_once():
    replies = [MediaReply(503, headers={"retry-after": "0"}), MediaReply(200, cut=True)]
    async with media_gateway(replies, retries=2) as (system, server, client):
        answer = await client.audio.transcriptions.create(model="ears", file=sound(2))
        assert answer.text == TRANSCRIPT
        assert len(server.asked) == 3
        assert {each.files["file"] for each in server.asked} == {hashlib.sha256(sound(2)[1]).hexdigest()}
        await system.wait_until(lambda: system.contexts)
        assert [event.cost_nusd for event in system.ledger.events] == [900_000]
        assert system.contexts[0].recoveries == 2


async def test_another_model_answers_where_the_first_one_cannot():
    async with ScriptedMedia() as second:
        routing = RoutingConfig(fallbacks={"pictures": FallbackConfig(general=["other-pictures"])})
        other = {"other-pictures": model_config(second.url, "image_generation", "flux")}
        async with media_gateway([MediaReply(500)], routing=routing, further_models=other) as (
            system,
            _,
            client,
        ):
            answer = await client.images.with_raw_response.generate(model="pictures", prompt="a door")
            assert answer.headers["x-maitred-fallback"] == "general=other-pictures"
            assert second.asked[0].fields["model"] == "flux"
            await system.wait_until(lambda: system.contexts)
            assert system.contexts[0].model == "other-pictures"


async def test_a_caller_who_leaves_ends_the_request_at_the_server_and_pays():
    async with media_gateway([MediaReply(stall=True)]) as (system, server, client):
        asking = asyncio.create_task(client.images.generate(model="pictures", prompt="a door"))
        await server.begun.wait()
        asking.cancel()
        await system.wait_until(lambda: system.contexts and server.left)
        event = system.ledger.events[-1]
        assert (event.outcome, event.cost_nusd) == (Outcome.CANCELLED, 40_000_000)
        await system.wait_until(lambda: system.nothing_left)


async def test_budgets_and_rates_hold():
    limits = [
        Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=10**8),
        Limit(id="rate", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=3),
    ]
    async with media_gateway(limited=limits) as (_, server, client):
        with pytest.raises(openai.RateLimitError):
            await client.images.generate(model="pictures", prompt="a door", n=3)
        for _ in range(2):
            await client.images.generate(model="pictures", prompt="a door")
        with pytest.raises(openai.RateLimitError):
            await client.images.generate(model="pictures", prompt="a door")
        assert len(server.asked) == 2
        with pytest.raises(openai.BadRequestError, match="may cost"):
            await client.images.generate(model="pictures", prompt="a", extra_headers={"x-maitred-max-cost-usd": "0.01"})


async def test_a_stream_that_breaks_off_never_looks_whole():
    async with media_gateway([MediaReply(200, SPEECH, "audio/mpeg", cut=True)]) as (system, _, _client):
        with contextlib.suppress(httpx.RemoteProtocolError):  # where a part has gone out; else it is an error
            answer = await system.client.post("/v1/audio/speech", json={"model": "voice", "input": "Good evening."})
            assert answer.status_code == 502
        await system.wait_until(lambda: system.contexts)
        assert system.ledger.events[-1].outcome is Outcome.FAILED
        assert system.ledger.events[-1].cost_nusd == 0


async def test_the_operators_key_is_in_no_answer():
    repeated = b'{"created": 1, "data": [{"url": "http://x/' + KEY.encode() + b'"}]}'
    async with media_gateway([MediaReply(200, repeated), MediaReply(400, repeated)]) as (system, _, _client):
        for _ in range(2):
            answer = await system.client.post("/v1/images/generations", json={"model": "pictures", "prompt": "x"})
            assert KEY not in answer.text


async def test_fields_of_the_configuration_are_added():
    async with ScriptedMedia() as second:
        added = model_config(second.url, "audio_transcription", "w", parameters={"language": "de", "prompt": "ours"})
        async with media_gateway(further_models={"german": added}) as (_, _, client):
            await client.audio.transcriptions.create(model="german", file=sound(1), prompt="theirs")
            assert second.asked[0].fields["language"] == "de"
            assert second.asked[0].fields["prompt"] == "theirs"
