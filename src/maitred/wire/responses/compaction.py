"""Compaction of a conversation: what stands for its earlier turns, sealed for the client that keeps it.

The model reads a compacted conversation as follows, the first lines only as far as there are such messages:

    instructions     system and developer messages that the client has left out since
    user messages    those before the compaction item, if its window leaves them there
    before           last message of the user, if the model was at work on it
    summary          what the model has said of the conversation
    after            messages of the user that wait for an answer
    ...              items after the compaction item

A sealed window is signed and not encrypted: the client knows the conversation, but it shall not pass off another text,
or that of another tenant, as what this server made.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Principal
from maitred.wire.responses.requests import CompactionItem, InputItem, MessageItem

MAX_SUMMARY_TOKENS = 2048
"""Most tokens of a summary, with the reasoning before it."""
MAX_SEALED_BYTES = 20 * 1024 * 1024
"""Largest size of ``encrypted_content``, as OpenAI has it."""
SUMMARY_REQUEST = (
    "Summarise the conversation above, so that you can go on with it without reading it again. Say what the user "
    "wants, with every wish and constraint that still holds; what was done and decided, and why; and what is left to "
    "do, with the next step. Keep names, numbers, paths and results that are still needed exactly as they are. Write "
    "the summary alone, in at most 1,000 words. Do not answer the user now, and call no tools."
)
"""Message with which the model is asked for a summary."""
_SUMMARY_HEAD = (
    "The conversation up to here was replaced by the following summary of it. Go on from there, and do not speak of "
    "the summary.\n\n"
)
_SUMMARY_CUT = "\n\n(The summary was cut here.)"
_PREFIX = "maitred-c1."
_SIGNATURE_BYTES = 32
_ROLES_OF_INSTRUCTIONS = ("system", "developer")
_ALTERED = (
    "{path}.encrypted_content was altered, or made for another tenant. Send the compaction item as it came, or the "
    "items that it stands for."
)


class CompactedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that stand for a conversation up to a compaction item."""

    summary: str
    is_cut: bool = False
    """Whether the summary has reached the bound of summaries."""
    instructions: list[MessageItem] = []
    """System and developer messages of the conversation."""
    before: list[MessageItem] = []
    after: list[MessageItem] = []
    replaces_user_messages: bool = False
    """Whether messages of the user before the compaction item are replaced, too."""


class _SignedWindow(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    organisation: str
    window: CompactedWindow


def is_instruction(item: InputItem) -> bool:
    """Returns whether an item is a message of the system or the developer."""
    return isinstance(item, MessageItem) and item.role in _ROLES_OF_INSTRUCTIONS


def is_user_message(item: InputItem) -> bool:
    """Returns whether an item is a message of the user."""
    return isinstance(item, MessageItem) and item.role == "user"


def summary_message(window: CompactedWindow) -> MessageItem:
    """Returns the message in which the model reads the summary of a window."""
    return MessageItem(role="user", content=_SUMMARY_HEAD + window.summary + _SUMMARY_CUT * window.is_cut)


def seal(window: CompactedWindow, principal: Principal, key: bytes) -> str:
    """Returns a window as the text of ``encrypted_content``.

    Args:
        window: The window.
        principal: The caller, whose tenant can use it.
        key: Key for the signature.

    Raises:
        InvalidRequest: It is too large.
    """
    sealed = _SignedWindow(tenant=principal.tenants[0], organisation=principal.tenants[-1], window=window)
    payload = msgspec.json.encode(sealed)
    text = _PREFIX + base64.urlsafe_b64encode(_sign(payload, key) + payload).decode("ascii")
    if len(text) > MAX_SEALED_BYTES:
        raise InvalidRequest(
            f"What stays of the conversation has more than {MAX_SEALED_BYTES:,} bytes. Send fewer or smaller messages "
            "in input.",
            param="input",
        )
    return text


def _sign(payload: bytes, key: bytes) -> bytes:
    return hmac.digest(key, payload, "sha256")


def is_sealed_here(item: CompactionItem) -> bool:
    """Returns whether a compaction item looks like one of this server."""
    return item.encrypted_content.startswith(_PREFIX)


def unseal(item: CompactionItem, principal: Principal, key: bytes, path: str) -> CompactedWindow:
    """Returns the window of a compaction item.

    Args:
        item: The item.
        principal: The caller.
        key: Key of the signature.
        path: Place of the item in the request, for messages about it.

    Raises:
        InvalidRequest: It is not as this server has made it, or it is another tenant's, or too large.
    """
    text, param = item.encrypted_content, f"{path}.encrypted_content"
    if len(text) > MAX_SEALED_BYTES:
        raise InvalidRequest(f"{param} has more than {MAX_SEALED_BYTES:,} bytes.", param=param)
    altered = InvalidRequest(_ALTERED.format(path=path), param=param)
    try:
        signed = base64.b64decode(text[len(_PREFIX) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise altered from None
    signature, payload = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(payload, key)):
        raise altered
    sealed = msgspec.json.decode(payload, type=_SignedWindow)
    # As stored responses: of the caller's tenant, or of a team of it.
    if principal.tenants[0] not in (sealed.tenant, sealed.organisation):
        raise altered
    return sealed.window


def compact_all(items: Sequence[InputItem]) -> CompactedWindow:
    """Returns the window of a whole conversation, still without a summary; messages of the user stay where they are."""
    return CompactedWindow(summary="", instructions=_instructions(items))


def compact_earlier(items: Sequence[InputItem]) -> tuple[Sequence[InputItem], CompactedWindow] | None:
    """Splits a conversation that the model is to go on with after a compaction.

    Returns:
        The items to summarise, and the window of the conversation, still without their summary; None: there are only
        messages of the user and instructions, which are kept word for word.
    """
    end = len(items)
    while end and (is_user_message(items[end - 1]) or is_instruction(items[end - 1])):
        end -= 1
    if not end:
        return None
    earlier = items[:end]
    waiting = [item for item in items[end:] if isinstance(item, MessageItem) and is_user_message(item)]
    # Without a message that waits, the model is at work on the last one.
    asked = [item for item in earlier if isinstance(item, MessageItem) and is_user_message(item)]
    return earlier, CompactedWindow(
        summary="",
        instructions=_instructions(items),
        before=[] if waiting else asked[-1:],
        after=waiting,
        replaces_user_messages=True,
    )


def _instructions(items: Sequence[InputItem]) -> list[MessageItem]:
    return [item for item in items if isinstance(item, MessageItem) and is_instruction(item)]
