"""What the reader makes of texts, with small encoders and their tokenizers."""

import json

import numpy as np
import pytest
import tokenizers
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.encoder.decoder import PooledDecoder
from maitred.engine.encoder.model import Encoder
from maitred.engine.similar.question_reader import QuestionReader
from maitred.text.tokenizer_config import read_special_tokens
from tests.support.models import make_encoder, make_model, save_words

HELLO, WORLD, COMMA = 4, 5, 6


@pytest.fixture
def folder(tmp_path):
    make_encoder(tmp_path)
    save_words(tmp_path)
    return tmp_path


def reader_of(folder, kind=Encoder, context_tokens=64):
    model = kind.load(folder, dtype=torch.float32, device=torch.device("cpu"))

    def encode(texts):
        vectors, rows = model.encode_with_tokens(texts)
        assert torch.equal(vectors, model.encode(texts))
        # Longer than 1, as of a model whose pooling does not scale.
        return 3 * vectors.numpy(), [row.numpy() for row in rows]

    return QuestionReader(encode, folder, context_tokens=context_tokens, special_tokens=read_special_tokens(folder))


def test_tokens_that_begin_and_end_every_text_are_left_out(folder):
    reader = reader_of(folder)
    (question,) = reader.read(["Hello, world"])
    assert question.text == "Hello, world"
    assert question.wording.words == ("hello", "world")
    assert question.token_ids.tolist() == [HELLO, COMMA, WORLD]
    assert question.token_vectors.shape == (3, 48)
    assert question.token_vectors.dtype == np.float16
    assert np.linalg.norm(question.vector) == pytest.approx(1)
    _, (rows,) = reader.encode([reader.tokenizer.encode("Hello, world", add_special_tokens=True)])
    assert np.array_equal(question.token_vectors, rows[1:-1].astype(np.float16))


@pytest.mark.parametrize(
    ("template", "tokens"),
    [("$A", [HELLO, WORLD]), ("$A [SEP]", [HELLO, WORLD]), ("[CLS] [CLS] $A", [HELLO, WORLD])],
)
def test_whatever_a_tokenizer_adds(folder, template, tokens):
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(path))
    (question,) = reader_of(folder).read(["hello world"])
    assert question.token_ids.tolist() == tokens


def test_the_end_that_the_settings_ask_for_and_the_prompt_before_a_text_are_read(folder):
    settings = {"add_eos_token": True, "eos_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"query": "world "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (question,) = reader_of(folder).read(["hello"])
    assert question.text == "hello"
    assert question.token_ids.tolist() == [WORLD, HELLO]


def test_a_text_of_special_tokens_alone_keeps_them(folder):
    (question,) = reader_of(folder).read([""])
    assert question.token_ids.tolist() == [2, 3]


def test_texts_that_do_not_fit_are_left_out(folder):
    reader = reader_of(folder, context_tokens=4)
    read = reader.read(["hello", "hello hello hello", "world world"])
    assert [question.text for question in read] == ["hello", "world world"]
    assert reader.read(["hello hello hello"]) == []


def test_a_decoder_reads_questions_too(tmp_path):
    make_model(tmp_path, "llama")
    save_words(tmp_path)
    (question,) = reader_of(tmp_path, PooledDecoder).read(["hello world"])
    assert question.token_ids.tolist() == [HELLO, WORLD]
    assert np.linalg.norm(question.token_vectors.astype(np.float32), axis=1) == pytest.approx(np.ones(2), abs=1e-3)


def test_special_tokens_are_those_of_the_files(folder):
    assert read_special_tokens(folder) == {0, 1, 2, 3}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"7": {"content": ".", "special": True}}})
    )
    assert read_special_tokens(folder) == {0, 1, 2, 3, 7}
    (folder / "tokenizer.json").write_text("[")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        read_special_tokens(folder)
    (folder / "tokenizer.json").unlink()
    assert read_special_tokens(folder) == frozenset()
