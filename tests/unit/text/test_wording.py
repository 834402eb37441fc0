"""What rules read from a question."""

import pytest

from maitred.text.wording import Wording, is_content_word, stem


def test_words_are_lower_case_and_content_words_have_no_plural():
    wording = Wording.of("Where are my new Cards?")
    assert wording.words == ("where", "are", "my", "new", "cards")
    assert wording.content == ("new", "card")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("wait 2 weeks", ("2 week",)),
        ("wait 2 week", ("2 week",)),
        ("pay $5.50 at 10:30", ("$5.50", "10:30")),
        ("a fee of 5 % or 5%", ("5%", "5%")),
        ("minus -3 degrees", ("-3 degree",)),
        ("٣ apples", ("3 apple",)),
        ("३ apples", ("3 apple",)),
        ("３ apples", ("3 apple",)),
        ("三 apples", ("三",)),
        ("twenty five apples", ("twenty", "five")),
        ("the 13 of them", ("13",)),
        ("no number", ()),
    ],
)
def test_numbers(text, numbers):
    assert Wording.of(text).numbers == numbers


@pytest.mark.parametrize(
    ("text", "literals"),
    [
        ("open https://a.org/b?c=1 now", ("https://a.org/b?c=1",)),
        ("mail bob.b@x.org now", ("bob.b@x.org",)),
        ("run `rm -rf x` now", ("rm -rf x",)),
        ('say "Good day" to him', ("good day",)),
        ("say 'good day' to him", ("good day",)),
        ("call load_model() or loadModel", ("load_model", "loadmodel")),
        ("order INV-2033 and A4", ("a4", "inv-2033")),
        ("see /etc/hosts", ("/etc/hosts",)),
        ("a self-service top-up and/or re-try", ()),
        ("isn't it the dogs' bone", ()),
    ],
)
def test_literals(text, literals):
    assert tuple(sorted(set(Wording.of(text).literals))) == literals


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("When is the train to Paris?", ("paris",)),
        ("Paris is nice. Rome is nice, too.", ()),
        ("I think I'm at the ATM", ("atm",)),
        ("does Visa's card work", ("visa",)),
        ("l’ami de Zoë", ("zoë",)),
    ],
)
def test_names_are_words_with_a_capital_inside_a_sentence(text, names):
    assert Wording.of(text).names == names


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("it works", 0),
        ("it does not work", 1),
        ("it doesn't work", 1),
        ("it doesn’t work", 1),
        ("it doesnt work", 1),
        ("can't I pay without a card", 2),
        ("es geht nicht", 1),
        ("a list of to-do not's", 1),
    ],
)
def test_negations(text, count):
    assert Wording.of(text).negations == count


def test_dates():
    assert Wording.of("from monday to Friday, tomorrow").dates == ("monday", "friday", "tomorrow")


@pytest.mark.parametrize(("word", "stemmed"), [("cards", "card"), ("cities", "city"), ("bus", "bus"), ("pass", "pass")])
def test_stems(word, stemmed):
    assert stem(word) == stemmed


@pytest.mark.parametrize(
    ("word", "content"), [("I'm", False), ("it’s", False), ("won't", False), ("card", True), ("7", False)]
)
def test_content_words(word, content):
    assert is_content_word(word) is content
