"""What is written with stencils is, byte for byte, what the encoder writes."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.chat import ChatFormatter
from maitred.api.completions import CompletionFormatter
from maitred.api.messages import MessagesFormatter
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.wire.openai.decode import decode_chat, decode_completion
from maitred.wire.sse import SSEDecoder

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
words = st.text(st.sampled_from('ab"\\\n\x00é\u2028😀'), min_size=1)
parts = st.lists(
    st.one_of(
        st.builds(TextDelta, st.just(0), texts | words),
        st.builds(TextDelta, st.just(0), texts, continued=st.just(True)),
        st.builds(TextDelta, st.just(0), st.just(""), extra=st.just({"reasoning_content": "so"})),
        st.builds(TextDelta, st.just(0), words, extra=st.just({"refusal": "no"})),
    ),
    max_size=8,
)


def answered_by(model):
    return RequestContext("req-1", 0.0, model=model)


def fields(events):
    return [msgspec.json.decode(event.data) for event in SSEDecoder().feed(events)]


@given(model=words, parts=parts, usage=st.booleans(), choices=st.integers(1, 3), data=st.data())
def test_chat_and_completions(model, parts, usage, choices, data):
    parts = [msgspec.structs.replace(part, index=data.draw(st.integers(0, choices - 1))) for part in parts]
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": usage}, "n": choices}
    chat = ChatFormatter(
        decode_chat(msgspec.json.encode({**asked, "messages": [{"role": "user", "content": "hi"}]}), strict=True),
        "chatcmpl-1",
        answered_by(model),
    )
    completion = decode_completion(msgspec.json.encode({**asked, "prompt": "hi"}), strict=True)
    text = CompletionFormatter(completion, "cmpl-1", answered_by(model))
    for shape in (chat, text):
        assert shape.events(parts) == b"".join(map(shape._encode_part, parts))


@given(
    model=words,
    texts=st.lists(texts | words, max_size=3),
    finish=st.sampled_from(FinishReason),
    extras=st.lists(st.just({"reasoning_content": "so"}), max_size=1),
    scores=st.none() | st.just([]),
    counts=st.tuples(*[st.integers(0, 2**31)] * 3),
    estimated=st.booleans(),
    thought=st.sampled_from([0, 0, 5]),
    functions=st.booleans(),
    choices=st.sampled_from([1, 1, 2]),
)
def test_whole_chats(model, texts, finish, extras, scores, counts, estimated, thought, functions, choices):
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "functions": [{"name": "f"}] * functions}
    shape = ChatFormatter(decode_chat(msgspec.json.encode(asked), strict=True), "chatcmpl-1", answered_by(model))
    whole = [CollectedChoice(texts, scores, extras, finish) for _ in range(choices)]
    usage = Usage(*counts, estimated, thought)
    assert shape.whole(whole, usage) == shape.in_full(whole, usage)


@given(model=words, parts=parts)
def test_messages(model, parts):
    quick, plain = (MessagesFormatter("msg_1", answered_by(model), thoughts=True) for _ in range(2))
    end = [TextDelta(0, "", FinishReason.STOP)]
    assert quick.events([*parts, *end]) == b"".join(map(plain._encode_part, [*parts, *end]))


@given(model=words, text=texts)
def test_what_a_client_reads(model, text):
    request = decode_completion(msgspec.json.encode({"model": model, "prompt": "", "stream": True}), strict=True)
    (event,) = fields(CompletionFormatter(request, "cmpl-1", answered_by(model)).events([TextDelta(0, text)]))
    assert event["choices"][0]["text"] == text
    assert event["model"] == model
