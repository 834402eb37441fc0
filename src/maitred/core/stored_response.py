"""Stored responses and conversations of the Responses API: what a later request needs to go on with them."""

from collections.abc import Mapping

import msgspec


class StoredItem(msgspec.Struct, frozen=True):
    """One item of a conversation as it is stored."""

    id: str
    item: bytes
    """The item as JSON, with its id."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response of the Responses API as it is stored."""

    id: str
    tenant: str
    """Tenant of the key that made it."""
    organisation: str
    previous: str | None
    """Id of the response before it; None: it is the first."""
    conversation: str | None = None
    """Id of the conversation that its items are added to; None: it belongs to none."""
    created_s: float
    """Wall time at which it was made, and..."""
    expires_s: float
    """...from which it is deleted."""
    input: bytes
    """Items of its own input as a JSON list, each with an id."""
    output: bytes
    """Items of its output as a JSON list, with signed thoughts."""
    resource: bytes
    """The response as the client received it, as JSON."""
    last_event: int | None = None
    """Sequence number of the event that ended its stream; None: it was no stream, or it goes on."""
    item_ids: tuple[str, ...] = ()
    """Ids in its output that its server has given, so that they say nothing of this response; they are only written."""
    owner: str | None = None
    """Gateway that runs it in the background; None: it has ended. To save one with an owner ends it, if that gateway
    still owns it."""


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as it is stored, without its items."""

    id: str
    tenant: str
    organisation: str
    created_s: float
    expires_s: float
    """Wall time from which it is deleted; each use moves it."""
    metadata: Mapping[str, str]


class BackgroundClaim(msgspec.Struct, frozen=True):
    """Claim of a gateway on a response that runs in the background, as the database has it."""

    owner: str | None
    """Gateway that runs it; None: it has ended."""
    cancelled: bool
    """Whether its caller has cancelled it."""
