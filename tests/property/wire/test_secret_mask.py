"""A mask of secrets changes nothing but the secrets: no text is lost, doubled, or told after what followed it."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.inference import ChunkMetadata, TextDelta
from maitred.core.request import FinishReason
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.secret_mask import DeltaMask

SECRET = "ababacde"
MASKED = "*" * len(SECRET)
TEXTS = st.sampled_from(["a", "ab", "ba", "c", "de", SECRET])
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
BLOCK = {"type": "content_block_stop"}
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "thought": TEXTS,
        "refusal": TEXTS,
        "call": st.tuples(st.integers(0, 1), TEXTS),
        "signed": st.none(),
        "image": st.none(),
    },
)


def delta(index, text, told):
    extra = {}
    if "thought" in told:
        extra |= dict.fromkeys(("reasoning_content", "reasoning"), told["thought"])
    if "signed" in told:
        extra["thinking_blocks"] = [{"type": "redacted_thinking", "data": "x"}]
    if "refusal" in told:
        extra["refusal"] = told["refusal"]
    if "call" in told:
        number, written = told["call"]
        extra["tool_calls"] = [{"index": number, "function": {"arguments": written}}]
    if "image" in told:
        extra["images"] = [IMAGE]
    return TextDelta(index, text, extra=extra or None)


DELTAS = st.one_of(
    st.builds(delta, st.integers(0, 1), st.just("") | TEXTS, EXTRAS),
    st.builds(delta, st.integers(0, 1), TEXTS, st.just({})),
    st.builds(TextDelta, st.integers(0, 1), st.just(""), block=st.just(BLOCK)),
)


def told(parts):
    """What a reader is told of each choice, in its order; neighbouring pieces of one text are one."""
    choices = [], []
    for part in parts:
        extra, said = part.extra or {}, choices[part.index]
        thoughts = [extra[name] for name in ("reasoning_content", "reasoning") if name in extra]
        assert len({*thoughts}) <= 1
        pieces = [("thought", thoughts[0])] if thoughts else []
        pieces += [("signed", "")] * ("thinking_blocks" in extra)
        pieces += [("text", part.text), ("refusal", extra.get("refusal", ""))]
        pieces += [(call["index"], call["function"]["arguments"]) for call in extra.get("tool_calls", ())]
        pieces += [("image", "")] * ("images" in extra) + [("block", "")] * (part.block is not None)
        for member, text in pieces:
            if said and said[-1][0] == member and text:
                said[-1][1] += text
            elif text or member in ("signed", "image", "block"):
                said.append([member, text])
    return choices


def masked(parts):
    mask = DeltaMask((SECRET,))
    ends = [TextDelta(index, "", FinishReason.STOP) for index in (0, 1)]
    batches = [TextBatch([part]) for part in (*parts, *ends)]
    batches = [mask.apply(batch) if mask.is_concerned(batch) else batch for batch in batches]
    assert mask.held == {}
    return [part for batch in batches if batch is not None for part in batch.parts]


def joined(said):
    """Each text of a choice, as readers see it who do not care about the order."""
    return {member: "".join(text for name, text in said if name == member) for member, _ in said}


@given(st.lists(DELTAS, max_size=6))
def test_nothing_is_lost_doubled_or_overtaken(parts):
    for sent, shown in zip(told(parts), told(masked(parts)), strict=True):
        assert [(member, len(text)) for member, text in shown] == [(member, len(text)) for member, text in sent]
        texts, shown_texts = joined(sent), joined(shown)
        for member, text in texts.items():
            assert SECRET not in shown_texts[member]
            pairs = zip(text, shown_texts[member], strict=True)
            assert all(seen == own or (seen == "*" and SECRET in text) for own, seen in pairs)


@given(st.lists(DELTAS, max_size=6))
def test_a_secret_in_one_text_is_masked_whole(parts):
    for sent, shown in zip(told(parts), told(masked(parts)), strict=True):
        for (_, text), (_, seen) in zip(sent, shown, strict=True):
            assert SECRET not in text or MASKED in seen


@given(st.data(), st.sampled_from(["thought", "refusal", "text"]))
def test_a_secret_in_pieces_is_masked(data, member):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(SECRET) - 1))))
    pieces = [SECRET[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    parts = [delta(0, piece, {}) if member == "text" else delta(0, "", {member: piece}) for piece in pieces]
    around = TextDelta(0, "", metadata=ChunkMetadata({"system_fingerprint": "f"}))
    parts.insert(data.draw(st.integers(0, len(parts))), around)
    assert told(masked(parts)) == ([[member, MASKED]], [])
