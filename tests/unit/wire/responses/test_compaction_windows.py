"""Windows of compacted conversations: who can open a sealed one, and what stays of a conversation."""

import base64

import msgspec
import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Principal, Scope
from maitred.wire.responses.compaction import (
    MAX_SEALED_BYTES,
    CompactedWindow,
    compact_all,
    compact_earlier,
    seal,
    unseal,
)
from maitred.wire.responses.inbound import conversation_items, to_chat
from maitred.wire.responses.requests import CompactionItem, FunctionCallItem, MessageItem, ResponsesRequest

KEY = b"k" * 32


def principal(*tenants):
    return Principal(key="key", tenants=tenants, scopes=frozenset({Scope.INFERENCE}))


def message(role, text):
    return MessageItem(role=role, content=text)


SYSTEM, HELLO, HI, QUESTION = map(
    message, ("developer", "user", "assistant", "user"), ("Be brief.", "Hello", "Hi", "What?")
)
CALL = FunctionCallItem(call_id="c", name="look", arguments="{}")
WINDOW = CompactedWindow(summary="They met.", instructions=[SYSTEM], after=[QUESTION], replaces_user_messages=True)


def test_the_tenant_that_got_it_and_its_organisation_can_open_a_window():
    item = CompactionItem(encrypted_content=seal(WINDOW, principal("team", "acme"), KEY))
    for owner in (principal("team", "acme"), principal("acme")):
        assert unseal(item, owner, KEY, "input[0]") == WINDOW
    for other in (principal("other-team", "acme"), principal("globex")):
        with pytest.raises(InvalidRequest, match="another tenant"):
            unseal(item, other, KEY, "input[0]")
    with pytest.raises(InvalidRequest, match="altered"):
        unseal(item, principal("team", "acme"), b"l" * 32, "input[0]")


def test_no_byte_of_a_window_can_be_changed():
    owner = principal("team")
    text = seal(WINDOW, owner, KEY)
    prefix, _, encoded = text.partition(".")
    signed = base64.urlsafe_b64decode(encoded)
    for position in range(len(signed)):
        changed = signed[:position] + bytes([signed[position] ^ 1]) + signed[position + 1 :]
        item = CompactionItem(encrypted_content=f"{prefix}.{base64.urlsafe_b64encode(changed).decode('ascii')}")
        with pytest.raises(InvalidRequest, match="altered") as caught:
            unseal(item, owner, KEY, "input[0]")
        assert caught.value.param == "input[0].encrypted_content"


def test_a_window_is_not_larger_than_openai_has_it():
    large = CompactedWindow(summary="", after=[message("user", "a" * MAX_SEALED_BYTES)])
    with pytest.raises(InvalidRequest, match="Send fewer"):
        seal(large, principal("team"), KEY)
    item = CompactionItem(encrypted_content="maitred-c1." + "a" * MAX_SEALED_BYTES)
    with pytest.raises(InvalidRequest, match="has more than"):
        unseal(item, principal("team"), KEY, "input[0]")


@pytest.mark.parametrize(
    ("items", "earlier", "before", "after"),
    [
        ([SYSTEM, HELLO, HI, QUESTION], [SYSTEM, HELLO, HI], [], [QUESTION]),
        ([HELLO, CALL], [HELLO, CALL], [HELLO], []),
        ([HELLO, HI, QUESTION, SYSTEM, QUESTION], [HELLO, HI], [], [QUESTION, QUESTION]),
        ([HI], [HI], [], []),
    ],
)
def test_what_waits_for_an_answer_stays_word_for_word(items, earlier, before, after):
    summarised, window = compact_earlier(items)
    assert (list(summarised), window.before, window.after) == (earlier, before, after)
    assert window.instructions == [item for item in items if item is SYSTEM]


@pytest.mark.parametrize("items", [[], [SYSTEM, HELLO], [HELLO, QUESTION]])
def test_messages_of_the_user_alone_are_not_compacted(items):
    assert compact_earlier(items) is None


def test_the_window_stands_for_what_was_before_it():
    item = CompactionItem(encrypted_content="")
    request = ResponsesRequest(model="m", input=[SYSTEM, HELLO, HI, item, HI, QUESTION])
    read = [entry for _, entry in conversation_items(request, [CALL], WINDOW)]
    assert read[0] == SYSTEM
    assert read[1].content.endswith("They met.")
    assert read[2:] == [QUESTION, HI, QUESTION]
    kept = [entry for _, entry in conversation_items(request, [CALL], compact_all([SYSTEM, HELLO]))]
    assert kept[:2] == [SYSTEM, HELLO]
    assert kept[3:] == [HI, QUESTION]
    # Instructions that the client left out come back, and neighbours are one message.
    chat = to_chat(ResponsesRequest(model="m", input=[item, HI, QUESTION]), window=WINDOW)
    assert [entry.role for entry in chat.messages] == ["developer", "user", "assistant", "user"]
    assert chat.messages[1].content.endswith("They met.\n\nWhat?")
    assert msgspec.json.decode(msgspec.json.encode(WINDOW), type=CompactedWindow) == WINDOW
