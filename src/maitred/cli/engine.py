"""`maitred engine`: one engine process on a socket."""

from typing import Annotated

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
from maitred.core.lifeline import follow_parent
from maitred.engine.threads import sleep_at_barriers

EXAMPLES = """
Examples:

    maitred engine --listen unix:/tmp/engine.sock

    maitred engine ./model --listen tcp:127.0.0.1:9100 --device cuda
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
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run one engine without HTTP, for a gateway to connect to.

    `maitred serve` starts one by itself; start your own to put the engine on another machine or to restart the gateway
    without reloading the model.
    """
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
        },
        sections=("model", "engine"),
    )
    from maitred.wire.address import parse_address

    parse_address(listen)
    folder = require_model(loaded)
    sleep_at_barriers()
    with needing("engine", "The engine"):
        from maitred.engine.process import serve
    serve(folder, loaded.config.engine, listen)
