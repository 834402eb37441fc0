"""The pipeline, with a replica that lives in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.planner import RequestBounds
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.clock import SystemClock
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, ReplicaLost, ReplicaUnavailable
from maitred.core.inference import Conversation, InferenceRequest, TextDelta
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, TokenDelta, TokenLogprobs, Usage
from maitred.core.tenancy import ANONYMOUS
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer
from tests.support.admission_services import AdmissionSetup

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
EOS = 3
CARD = ModelCard(
    name="m",
    context_tokens=64,
    vocab_size=TOKENIZER.vocab_size,
    eos_token_ids=(EOS,),
    max_sequences=8,
    kv_capacity_tokens=1024,
    max_choices=4,
    dtype="none",
    device="none",
)
STOP, LENGTH, DEADLINE = FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE


class FrozenClock:
    """Ticks by one second per look."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        self.now_s += 1
        return self.now_s

    def wall_s(self):
        return 0.0


class MemoryReplica:
    """Plays prepared batches; notes what it was asked and what was cancelled."""

    def __init__(self, *batches: list[TokenDelta], up=True):
        self.batches = batches
        self.up = up
        self.requests: list[EngineRequest] = []
        self.cancelled: list[tuple[str, int]] = []
        self.open = 0

    def card(self) -> ModelCard:
        if not self.up:
            raise ReplicaUnavailable
        return CARD

    def load(self) -> LoadReport:
        return LoadReport()

    weight = 1.0

    def count_unreported(self) -> int:
        return 0

    def on_change(self, listener):
        pass

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator["MemoryStream"]:
        if not self.up:
            raise ReplicaUnavailable
        self.requests.append(request)
        self.open += 1
        try:
            yield MemoryStream(self, request)
        finally:
            self.open -= 1


class MemoryStream:
    def __init__(self, replica, request):
        self.replica, self.request = replica, request

    async def __aiter__(self):
        for batch in self.replica.batches:
            yield batch

    def cancel(self, index):
        self.replica.cancelled.append((self.request.id, index))


def ask(prompt="Hi", stops=(), **sampling):
    own = {key: sampling.pop(key) for key in ("model", "max_tokens", "seed", "echo") if key in sampling}
    prompts = prompt if isinstance(prompt, list) else [prompt]
    params = SamplingParams(max_tokens=0, seed=0, **sampling)
    return InferenceRequest(
        **{"model": "m", "prompts": prompts, "sampling": params, "stops": stops, "max_tokens": 20, **own}
    )


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def pipeline(replica, **options):
    dispatcher = Dispatcher("m", [Endpoint("local", replica)], DispatchConfig(recoveries=0), SystemClock())
    catalog = Catalog([ServedModel("m", [replica], TOKENIZER)])
    return Pipeline(
        Router(catalog),
        LocalFlowController({"m": dispatcher}, AdmissionSetup().admission, FrozenClock()),
        clock=FrozenClock(),
        **options,
    )


async def run(replica, asked, context=None, **options):
    """All parts of an answer, merged per choice."""
    context = context or RequestContext("req", 0.0)
    parts: list[TextDelta] = []
    async with pipeline(replica, **options).generate(asked, context) as answer:
        async for batch in answer:
            parts += batch
    assert replica.open == 0
    return parts, context


def text_of(parts, index=0):
    return "".join(part.text for part in parts if part.index == index)


async def test_tokens_become_text_and_the_end_token_is_counted_not_shown():
    hello = ids("Hello there")
    replica = MemoryReplica(
        [TokenDelta(0, hello[:1], cached_tokens=1)], [TokenDelta(0, hello[1:])], [TokenDelta(0, [EOS], finish=STOP)]
    )
    parts, context = await run(replica, ask())
    assert text_of(parts) == "Hello there"
    assert [part.finish for part in parts][-1] is STOP
    assert context.usage == Usage(len(replica.requests[0].prompt), len(hello) + 1, 1)


async def test_what_a_request_leaves_open_is_as_the_model_has_it():
    replica = MemoryReplica([TokenDelta(0, [EOS], finish=STOP)])
    model = ServedModel("m", [replica], TOKENIZER, defaults=GenerationDefaults(temperature=0.3, top_k=5))
    dispatcher = Dispatcher("m", [Endpoint("local", replica)], DispatchConfig(recoveries=0), SystemClock())
    served = Pipeline(
        Router(Catalog([model])),
        LocalFlowController({"m": dispatcher}, AdmissionSetup().admission, FrozenClock()),
        clock=FrozenClock(),
    )
    asked = msgspec.structs.replace(ask(top_k=7), unset_fields=frozenset({"temperature"}))
    async with served.generate(asked, RequestContext("req", 0.0)) as answer:
        assert [part async for batch in answer for part in batch]
    assert (replica.requests[0].sampling.temperature, replica.requests[0].sampling.top_k) == (0.3, 7)


