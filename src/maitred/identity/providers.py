"""Opens the identity providers of the configuration, where there are any and what they need is installed."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.identity import TokenIssuers


@asynccontextmanager
async def token_issuers(
    configs: Mapping[str, OidcConfig], directory: Directory, clock: Clock
) -> AsyncIterator[TokenIssuers | None]:
    """The providers for as long as the context lasts; None if none is configured.

    Raises:
        ConfigInvalid: One is not set up soundly, or the packages that check tokens are not installed.
    """
    if not configs:
        yield None
        return
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
