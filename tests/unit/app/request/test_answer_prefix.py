"""Answers that another server has begun and an engine of ours ends."""

import json
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router, read_routes
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.config.tree import Config
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import ReplicaLost
from maitred.core.inference import Conversation, TextDelta
from maitred.core.request import TokenDelta, Usage
from maitred.core.text_replica import TextBatch
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.routing.catalog import Catalog, ServedModel, TextModel
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig
from maitred.text.answer_format import AnswerFormat
from maitred.text.tokenizer import Tokenizer
from tests.support.admission_services import AdmissionSetup
from tests.support.clock import FakeClock
from tests.support.tool_models import save_tool_tokenizer
from tests.unit.app.request.test_pipeline import EOS, STOP, TOKENIZER, MemoryReplica, ask, ids, text_of


class BrokenServer(MemoryReplica):
    """A server of others that sends these texts, and breaks off."""

    name = "far-1"

    @property
    def trace_attributes(self):
        return {}

    def is_refusing(self):
        return False

    @asynccontextmanager
    async def generate(self, request):
        self.requests.append(request)
        yield BrokenStream(self.batches)


class BrokenStream:
    ignored_fields = ()
    is_passthrough = False

    def __init__(self, texts):
        self.texts = texts

    def listen(self, on_batch):
        pass

    async def __aiter__(self):
        for text in self.texts:
            yield TextBatch([text if isinstance(text, TextDelta) else TextDelta(0, text)], chunks=1)
        raise ReplicaLost


async def run(server, engine, asked, allowed=True, tokenizer=TOKENIZER):
    """The deltas, the failure, the context and the lines of the ledger."""
    clock, setup = FakeClock(), AdmissionSetup()
    config = DispatchConfig(headroom=0.0)
    dispatchers = {
        "far": Dispatcher("far", [Endpoint("far-1", server)], config, clock),
        "m": Dispatcher("m", [Endpoint("here", engine)], config, clock),
    }
    far = TextModel("far", [server], TOKENIZER, continues_at_fallback=allowed)
    catalog = Catalog([far, ServedModel("m", [engine], tokenizer, answer_format=AnswerFormat.of(tokenizer))])
    routing = RoutingConfig(fallbacks={"far": FallbackConfig(general=["m"])})
    flow = LocalFlowController(dispatchers, setup.admission, clock)
    pipeline = Pipeline(Router(catalog, read_routes(Config(routing=routing), catalog)), flow, clock=clock)
    context = RequestContext("req", clock.now_s)
    (prompt,) = asked.prompts
    fields = {"messages": prompt.messages} if isinstance(prompt, Conversation) else {"prompt": prompt}
    fields |= {"max_tokens": asked.max_tokens}
    parts, failure = [], None
    try:
        async with pipeline.generate(replace(asked, model="far", to_openai=lambda: fields), context) as answer:
            async for batch in answer:
                parts += batch
    except ReplicaLost as lost:
        failure = lost
    assert engine.open == 0
    assert all(dispatcher.core.running == dispatcher.core.waiting == 0 for dispatcher in dispatchers.values())
    return parts, failure, context, setup.ledger.events


HELLO = "Hello there, dear friends"
BEGUN = "Hello there,"


def rest_of(text=HELLO, begun=BEGUN):
    tokens = ids(text.removeprefix(begun))
    return [[TokenDelta(0, [token])] for token in tokens] + [[TokenDelta(0, [EOS], STOP)]]


async def test_an_engine_ends_the_answer_that_another_server_began():
    engine = MemoryReplica(*rest_of())
    parts, failure, context, events = await run(BrokenServer("Hello ", "there,"), engine, ask(seed=5))
    assert (text_of(parts), failure) == (HELLO, None)
    assert [part.finish for part in parts if part.finish] == [STOP]
    assert [part.text for part in parts if part.continued] == [text_of(parts[2:3])]
    (request,) = engine.requests
    assert request.resumes == {0: ids(BEGUN)}
    assert request.sampling.max_tokens == 20
    tokens = len(ids(BEGUN)) + len(engine.batches)
    assert context.usage == Usage(len(request.prompt), tokens)
    assert (context.continued, context.recoveries, context.fallbacks) == (1, 1, ["general=m"])
    assert [(event.model, event.outcome, event.output_tokens) for event in events] == [
        ("far", Outcome.FAILED, events[0].output_tokens),
        ("m", Outcome.FINISHED, tokens),
    ]


async def test_only_where_the_operator_allows_it():
    engine = MemoryReplica(*rest_of())
    parts, failure, *_ = await run(BrokenServer(BEGUN), engine, ask(), allowed=False)
    assert (text_of(parts), engine.requests) == (BEGUN, [])
    assert isinstance(failure, ReplicaLost)


@pytest.mark.parametrize(
    ("begun", "asked"),
    [
        (BEGUN, ask(max_tokens=2)),  # nothing is left to write
    ],
)
async def test_what_an_engine_cannot_end_stays_broken(begun, asked):
    engine = MemoryReplica(*rest_of())
    parts, failure, *_ = await run(BrokenServer(begun), engine, asked)
    assert (text_of(parts), engine.requests) == (begun, [])
    assert isinstance(failure, ReplicaLost)