async def test_a_plain_token_that_stops_is_hidden_only_when_it_was_asked_to_stop():
    (x,) = ids(" there")
    parts, _ = await run(MemoryReplica([TokenDelta(0, [x], finish=STOP)]), ask(stop_token_ids=(x,)))
    assert text_of(parts) == ""
    parts, _ = await run(MemoryReplica([TokenDelta(0, [x], finish=LENGTH)]), ask())
    assert text_of(parts) == " there"


async def test_a_stop_string_across_tokens_cuts_cancels_and_counts():
    tokens = ids("one two three four")
    upto = len(ids("one two three"))
    replica = MemoryReplica(*([TokenDelta(0, [token])] for token in tokens))
    parts, context = await run(replica, ask(stops=("wo thr",)))
    assert text_of(parts) == "one t"
    assert parts[-1].finish is STOP
    assert len(replica.cancelled) == 1
    assert context.completion_tokens <= upto


async def test_where_the_stop_falls_does_not_depend_on_how_tokens_were_batched():
    tokens = ids("one two three four")
    one_by_one, context_one = await run(MemoryReplica(*([TokenDelta(0, [t])] for t in tokens)), ask(stops=(" three",)))
    at_once, context_all = await run(MemoryReplica([TokenDelta(0, tokens, finish=STOP)]), ask(stops=(" three",)))
    piled_up, context_pile = await run(MemoryReplica([TokenDelta(0, [t]) for t in tokens]), ask(stops=(" three",)))
    assert text_of(one_by_one) == text_of(at_once) == text_of(piled_up) == "one two"
    assert context_one.completion_tokens == context_all.completion_tokens == context_pile.completion_tokens


async def test_a_stop_string_that_completes_with_the_last_token_wins_over_length():
    tokens = ids("one two")
    replica = MemoryReplica([TokenDelta(0, tokens, finish=LENGTH)])
    parts, _ = await run(replica, ask(stops=(" two",)))
    assert (text_of(parts), parts[-1].finish) == ("one", STOP)
    assert replica.cancelled == []


async def test_stop_strings_are_overlooked_before_min_tokens():
    tokens = ids("one two one two")
    count = len(tokens)
    parts, context = await run(
        MemoryReplica([TokenDelta(0, tokens, finish=LENGTH)]), ask(stops=(" two",), min_tokens=count - 1)
    )
    assert text_of(parts) == "one two one"
    assert context.completion_tokens == count


async def test_the_first_token_after_min_tokens_may_complete_a_stop_string():
    tokens = [*ids("a"), *ids("b"), *ids("c")]
    assert len(tokens) == 3
    for min_tokens, text in [(0, "a"), (1, "a"), (2, "abc")]:
        replica = MemoryReplica([TokenDelta(0, tokens, finish=LENGTH)])
        parts, _ = await run(replica, ask(stops=("b",), min_tokens=min_tokens))
        assert text_of(parts) == text


async def test_text_that_was_held_back_comes_out_at_the_end():
    tokens = ids("one two")
    parts, _ = await run(MemoryReplica([TokenDelta(0, tokens, finish=LENGTH)]), ask(stops=(" twofold",)))
    assert text_of(parts) == "one two"


async def test_choices_of_several_prompts_have_different_indexes():
    a, b = ids(" there"), ids("Hello")
    replica = MemoryReplica(
        [TokenDelta(0, a), TokenDelta(1, b)], [TokenDelta(1, b, finish=LENGTH), TokenDelta(0, a, finish=LENGTH)]
    )
    parts, context = await run(replica, ask(prompt=["x", "y"], n=2))
    assert [text_of(parts, index) for index in range(4)] == [" there there", "HelloHello"] * 2
    assert context.completion_tokens == 8
    assert len({request.id for request in replica.requests}) == 2


async def test_deltas_that_piled_up_become_one_part_per_choice():
    a = ids("Hello")
    replica = MemoryReplica(
        [
            TokenDelta(0, a),
            TokenDelta(1, a),
            TokenDelta(0, a),
            TokenDelta(1, a, finish=LENGTH),
            TokenDelta(0, a, LENGTH),
        ]
    )
    parts, _ = await run(replica, ask(n=2))
    assert [(part.index, part.text, part.finish) for part in parts] == [
        (0, "HelloHelloHello", LENGTH),
        (1, "HelloHello", LENGTH),
    ]


