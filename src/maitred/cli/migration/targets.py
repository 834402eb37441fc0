"""`maitred import portkey` and `maitred import kong`: files that name targets become ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.migration.result import DEFAULT_OUTPUT, DryRunOption, OutputOption, deliver

PORTKEY_EXAMPLES = """
Examples:

    maitred import portkey config.json --dry-run

    maitred import portkey config.json --output maitred.yaml
"""
KONG_EXAMPLES = """
Examples:

    maitred import kong kong.yaml --dry-run

    maitred import kong kong.yaml --output maitred.yaml
"""


def portkey(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Config of Portkey's gateway, as JSON.")],
    output: OutputOption = DEFAULT_OUTPUT,
    dry_run: DryRunOption = False,
) -> None:
    """Convert a config of Portkey's gateway, and say what became of every key of it.

    Secrets are not written: the configuration refers to environment variables, and the report names them.
    """
    from maitred.migration.target.portkey import read_portkey_file

    deliver(read_portkey_file(file, os.environ), output, dry_run=dry_run)


def kong(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Declarative file of Kong, as YAML.")],
    output: OutputOption = DEFAULT_OUTPUT,
    dry_run: DryRunOption = False,
) -> None:
    """Convert a file of Kong with the plugins ai-proxy or ai-proxy-advanced, and say what became of every key of it.

    Secrets are not written: the configuration refers to environment variables, and the report names them.
    """
    from maitred.migration.target.kong import read_kong_file

    deliver(read_kong_file(file, os.environ), output, dry_run=dry_run)
