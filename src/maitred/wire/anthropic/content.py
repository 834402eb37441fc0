"""Content of a message that chat completions tell in members of their own: citations, images, and members of calls.

Whatever has no place in a message stays a member of it, or of its block, under the name that its server gave it.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from maitred.core.inference import ChunkMetadata
from maitred.core.request import Usage
from maitred.wire.anthropic.responses import ContentBlock, MessagesAnswer, MessageUsage

_DECIDED = frozenset({*MessagesAnswer.__struct_fields__, "choices", "object", "created"})
"""Members of a message that the gateway decides."""
_READ_OF_CALL = frozenset({"index", "id", "type", "function", "custom"})
_BODY_FIELDS = frozenset({"name", "arguments", "input"})


def type_of(block: ContentBlock | Mapping[str, Any]) -> object:
    """Returns the type of a block."""
    return block.type if isinstance(block, ContentBlock) else block.get("type")


def members_of_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a server sends with a call beside its name and its arguments."""
    members = {name: value for name, value in call.items() if name not in _READ_OF_CALL}
    for field in ("function", "custom"):
        if body := call.get(field):
            members |= {name: value for name, value in body.items() if name not in _BODY_FIELDS}
    return members


def members_of(metadata: ChunkMetadata, others: Mapping[str, Any], stop_sequence: str | int | None) -> dict[str, Any]:
    """Returns the members of a message that the gateway does not decide.

    A chat server's `stop_reason` is what ended the answer: a stop string, or the number of a stop token. In a message
    this word means something else, so the server's becomes `native_stop_reason`, unless the message tells it as its
    stop sequence.
    """
    members = {**metadata.chunk, **metadata.choice, **others}
    if (ended_by := metadata.choice.get("stop_reason")) is not None and ended_by != stop_sequence:
        members["native_stop_reason"] = ended_by
    return {name: value for name, value in members.items() if name not in _DECIDED}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Returns the usage with whatever else the server counted."""
    return {**(usage.details or {}), **to_builtins(MessageUsage.of(usage))}


def citation_event(citation: dict[str, Any]) -> dict[str, Any]:
    """Returns the event that adds a citation to the open text."""
    return {"type": "content_block_delta", "delta": {"type": "citations_delta", "citation": citation}}


def to_citations(annotations: object) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the annotations of web pages as citations, and the others."""
    citations: list[dict[str, Any]] = []
    others = []
    for annotation in annotations if isinstance(annotations, list) else () if annotations is None else (annotations,):
        match annotation:
            case {"type": "url_citation", "url_citation": {"url": str() as url} as cited, **more}:
                more |= cited
                more |= {"type": "web_search_result_location", "url": url, "title": cited.get("title")}
                more |= {"cited_text": more.pop("content", None) or "", "encrypted_index": ""}
                citations.append({str(name): value for name, value in more.items()})
            case _:
                others.append(annotation)
    return citations, others


def to_images(images: object) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns images as blocks, and those that are in another form."""
    blocks: list[dict[str, Any]] = []
    others = []
    for image in images if isinstance(images, list) else () if images is None else (images,):
        match image:
            case {"image_url": {"url": str() as url}, **more} | {"image_url": str() as url, **more}:
                members = {str(name): value for name, value in more.items() if name not in ("type", "index")}
                blocks.append({**members, "type": "image", "source": _source_of(url)})
            case {"type": "image", "source": dict() as source, **more}:
                blocks.append({**{str(name): value for name, value in more.items()}, "type": "image", "source": source})
            case _:
                others.append(image)
    return blocks, others


def _source_of(url: str) -> dict[str, Any]:
    if (split := split_data_url(url)) is None:
        return {"type": "url", "url": url}
    media_type, data = split
    return {"type": "base64", "media_type": media_type, "data": data}


def split_data_url(url: str) -> tuple[str, str] | None:
    """Returns the media type and the base64 of a ``data:`` URL; None: the URL is another one."""
    media_type, is_base64, data = url.removeprefix("data:").partition(";base64,")
    return (media_type, data) if url.startswith("data:") and is_base64 else None


def whole_block(block: dict[str, Any]) -> dict[str, Any] | ContentBlock:
    """Returns a block of a server that speaks Messages; a call that is cut off becomes text: no client can run it."""
    if block.get("type") != "tool_use" or isinstance(block.get("input"), dict):
        return block
    return ContentBlock(type="text", text=f"{block.get('name')}({block.get('input')}")