async def test_seeds_are_the_callers_or_drawn_per_prompt():
    draws = iter([11, 12])
    done = [TokenDelta(0, ids("x"), finish=LENGTH)]
    replica = MemoryReplica(done)
    await run(replica, ask(prompt=["a", "b"]), draw_seed=lambda: next(draws))
    await run(replica, ask(prompt=["a", "b"], seed=7))
    assert [request.sampling.seed for request in replica.requests] == [11, 12, 7, 7]


@pytest.mark.parametrize(("asked_s", "passed_s"), [(None, None), (0.05, 0.05), (0.001, 0.02)])
async def test_the_replica_hears_what_a_reader_wants_between_tokens_within_reason(asked_s, passed_s):
    replica = MemoryReplica([TokenDelta(0, ids("x"), finish=LENGTH)])
    await run(replica, msgspec.structs.replace(ask(), itl_objective_s=asked_s), bounds=RequestBounds(min_itl_s=0.02))
    assert replica.requests[0].itl_objective_s == passed_s


async def test_max_tokens_is_what_the_window_leaves_if_not_given():
    replica = MemoryReplica([TokenDelta(0, ids("x"), finish=LENGTH)])
    await run(replica, ask(prompt=[[5] * 10], max_tokens=None))
    assert replica.requests[0].sampling.max_tokens == 54
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens .* 55 .* 64.* at most 54"):
        await run(replica, ask(prompt=[[5] * 10], max_tokens=55))
    with pytest.raises(ContextLengthExceeded) as error:
        await run(replica, ask(prompt=[[5] * 64]))
    assert error.value.param == "prompt"


