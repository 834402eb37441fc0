"""The short way through an answer comes to the same records as the long one."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from maitred.load.measure.record import RequestRecord
from maitred.load.play.client.answer import StreamRecorder, StreamTotals

HEADERS = {b"content-type": b"text/event-stream"}

texts = st.text(max_size=12) | st.sampled_from(
    ['"', '\\"', "a", "", "chat", "index", '"}]}\n\n', "\n\ndata: ", "é", "\\"]
)
events = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["chatcmpl-1", "chatcmpl-2"]),
        "choices": st.lists(
            st.fixed_dictionaries(
                {"index": st.just(0), "delta": st.fixed_dictionaries({"content": texts})},
                optional={"finish_reason": st.sampled_from([None, "stop"]), "text": st.just("no")},
            ),
            min_size=1,
            max_size=2,
        ),
    },
    optional={
        "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 4}]),
        "error": st.sampled_from([None, {"message": "no"}]),
    },
)


def read(stream, *, short):
    record = RequestRecord(0, 0, "", 0.0, 0)
    reader = StreamRecorder(record, StreamTotals(), keep_text=not short)
    reader.head(200, HEADERS, 0.0)
    for at_s, data in enumerate(stream):
        reader.body(data, float(at_s))
    return list(record.arrivals_s), record.finish_reason, record.output_tokens, reader.failure, reader.outcome()


@given(st.lists(events, max_size=12), st.booleans(), st.lists(st.integers(0, 400), max_size=6))
def test_records_do_not_depend_on_whether_the_text_is_kept(sent, ascii_only, cuts):
    stream = [b"data: " + json.dumps(event, ensure_ascii=ascii_only).encode() + b"\n\n" for event in sent]
    stream.append(b"data: [DONE]\n\n")
    whole = b"".join(stream)
    assert read(stream, short=True) == read(stream, short=False)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[begin:end] for begin, end in itertools.pairwise(edges)]
    assert read(pieces, short=True) == read(pieces, short=False)
