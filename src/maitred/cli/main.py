"""Command line `maitred`: all its commands.

Putting sixty commands together takes as long as reading a configuration, and with `maitred serve` an engine waits for
it. So its words are read by themselves, where they are plain, and only else by all of the command line.
"""

import sys


def main() -> None:
    """Entry point of the `maitred` script and of ``python -m maitred``."""
    if sys.argv[1:2] == ["serve"]:
        from maitred.cli.plain import run_plainly
        from maitred.cli.serve import serve

        run_plainly(serve, sys.argv[2:])
    from maitred.cli.app import app

    app()
