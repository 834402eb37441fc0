"""`maitred engine`: one engine process on a socket."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.extras import needing
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
from maitred.core.errors import ConfigInvalid
from maitred.core.lifeline import follow_parent
from maitred.engine.threads import wait_briefly_at_barriers

if TYPE_CHECKING:
    from maitred.fleet.passed import PassedSettings

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
    passed: Annotated[
        str | None,
        typer.Option(
            "--settings", metavar="JSON", help="Everything, from a gateway; no file, variable or flag is read."
        ),
    ] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run one engine without HTTP, for a gateway to connect to.

    `maitred serve` starts one by itself; start your own to put the engine on another machine or to restart the gateway
    without reloading the model.
    """
    from maitred.config.tree import BUNDLED_MODEL
    from maitred.engine.lean_torch import import_lean_torch
    from maitred.observe.logs import set_up
    from maitred.wire.address import parse_address
    from maitred.wire.link.config import LinkConfig

    follow_parent()
    if passed is not None:
        folder, settled = Path(model) if model else BUNDLED_MODEL, _decoded(passed)
        engine_config, weights, link, log = settled.engine, settled.service, LinkConfig(), settled.log
    else:
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
            sections=("model", "engine", "dispatch", "engine_link", "log"),
        )
        folder, engine_config = require_model(loaded), loaded.config.engine
        weights, link = loaded.config.dispatch.service.weights, loaded.config.engine_link
        log = loaded.config.log
    parse_address(listen)
    set_up(log)
    wait_briefly_at_barriers()
    # Hundreds of thousands of objects come to stay now. To look through them for garbage, again and again while they
    # come, takes a quarter of the start; `serve` goes back to it when it is ready.
    gc.disable()
    try:
        with needing("engine", "The engine"):
            import_lean_torch()
            from maitred.engine.process import serve
        serve(folder, engine_config, listen, weights, link)
    finally:
        gc.enable()


def _decoded(passed: str) -> "PassedSettings":
    """The settings as a gateway passes them: whole, and sound already.

    Raises:
        ConfigInvalid: They are not.
    """
    import msgspec

    from maitred.fleet.passed import PassedSettings

    try:
        return msgspec.json.decode(passed, type=PassedSettings)
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"--settings: {error}. It is for gateways to pass; use --set for your own.") from None
