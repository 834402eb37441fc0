"""Options that several commands share, and how the command line becomes the top layer of the configuration."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.core.errors import ConfigInvalid, InvalidRequest

if TYPE_CHECKING:
    from maitred.config.loader import LoadedConfig

CONFIGURATION = "Configuration"
MODEL = "Model and engines"
ADDRESS = "Address and access"
COMPUTATION = "Computation"
"""Panels of options in the help of a command."""

URL_VARIABLE = "MAITRED_URL"
KEY_VARIABLE = "MAITRED_API_KEY"
ADMIN_KEY_VARIABLE = "MAITRED_ADMIN_KEY"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="YAML file with settings. Default: ./maitred.yaml, if it exists.",
        rich_help_panel=CONFIGURATION,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting by its dotted name, such as engine.step_tokens=1024. Repeatable.",
        rich_help_panel=CONFIGURATION,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.", rich_help_panel=COMPUTATION)
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="auto, fp32 or bf16.", rich_help_panel=COMPUTATION)
]
ThreadsOption = Annotated[
    str | None,
    typer.Option(
        "--threads",
        metavar="COUNT",
        help="CPU threads of a step; 0: one per core, less one for the gateway.",
        rich_help_panel=COMPUTATION,
    ),
]
KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--kv-memory", metavar="SIZE", help="Memory for the KV cache, such as 2GiB.", rich_help_panel=COMPUTATION
    ),
]
MaxSequencesOption = Annotated[
    str | None,
    typer.Option(
        "--max-sequences", metavar="COUNT", help="Sequences in one batch at most.", rich_help_panel=COMPUTATION
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Defaults for single-user, team (5 to 20 people) or product (hundreds).",
        rich_help_panel=CONFIGURATION,
    ),
]
UrlOption = Annotated[
    str,
    typer.Option("--url", metavar="URL", envvar=URL_VARIABLE, help="The server to talk to."),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        envvar=ADMIN_KEY_VARIABLE,
        help="A key with the scope admin. The variable keeps it out of your shell's history.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        envvar=KEY_VARIABLE,
        help="Your API key, where the server asks for one. The variable keeps it out of your shell's history.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print what the server answers, as JSON.")]
TinyOption = Annotated[
    bool, typer.Option("--tiny", help="Use the toy model in maitred, not a real one.", rich_help_panel=MODEL)
]
DEFAULT_URL = "http://127.0.0.1:8000"
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Which model answers. Default: the first that the server lists."),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="NUMBER", min=0.0, max=2.0, help="0 always takes the likeliest token; 2 is wild."
    ),
]


def parse_duration(option: str, text: str) -> float:
    """The seconds of a duration; a number needs its unit, because people mean days by one and seconds by another.

    Raises:
        InvalidRequest: That is no duration, or its unit is missing.
    """
    from maitred.config.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds is None or lacks_unit(text):
        raise InvalidRequest(f"{option} must be a time with its unit, such as 30s, 12h or 1d; got {text!r}.")
    return seconds


def lacks_unit(text: str) -> bool:
    """Whether a duration or a size is a bare number other than 0, which needs none."""
    try:
        return float(text) != 0.0
    except ValueError:
        return False


def load_settings(
    path: Path | None,
    assignments: list[str] | None,
    flags: Mapping[str, tuple[str, str | None]],
    sections: Collection[str] | None = None,
    *,
    tiny: bool = False,
) -> "LoadedConfig":
    """The configuration with the command line as its top layer.

    Flags are text here, so that a wrong one is reported together with all other faults.

    Args:
        path: What `--config` named.
        assignments: What each `--set` said. A flag of its own wins over `--set`.
        flags: Dotted key -> the flag's name and its value; None where it was not given.
        sections: The sections that the command reads; None: all.
        tiny: Whether `--tiny` was given: the model is the bundled one.

    Raises:
        ConfigInvalid: The message lists every fault.
    """
    from maitred.config.default_model import with_default_model
    from maitred.config.loader import load
    from maitred.config.sources import Flag
    from maitred.config.tree import BUNDLED_MODEL

    if tiny:
        if flags["model.path"][1] is not None:
            raise ConfigInvalid("--tiny is for the model in maitred, and MODEL names another one. Leave one out.")
        flags = {**flags, "model.path": ("--tiny", str(BUNDLED_MODEL))}

    overrides: dict[str, object] = {}
    for assignment in assignments or []:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigInvalid(f"--set {assignment}: write it as --set section.setting=value.")
        overrides[key.strip()] = Flag("--set", value.strip())
    for key, (name, size) in flags.items():
        # The setting's name has the unit; the option's has not.
        if size is not None and key.endswith("_bytes") and lacks_unit(size):
            raise ConfigInvalid(f"{name} must be a size with its unit, such as 64MiB or 2GiB; got {size!r}.")
    overrides |= {key: Flag(name, value) for key, (name, value) in flags.items() if value is not None}
    return with_default_model(load(path, os.environ, overrides, sections=sections), os.environ)


def require_model(loaded: "LoadedConfig") -> Path:
    """The model's folder, from a path or from a hub id; see `find_model`.

    Raises:
        ConfigInvalid: Nothing is there, and nothing could be fetched.
    """
    from maitred.engine.models.source import find_model

    return find_model(loaded.config.model.folder)
