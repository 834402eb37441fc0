"""Settings of `engine_link`: authentication between gateways and engines, and loss detection.

Both ends use this section: each end has its own certificate, and the certificates of the authorities that sign the
certificate of the other end.
"""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.core.secret import Secret

_File = Annotated[str, Meta(min_length=1)]


class LinkConfig(Struct, frozen=True, kw_only=True):
    """Settings of authentication and loss detection between gateways and engines, used by both ends."""

    secret: Annotated[
        Secret | None,
        Meta(
            description="What both ends must know, at least 16 characters. Each proves it to the other without sending "
            "it, before anything else is read. An engine that listens on more than this machine needs one."
        ),
    ] = None
    certificate_file: Annotated[
        _File | None,
        Meta(
            description="This end's certificate (PEM, with the chain). With it an engine speaks TLS on TCP; a gateway "
            "shows it where the engine has a `ca_file`."
        ),
    ] = None
    key_file: Annotated[
        _File | None, Meta(description="The certificate's private key (PEM); null: it is in `certificate_file`.")
    ] = None
    ca_file: Annotated[
        _File | None,
        Meta(
            description="Who vouches for the other end (PEM). With it a gateway speaks TLS to every engine on TCP and "
            "checks its certificate and its name; an engine takes only gateways whose certificates it vouches for."
        ),
    ] = None
    allow_plaintext: Annotated[
        bool,
        Meta(
            description="Prompts and answers may cross a network without TLS, as where something else encrypts it. The "
            "secret is still needed."
        ),
    ] = False
    server_name: Annotated[
        _File | None,
        Meta(
            description="Name in the certificates of engines that gateways check in place of their address, as where "
            "all pods of a Deployment share one certificate; null: the address."
        ),
    ] = None
    silence_timeout_s: Annotated[
        float,
        Meta(
            ge=0.5,
            le=3600,
            description="An engine that has not answered for so long is taken for lost, and others go on with its "
            "answers; it is given three times the longest step that its measured times foresee, if that is more.",
            extra={"unit": "seconds"},
        ),
    ] = 12.0
