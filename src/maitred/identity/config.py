"""The `identity` section: the freshness of keys, and the accepted token issuers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from maitred.identity.declared_config import LimitsConfig

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric signature algorithms only. ``none`` has no signature, and with HS256 the verification key would be a
secret."""


class OidcConfig(Struct, frozen=True, kw_only=True):
    """An identity provider whose access tokens (signed JWTs) are accepted instead of keys."""

    issuer: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=2048,
            description="The provider, exactly as its tokens name it in `iss`: an `https` address, or an `http` one "
            "on this machine.",
        ),
    ]
    audience: Annotated[
        str,
        Meta(min_length=1, max_length=2048, description="Who its tokens must be meant for: what they say in `aud`."),
    ]
    jwks_url: Annotated[
        str | None,
        Meta(
            description="Where its public keys are; null asks the provider, at `/.well-known/openid-configuration` "
            "below `issuer`."
        ),
    ] = None
    algorithms: Annotated[
        tuple[Algorithm, ...],
        Meta(description="Signatures that are accepted. All of them are asymmetric."),
    ] = ("RS256", "ES256")
    tenant_claim: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="The claim that says which tenant the caller belongs to; a claim inside another is written "
            "`outer.inner`. Where it is a list, the first known entry counts.",
        ),
    ] = "tenant"
    tenants: Annotated[
        dict[str, str],
        Meta(
            description="Value of that claim: id of the tenant. If any are given, no other value is accepted; if none "
            "are, the value is the id, and the provider can name every tenant."
        ),
    ] = {}
    default_tenant: Annotated[
        str | None, Meta(description="The tenant of tokens that lack the claim; null refuses them.")
    ] = None
    scope_claim: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="The claim that says what the caller may do: words in one text, or a list.",
        ),
    ] = "scope"
    scopes: Annotated[
        dict[str, Literal["inference", "metrics", "admin"]],
        Meta(description="Value in that claim: the scope that it gives. Other values give nothing."),
    ] = field(
        default_factory=lambda: {
            "maitred:inference": "inference",
            "maitred:metrics": "metrics",
            "maitred:admin": "admin",
        }
    )
    default_scopes: Annotated[
        tuple[Literal["inference", "metrics", "admin"], ...],
        Meta(description="What a caller may do whose token gives no scope; an empty list refuses it."),
    ] = ("inference",)
    leeway_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="How far the provider's clock may be off, for when a token begins and ends.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    keys_ttl_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Age at which the provider's public keys are fetched again.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    keys_refetch_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Least time between two fetches. A token that is signed with a key not yet known has them "
            "fetched at once, though no more often than this.",
            extra={"unit": "seconds"},
        ),
    ] = 10.0
    keys_max_stale_s: Annotated[
        float,
        Meta(
            gt=0,
            le=30 * 86_400,
            description="Oldest keys that are used while the provider cannot be reached; after that its tokens are "
            "refused with 503.",
            extra={"unit": "seconds"},
        ),
    ] = 86_400.0


class IdentityConfig(Struct, frozen=True, kw_only=True):
    """Freshness of keys, accepted token issuers, and limits for every caller."""

    refresh_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description="Time between two looks at the store. A key that is revoked works no longer than this and what "
            "one look takes.",
            extra={"unit": "seconds"},
        ),
    ] = 0.3
    max_stale_s: Annotated[
        float,
        Meta(
            gt=0,
            le=30 * 86_400,
            description="How long the known keys are used while the store is away; after that every request is refused "
            "with 503.",
            extra={"unit": "seconds"},
        ),
    ] = 3600.0
    oidc: Annotated[
        dict[str, OidcConfig],
        Meta(
            description="One entry per provider. Its name stands before the subject in the usage of its callers. Needs "
            "`pip install 'maitred[oidc]'`."
        ),
    ] = {}
    limits: Annotated[LimitsConfig, Meta(description="What holds for everybody together.")] = LimitsConfig()
    limits_per_tenant: Annotated[LimitsConfig, Meta(description="What holds for each tenant by itself.")] = (
        LimitsConfig()
    )
    limits_per_key: Annotated[LimitsConfig, Meta(description="What holds for each key by itself.")] = LimitsConfig()
