"""Guards on siblings that differ in just one thing."""

import pytest

from maitred.text.question_guards import Difference, Skip, difference, skip_reason
from maitred.text.wording import Wording


@pytest.mark.parametrize(
    ("asked", "cached", "what"),
    [
        ("How do I pay 20 dollars?", "How do I pay 25 dollars?", Difference.NUMBERS),
        ("How do I pay 20 dollars?", "How do I pay 20 euros?", Difference.NUMBERS),
        ("How do I pay 20 dollars?", "How do I pay dollars?", Difference.NUMBERS),
        ("Is ५ kg allowed on board?", "Is ६ kg allowed on board?", Difference.NUMBERS),
        ("Is a fee of 5% usual here?", "Is a fee of $5 usual here?", Difference.NUMBERS),
        ("Can I bring two bags?", "Can I bring three bags?", Difference.NUMBERS),
        ("Is it open on monday?", "Is it open on sunday?", Difference.DATES),
        ("Will it rain tomorrow?", "Will it rain today?", Difference.DATES),
        ("Where is order AB12?", "Where is order AB13?", Difference.NUMBERS),
        ("Where is order AB-X?", "Where is order AB-Y?", Difference.NAMES),
        ("Who owns bob@x.org?", "Who owns eve@x.org?", Difference.LITERALS),
        ("What is on www.a.org now?", "What is on www.b.org now?", Difference.LITERALS),
        ("What does `ls` do?", "What does `rm` do?", Difference.LITERALS),
        ('Translate "good day" for me', 'Translate "good night" for me', Difference.LITERALS),
        ("Is load_model slow?", "Is save_model slow?", Difference.LITERALS),
        ("How far is it to Paris?", "How far is it to Rome?", Difference.NAMES),
        ("Is a train from Paris to Rome fast?", "Is a train from Rome to Paris fast?", Difference.NAMES),
        ("Is it open from 5 to 7?", "Is it open from 7 to 5?", Difference.NUMBERS),
        ("Is it open from monday to friday?", "Is it open from friday to monday?", Difference.DATES),
        ("Does the ATM charge me?", "Does the bank charge me?", Difference.NAMES),
        ("Why can I pay here?", "Why can't I pay here?", Difference.NEGATIONS),
        ("Why did it arrive?", "Why did it never arrive?", Difference.NEGATIONS),
        ("Can I pay with a card?", "Can I pay without a card?", Difference.NEGATIONS),
        ("How do I lock my card?", "How do I unlock my card?", Difference.NEGATIONS),
        ("How do I activate my card?", "How do I deactivate my card?", Difference.NEGATIONS),
    ],
)
def test_siblings_are_refused_in_both_orders(asked, cached, what):
    assert difference(Wording.of(asked), Wording.of(cached)) is what
    assert difference(Wording.of(cached), Wording.of(asked)) is what


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ("How can I pay 20 dollars?", "How do I pay 20 dollars"),
        ("Why hasn't my card arrived?", "My card has not arrived, why?"),
        ("Weather in Paris please", "what is the weather in paris?"),
        ("Paris: how is the weather?", "How is the weather in Paris?"),
        ("I don’t see my card", "I don't see the card"),
        ("Is 5% usual?", "is 5 % usual"),
    ],
)
def test_paraphrases_pass(asked, cached):
    assert difference(Wording.of(asked), Wording.of(cached)) is None


@pytest.mark.parametrize(
    ("text", "in_conversation", "reason"),
    [
        ("yes, cancel it", True, Skip.FOLLOW_UP),
        ("yes, cancel it", False, Skip.FOLLOW_UP),
        ("And that one?", False, Skip.EMPTY),
        ("And that card?", False, Skip.FOLLOW_UP),
        ("it does not work", False, Skip.FOLLOW_UP),
        ("Where is my card?", True, Skip.FOLLOW_UP),
        ("Where is my card?", False, None),
        ("Where can I see the fees of my new card account?", True, None),
        ("yes please", True, Skip.EMPTY),
        ("...", False, Skip.EMPTY),
        ("where is the card " * 26, False, Skip.LONG),
        ("Konto gesperrt Karte verloren Hilfe", False, Skip.LANGUAGE),
        ("我的卡在哪里", False, Skip.LANGUAGE),
    ],
)
def test_what_is_not_looked_up(text, in_conversation, reason):
    assert skip_reason(Wording.of(text), in_conversation=in_conversation) is reason
