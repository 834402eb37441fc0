"""The window for replicas that do not say what they have left."""

from maitred.dispatch.policy.window import ConcurrencyWindow


class Server:
    """Runs so many at once; the others queue in it."""

    def __init__(self, places):
        self.places = places

    def ttft_s(self, outstanding):
        return 0.1 * max(1.0, outstanding / self.places)


def play(window, server, rounds=3000):
    sizes = []
    for _ in range(rounds):
        window.on_first_token(server.ttft_s(window.size), window.size)
        sizes.append(window.size)
    return [size for size in sizes[rounds // 2 :] if size >= window.size / 1.5]  # but for the probes


def test_it_settles_where_the_server_begins_to_queue():
    sizes = play(ConcurrencyWindow(initial=2), Server(32))
    assert min(sizes) > 32
    assert max(sizes) < 96


def held_by_streams_without_end(window, server, rounds):
    """How many a server has after so many times its TTFT, when as many wait as it can get and no stream ends."""
    held = 0
    for _ in range(rounds):
        new, held = window.size - held, window.size
        for _ in range(min(new, server.places - (held - new))):
            window.on_first_token(server.ttft_s(0), held)
    return held


def test_it_sends_twice_as_many_after_every_ttft_until_something_queues():
    assert held_by_streams_without_end(ConcurrencyWindow(initial=8), Server(10**6), rounds=8) > 1_000


def test_a_start_overshoots_by_no_more_than_one_doubling():
    assert held_by_streams_without_end(ConcurrencyWindow(initial=8), Server(40), rounds=20) <= 2 * 40 + 8


def test_one_late_answer_does_not_end_the_start_and_two_do():
    grown = []
    for late in (1, 2):
        window = ConcurrencyWindow(initial=8)
        for ttft_s in (0.1, *[0.3] * late, *[0.1] * 10):
            window.on_first_token(ttft_s, window.size)
        grown.append(window.size)
    assert grown[0] > 1.5 * grown[1]


def test_where_nothing_is_late_it_is_never_narrowed_to_probe():
    window = ConcurrencyWindow()
    sizes = [(window.on_first_token(0.1, window.size), window.size)[1] for _ in range(5000)]
    assert sizes == sorted(sizes)


def test_a_probe_hears_only_those_who_had_half_the_company():
    window = ConcurrencyWindow(initial=64)
    window.on_first_token(0.1, 64)
    full = window.size
    while window.size > 0.6 * full:
        full = window.size
        window.on_first_token(0.2, full)
    for _ in range(100):
        window.on_first_token(0.25, full)  # sent before
    assert window.size <= full / 2 + 1
    for _ in range(8):
        window.on_first_token(0.15, window.size)
    widened = window.size
    assert widened > full / 2 + 1
    for _ in range(50):
        window.on_first_token(0.2, window.size)
    assert window.size > widened  # with 0.1 for the least, 0.2 were late


def test_it_follows_when_the_server_becomes_smaller():
    window = ConcurrencyWindow()
    before = play(window, Server(64))[-1]
    after = play(window, Server(16))[-1]
    assert after < before / 2


def test_it_does_not_grow_on_what_was_not_asked():
    window = ConcurrencyWindow(initial=50)
    for _ in range(100):
        window.on_first_token(0.1, 3)
    assert window.size == 50


def test_milliseconds_that_a_busy_gateway_adds_are_no_queue():
    window = ConcurrencyWindow()
    for _ in range(20):
        window.on_first_token(0.0002, window.size)
    before = window.size
    for _ in range(200):
        window.on_first_token(0.015, window.size)
    assert window.size > 2 * before


def test_a_refusal_halves_it_down_to_one():
    window = ConcurrencyWindow(initial=8)
    window.on_rejection()
    assert window.size == 4
    for _ in range(10):
        window.on_rejection()
    assert window.size == 1


def test_until_something_queues_a_line_waits_as_long_as_it_takes_to_widen():
    window = ConcurrencyWindow(initial=8)
    assert window.widened_in_s(1_000) == 0  # nobody knows its TTFT
    window.on_first_token(0.1, 8)
    assert 0.5 < window.widened_in_s(1_000) < 0.1 * 10
    for _ in range(2):
        window.on_first_token(0.3, window.size)
    assert window.widened_in_s(1_000) is None
