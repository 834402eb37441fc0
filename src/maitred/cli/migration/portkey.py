"""`maitred import portkey`: a config of Portkey's gateway becomes ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.migration.result import DEFAULT_OUTPUT, DryRunOption, OutputOption, deliver

EXAMPLES = """
Examples:

    maitred import portkey config.json --dry-run

    maitred import portkey config.json --output maitred.yaml
"""


def portkey(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Config of Portkey's gateway, as JSON.")],
    output: OutputOption = DEFAULT_OUTPUT,
    dry_run: DryRunOption = False,
) -> None:
    """Convert a config of Portkey's gateway, and say what became of every key of it.

    Secrets are not written: the configuration refers to environment variables, and the report names them.
    """
    from maitred.migration.gateways.portkey import read_portkey_file

    deliver(read_portkey_file(file, os.environ), output, dry_run=dry_run)