async def test_text_that_is_far_too_long_is_refused_unread(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    with pytest.raises(ContextLengthExceeded, match=r"at least .* Shorten the prompt") as error:
        await run(MemoryReplica(), ask(prompt="word " * 1_000_000))
    assert error.value.param == "prompt"


async def test_a_kv_cache_smaller_than_the_window_is_the_limit():
    small = msgspec.structs.replace(CARD, kv_capacity_tokens=32)
    replica = MemoryReplica([TokenDelta(0, ids("x"), finish=LENGTH)])
    replica.card = lambda: small
    await run(replica, ask(prompt=[[5] * 10], max_tokens=None))
    assert replica.requests[0].sampling.max_tokens == 22


async def test_a_prompt_is_counted_once_however_many_choices_find_it_in_the_cache():
    first, last = TokenDelta(0, ids("x"), LENGTH, cached_tokens=16), TokenDelta(1, ids("x"), LENGTH, cached_tokens=32)
    _, context = await run(MemoryReplica([last, first]), ask(prompt=[[5] * 40], n=2))
    assert context.usage == Usage(40, 2, 16)


@pytest.mark.parametrize(("begun", "billed_tokens"), [(False, 0), (True, 40)])
async def test_what_expires_before_anything_of_it_was_computed_costs_nothing(begun, billed_tokens):
    replica = MemoryReplica([TokenDelta(index, [], DEADLINE, begun=begun) for index in range(2)])
    dispatcher = Dispatcher("m", [Endpoint("local", replica)], DispatchConfig(), SystemClock())
    admission_setup, context = AdmissionSetup(), RequestContext("req", 0.0)
    served = Pipeline(
        Router(Catalog([ServedModel("m", [replica], TOKENIZER)])),
        LocalFlowController({"m": dispatcher}, admission_setup.admission, SystemClock()),
    )
    asked = msgspec.structs.replace(ask(prompt=[[5] * 40], n=2), partial=True)
    async with served.generate(asked, context) as answer:
        parts = [part async for batch in answer for part in batch]
    assert [(part.text, part.finish) for part in parts] == [("", DEADLINE), ("", DEADLINE)]
    assert (context.usage, context.first_token_s) == (Usage(billed_tokens, 0), None)
    (event,) = admission_setup.ledger.events
    assert (event.outcome, event.prompt_tokens, event.cost_nusd) == (
        Outcome.FINISHED,
        billed_tokens,
        billed_tokens * 1000,
    )
    assert dispatcher.core.predictor.served == billed_tokens


async def test_a_chat_is_rendered_with_the_models_template():
    replica = MemoryReplica([TokenDelta(0, ids("x"), finish=LENGTH)])
    messages = [{"role": "user", "content": "Hi"}]
    await run(replica, ask(prompt=[Conversation(messages)]))
    assert TOKENIZER.chat_template is not None
    rendered = TOKENIZER.chat_template.render(messages)
    assert replica.requests[0].prompt == TOKENIZER.encode(rendered, add_special_tokens=False)


async def test_echo_begins_with_the_prompt_and_the_stop_string_in_it_does_not_count():
    replica = MemoryReplica([TokenDelta(0, ids(" there"), finish=LENGTH)])
    parts, _ = await run(replica, ask(prompt="Hello", echo=True, stops=("Hello",)))
    assert text_of(parts) == "Hello there"


async def test_log_probabilities_are_given_as_text():
    (token,) = ids("Hello")
    scores = [TokenLogprobs(-0.25, [(token, -0.25), (EOS, -3.0)])]
    parts, _ = await run(MemoryReplica([TokenDelta(0, [token], LENGTH, scores)]), ask(top_logprobs=2))
    assert parts[0].scores is not None
    (score,) = parts[0].scores
    assert (score.chosen.text, score.chosen.raw, score.chosen.logprob) == ("Hello", b"Hello", -0.25)
    assert [other.logprob for other in score.top] == [-0.25, -3.0]


async def test_a_token_begins_where_the_text_before_it_ends():
    tokens = [*ids("Füße"), 0, *ids(" two")]
    scores = [TokenLogprobs(-1.0, [])] * len(tokens)
    parts, _ = await run(MemoryReplica([TokenDelta(0, tokens, LENGTH, scores)]), ask(top_logprobs=0))
    assert text_of(parts) == "Füße two"
    assert parts[0].scores is not None
    offsets = [score.offset for score in parts[0].scores]
    assert offsets == [len(TOKENIZER.decode(tokens[:count]).rstrip("\ufffd")) for count in range(len(tokens))]


async def test_times_are_noted_at_delivery():
    replica = MemoryReplica(
        [TokenDelta(0, ids("x"))], [TokenDelta(0, ids("x"))], [TokenDelta(0, ids("x"), finish=LENGTH)]
    )
    _, context = await run(replica, ask())
    # Two looks at the clock lie in between: the attempt has begun, and so much of the deadline is left.
    assert context.first_token_s - context.dispatched_s == 3.0
    assert context.gaps_s == [1.0, 1.0]


async def test_a_stream_that_just_ends_is_not_a_whole_answer():
    with pytest.raises(ReplicaLost):
        await run(MemoryReplica([TokenDelta(0, ids("x"))]), ask())
    with pytest.raises(ReplicaLost):
        await run(MemoryReplica([TokenDelta(0, [], finish=FinishReason.CANCELLED)]), ask())


async def test_what_cannot_run_is_refused_before_the_replica_hears_of_it():
    replica = MemoryReplica()
    for asked, kind, param in [
        (ask(model="n"), ModelNotFound, "model"),
        (ask(n=5), InvalidRequest, "n"),
        (ask(prompt=[[CARD.vocab_size]]), InvalidRequest, "prompt"),
        (ask(logit_bias={CARD.vocab_size: 1.0}), InvalidRequest, "logit_bias"),
        (ask(min_tokens=21), InvalidRequest, "min_tokens"),
        (ask(prompt=[[]]), InvalidRequest, "prompt"),
    ]:
        with pytest.raises(kind) as error:
            await run(replica, asked)
        assert error.value.param == param
    assert replica.requests == []


async def test_a_replica_that_restarts_is_still_known():
    replica = MemoryReplica([TokenDelta(0, ids("x"), finish=LENGTH)])
    served = pipeline(replica)
    assert served.ready()
    assert served.card(ANONYMOUS, "m") == CARD
    replica.up = False
    assert not served.ready()
    assert served.card(ANONYMOUS, "m") == CARD
    with pytest.raises(ContextLengthExceeded):
        async with served.generate(ask(prompt=[[5] * 64]), RequestContext("req", 0.0)):
            pass
    with pytest.raises(ReplicaUnavailable):
        async with served.generate(ask(), RequestContext("req", 0.0)):
            pass


async def test_a_model_without_a_template_cannot_chat():
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    tokenizer.chat_template = None
    served = Pipeline(
        Router(Catalog([ServedModel("m", [MemoryReplica()], tokenizer)])),
        LocalFlowController({}, AdmissionSetup().admission, SystemClock()),
    )
    with pytest.raises(InvalidRequest, match="no chat template"):
        async with served.generate(
            ask(prompt=[Conversation([{"role": "user", "content": "x"}])]), RequestContext("r", 0.0)
        ):
            pass
