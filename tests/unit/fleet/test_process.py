from maitred.fleet.process import Backoff


def test_doubles_up_to_a_limit():
    backoff = Backoff(first_s=1, most_s=5, healthy_s=60)
    assert [backoff.wait_s(0) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_forgives_after_a_healthy_life():
    backoff = Backoff(first_s=1, most_s=5, healthy_s=60)
    assert [backoff.wait_s(lived_s) for lived_s in (0, 0, 59.9, 60, 0)] == [1, 2, 4, 1, 2]
