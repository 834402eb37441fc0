"""Writes docs/request-fields.md: what becomes of every request field that is known here."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from maitred.replica.upstream.dialects import ANTHROPIC_DIALECT, DIALECTS, GATEWAY_FIELDS
from maitred.wire.anthropic.fields import HONOURED_FIELDS, MESSAGES_FIELDS
from maitred.wire.openai.decode import CHAT_FIELDS, COMPLETION_FIELDS
from maitred.wire.openai.fields import EMBEDDING_FIELDS, FIELDS, HINT, TOKENIZE_FIELDS, RequestField
from maitred.wire.openai.requests import EmbeddingRequest, TokenizeRequest
from maitred.wire.responses.fields import HONOURED_FIELDS as HONOURED_IN_RESPONSES
from maitred.wire.responses.fields import RESPONSES_FIELDS

PAGE = Path(__file__).parent.parent / "docs" / "request-fields.md"
INTRODUCTION = """# Request fields

What a client says reaches the model that answers, or the client is told that it does not. Every field of a request is
on one of three lists, for each target:

- **honoured** by our own engine, or **passed on** to the server;
- **refused**, because it changes the answer and the target does not have it: a 400 with the field in `param`, which
  says what to send instead. Values that ask for nothing (`n: 1`, `tools: []`, null) are left out in silence;
- **ignored**, because it is a hint: the answer is the same without it. The response header `x-maitred-ignored` names
  the hints that were left out (`metadata, stream_options.include_obfuscation`), the first 16 of them.

Fields that are on no list are ignored and named in the same way; with `server.strict` they are refused. Members of
messages and tools go to other servers as they were written; our own engine names those that it does not read
(`messages.content.cache_control`).

An operator who knows that a server has further fields lists them in `models.*.upstreams[].request_fields`; fields that
`parameters` sets may be sent too. Other words for `max_tokens` go to no server: they would pass by what limits and
budgets grant.

This page is rendered from the tables in the code (`python -m scripts.request_fields`), and a test compares the tables
with the types of the official clients of OpenAI and Anthropic and with vLLM's protocol.
"""
MESSAGES = """## Messages

A server that speaks this API gets a request as it was written ([anthropic.md](anthropic.md#what-becomes-of-a-request)).
For other models it becomes the equivalent chat completion; what becomes of `top_k` or `tools` there is in the first
table, and so is what becomes here of other fields of that table.

"""
RESPONSES = """## Responses

A server that speaks this API gets a request as it was written
([upstreams.md](upstreams.md#servers-that-speak-the-responses-api)). For other models it becomes the equivalent chat
completion, too; fields of the first table that are not below are refused or ignored as they are there.

"""
ALL = "all"


def rendered() -> str:
    """Returns the whole page."""
    sections = [
        INTRODUCTION,
        "## Chat and text completions\n\n" + completions_table(),
        MESSAGES + plain_table(HONOURED_FIELDS, MESSAGES_FIELDS),
        RESPONSES + plain_table(HONOURED_IN_RESPONSES, RESPONSES_FIELDS),
        "## Embeddings\n\n" + plain_table(EmbeddingRequest.__struct_fields__, EMBEDDING_FIELDS),
        "## Tokens of a text\n\n" + plain_table(TokenizeRequest.__struct_fields__, TOKENIZE_FIELDS),
    ]
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


def completions_table() -> str:
    """Returns the table of chat and text completions, with the dialects that a field is passed on to."""
    rows = [("Field", "Our own engine", "Passed on to", "Elsewhere")]
    rows += [
        (f"`{name}`", honoured_by_engine(name), passed_to(name), elsewhere(name, FIELDS[name]))
        for name in sorted(FIELDS)
    ]
    return table(rows)


def honoured_by_engine(name: str) -> str:
    """Returns where our own engine honours a field."""
    if name in CHAT_FIELDS and name in COMPLETION_FIELDS:
        return "honoured"
    if name in CHAT_FIELDS:
        return "in chat completions"
    return "in text completions" if name in COMPLETION_FIELDS else ""


def passed_to(name: str) -> str:
    """Returns the dialects that have a field."""
    if name in GATEWAY_FIELDS or name in ("include_reasoning", "best_of"):
        return "the gateway honours it"
    dialects = [dialect for dialect, about in DIALECTS.items() if name in about.allowed_fields]
    others = [dialect for dialect in DIALECTS if dialect not in dialects]
    anthropic = ["`kind: anthropic`"] if name in ANTHROPIC_DIALECT.allowed_fields else []
    if not others:
        return ", ".join([ALL, *anthropic])
    if len(others) <= 3:
        return ", ".join([f"{ALL} but {listed(others)}", *anthropic])
    return ", ".join([*(f"`{dialect}`" for dialect in dialects), *anthropic])


def elsewhere(name: str, field: RequestField) -> str:
    """Returns what becomes of a field where it is not honoured."""
    if name in ("model", "stream", "max_tokens"):
        return ""
    return f"refused. {field.alternative}".strip() if field.changes_answer else "ignored"


def plain_table(honoured: Collection[str], fields: Mapping[str, RequestField]) -> str:
    """Returns the table of an API whose fields have the same fate for every target."""
    rows = [("Field", "What becomes of it")]
    for name in sorted({*honoured, *fields}):
        fate = "honoured" if name in honoured else elsewhere(name, fields.get(name, HINT))
        rows.append((f"`{name}`", fate))
    return table(rows)


def listed(names: Iterable[str]) -> str:
    """Returns names with commas."""
    return ", ".join(f"`{name}`" for name in names)


def table(rows: list[tuple[str, ...]]) -> str:
    """Returns rows as a table, the first of them as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
    print(f"{len(FIELDS)} fields in {PAGE}")
