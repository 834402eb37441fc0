"""`maitred import kong`: a declarative file of Kong with its AI plugins becomes ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.migration.result import DEFAULT_OUTPUT, DryRunOption, OutputOption, deliver

EXAMPLES = """
Examples:

    maitred import kong kong.yaml --dry-run

    maitred import kong kong.yaml --output maitred.yaml
"""


def kong(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Declarative file of Kong, as YAML.")],
    output: OutputOption = DEFAULT_OUTPUT,
    dry_run: DryRunOption = False,
) -> None:
    """Convert a file of Kong with the plugins ai-proxy or ai-proxy-advanced, and say what became of every key of it.

    Secrets are not written: the configuration refers to environment variables, and the report names them.
    """
    from maitred.migration.gateways.kong import read_kong_file

    deliver(read_kong_file(file, os.environ), output, dry_run=dry_run)
