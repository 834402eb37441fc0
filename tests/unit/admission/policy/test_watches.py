"""What the limits of a caller come to is kept as long as they stay the same, and no longer."""

from maitred.admission.policy import watches
from maitred.admission.policy.rules import Rule
from maitred.admission.policy.watches import Watches
from tests.admission_desk import ALICE, limit


class Book:
    """Pages that are replaced, never changed."""

    def __init__(self):
        self.pages, self.asked = {}, 0

    def write(self, subject, *limits):
        self.pages[subject] = tuple(limits)

    def limits_of(self, subject):
        self.asked += 1
        return self.pages.get(subject, ())


def test_what_holds_is_found_from_the_narrowest_subject_to_the_widest():
    book = Book()
    everywhere, own = limit("*", "requests_per_minute", 9), limit("key:alice", "output_tokens", 5)
    book.write("*", everywhere)
    book.write("key:alice", own)
    found = Watches(book).over(ALICE.subjects, "tiny")
    assert found.rules == [Rule("key:alice", own), Rule("*", everywhere)]
    assert [watch.claim.counter for watch in found.watches] == ["requests_per_minute|*|*"]


def test_a_page_is_read_once_as_long_as_it_stays_the_same():
    book = Book()
    book.write("key:alice", limit("key:alice", "requests_per_minute", 9))
    found = Watches(book)
    first, second = (found.over(ALICE.subjects, "tiny").watches for _ in range(2))
    assert first[0] is second[0]


def test_a_changed_limit_holds_for_the_next_request():
    book = Book()
    found = Watches(book)
    assert not found.over(ALICE.subjects, "tiny").watches
    for subject in ("key:alice", "key:*", "tenant:*"):
        for value in (9, 8):
            book.write(subject, limit(subject, "requests_per_minute", value))
            assert value in [watch.claim.capacity for watch in found.over(ALICE.subjects, "tiny").watches]
        book.write(subject)
        assert not found.over(ALICE.subjects, "tiny").watches


def test_models_are_told_apart():
    book = Book()
    book.write("*", limit("*", "requests_per_minute", 9, model="tiny"))
    found = Watches(book)
    assert [len(found.over(ALICE.subjects, model).watches) for model in ("tiny", "large", "tiny")] == [1, 0, 1]


def test_only_so_many_subjects_are_kept(monkeypatch):
    monkeypatch.setattr(watches, "_MOST_KEPT", 3)
    book = Book()
    found = Watches(book)
    for number in (*range(10), 0):
        subject = f"key:{number}"
        book.write(subject, limit(subject, "requests_per_minute", number))
        (watch,) = found.over([subject], "tiny").watches
        assert watch.claim.capacity == number
    assert len(found._kept) == 3
