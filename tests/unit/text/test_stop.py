"""What a stop window shows, and when."""

import pytest

from maitred.text.stop import StopWindow


@pytest.mark.parametrize(
    ("stops", "pushes", "shown"),
    [
        ([], ["a", "b"], [("a", False), ("b", False)]),
        (["END"], ["a", "E", "N", "x"], [("a", False), ("", False), ("", False), ("ENx", False)]),
        (["END"], ["aE", "ND", "b"], [("a", False), ("", True), ("", True)]),
        (["END"], ["aENDb"], [("a", True)]),
        (["aab"], ["aaa", "b"], [("a", False), ("", True)]),
        (["\n\n"], ["a\n", "b\n\n"], [("a", False), ("\nb", True)]),
        (["abcd", "bc"], ["xabc"], [("xa", True)]),
        (["bc", "abc"], ["xabc"], [("x", True)]),
    ],
)
def test_pushes(stops, pushes, shown):
    window = StopWindow(stops)
    assert [window.push(text) for text in pushes] == shown


@pytest.mark.parametrize("cuts", [[], [1], [3], [4], [5], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize(
    ("stops", "shown"), [(["END"], "aaEND"), (["ND", "END"], "aaEND"), (["aE", "END"], "aaE"), (["x"], "aaENDb")]
)
def test_a_text_that_includes_its_stop_string_ends_behind_it(stops, shown, cuts):
    window = StopWindow(stops, includes_stop=True)
    pieces = [window.push("aaENDb"[start:end])[0] for start, end in zip([0, *cuts], [*cuts, 6], strict=True)]
    assert "".join(pieces) + window.flush() == shown


def test_flush_shows_what_was_held_back():
    window = StopWindow(["END"])
    assert window.push("aEN") == ("a", False)
    assert window.flush() == "EN"
    assert window.flush() == ""


def test_nothing_is_left_after_a_stop():
    window = StopWindow(["END"])
    window.push("aEND")
    assert window.flush() == ""
