"""What becomes of a test whose real server is not installed."""

import os
from contextlib import AbstractContextManager, ExitStack
from typing import NoReturn, TypeVar

import pytest

from maitred.testing.server_process import ProgramMissing

T = TypeVar("T")


def entered(stack: ExitStack, server: AbstractContextManager[T]) -> T:
    """Starts a server that ends with the stack. Without its program the test is skipped; in CI it fails."""
    try:
        return stack.enter_context(server)
    except ProgramMissing as missing:
        do_without(missing)


def do_without(missing: ProgramMissing) -> NoReturn:
    """Skips the test; in CI it fails."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(str(missing))
    pytest.skip(str(missing))
