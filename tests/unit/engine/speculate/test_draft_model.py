"""A smaller model that writes ahead: answers stay the same, and it is in step with whatever becomes of a sequence."""

import msgspec
import pytest

from maitred.core.errors import ConfigInvalid
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.speculate.draft_position import DraftModelPosition
from maitred.engine.speculate.vocabulary import check_same_vocabulary
from tests.support.drafters import Always
from tests.support.models import make_model

SHARED = [5 + position % 97 for position in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, one that has nothing in common with it but the vocabulary, and one of a few columns less."""
    model, stranger, narrow = (tmp_path_factory.mktemp(name) for name in ("model", "stranger", "narrow"))
    make_model(model, "llama3")
    make_model(stranger, "qwen3", num_hidden_layers=1, max_position_embeddings=90)
    make_model(narrow, "llama", vocab_size=120)
    return {"itself": model, "stranger": stranger, "narrow": narrow}


def make_engine(folders, draft=None, *, method="draft_model", **fields):
    speculation = SpeculationConfig(method=method if draft else "none", draft_model=draft and str(folders[draft]))
    config = EngineConfig(
        **{
            "device": "cpu",
            "dtype": "fp32",
            "threads": 1,
            "block_tokens": 8,
            "kv_memory_bytes": 2 << 20,
            "step_tokens": 70,
            "max_sequences": 64,
            **fields,
        },
        speculation=speculation,
    )
    engine, _ = build(folders["itself"], config)
    if draft:
        engine._speculator._benefit = Always()
    return engine


def requests(count=24, **fields):
    return [
        EngineRequest(
            id=str(i),
            prompt=SHARED[: (7 * i) % 41] + [4 + (7 * i + j) % 110 for j in range(1 + (5 * i) % 50)],
            sampling=SamplingParams(**{"max_tokens": 30, "seed": i, "temperature": 0.8, "ignore_eos": True, **fields}),
        )
        for i in range(count)
    ]


def answers(engine, asked, between=lambda engine, step: None):
    outputs, scores, finishes = {}, {}, {}
    for request in asked:
        engine.submit("owner", request)
    step = 0
    while engine.occupied:
        between(engine, step)
        step += 1
        for output in engine.step().get("owner", []):
            key = output.request_id, output.delta.index
            outputs.setdefault(key, []).extend(output.delta.tokens)
            scores.setdefault(key, []).extend(entry.logprob for entry in output.delta.logprobs or [])
            if output.delta.finish:
                finishes[key] = output.delta.finish
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    return outputs, scores, finishes


def read_lengths(engine):
    """How many tokens the draft model reads in each of its passes, from now on."""
    decoder, _ = engine._speculator._author._model
    lengths, forward = [], decoder.forward
    decoder.forward = lambda batch, cache: lengths.append(len(batch.token_ids)) or forward(batch, cache)
    return lengths


def right(engine):
    load = engine.load()
    return load.accepted_tokens / load.drafted_tokens


@pytest.fixture(scope="module")
def calm(folders):
    return make_engine(folders, step_tokens=512)


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.3, "top_p": 0.9}, {"n": 2}], ids=str
)
def test_a_model_that_drafts_for_itself_is_always_right(folders, calm, fields):
    engine = make_engine(folders, "itself", kv_memory_bytes=8 << 20)
    asked = requests(8, **fields)
    assert answers(engine, asked) == answers(calm, asked)
    assert right(engine) == 1.0
    load = engine.load()
    assert load.accepted_tokens > 0.5 * load.output_tokens


@pytest.mark.parametrize("draft", ["itself", "stranger", "narrow"])
@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_answers_are_the_same_whoever_drafts(folders, calm, draft, method):
    """In a cache that is too small, with prompts in chunks and shared prefixes, and readers that stop and go on."""
    engine = make_engine(folders, draft, method=method, kv_memory_bytes=640 << 10)

    def stop_and_go(engine, step):
        for i in range(24):
            if (step + 3 * i) % 17 == 0 and step < 200:
                engine.pause("owner", str(i), paused=True)
            elif (step + 3 * i) % 17 == 5 or step == 200:
                engine.pause("owner", str(i), paused=False)

    asked = requests(24, top_logprobs=1)
    expected = answers(calm, asked)
    assert answers(engine, asked, stop_and_go) == expected
    load = engine.load()
    assert load.drafted_tokens > 0
    if draft == "itself" and method == "draft_model":
        assert load.cached_tokens > 0, "the test is meant to share prefixes"
        assert right(engine) == 1.0, "what others have read, or it itself before, is found again"


def test_one_that_is_preempted_is_drafted_for_again(folders, calm):
    engine = make_engine(folders, "itself", kv_memory_bytes=640 << 10)
    asked = [
        EngineRequest(
            id=str(i),
            prompt=[*SHARED[: i % 9], 4 + 7 * i % 110],
            sampling=SamplingParams(max_tokens=40, seed=i, ignore_eos=True),
        )
        for i in range(40)
    ]
    assert answers(engine, asked) == answers(calm, asked)
    assert engine.load().preemptions > 0, "the test is meant to preempt"
    assert right(engine) == 1.0


def test_an_answer_that_is_taken_over_goes_on_the_same(folders, calm):
    engine = make_engine(folders, "stranger")
    asked = requests(6)
    whole = answers(calm, asked)[0]
    cut = [msgspec.structs.replace(r, resumes={0: whole[r.id, 0][: 3 * int(r.id)]}) for r in asked]
    rest = answers(engine, cut)[0]
    for request in cut:
        assert request.resumes[0] + rest[request.id, 0] == whole[request.id, 0]


def test_one_that_is_cancelled_leaves_nothing(folders):
    engine = make_engine(folders, "itself")
    for request in requests(4):
        engine.submit("owner", request)
    for _ in range(4):
        engine.step()
    engine.cancel_owner("owner")
    reading = engine._speculator._author._reading
    assert not reading._read
    assert not reading._ahead
    assert not engine._speculator._foretold


def test_what_the_prefix_cache_knows_is_read_once(folders):
    """The second of two equal prompts is found by the model, and by its draft model."""
    engine = make_engine(folders, "itself", kv_memory_bytes=8 << 20)
    lengths = read_lengths(engine)
    prompt = [4 + position % 100 for position in range(60)]
    for name in "ab":
        lengths.clear()
        sampling = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        answers(engine, [EngineRequest(id=name, prompt=prompt, sampling=sampling)])
        most = max(lengths)
        assert most >= 60 if name == "a" else most < 16
    assert right(engine) == 1.0


def test_it_reads_a_prompt_larger_than_a_step_in_pieces(folders, calm):
    engine = make_engine(folders, "itself", step_tokens=64, kv_memory_bytes=8 << 20)
    lengths = read_lengths(engine)
    prompt = [4 + position % 100 for position in range(200)]
    asked = [EngineRequest(id="a", prompt=prompt, sampling=SamplingParams(max_tokens=40, seed=1, ignore_eos=True))]
    assert answers(engine, asked) == answers(calm, asked)
    assert 32 < max(lengths) < 64
    assert engine.load().accepted_tokens > 20


def test_the_cache_of_the_draft_model_is_part_of_the_memory(folders):
    with_it, without = make_engine(folders, "itself"), make_engine(folders)
    assert with_it.load().total_blocks == without.load().total_blocks // 2


def test_methods_and_draft_models_go_together(folders):
    for speculation, message in [
        (SpeculationConfig(method="auto"), "no draft model is named"),
        (SpeculationConfig(method="ngram", draft_model=str(folders["narrow"])), "does not use it"),
        (SpeculationConfig(method="draft_model", draft_model="/nowhere/at/all"), "does not exist"),
    ]:
        with pytest.raises(ConfigInvalid, match=message):
            build(folders["itself"], EngineConfig(device="cpu", speculation=speculation))


def test_another_vocabulary_is_detected_by_a_token(tmp_path):
    def save(name, vocabulary, added=()):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        entries = [{"content": text, "id": number} for text, number in added]
        content = {"model": {"vocab": vocabulary}, "added_tokens": entries, "padding": name}
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(content))
        return folder

    model = save("model", {"a": 0, "b": 1}, [("<s>", 2)])
    check_same_vocabulary(model, save("same", {"b": 1, "a": 0}, [("<s>", 2)]))
    check_same_vocabulary(model, save("more", {"b": 1, "a": 0}, [("<s>", 2), ("<x>", 3)]))
    check_same_vocabulary(model, tmp_path)
    with pytest.raises(
        ConfigInvalid, match="the token 'b' is number 1 in the model and is number 7 in the draft model"
    ):
        check_same_vocabulary(model, save("other", {"a": 0, "b": 7}, [("<s>", 2)]))
    with pytest.raises(ConfigInvalid, match="'<s>' is number 2 in the model and does not exist in the draft model"):
        check_same_vocabulary(model, save("fewer", {"a": 0, "b": 1}))


class Tables:
    """A sequence, as far as a reading looks at it."""

    def __init__(self, key, tokens, blocks):
        self.key, self.tokens, self.blocks = key, tokens, blocks
        self.table = self

    def keys(self, tokens, count):
        return [bytes(tokens[: 4 * (position + 1)]) for position in range(count)]


def test_a_reading_follows_right_drafts_and_not_wrong_ones():
    reading, sequence = DraftModelPosition(4), Tables(1, [1, 2, 3, 4, 5], [7, 8])
    assert reading.position(sequence) == 0
    reading.begin(sequence, 0, 8)
    reading.done(sequence, 5, [6, 9, 9])
    sequence.tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    assert reading.position(sequence) == 6
    reading.begin(sequence, 6, 8)
    reading.done(sequence, 8, [])
    assert reading.position(sequence) == 7, "of the last token it is asked again"


def test_a_reading_finds_blocks_by_what_is_in_them():
    reading, first = DraftModelPosition(4), Tables(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9])
    reading.position(first)
    reading.begin(first, 0, 9)
    reading.done(first, 9, [])
    reading.forget(first)
    assert reading.position(first) == 8
    assert reading.position(Tables(2, [1, 2, 3, 4, 5, 6, 7, 0, 0], [7, 8, 9])) == 4
    assert reading.position(Tables(3, [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 9, 8])) == 4
    other = Tables(4, [3, 3, 3], [7])
    reading.position(other)
    reading.begin(other, 0, 3)
    assert reading.position(Tables(5, first.tokens, first.blocks)) == 0, "what was in the block is not there any more"


def test_it_sleeps_when_its_model_does_and_is_right_again_afterwards(folders, calm):
    engine = make_engine(folders, "itself", kv_memory_bytes=8 << 20)
    author = engine._speculator._author
    asked = requests(8, temperature=0.0)
    expected = answers(calm, asked)
    assert answers(engine, asked) == expected
    engine.set_asleep(asleep=True)
    engine.step()
    assert engine.load().asleep
    assert author._model is None, "its weights and its cache are given back with the model's own"
    assert answers(engine, asked) == expected
    assert not engine.load().asleep
    assert right(engine) == 1.0
