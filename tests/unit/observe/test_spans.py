"""A request's timeline as spans."""

from maitred.core.context import Outcome, RequestContext
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.timeline import SpanName, TimelineSpan
from maitred.core.trace_context import TraceContext
from maitred.observe.spans import make_spans

TRACE = TraceContext("1" * 32, "2" * 16, sampled=True)


def ended(route):
    sampling = SamplingParams(max_tokens=0, seed=0)
    context = RequestContext(
        "req-1", 100.0, route=route, model="m", request=InferenceRequest(model="m", prompts=["x"], sampling=sampling)
    )
    context.timeline.trace = TRACE
    attempt = context.timeline.begin(SpanName.ATTEMPT, 101.0, replica="local")
    engine = TimelineSpan(SpanName.ENGINE, 101.25, {"replica": "local", "texts": 2})
    encode = TimelineSpan(SpanName.ENCODE, 101.5, {"prompt_tokens": 7, "batch": 2.0})
    engine.inside.append(encode)
    attempt.inside.append(engine)
    for span in (encode, engine, attempt):
        span.end(102.0)
    context.prompt_tokens, context.first_token_s, context.finish_reasons = 7, 102.0, [FinishReason.STOP]
    context.close(Outcome.FINISHED, 200, 102.5)
    return context


def test_embeddings_generate_nothing_and_say_so():
    root, attempt, engine, encode = make_spans(ended("/v1/embeddings"), 0.0)
    assert root.name == "embeddings m"
    attributes = {name: value for name, value in root.attributes.items() if name.startswith("gen_ai.")}
    assert attributes == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "maitred",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 7,
    }
    assert (engine.parent_id, encode.parent_id) == (attempt.span_id, engine.span_id)
    assert (encode.name, encode.engine, encode.began_ns, encode.ended_ns) == ("encode", "local", 101.5e9, 102e9)
    assert encode.attributes == {"maitred.prompt_tokens": 7, "maitred.batch": 2.0}


def test_an_answer_says_how_it_was_asked_for_and_how_it_ended():
    root, *_ = make_spans(ended("/v1/completions"), 0.0)
    assert root.name == "text_completion m"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == 2.0
    assert root.attributes["gen_ai.request.temperature"] == 1.0
