"""`maitred engine`: one engine process on a socket."""

from typing import Annotated

import typer

from maitred.cli.options import (
    ConfigOption,
    DeviceOption,
    DtypeOption,
    KvMemoryOption,
    MaxSequencesOption,
    ProfileOption,
    SetOption,
    ThreadsOption,
    load_settings,
    require_model,
)
from maitred.core.parent_watch import follow_parent

EXAMPLES = """
Examples:

    maitred engine --listen unix:/tmp/engine.sock

    maitred engine ./model --listen tcp:127.0.0.1:9100 --device cuda

    maitred engine ./model --listen tcp:0.0.0.0:9100 --secret-file secret --cert-file engine.pem --key-file engine.key
"""


def engine(
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Where gateways connect: unix:/path or tcp:host:port.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder of the model. Default: the small one in maitred."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    max_sequences: MaxSequencesOption = None,
    secret_file: Annotated[
        str | None, typer.Option("--secret-file", metavar="PATH", help="Holds the secret that gateways must know.")
    ] = None,
    cert_file: Annotated[
        str | None, typer.Option("--cert-file", metavar="PATH", help="Certificate (PEM); gateways then speak TLS.")
    ] = None,
    key_file: Annotated[str | None, typer.Option("--key-file", metavar="PATH", help="Its private key (PEM).")] = None,
    ca_file: Annotated[
        str | None, typer.Option("--ca-file", metavar="PATH", help="Take only gateways with a certificate of this one.")
    ] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run one engine without HTTP, for a gateway to connect to.

    `maitred serve` starts one by itself; start your own to put the engine on another machine or to restart the gateway
    without reloading the model.
    """
    from maitred.cli.local_engine import run
    from maitred.wire.address import parse_address

    follow_parent()
    loaded = load_settings(
        config,
        settings,
        {
            "profile": ("--profile", profile),
            "model.path": ("MODEL", model or None),
            "engine.device": ("--device", device),
            "engine.dtype": ("--dtype", dtype),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory_bytes": ("--kv-memory", kv_memory),
            "engine.max_sequences": ("--max-sequences", max_sequences),
            "engine_link.secret.file": ("--secret-file", secret_file),
            "engine_link.certificate_file": ("--cert-file", cert_file),
            "engine_link.key_file": ("--key-file", key_file),
            "engine_link.ca_file": ("--ca-file", ca_file),
        },
        # What a token counts is said where requests wait, and has to be the same here.
        sections=("model", "engine", "dispatch", "engine_link", "log", "region"),
    )
    folder, ours = require_model(loaded), loaded.config
    parse_address(listen)
    run(folder, ours.engine, listen, ours.dispatch.service.weights, ours.engine_link, ours.log, ours.region)
