"""Decoders whose last rows are pooled, against the libraries that their models come from."""

import json

import pytest
import tokenizers
import torch
import transformers
from torch.nn import functional

from maitred.core.errors import ConfigInvalid
from maitred.engine.encoder.decoder import PooledDecoder
from maitred.text.tokenizer import Tokenizer
from tests.support.models import FAMILIES, make_model

LENGTHS = (3, 1, 60, 17, 17, 40, 2, 61, 300)
HIDDEN = 64


def load(folder, pooling=None, dtype=torch.float32):
    return PooledDecoder.load(folder, dtype=dtype, device=torch.device("cpu"), pooling=pooling)


def texts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 131, (length,), generator=generator).tolist() for length in lengths]


def saved_by_sentence_transformers(folder, pooling, *, normalised=True):
    """The files beside a checkpoint that say how it is pooled, in one of the forms that there are."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * normalised)]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
                for index, (path, name) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **pooling}))


@torch.inference_mode()
def padded(model, several):
    """The last rows of all texts, computed together with padding behind the short ones, and which are real."""
    width = max(map(len, several))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in several])
    real = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in several])
    return model(tokens, attention_mask=real).last_hidden_state, real


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_of_every_family_is_that_of_the_library(tmp_path, family):
    model = make_model(tmp_path, family)
    rows, real = padded(model.model, texts())
    wanted = functional.normalize(rows[torch.arange(len(rows)), real.sum(1) - 1], dim=-1)
    assert (load(tmp_path).encode(texts()) - wanted).abs().max() < 1e-4


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.parametrize(("form", "mode"), [*(("old", mode) for mode in MODES), ("new", "mean"), ("setting", "max")])
def test_poolings_are_those_of_sentence_transformers(tmp_path, mode, form):
    library = pytest.importorskip("sentence_transformers.sentence_transformer.modules.pooling")
    model = make_model(tmp_path, "qwen3")
    old = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
    config = {"old": {f"pooling_mode_{old.get(mode, mode)}": True}, "new": {"pooling_mode": mode}}
    if form in config:
        saved_by_sentence_transformers(tmp_path, config[form], normalised=False)
    rows, real = padded(model.model, texts())
    wanted = library.Pooling(HIDDEN, mode)({"token_embeddings": rows, "attention_mask": real})["sentence_embedding"]
    if form == "setting":
        wanted = functional.normalize(wanted, dim=-1)
    ours = load(tmp_path, mode if form == "setting" else None).encode(texts())
    assert (ours - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))


def test_poolings_that_stand_side_by_side(tmp_path):
    model = make_model(tmp_path, "qwen3")
    saved_by_sentence_transformers(tmp_path, {"pooling_mode": ["cls", "lasttoken"]}, normalised=False)
    rows, real = padded(model.model, texts())
    wanted = torch.cat((rows[:, 0], rows[torch.arange(len(rows)), real.sum(1) - 1]), dim=-1)
    decoder = load(tmp_path)
    assert decoder.dimensions == 2 * HIDDEN
    assert (decoder.encode(texts()) - wanted).abs().max() < 1e-4


def test_a_model_that_was_saved_without_its_head_is_the_same(tmp_path):
    model = make_model(tmp_path / "whole", "qwen3")
    model.model.save_pretrained(tmp_path / "headless")
    assert torch.equal(load(tmp_path / "whole").encode(texts()), load(tmp_path / "headless").encode(texts()))


def test_neighbours_change_nothing(tmp_path):
    make_model(tmp_path, "llama")
    decoder = load(tmp_path)
    alone = torch.cat([decoder.encode([text]) for text in texts()])
    assert (decoder.encode(texts()) - alone).abs().max() < 1e-5


def test_half_precision_is_near(tmp_path):
    make_model(tmp_path, "qwen2")
    near = functional.cosine_similarity(
        load(tmp_path, dtype=torch.bfloat16).encode(texts()), load(tmp_path).encode(texts())
    )
    assert near.min() > 0.98


def test_the_window_is_the_models_or_that_of_its_training(tmp_path):
    make_model(tmp_path, "mistral_window")
    assert load(tmp_path).context_tokens == 512
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    assert load(tmp_path).context_tokens == 64
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert load(tmp_path).context_tokens == 32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_causal": False}, "in both directions"),
        ({"use_bidirectional_attention": True}, "in both directions"),
        ({"architectures": ["T5EncoderModel"]}, "The architecture T5EncoderModel is not supported"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, change, reason):
    make_model(tmp_path, "qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigInvalid, match=reason):
        load(tmp_path)


def save_letters(folder, *, ends):
    """A tokenizer of letters that ends texts by itself, or is asked to by its configuration, or does not."""
    table = {"<unk>": 0, "<s>": 1, "<pad>": 2, "</s>": 3} | {chr(97 + i): 4 + i for i in range(26)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "<pad>", "</s>"])
    if ends == "tokenizer":
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 3)]
        )
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )
    whole.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    if ends == "setting":
        path.write_text(json.dumps({**json.loads(path.read_text()), "add_eos_token": True}))


@pytest.mark.parametrize(("ends", "last"), [("tokenizer", 3), ("setting", 3), ("nothing", 4)])
def test_texts_are_ended_where_the_files_say_so(tmp_path, ends, last):
    save_letters(tmp_path, ends=ends)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.append_end(tokenizer.encode("b a", add_special_tokens=True)) == [5, 4, *[3] * (last == 3)]
    assert tokenizer.encode_embedding_input("b a") == [5, 4, *[3] * (last == 3)]


def test_sentences_get_the_vectors_of_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    make_model(tmp_path, "qwen3").model.save_pretrained(tmp_path)
    save_letters(tmp_path, ends="tokenizer")
    saved_by_sentence_transformers(tmp_path, {"pooling_mode_lasttoken": True, "include_prompt": True})
    sentences = ["a", "l o n g e r " * 30, "b a", "x y z ?"]
    tokenizer = Tokenizer.load(tmp_path)
    ours = load(tmp_path).encode([tokenizer.encode(sentence, add_special_tokens=True) for sentence in sentences])
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu").encode(sentences, convert_to_tensor=True)
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("default", [None, "query"])
@pytest.mark.parametrize("cut", [None, 5, 10_000])
def test_prompts_and_lengths_are_those_of_sentence_transformers(tmp_path, default, cut):
    library = pytest.importorskip("sentence_transformers")
    make_model(tmp_path, "qwen3").model.save_pretrained(tmp_path)
    save_letters(tmp_path, ends="tokenizer")
    saved_by_sentence_transformers(tmp_path, {"pooling_mode_mean_tokens": True})
    settings = {"prompts": {"query": "q ", "document": ""}, "default_prompt_name": default, "truncate_dim": cut}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    tokenizer, decoder = Tokenizer.load(tmp_path), load(tmp_path)
    sentences = [tokenizer.text_prompt + sentence for sentence in ("a", "x y z")]
    ours = decoder.encode([tokenizer.encode(sentence, add_special_tokens=True) for sentence in sentences])
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu").encode(["a", "x y z"], convert_to_tensor=True)
    assert decoder.dimensions == theirs.shape[1]
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
        ("sentence_bert_config.json", {"module_output_name": "scores"}, "module_output_name"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"padding": "longest"}}},
            "processing_kwargs",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            "modality_config",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "query", "prompts": {}}, "'query'"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt"),
        ("modules.json", [{"type": "x.Transformer", "path": ""}], "no module Pooling"),
        (
            "modules.json",
            [{"type": "x.Normalize", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}],
            "normalises before it pools",
        ),
    ],
)
def test_settings_that_would_give_other_vectors_are_refused(tmp_path, name, settings, reason):
    make_model(tmp_path, "qwen3")
    saved_by_sentence_transformers(tmp_path, {"pooling_mode": "mean"})
    prompts = {"prompts": {"query": "q "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / name).write_text(json.dumps(settings))
    with pytest.raises(ConfigInvalid, match=reason):
        load(tmp_path)
