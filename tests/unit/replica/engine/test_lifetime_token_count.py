"""What an engine has generated, over lives and connections."""

from maitred.core.replica import LoadReport
from maitred.replica.engine.client import LifetimeTokenCount
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.frames import PROTOCOL_VERSION, EngineHello


def counted(output_tokens, steps=0):
    return LoadReport(output_tokens=output_tokens, steps=steps)


def hello(epoch, output_tokens=0):
    return EngineHello(PROTOCOL_VERSION, epoch, 1, SCRIPTED_CARD, counted(output_tokens))


def test_nothing_before_anybody_is_met():
    assert LifetimeTokenCount().total(counted(0)) == 0


def test_a_life_from_its_start():
    count = LifetimeTokenCount()
    count.on_connect(hello(1), LoadReport())
    assert [count.total(counted(tokens)) for tokens in (0, 3, 8)] == [0, 3, 8]
    assert count.total(counted(8)) == 8, "looking changes nothing"


def test_what_an_attached_engine_did_before_is_not_ours():
    count = LifetimeTokenCount()
    count.on_connect(hello(1, 1000), LoadReport())
    assert count.total(counted(1000)) == 0
    assert count.total(counted(1007)) == 7


def test_a_new_life_adds_to_the_old_one_even_if_it_is_ahead_of_it():
    count = LifetimeTokenCount()
    count.on_connect(hello(1), LoadReport())
    count.on_connect(hello(2), counted(5, steps=5))
    assert count.total(counted(0)) == 5
    assert count.total(counted(90, steps=90)) == 95
    count.on_connect(hello(3), counted(90, steps=90))
    assert count.total(counted(1)) == 96


def test_the_same_life_over_a_new_connection_goes_on():
    count = LifetimeTokenCount()
    count.on_connect(hello(1, 10), LoadReport())
    count.on_connect(hello(1, 40), counted(30))  # it has generated ten more while nobody listened
    assert count.total(counted(40)) == 30
    count.on_connect(hello(2, 7), counted(41))
    assert count.total(counted(9)) == 33
