"""The `server` section: address and limits of the HTTP server."""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.wire.loopback import is_loopback

_CORS_ORIGIN = r"^(\*|[A-Za-z][A-Za-z0-9+.-]*://[^/\s,*?#]+)$"


class WebSocketConfig(Struct, frozen=True, kw_only=True):
    """Settings of WebSockets, by which clients speak the Responses API."""

    max_per_key: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="WebSockets that one key may have open at once; callers without a key count as one. A further "
            "handshake is refused with 429. 0: none are opened.",
            extra={"unit": "connections"},
        ),
    ] = 256
    lifetime_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="How long one may be open. Then it takes no more turns, and is closed when none runs.",
            extra={"unit": "seconds"},
        ),
    ] = 3600.0
    ping_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Silence of a client after which it gets a ping. If it is as long silent again, the connection "
            "is cut.",
            extra={"unit": "seconds"},
        ),
    ] = 20.0
    max_lanes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Lanes of one connection (`stream_id`) whose turns run at once. Each remembers its last "
            "response.",
            extra={"unit": "lanes"},
        ),
    ] = 16
    max_queued_turns: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Turns of one lane that may wait for the one that runs. All waiting turns of a connection "
            "together may be as large as one body (`server.max_body_bytes`).",
            extra={"unit": "turns"},
        ),
    ] = 8
    max_remembered_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="Memory of one connection for the conversations of the last response of each lane, which "
            "`previous_response_id` finds there also with `store: false`. The oldest are dropped.",
            extra={"unit": "bytes"},
        ),
    ] = 4 << 20


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server: its address and its limits."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address to listen on. On anything but a loopback address every request needs an API key, "
            "unless `allow_unauthenticated` says otherwise.",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")] = 8000
    allow_unauthenticated: Annotated[
        bool | None,
        Meta(
            description="Serve requests that carry no API key, as the tenant `anonymous`. Null: only on a loopback "
            "address. True on another address lets whoever reaches the port use the model: set it only behind a proxy "
            "or firewall that decides who may."
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names that may stand in the `Host` and `Origin` of requests without a key, beside those of "
            "this machine. On a loopback address without keys, all others are refused with 403: a web page of another "
            "site, or one that binds its name to this machine, could use the models otherwise. A proxy on this machine "
            "that passes its own name on needs that name here."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=_CORS_ORIGIN)], ...],
        Meta(
            description="Origins, such as `https://app.example`, whose web pages may use the API from a browser "
            "(CORS). `*` stands for every origin. On a loopback address without keys, pages of other machines are "
            "served only if their origin itself is named."
        ),
    ] = ()
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes that speak HTTP. 1: one process does everything. With more, a further one, the "
            "controller, decides for all of them; see [workers](workers.md).",
            extra={"unit": "processes"},
        ),
    ] = 1
    max_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Requests held at once, running or waiting; more are refused with 429 and a `Retry-After`. One "
            "key takes eight ninths at most, so that others can come in, of its own organisation as well.",
            extra={"unit": "requests"},
        ),
    ] = 8192
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 30,
            description="Largest request body; a larger one is refused with 413.",
            extra={"unit": "bytes"},
        ),
    ] = 10 << 20
    max_upload_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=4 << 30,
            description="Largest form with files (sound to transcribe, images to edit); a larger one is refused with "
            "413. It is kept in a temporary file while its request runs.",
            extra={"unit": "bytes"},
        ),
    ] = 100 << 20
    upload_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="To read such a form, from its first byte to its last.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    body_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="How long a request body may take to arrive; a slower one is refused with 408.",
            extra={"unit": "seconds"},
        ),
    ] = 60.0
    drain_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="How long answers may go on after SIGTERM. What is not finished then ends with an error event.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    heartbeat_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Longest silence on a stream. When nothing was sent for so long, because its request waits in "
            "the queue or its sequence has lost its place in the batch, it gets a comment, which says where the "
            "request stands. Common proxies give up after 30 to 60 seconds of silence.",
            extra={"unit": "seconds"},
        ),
    ] = 15.0
    unread_tokens: Annotated[
        int,
        Meta(
            ge=16,
            le=1 << 20,
            description="Tokens of one stream that may lie unread in the gateway. With more, the engine computes no "
            "further ones of it until its client reads on.",
            extra={"unit": "tokens"},
        ),
    ] = 512
    stall_grace_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="How long a client may go without reading anything while its answer waits to be sent. Then the "
            "request ends, what it held is free, and the connection is cut.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    retry_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Retries that a tenant is granted while the server is saturated, for each request that it "
            "sends for the first time. Beyond them, refusals say `x-should-retry: false`. What is sent to another "
            "upstream after a failure is taken from the same budget.",
            extra={"unit": "retries per request"},
        ),
    ] = 0.2
    retry_allowance: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Retries in a minute that a tenant is granted beside that share, so that one who sends little "
            "may come back.",
            extra={"unit": "retries"},
        ),
    ] = 10
    litellm_compatibility: Annotated[
        bool,
        Meta(
            description="Serve the administration of LiteLLM's proxy (`/key/*`, `/team/*`, `/user/*`, `/budget/*`, "
            "`/spend/*`, `/model/info`, `/health/*`) on the tenants, keys and limits of this server, send its "
            "`x-litellm-*` headers and read them in requests; see [the guide](migration-litellm.md#scripts-that-call-"
            "litellm). Where a file of LiteLLM's is served or imported, it is on."
        ),
    ] = False
    strict: Annotated[
        bool,
        Meta(
            description="Refuse requests with fields that are unknown here, instead of ignoring these fields and "
            "naming them in `x-maitred-ignored`. Finds misspelt parameters."
        ),
    ] = False

    websocket: WebSocketConfig = WebSocketConfig()

    @property
    def serves_anyone(self) -> bool:
        """Whether requests without a key are served."""
        return is_loopback(self.host) if self.allow_unauthenticated is None else self.allow_unauthenticated

    @property
    def is_local_without_keys(self) -> bool:
        """Whether only this machine reaches the server, and needs no key."""
        return self.serves_anyone and is_loopback(self.host)
