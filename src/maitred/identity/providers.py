"""Opens the configured identity providers if their packages are installed.

This module imports none of the packages that check tokens, so the configuration can be checked without them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.identity import TokenIssuers
from maitred.wire.loopback import is_trustworthy


@asynccontextmanager
async def token_issuers(
    configs: Mapping[str, OidcConfig], directory: Directory, clock: Clock
) -> AsyncIterator[TokenIssuers | None]:
    """Yields the providers for the length of the context; None if none is configured.

    Raises:
        ConfigInvalid: A provider has invalid settings, or the packages that check tokens are not installed.
    """
    if not configs:
        yield None
        return
    faults = list(provider_faults(configs))
    if faults:
        raise ConfigInvalid(
            "\n".join(["The identity providers have faults:", *(f"  {key}: {text}" for key, text in faults)])
        )
    try:
        from maitred.identity.oidc import OidcIssuers
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jwt", "cryptography"):
            raise
        raise ConfigInvalid(
            f"identity.oidc: tokens are checked with {error.name}, which is not installed. "
            "Run: pip install 'maitred[oidc]'"
        ) from error
    async with OidcIssuers(configs, directory, clock) as issuers:
        yield issuers


def provider_faults(configs: Mapping[str, OidcConfig]) -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the fault of each invalid setting."""
    issuers: dict[str, str] = {}
    for name, config in configs.items():
        place = f"identity.oidc.{name}"
        for setting, url in (("issuer", config.issuer), ("jwks_url", config.jwks_url)):
            if url is not None and not is_trustworthy(url):
                yield (
                    f"{place}.{setting}",
                    f"{url!r} must begin with https://, or be an http address of this machine: over a network, anybody "
                    "in between could replace the keys.",
                )
        if issuers.setdefault(config.issuer, name) != name:
            yield (
                f"{place}.issuer",
                f"This is the issuer of {issuers[config.issuer]!r} too, and a token says no more than its issuer. Keep "
                "one of them.",
            )
        if not config.algorithms:
            yield f"{place}.algorithms", "Without an algorithm no token can be checked. Name at least one."
