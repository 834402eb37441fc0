"""Loading a tokenizer from its files, and the bytes of its tokens."""

import json
import shutil
from concurrent import futures

import pytest
import tokenizers
import transformers
from tokenizers import models

from maitred.core.errors import ConfigInvalid, InvalidRequest, Unsupported
from maitred.text.tokenizer import Tokenizer
from tests.support.models import save_words
from tests.support.tokenizers import LINES, TINY, byte_level, data_folder, gpt2, sentencepiece


@pytest.fixture
def folder(tmp_path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    return tmp_path


def configure(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_loads_the_bundled_tokenizer():
    tokenizer = byte_level()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size) == ("<|begin|>", "<|end|>", 4096)
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("make", [byte_level, sentencepiece, lambda: sentencepiece(metaspace=True)])
def test_text_survives(make, line):
    tokenizer = make()
    tokens = tokenizer.encode(line, add_special_tokens=False)
    assert tokenizer.decode(tokens) == line
    assert tokenizer._backend.decode(tokens) == line


def test_other_threads_run_while_a_long_text_is_encoded():
    with futures.ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(byte_level().encode, "hello world " * 20_000, add_special_tokens=False)
        turns = 0
        while not encoding.done():
            futures.wait([encoding], timeout=0.001)
            turns += 1
    # Hundreds; with the interpreter's lock held throughout, one or two.
    assert turns > 10


def test_special_tokens_are_added_and_hidden_on_demand():
    tokenizer = byte_level()
    tokens = tokenizer.encode("Hi", add_special_tokens=True)
    assert tokens == [0, *tokenizer.encode("Hi", add_special_tokens=False)]
    assert tokenizer.decode(tokens) == "Hi"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<|begin|>Hi"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_texts_are_truncated_as_by_the_reference(tmp_path, side, add_special_tokens):
    save_words(tmp_path)
    for folder in (tmp_path, TINY):
        oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        oracle.truncation_side = side
        tokenizer, text = Tokenizer.load(folder), "hello world, hello 12"
        for limit in range(3, 12):
            expected = oracle.encode(text, add_special_tokens=add_special_tokens, truncation=True, max_length=limit)
            cut = tokenizer.encode_truncated(text, limit, side, add_special_tokens=add_special_tokens)
            assert cut == expected
        assert len(tokenizer.encode_truncated(text, 1, side, add_special_tokens=add_special_tokens)) == 1


def test_the_end_of_a_text_takes_the_place_of_a_token_where_there_is_no_other(folder):
    configure(folder, eos_token="<|end|>", add_eos_token=True)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.append_end([5, 6, 7]) == tokenizer.append_end([5, 6, 7], 4) == [5, 6, 7, 4]
    assert tokenizer.append_end([5, 6, 7], 3) == [5, 6, 4]
    assert tokenizer.append_end([5, 6, 7], 3, "left") == [6, 7, 4]
    assert tokenizer.append_end([5], 1) == [4]
    assert tokenizer.append_end([5, 6, 4], 3) == [5, 6, 4]


def test_templates_of_requests_run_only_where_the_operator_trusts_them(folder):
    source, messages = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", [{"role": "user", "content": "a"}]
    with pytest.raises(Unsupported, match="trust_request_chat_template") as refusal:
        Tokenizer.load(folder).request_template(source)
    assert refusal.value.param == "chat_template"
    tokenizer = Tokenizer.load(folder, trusts_request_templates=True)
    template = tokenizer.request_template(source)
    assert tokenizer.request_template(source) is template
    assert tokenizer.decode(tokenizer.encode_conversation(messages, template=template)) == "a"
    spelt = tokenizer.encode_conversation([{"role": "user", "content": "<|user|>"}], template=template)
    assert tokenizer.decode(spelt) == "<|user|>"
    with pytest.raises(InvalidRequest, match="chat_template does not compile"):
        tokenizer.request_template("{% for %}")
    with pytest.raises(InvalidRequest, match="cannot write these messages"):
        tokenizer.encode_conversation(messages, template=tokenizer.request_template("{{ ''.__class__.__mro__ }}"))
    for number in range(40):
        tokenizer.request_template(f"{{{{ {number} }}}}")
    assert len(tokenizer._request_templates) <= 16


def test_the_bytes_of_a_byte_level_token():
    tokenizer = byte_level()
    tokens = tokenizer.encode(" 👋", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == " 👋".encode()
    assert tokenizer.token_bytes(0) == b"<|begin|>"
    assert tokenizer.token_text(tokens[-1]) == "\ufffd"


def test_the_bytes_of_a_sentencepiece_token():
    tokenizer = sentencepiece()
    quick = tokenizer.encode("the quick €", add_special_tokens=False)
    assert [tokenizer.token_bytes(token) for token in quick[-4:]] == [b" ", b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.token_text(quick[0]) == " the"


def test_ids_that_no_token_has_show_nothing():
    tokenizer = byte_level()
    assert tokenizer.decode([10**9, -1, *tokenizer.encode("a", add_special_tokens=False)]) == "a"
    assert tokenizer.token_bytes(10**9) == b""


def test_every_valid_token_decodes_as_the_reference_does():
    for tokenizer in (byte_level(), sentencepiece()):
        for token in range(tokenizer.vocab_size):
            ours = tokenizer.decode([token], skip_special_tokens=False)
            assert ours == tokenizer._backend.decode([token], skip_special_tokens=False)


def test_special_tokens_written_as_objects(folder):
    configure(folder, eos_token={"__type": "AddedToken", "content": "<|end|>"}, bos_token=None, model_max_length=9)
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (None, "<|end|>", None)


@pytest.mark.parametrize(
    "template",
    [
        "one",
        [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}],
        [{"name": "x", "template": "one"}],
    ],
)
def test_templates_in_the_configuration(folder, template):
    configure(folder, chat_template=template)
    assert Tokenizer.load(folder).chat_template.render([]) == "one"


def test_a_template_file_goes_first(folder):
    configure(folder, chat_template="one", eos_token="</s>")
    (folder / "chat_template.jinja").write_text("two{{ eos_token }}")
    assert Tokenizer.load(folder).chat_template.render([]) == "two</s>"


def test_templates_by_name(folder):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two {{ tools }}"}]
    configure(folder, chat_template=named)
    template = Tokenizer.load(folder).chat_template
    assert [template.render([]), template.render([], tools=[1]), template.knows_tools] == ["one", "two [1]", True]
    configure(folder, chat_template=[{"name": "rag", "template": "one"}, named[1]])
    with pytest.raises(ConfigInvalid, match=r"\(rag, tool_use\), and none of them is named default"):
        Tokenizer.load(folder)
    configure(folder)
    (folder / "chat_template.jinja").write_text("three")
    for number, name in enumerate(("chat_templates", "additional_chat_templates")):
        (folder / name).mkdir()
        (folder / name / "tool_use.jinja").write_text(f"four{number}")
        template = Tokenizer.load(folder).chat_template
        assert [template.render([]), template.render([], tools=[1])] == ["three", f"four{number}"]


def test_templates_that_the_reference_saved(folder):
    configure(folder, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    oracle.chat_template = {"default": "one", "tool_use": "two {{ tools | tojson }}"}
    oracle.save_pretrained(folder / "saved")
    template = Tokenizer.load(folder / "saved").chat_template
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    for given in (None, tools):
        told = oracle.apply_chat_template([{"role": "user", "content": "a"}], tools=given, tokenize=False)
        assert template.render([], tools=given) == told


SETTINGS = [
    {"eos_token": "<|end|>", "pad_token": "<pad>", "unk_token": "<unk>"},
    {"eos_token": "<|end|>", "added_tokens_decoder": {"4096": {"content": "<tool>", "special": False}}},
    {
        "added_tokens_decoder": {
            "4096": {"content": "<x>", "special": True},
            "4097": {"content": "<y>", "special": True},
        }
    },
    {"eos_token": "<|end|>", "added_tokens_decoder": {"4": {"content": "<|end|>", "special": False}}},
    {"extra_special_tokens": {"image_token": "<image>"}, "bos_token": "<|begin|>"},
    {"bos_token": "<|begin|>", "add_bos_token": False},
    {"extra_special_tokens": ["<x>", "<y>"], "eos_token": "<|end|>"},
    {"additional_special_tokens": ["<x>", "<|user|>"]},
    {"extra_special_tokens": {"image_token": "<x>", "foo": "<y>"}, "pad_token": "<pad>"},
    {"eos_token": {"__type": "AddedToken", "content": "<image>", "lstrip": True, "rstrip": True, "normalized": False}},
    {
        "pad_token": "<0>",
        "unk_token": "<0>",
        "eos_token": {"__type": "AddedToken", "content": "<1>", "single_word": True},
    },
    {"split_special_tokens": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_add_tokens_as_the_reference_does(folder, settings):
    configure(folder, tokenizer_class="PreTrainedTokenizerFast", **settings)
    tokenizer, oracle = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "a <tool> <0><1> <image><|end|> <pad><unk> <x>  <y> <image>  b <|user|>"
    for special in (False, True):
        assert tokenizer.encode(text, add_special_tokens=special) == oracle.encode(text, add_special_tokens=special)
    tokens = oracle.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == oracle.decode(tokens, skip_special_tokens=True)


TALK = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]</s>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"legacy": True},
        {"legacy": False},
        {"add_prefix_space": False},
        {"legacy": True, "add_prefix_space": True},
    ],
)
@pytest.mark.parametrize("model_type", [None, "llama", "mistral"])
def test_spaces_before_texts_are_those_of_the_reference(tmp_path, kind, metaspace, settings, model_type):
    sentencepiece(metaspace=metaspace)._backend.save(str(tmp_path / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TALK}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **tokens, **settings}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer, oracle = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the quick fox", " the  fox", "fox\nthe "):
        messages = [{"role": "user", "content": text}] * 2
        assert tokenizer.encode_conversation(messages) == oracle.apply_chat_template(messages)["input_ids"]
        whole = f"{text}</s>{text}"
        ids = tokenizer.encode(whole, add_special_tokens=True)
        assert ids == oracle(whole)["input_ids"]
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_tokens_in_the_older_file(folder):
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}, "pad_token": "<pad>"}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.added_token("<pad>") == 4096
    configure(folder, added_tokens_decoder={})
    assert Tokenizer.load(folder).eos_token is None


def test_texts_in_lower_case_where_sentence_transformers_writes_them_so(folder):
    plain = Tokenizer.load(folder).encode("the king", add_special_tokens=False)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert Tokenizer.load(folder).encode("The KING", add_special_tokens=False) == plain


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"has no tokenizer\.json\. Copy"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        Tokenizer.load(tmp_path)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigInvalid, match="is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigInvalid, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"a": 1}}')
    with pytest.raises(ConfigInvalid, match="added_tokens_decoder cannot be read"):
        Tokenizer.load(tmp_path)


def test_decoders_without_bytes_are_refused():
    backend = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ConfigInvalid, match="has no decoder"):
        Tokenizer(backend, {}, None)
    backend.decoder = tokenizers.decoders.CTC()
    with pytest.raises(ConfigInvalid, match="'CTC' is not supported"):
        Tokenizer(backend, {}, None)


def test_gpt2_vectors():
    tokenizer = gpt2()
    vectors = json.loads((data_folder() / "tokenizers" / "vectors.json").read_text(encoding="utf-8"))
    for text, tokens in vectors["gpt2"] + vectors["gpt2_special_all"]:
        assert tokenizer.encode(text, add_special_tokens=False) == tokens
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