async def test_control_tokens_that_the_other_server_spelt_are_text():
    begun = f"a{TOKENIZER.decode([EOS], skip_special_tokens=False)}b"
    engine = MemoryReplica(*rest_of())
    parts, failure, *_ = await run(BrokenServer(begun), engine, ask())
    assert (text_of(parts), failure) == (begun + " dear friends", None)
    (given,) = engine.requests[0].resumes.values()
    assert TOKENIZER.decode(given) == begun


QWEN = """{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- m.content + '<|end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
TIGHT = QWEN.replace("\n", "").replace("'<|assistant|>'", "'<|assistant|><think>'")


class ThinkingReplica(MemoryReplica):
    """An engine of a vocabulary with the markers of thoughts."""

    def card(self):
        return replace(super().card(), vocab_size=TOKENIZER.vocab_size + 4)


TALK = [{"role": "user", "content": "Hi"}]


def thinking_tokenizer(folder, template=None):
    """A model that thinks; its own template opens the thought, and shows none of earlier ones."""
    tokenizer = save_tool_tokenizer(folder, "thinking")
    if template is None:
        return tokenizer
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return Tokenizer.load(folder)


def thought(text):
    return TextDelta(0, "", extra={"reasoning_content": text, "reasoning": text})


def thoughts_of(parts):
    return "".join((part.extra or {}).get("reasoning_content", "") for part in parts)


@pytest.mark.parametrize(
    ("template", "sent", "written"),
    [
        (None, ["Hello ", "there,"], "\n</think>\n\nHello there,"),
        (None, [thought("Hm"), thought(" so"), "Hello"], "Hm so\n</think>\n\nHello"),
        (None, [thought("\nHm"), thought("\n"), "\n\nHello"], "Hm\n</think>\n\nHello"),
        (None, [thought("Hm"), thought(" so")], "Hm so"),
        (TIGHT, ["Hello there,"], "</think>Hello there,"),
        (TIGHT, [thought("Hm </think> so"), "Hello"], "Hm </think> so</think>Hello"),
        (QWEN, ["Hello there,"], "Hello there,"),
        (QWEN, [thought("Hm"), "Hello <|end|>"], "<think>\nHm\n</think>\n\nHello <|end|>"),
        (QWEN, [thought("Hm")], "<think>\nHm"),
    ],
)
async def test_a_model_that_thinks_ends_an_answer_as_its_template_writes_answers(tmp_path, template, sent, written):
    tokenizer = thinking_tokenizer(tmp_path, template)
    marker, end = tokenizer.added_token("</think>"), tokenizer.added_token("<|end|>")
    in_thought = isinstance(sent[-1], TextDelta)
    rest = [*([marker] if in_thought else []), *tokenizer.encode(" dear friends", add_special_tokens=False)]
    engine = ThinkingReplica(*[[TokenDelta(0, [token])] for token in rest], [TokenDelta(0, [EOS], STOP)])
    asked = ask(prompt=[Conversation(TALK)], max_tokens=40)
    parts, failure, context, events = await run(BrokenServer(*sent), engine, asked, tokenizer=tokenizer)
    assert failure is None
    told = [part.text if isinstance(part, TextDelta) else part for part in sent]
    assert text_of(parts) == "".join(told) + ("dear friends" if in_thought else " dear friends")
    assert thoughts_of(parts) == thoughts_of([part for part in sent if isinstance(part, TextDelta)])
    (request,) = engine.requests
    (given,) = request.resumes.values()
    assert request.prompt == tokenizer.encode_conversation(TALK)
    assert tokenizer.decode(given, skip_special_tokens=False) == written
    assert given.count(marker) == (written.count("</think>") > 0)
    assert end not in given
    assert context.completion_tokens == len(given) + len(rest) + 1 == events[-1].output_tokens
    assert bool(context.reasoning_tokens) == any(isinstance(part, TextDelta) for part in sent)


async def test_a_thought_goes_on_where_it_broke_off(tmp_path):
    tokenizer = thinking_tokenizer(tmp_path)
    rest = [[TokenDelta(0, [token])] for token in tokenizer.encode(" so</think>\n\nHail!", add_special_tokens=False)]
    engine = ThinkingReplica(*rest, [TokenDelta(0, [EOS], STOP)])
    parts, failure, context, _ = await run(
        BrokenServer(thought("Hm")), engine, ask(prompt=[Conversation(TALK)]), tokenizer=tokenizer
    )
    assert (thoughts_of(parts), text_of(parts), failure) == ("Hm so", "Hail!", None)
    assert 0 < context.reasoning_tokens < context.completion_tokens


async def test_a_model_that_does_not_think_does_not_go_on_with_a_thought():
    for sent in ([thought("Hm")], [thought("Hm"), "Hello"]):
        engine = MemoryReplica(*rest_of())
        _, failure, *_ = await run(BrokenServer(*sent), engine, ask(prompt=[Conversation(TALK)]))
        assert engine.requests == []
        assert isinstance(failure, ReplicaLost)


async def test_stop_strings_and_minimal_lengths_count_from_the_beginning_of_the_answer():
    begun = ids(BEGUN)
    engine = MemoryReplica(*rest_of())
    asked = ask(stops=("dear",), min_tokens=len(begun))
    parts, failure, *_ = await run(BrokenServer(BEGUN), engine, asked)
    assert (text_of(parts), failure) == ("Hello there, ", None)
    assert parts[-1].stop == "dear"
