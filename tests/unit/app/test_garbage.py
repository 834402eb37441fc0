"""What is there when serving begins is not looked at again."""

import gc

from maitred.app.garbage import collect_seldom


def test_what_stays_is_left_alone_and_the_rest_is_looked_at_seldom():
    before, enabled = gc.get_threshold(), gc.isenabled()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own; a test before may have served here
        collect_seldom()
        assert gc.get_freeze_count() > 0
        new, young, middle = gc.get_threshold()
        assert new > 700
        assert middle > 10
        assert new * (young + 1) <= 20_000  # a look takes a microsecond an object, and nobody is served meanwhile
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
