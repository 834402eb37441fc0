"""Why a block ends is known on every level of its stack."""
# ruff: noqa: PT012 - the block is what is tested

import asyncio

import pytest

from maitred.api.in_flight import CancelScope, ClientDisconnected
from maitred.core.errors import Draining


@pytest.mark.parametrize("reason", [ClientDisconnected(), Draining()])
async def test_the_stack_and_the_caller_see_the_reason(reason):
    seen = []
    with pytest.raises(type(reason)) as caught, CancelScope() as block:
        asyncio.get_running_loop().call_soon(block.cancel, reason)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            seen = list(error.args)
            raise
    assert caught.value is reason
    assert seen == [reason]
