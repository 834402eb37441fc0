"""Entry point of the `maitred` command line, which reads the plain words of `maitred serve` by itself.

Putting sixty commands together takes as long as reading a configuration, and with `maitred serve` an engine waits for
it. So its words are read by themselves, where they are plain, and only else by all of the command line.

Plain are the options of the command, each with its value, and its argument. Anything else, be it a question for help or
a mistake, is left to typer, which has the words for it. typer also checks values with pydantic, whose import takes
longer than everything here; values of plain options are texts, and our own configuration reads them.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import typer
from typer.models import OptionInfo, ParamMeta
from typer.utils import get_params_from_function


def main() -> None:
    """Entry point of the `maitred` script and of ``python -m maitred``."""
    if sys.argv[1:2] == ["serve"]:
        from maitred.cli.group import explain_errors
        from maitred.cli.serve import serve

        if (arguments := plain_arguments(serve, sys.argv[2:])) is None or "dtype" in arguments:
            # It may be a start script of vLLM's, whose flags have other names.
            from maitred.cli.migration.vllm_flags import apply_vllm_flags

            try:
                with explain_errors():
                    sys.argv[2:] = apply_vllm_flags(sys.argv[2:], partial(typer.echo, err=True))
            except typer.Exit as done:
                sys.exit(done.exit_code)
        if (arguments := plain_arguments(serve, sys.argv[2:])) is not None:
            try:
                with explain_errors():
                    serve(**arguments)
            except typer.Exit as done:
                sys.exit(done.exit_code)
            sys.exit()
    from maitred.cli.app import app

    app()


def plain_arguments(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Returns the arguments of a command from plain words; None where typer has to parse them.

    Args:
        command: Its parameters are texts, paths, lists of texts, or flags, none of which has to be given.
        words: Of the command line, after the command's name.
    """
    options: dict[str, ParamMeta] = {}
    places: list[ParamMeta] = []
    for parameter in get_params_from_function(command).values():
        if isinstance(parameter.default, OptionInfo):
            options |= dict.fromkeys(parameter.default.param_decls or (), parameter)
        else:
            places.append(parameter)
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            if not places:
                return None
            given[places.pop(0).name] = word
            continue
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None or (option.annotation is bool and equals):
            return None
        if option.annotation is bool:
            given[option.name] = True
            continue
        text = value if equals else next(rest, None)
        if text is None:
            return None
        kinds = get_args(option.annotation)
        if list[str] in kinds:
            given.setdefault(option.name, []).append(text)
        else:
            given[option.name] = Path(text) if Path in kinds else text
    return given
