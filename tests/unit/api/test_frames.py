"""An error that nobody looks at any more holds nothing."""

import weakref

import pytest

from maitred.api.dialect import clear_traceback
from maitred.core.errors import QueueFull

pytestmark = pytest.mark.usefixtures("uncollected")


class Held:
    """What a handler holds."""


def test_an_error_with_its_causes_lets_go():
    held = Held()
    reference = weakref.ref(held)

    def fail(held):
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            kept = QueueFull("the failure")
            raise kept from cause

    try:
        fail(held)
    except QueueFull as error:
        failure = error
    del held
    assert reference() is not None
    clear_traceback(failure)
    assert reference() is None
    assert failure.__cause__ is None


def test_errors_that_led_to_each_other_are_no_endless_loop():
    one, other = QueueFull("one"), QueueFull("other")
    one.__context__, other.__context__ = other, one
    clear_traceback(one)
    assert one.__context__ is other.__context__ is None
