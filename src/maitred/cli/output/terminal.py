"""Exchange between the client and the terminal, or a pipe."""

import shlex
import sys
from collections.abc import AsyncIterator, Iterator

import typer

from maitred.cli.client import ReplyDelta, not_text

_OBEYED = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters: a terminal would obey them, and a model may write anything."""


def given_lines() -> Iterator[str]:
    """Standard input, line by line.

    Raises:
        InvalidRequest: It is not text.
    """
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise not_text() from error


async def write_answer(pieces: AsyncIterator[ReplyDelta], answer: list[str]) -> None:
    """Writes pieces as they come.

    Args:
        pieces: The answer.
        answer: Gets each piece of text as soon as it is written, so that the caller has the part that came, too, when
            the answer is stopped or cut.
    """
    to_terminal = sys.stdout.isatty()
    finish_reason = None
    try:
        async for piece in pieces:
            text = piece.text.translate(_OBEYED) if to_terminal else piece.text
            answer.append(piece.text)
            sys.stdout.write(text)
            sys.stdout.flush()
            finish_reason = piece.finish_reason or finish_reason
    finally:
        if answer and not answer[-1].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    if finish_reason == "length" and to_terminal:
        typer.echo("(The answer reached its limit of tokens; --max-tokens sets it.)", err=True)


def command_line() -> str:
    """The command as it could be typed again."""
    return shlex.join(["maitred", *sys.argv[1:]])
