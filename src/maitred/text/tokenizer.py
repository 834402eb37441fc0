"""Tokenizer and incremental detokenizer of a model, loaded from the files beside its weights.

Hugging Face `tokenizers` converts text to tokens. A table of the exact bytes of every token (`maitred.text.vocabulary`)
converts tokens to text. This table is as fast as the decoder of the library, and makes the incremental detokenizer and
the log-probabilities agree with whole-text decoding byte for byte.

The detokenizer converts tokens to text while they arrive. The bytes of one character can be spread over several tokens,
and the output must have only complete characters. The bytes of a token do not depend on its neighbours
(`maitred.text.vocabulary`), so an incremental UTF-8 decoder is enough. Its cost is linear in the tokens, and it holds
back at most three bytes.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers

from maitred.core.errors import ConfigInvalid, InvalidRequest, Unsupported
from maitred.text.chat_template import ChatTemplate
from maitred.text.control_tokens import CLOSE_MARK, OPEN_MARK, ControlTokens
from maitred.text.text_tokenizer import TextTokenizer
from maitred.text.token_cache import SegmentCache, WordCache, separators, word_cache
from maitred.text.tokenizer_config import PrependScheme, TokenizerConfig, VocabularyToken
from maitred.text.vocabulary import DecodingRules, read_decoding_rules

_NORMALISED_BYTES = 3
_SHORT_CHARACTERS = 2_048
"""Prompts up to this length are encoded word by word. The library lets other threads run meanwhile, which counts for
longer ones."""
_MOST_REQUEST_TEMPLATES = 16
"""Most templates of requests that stay compiled."""
_NO_REQUEST_TEMPLATE = (
    "chat_template is not allowed for this model: its operator has not set trust_request_chat_template. Render the "
    "prompt yourself and send it to /v1/completions. Otherwise remove it."
)
NO_MARKS: Mapping[int, bytes] = {}


class Tokenizer:
    """Tokenizer of one model: converts text to tokens and tokens to text.

    Args:
        backend: Object of the library `tokenizers` that encodes text.
        special_tokens: Maps a role to its text, such as ``{"eos_token": "</s>"}``.
        chat_template: Chat template of the model, or None.
        adds_eos: Whether the files of the model request an end-of-text token after each text (``add_eos_token``).
        allows_control_tokens: Whether a control token that a message spells is read as one; otherwise it is text.
        trusts_request_templates: Whether a request may bring a chat template of its own.
        cache_bytes: Most bytes of the tokens of conversations that are kept for their next turns; 0: none.

    Attributes:
        vocab_size: One more than the largest token id.
        bos_token: Text of the token that begins a text, or None.
        eos_token: Text of the token that ends a turn, or None.
        control_tokens: Tokens that structure a prompt or an answer, with their texts: special ones, and others that the
            chat template writes.
        strips_leading_space: Whether decoding drops one space at the very start of a text.
        digest: Digest of what turns text into tokens and tokens into text, as it was when it was loaded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
        *,
        adds_eos: bool = False,
        text_prompt: str = "",
        allows_control_tokens: bool = False,
        trusts_request_templates: bool = False,
        cache_bytes: int = 0,
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self._trusts_request_templates = trusts_request_templates
        self._request_templates: dict[str, ChatTemplate] = {}
        # A file may contain the length limit of the training, which would silently cut texts. Other code checks the
        # context window and raises an error.
        backend.no_truncation()
        backend.no_padding()
        # Reading the vocabulary from the tokenizer's JSON takes half the time of its own method.
        description = backend.to_str()
        self.digest = blake2b(description.encode(), digest_size=16).hexdigest()
        described = msgspec.json.decode(description, type=_Description)
        rules = read_decoding_rules(described.decoder)
        self._bytes, self._visible = _tables(backend, described.model.ids(), rules)
        # WordPiece replaces an unknown word of any length by one token, and ignores spaces.
        self._drops_text = isinstance(backend.model, tokenizers.models.WordPiece)
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        literals = "" if chat_template is None else chat_template.literals
        self.control_tokens = {
            token: entry.content
            for token, entry in added.items()
            if entry.special or (entry.content in literals and not entry.content.isspace())
        }
        self._longest_token_bytes = max(map(len, self._bytes.values()), default=1)
        self.strips_leading_space = rules.strips_leading_space
        self.vocab_size = max(self._bytes, default=-1) + 1
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.chat_template = chat_template
        self.text_prompt = text_prompt
        self._control = (
            None if allows_control_tokens or not self.control_tokens else ControlTokens(backend, self.control_tokens)
        )
        self._closing = backend.token_to_id(self.eos_token) if adds_eos and self.eos_token else None
        self._segments: SegmentCache | None = None
        self._words: WordCache | None = None
        if cache_bytes:
            named = {*special_tokens.values()}
            written = {text for text in self.control_tokens.values() if text in literals or text in named}
            self._segments = SegmentCache(separators(backend, written), cache_bytes)
            if self._control is None or not self._control.takes_other_spellings:
                self._words = word_cache(backend, described.normalizer, described.pre_tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        allows_control_tokens: bool = False,
        trusts_request_templates: bool = False,
        cache_bytes: int = 0,
    ) -> "Tokenizer":
        """Reads ``tokenizer.json`` and the settings beside it (`maitred.text.tokenizer_config`).

        Args:
            folder: Folder of the model.
            allows_control_tokens: Whether a control token that a message spells is read as one; otherwise it is text.
            trusts_request_templates: Whether a request may bring a chat template of its own.
            cache_bytes: Most bytes of the tokens of conversations that are kept for their next turns; 0: none.

        Raises:
            ConfigInvalid: A file is missing or cannot be used.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigInvalid(
                f"{folder} has no tokenizer.json. Copy the one that was published with the model into this folder."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises only this general exception.
            raise ConfigInvalid(f"{path} cannot be read: {error}. Copy it from the model's publisher again.") from error
        config = TokenizerConfig.load(folder)
        _configure(backend, config)
        template = None
        if config.template is not None:
            template = ChatTemplate(config.template, config.special_tokens, tool_source=config.tool_template)
        return cls(
            backend,
            config.special_tokens,
            template,
            adds_eos=config.adds_eos,
            text_prompt=config.text_prompt,
            allows_control_tokens=allows_control_tokens,
            trusts_request_templates=trusts_request_templates,
            cache_bytes=cache_bytes,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Converts text to token ids, and recognises special tokens that are written in the text.

        Other threads can run during the call, because it uses a batch method of the library, and only those release the
        interpreter lock. The fast method omits the offsets, which are unused and would take half of the time.
        """
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_truncated(
        self, text: str, max_tokens: int, side: Literal["left", "right"], *, add_special_tokens: bool
    ) -> list[int]:
        """Converts text to at most so many token ids.

        Tokens of the text are dropped on one side. Special tokens that are added around it stay, as with the truncation
        of Hugging Face's tokenizers.
        """
        backend = self._backend
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        added = backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        if max_tokens > added:
            encoding.truncate(max_tokens - added, direction=side)
        ids = backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return truncate_tokens(ids, max_tokens, side)

    def request_template(self, source: str) -> ChatTemplate:
        """Compiles the chat template of a request, which runs in the same sandbox as the model's own.

        Raises:
            Unsupported: The operator does not allow templates of requests.
            InvalidRequest: The template does not compile.
        """
        if not self._trusts_request_templates:
            raise Unsupported(_NO_REQUEST_TEMPLATE, param="chat_template")
        template = self._request_templates.get(source)
        if template is None:
            try:
                template = ChatTemplate(source, self._special_tokens)
            except ConfigInvalid as error:
                raise InvalidRequest(
                    f"chat_template does not compile: {error.__cause__}", param="chat_template"
                ) from None
            if len(self._request_templates) >= _MOST_REQUEST_TEMPLATES:
                self._request_templates.clear()
            self._request_templates[source] = template
        return template

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        template: ChatTemplate | None = None,
        add_special_tokens: bool = False,
        organisation: str = "",
    ) -> list[int]:
        """Converts a conversation to token ids by the model's chat template, or another; see `ChatTemplate.render`.

        What the messages, the tools and the arguments say is text, also where it spells a control token. What this
        organisation sent before is not encoded again (`SegmentCache`).
        """
        template, control, mark = template or self.chat_template, self._control, None
        assert template is not None
        if control is not None:
            if tools or arguments:
                mark = control.mark
            for message in messages:
                content = message.get("content")
                if len(message) > 2 or (content and control.pattern.search(content)):
                    mark = control.mark
                    break
        prompt = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            arguments=arguments,
            continue_final_message=continue_final_message,
            mark=mark,
        )
        if self._segments is None or add_special_tokens:
            return self._encode_prompt(prompt, add_special_tokens=add_special_tokens)
        encode = self._encode_words if len(prompt) <= _SHORT_CHARACTERS else self._encode_prompt
        return self._segments.encode(prompt, organisation, encode)

    def _encode_words(self, prompt: str) -> list[int]:
        tokens = None if self._words is None else self._words.encode(prompt)
        return self._encode_prompt(prompt) if tokens is None else tokens

    def _encode_prompt(self, prompt: str, *, add_special_tokens: bool = False) -> list[int]:
        control = self._control
        if control is not None and (control.takes_other_spellings or OPEN_MARK in prompt or CLOSE_MARK in prompt):
            return control.encode(prompt, add_special_tokens=add_special_tokens)
        return self.encode(prompt, add_special_tokens=add_special_tokens)

    def mark(self, text: str) -> str:
        """Returns a text for `encode_marked` in which control tokens are text."""
        return text if self._control is None else self._control.mark(text)

    def encode_marked(self, text: str) -> list[int]:
        """Converts text to token ids, and recognises the control tokens that are not marked."""
        if self._control is None:
            return self.encode(text, add_special_tokens=False)
        return self._control.encode(text, add_special_tokens=False)

    def text_tokenizer(self, control: Set[int]) -> TextTokenizer:
        """Makes an encoder of text that gives none of these tokens."""
        return TextTokenizer(self._backend, self._bytes, control)

    def encode_embedding_input(self, text: str) -> list[int]:
        """Converts a text to the token ids of which an embedding model computes its vector, with prompt and end."""
        return self.append_end(self.encode(self.text_prompt + text, add_special_tokens=True))

    def append_end(
        self, ids: list[int], max_tokens: int | None = None, side: Literal["left", "right"] = "right"
    ) -> list[int]:
        """Appends the end-of-text token for an embedding model whose files ask for it.

        Newer files request this token in ``tokenizer.json``; then `encode` has appended it already. A prompt that the
        model continues never gets this token.

        Args:
            ids: Token ids of the text.
            max_tokens: Most tokens; a text that has so many loses one on the given side. None: no limit.
            side: See `truncate_tokens`.
        """
        if self._closing is None or ids[-1:] == [self._closing]:
            return ids
        return [*(ids if max_tokens is None else truncate_tokens(ids, max_tokens - 1, side)), self._closing]

    def added_token(self, text: str) -> int | None:
        """Returns the id of the token that was added to the vocabulary for exactly this text, or None."""
        token = self._backend.token_to_id(text)
        return token if token in self._added else None

    def fewest_tokens(self, text_characters: int) -> int:
        """Returns a lower bound for the tokens of a text of this length, without its content.

        A character has at least one byte, and Unicode normalisation, which some tokenizers apply first, reduces at most
        three bytes to one. If a tokenizer drops text, the bound is 0.
        """
        return 0 if self._drops_text else text_characters // (self._longest_token_bytes * _NORMALISED_BYTES)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Converts token ids to text; invalid UTF-8 becomes U+FFFD, and unknown ids give no text."""
        table = self._visible if skip_special_tokens else self._bytes
        text = b"".join([table.get(token, b"") for token in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def visible_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes that these tokens add to a text; special tokens add none."""
        table = self._visible
        if len(ids) == 1:  # most steps have one token
            return table.get(ids[0], b"")
        return b"".join([table.get(token, b"") for token in ids])

    def all_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of these tokens, special ones included."""
        return b"".join([self._bytes.get(token, b"") for token in ids])

    def token_bytes(self, id: int) -> bytes:  # noqa: A002 - the word for it
        """Returns the exact bytes of any token, including special ones; empty for an unknown id."""
        return self._bytes.get(id, b"")

    def token_text(self, id: int) -> str:  # noqa: A002 - the word for it
        """Returns the text of one token; an incomplete character becomes U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")


def _configure(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Adds the tokens of the settings to a tokenizer, and applies their case and their spaces before texts."""
    named = set(config.special_tokens.values())
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    wanted = [_added_token(token, special=token.content in named) for _, token in sorted(config.added_tokens.items())]
    present = {token.content for token in backend.get_added_tokens_decoder().values()} | {
        token.content for token in wanted
    }
    for token in config.named_tokens:
        if token.content not in present:
            present.add(token.content)
            wanted.append(_added_token(token, special=True))
    if new := [token for token in wanted if repr(token) not in known]:
        backend.add_tokens(new)
    if config.prepend_scheme is not None and getattr(backend.model, "byte_fallback", False):
        _set_prepend_scheme(backend, config.prepend_scheme)
    backend.encode_special_tokens = config.splits_special_tokens
    if config.lowercases:
        lower = tokenizers.normalizers.Lowercase()
        backend.normalizer = (
            lower if backend.normalizer is None else tokenizers.normalizers.Sequence([lower, backend.normalizer])
        )


def _added_token(token: VocabularyToken, *, special: bool) -> tokenizers.AddedToken:
    """Makes a token of a vocabulary; `special` is True if it is special whatever its flag says."""
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not token.special if token.normalized is None else token.normalized,
        special=token.special or special,
    )


def _set_prepend_scheme(backend: tokenizers.Tokenizer, scheme: PrependScheme) -> None:
    """Has a SentencePiece vocabulary put a space before texts by this scheme."""
    backend.normalizer = None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    if scheme != "never":
        steps.append(tokenizers.decoders.Strip(" ", 1, 0))
    backend.decoder = tokenizers.decoders.Sequence(steps)


class _Model(msgspec.Struct):
    """Section of a tokenizer's JSON with its vocabulary.

    Unigram models list tokens with scores, and other models map tokens to ids.
    """

    vocab: dict[str, int] | list[tuple[str, float]]

    def ids(self) -> Iterator[tuple[str, int]]:
        """Yields every token of the vocabulary with its id."""
        if isinstance(self.vocab, dict):
            yield from self.vocab.items()
        else:
            yield from ((text, token) for token, (text, _) in enumerate(self.vocab))


class _Description(msgspec.Struct):
    """Sections of a tokenizer's JSON that this module reads."""

    model: _Model
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def _tables(
    backend: tokenizers.Tokenizer, vocabulary: Iterator[tuple[str, int]], rules: DecodingRules
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Makes the tables from token id to bytes, for all tokens and for tokens visible in text."""
    table = {token: rules.bytes_of(text) for text, token in vocabulary}
    special: set[int] = set()
    for token, added in backend.get_added_tokens_decoder().items():
        if added.special:
            special.add(token)
        # SentencePiece vocabularies contain added runs of ▁; byte-level ones contain added plain text.
        literal = added.special or rules.byte_level
        table[token] = added.content.encode() if literal else rules.bytes_of(added.content)
    return table, {token: data for token, data in table.items() if token not in special}


_TAIL_TOKENS = 5
"""Number of prompt tokens that the detokenizer reads.

A character has at most four bytes, so at most three tokens can be unfinished. An answer that follows only special
tokens is decoded as a new text, as in training.
"""


def truncate_tokens(tokens: list[int], max_tokens: int, side: Literal["left", "right"]) -> list[int]:
    """Returns at most so many tokens; those on the given side are dropped."""
    if len(tokens) <= max_tokens:
        return tokens
    return tokens[len(tokens) - max_tokens :] if side == "left" else tokens[:max_tokens]


class Detokenizer:
    """Incremental detokenizer of one choice.

    All pushes and the flush together return what `Tokenizer.decode` returns for all tokens.

    Args:
        tokenizer: Tokenizer of the model.
        prompt_tail: Prompt that the answer continues, or the end of the prompt. Its last few tokens decide whether a
            leading space belongs to the text, and may contain the start of the first character of the answer.
        marks: Maps a token to the code point that replaces it (see `maitred.text.special_tokens`).
        skip_special_tokens: Whether special tokens give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int] = (),
        marks: Mapping[int, bytes] = NO_MARKS,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._visible_bytes = tokenizer.visible_bytes if skip_special_tokens else tokenizer.all_bytes
        self._marks = marks
        tail = tokenizer.visible_bytes(prompt_tail[-_TAIL_TOKENS:])
        self._unfinished = b""
        """Bytes of a character that is incomplete so far."""
        self._strip = False
        self._decode(tail)
        self._strip = tokenizer.strips_leading_space and not tail

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the characters that these tokens complete."""
        if self._marks:
            for position, token in enumerate(tokens):
                if token in self._marks:
                    # A character that is incomplete before a marker stays so.
                    before = self._decode(self._visible_bytes(tokens[:position]), final=True)
                    mark = self._marks[token].decode("utf-8", "surrogatepass")
                    self._strip = False
                    return before + mark + self.push(tokens[position + 1 :])
        return self._decode(self._visible_bytes(tokens))

    def flush(self) -> str:
        """Returns the held-back text at the end: U+FFFD for an incomplete character."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        """Decodes the characters that these bytes complete.

        A leading space that does not belong to the text is removed.
        """
        if self._unfinished:
            data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[used:]
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
