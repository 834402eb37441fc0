"""Answers in the cache: what is recorded is what came, and what was changed is not found."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.cache.answer import AnswerRecorder, CachedAnswer, decode_answer, encode_answer
from maitred.core.inference import ChunkMetadata, TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, Usage

SEAL = bytes(range(16))
TEXTS = st.text(max_size=8)
SCORES = st.builds(
    lambda text, logprob: [TokenScore(TokenLogprob(text, text.encode("utf-8", "replace"), logprob), [], 0)],
    TEXTS,
    st.floats(-20, 0),
)
DELTAS = st.builds(
    TextDelta,
    st.integers(0, 2),
    TEXTS,
    scores=st.none() | SCORES,
    extra=st.none() | st.builds(lambda text: {"reasoning_content": text}, TEXTS),
    metadata=st.none() | st.builds(lambda text: ChunkMetadata({"system_fingerprint": text}), TEXTS),
    token_ids=st.none() | st.lists(st.integers(0, 9), max_size=3),
    block=st.none() | st.just({"type": "content_block_start"}),
)
FINISHED = st.builds(
    TextDelta, st.integers(0, 2), TEXTS, finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
)


def pieces(deltas, index):
    """What a reader of one choice gets, without the places where its text is cut."""
    merged = []
    for delta in deltas:
        if delta.index != index:
            continue
        if merged and merged[-1].plain and delta.plain:
            merged[-1] = TextDelta(index, merged[-1].text + delta.text)
        elif delta.text or not delta.plain:
            merged.append(delta)
    return merged


@given(st.lists(st.lists(DELTAS | FINISHED, max_size=4), max_size=12), st.integers(0, 12))
def test_a_recording_has_what_came_in_order_for_each_choice(batches, looked_at):
    recorder = AnswerRecorder(1 << 20)
    for number, batch in enumerate(batches):
        recorder.add(batch)
        if number == looked_at:
            recorder.deltas()  # somebody joins here
    came = [delta for batch in batches for delta in batch]
    for index in range(3):
        assert pieces(recorder.deltas(), index) == pieces(came, index)


@given(st.lists(DELTAS, max_size=8), st.integers(0, 64))
def test_a_recording_that_is_too_long_is_given_up_whole(deltas, most):
    recorder = AnswerRecorder(most)
    recorder.add(deltas)
    sizes = [len(delta.text) if delta.plain else len(msgspec.msgpack.encode(delta)) for delta in deltas]
    assert recorder.given_up is (sum(sizes) > most)
    if recorder.given_up:
        recorder.add([TextDelta(0, "more")])
        assert recorder.deltas() == []


def answer_of(deltas):
    usage = Usage(3, 5, 1, reasoning_tokens=2, details={"audio_tokens": 1})
    return CachedAnswer(deltas, usage, [FinishReason.STOP], stored_s=17.0, ignored_fields=["user"])


@given(st.lists(DELTAS | FINISHED, max_size=8))
def test_an_answer_is_read_as_it_was_written(deltas):
    assert decode_answer(encode_answer(answer_of(deltas), SEAL), SEAL) == answer_of(deltas)


@given(st.lists(DELTAS, max_size=4), st.data())
def test_a_changed_answer_is_none(deltas, data):
    written = encode_answer(answer_of(deltas), SEAL)
    place = data.draw(st.integers(0, len(written) - 1))
    changed = bytearray(written)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert decode_answer(bytes(changed), SEAL) is None
    assert decode_answer(written[:place], SEAL) is None
    assert decode_answer(written, bytes(16)) is None


@given(st.binary(max_size=64))
def test_any_bytes_are_none(data):
    assert decode_answer(data, SEAL) is None
