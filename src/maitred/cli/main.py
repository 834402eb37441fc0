"""Command line `maitred`: all its commands.

Putting sixty commands together takes as long as reading a configuration, and with `maitred serve` an engine waits for
it. So its words are read by themselves, where they are plain, and only else by all of the command line.
"""

import sys


def main() -> None:
    """Entry point of the `maitred` script and of ``python -m maitred``."""
    if sys.argv[1:2] == ["serve"]:
        import typer

        from maitred.cli.group import explain_errors
        from maitred.cli.plain import plain_arguments
        from maitred.cli.serve import serve

        if (arguments := plain_arguments(serve, sys.argv[2:])) is not None:
            try:
                with explain_errors():
                    serve(**arguments)
            except typer.Exit as done:
                sys.exit(done.exit_code)
            sys.exit()
    from maitred.cli.app import app

    app()
