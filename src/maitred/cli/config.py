"""`maitred config`: what is in force, where it came from, and what is wrong with it."""

from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.options import ConfigOption, ProfileOption, SetOption, load_settings

CHECK_EXAMPLES = """
Examples:

    maitred config check

    maitred config check /etc/maitred/maitred.yaml
"""
SHOW_EXAMPLES = """
Examples:

    maitred config show --origin

    MAITRED__SERVER__PORT=9000 maitred config show --origin

    maitred config show --profile team --origin

    maitred config show --set engine.max_sequences=64 > maitred.yaml
"""


def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file. Default: ./maitred.yaml, if it exists.")
    ] = None,
    profile: ProfileOption = None,
    settings: SetOption = None,
) -> None:
    """Read all layers of the configuration and list every fault.

    Prints OK, or the faults with the line, variable or flag each stands in, and exits with 2.
    """
    load_settings(file, settings, {"profile": ("--profile", profile)})
    typer.echo("OK")


def show(
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
) -> None:
    """Print the settings in force as YAML.

    Secrets are printed as the references that they were given by.
    """
    from maitred.config.render import yaml_of

    typer.echo(
        yaml_of(load_settings(config, settings, {"profile": ("--profile", profile)}), with_origins=origin), nl=False
    )


def docs() -> None:
    """Print the reference of all settings as Markdown (docs/configuration.md)."""
    from maitred.config.render import reference

    typer.echo(reference(), nl=False)
