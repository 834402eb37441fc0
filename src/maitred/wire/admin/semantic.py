"""Queries and responses of the admin API for the semantic cache: its scopes, and what they have compared."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.semantic_scope import CertificationState, ScopePhase

_Model = Annotated[str | None, Meta(description="Those of this model, by the name that requests resolve to.")]
_Tenant = Annotated[str | None, Meta(description="Those of this tenant, of its keys, and of its teams.")]
_Scope = Annotated[str | None, Meta(description="Those of this name, as the list of scopes writes it.")]
_Encoder = Annotated[str | None, Meta(description="Those of this encoder, by its digest.")]
_All = Annotated[bool, Meta(description="All scopes; needed where nothing else is given.")]
_After = Annotated[str, Meta(description="`next` of the page before.")]
_Limit = Annotated[int, Meta(description="Entries of a page, 1 to 500.")]


class SemanticScopesQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the scopes of the semantic cache to list."""

    model: _Model = None
    tenant: _Tenant = None
    after: _After = ""
    limit: _Limit = 100


class LabelledPairsQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the labels of the semantic cache to list."""

    model: _Model = None
    tenant: _Tenant = None
    scope: _Scope = None
    same: Annotated[
        bool | None, Meta(description="Only pairs whose answers were the same (true), or were not (false).")
    ] = None
    after: _After = ""
    limit: _Limit = 100


class SelectSemanticScopes(Struct, frozen=True, kw_only=True):
    """Query that selects scopes of the semantic cache, by all that is given."""

    model: _Model = None
    tenant: _Tenant = None
    scope: _Scope = None
    encoder: _Encoder = None
    all: _All = False


class ResetSemanticScopes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that selects scopes of the semantic cache, by all that is given, and says what they begin anew with."""

    model: _Model = None
    tenant: _Tenant = None
    scope: _Scope = None
    encoder: _Encoder = None
    all: _All = False
    keep_labels: Annotated[
        bool,
        Meta(description="Train the next verifier from the labels that are there. Otherwise they are deleted."),
    ] = False


class SemanticScopeBody(Struct, frozen=True, kw_only=True):
    """Scope of the semantic cache: a model and who shares its answers, for one encoder."""

    scope: Annotated[str, Meta(description="Its name: the model and who shares its answers, as a list in JSON.")]
    model: str
    shared_by: Annotated[
        Literal["key", "tenant", "organisation", "public"],
        Meta(description="Who shares answers: requests with one key, of one tenant, of one organisation, or all."),
    ]
    key: Annotated[str | None, Meta(description="The key; null: several share.")]
    tenant: Annotated[str | None, Meta(description="The tenant, or that of the key; null: several share.")]
    organisation: Annotated[str | None, Meta(description="The organisation; null: all callers share.")]
    state: Annotated[
        CertificationState,
        Meta(description="`shadow`: it learns and serves nothing; `certified`: it serves; `tripped`: it has stopped."),
    ]
    phase: ScopePhase
    progress: Annotated[
        int | None,
        Meta(
            description="Of the phase: compared answers (`learning`, `training`), scores (`scoring`), or audited "
            "look-ups (the others)."
        ),
    ]
    progress_needed: Annotated[
        int | None,
        Meta(
            description="How many of them end the phase, if no more false hits come; null: it does not end by itself."
        ),
    ]
    threshold: Annotated[float | None, Meta(description="Score from which on an answer is served; null: none is.")]
    false_hit_bound: Annotated[
        float | None, Meta(description="Upper bound of false hits per look-up; null: none is known yet.")
    ]
    budget: Annotated[float, Meta(description="The bound has to be within it; see `cache.semantic.budget`.")]
    labels: Annotated[int, Meta(description="Pairs of questions that are kept for the training.")]
    same: Annotated[int, Meta(description="Compared answers that were the same, in training and in audits.")]
    different: Annotated[int, Meta(description="Compared answers that were not.")]
    lookups: Annotated[int, Meta(description="Look-ups since it began, or began anew; as all counts here.")]
    audits: Annotated[int, Meta(description="Of these, audited ones that count for the bound.")]
    served: Annotated[int, Meta(description="Of these, those that got the answer of a similar question.")]
    saved_tokens: Annotated[int, Meta(description="Tokens of prompts and answers that were not computed.")]
    false_hits: Annotated[
        int, Meta(description="Audited look-ups that got, or would have got, a wrong answer by the threshold of then.")
    ]
    encoder: Annotated[str, Meta(description="Digest of the encoder.")]
    verifier: Annotated[str, Meta(description="Version of its verifier; empty: none is trained yet.")]
    updated_at: str


class SemanticScopeList(Struct, frozen=True, kw_only=True):
    """Page of scopes of the semantic cache, in the order of their names."""

    object: Literal["list"] = "list"
    data: list[SemanticScopeBody]
    has_more: bool
    next: str | None


class LabelledPairBody(Struct, frozen=True, kw_only=True):
    """Two questions of users, and whether their answers were the same."""

    scope: str
    asked: Annotated[str, Meta(description="The later question.")]
    cached: Annotated[str, Meta(description="The earlier question, whose answer was in the cache.")]
    same: bool
    created_at: str


class LabelledPairList(Struct, frozen=True, kw_only=True):
    """Page of labels, the newest first."""

    object: Literal["list"] = "list"
    data: list[LabelledPairBody]
    has_more: bool
    next: str | None


class SemanticScopeChange(Struct, frozen=True, kw_only=True):
    """Confirmation that scopes of the semantic cache begin anew, or were removed."""

    object: Literal["changed_scopes"] = "changed_scopes"
    changed: Annotated[int, Meta(description="How many.")]
