"""The window for replicas that do not say what they have left."""

from maitred.dispatch.policy.window import Window


class Server:
    """Runs so many at once; the others queue in it."""

    def __init__(self, places):
        self.places = places

    def ttft_s(self, outstanding):
        return 0.1 * max(1.0, outstanding / self.places)


def play(window, server, rounds=3000):
    sizes = []
    for _ in range(rounds):
        window.first_token(server.ttft_s(window.size), window.size)
        sizes.append(window.size)
    return [size for size in sizes[rounds // 2 :] if size >= window.size / 1.5]  # but for the probes


def test_it_settles_where_the_server_begins_to_queue():
    sizes = play(Window(first=2), Server(32))
    assert min(sizes) > 32
    assert max(sizes) < 96


def test_it_follows_when_the_server_becomes_smaller():
    window = Window()
    before = play(window, Server(64))[-1]
    after = play(window, Server(16))[-1]
    assert after < before / 2


def test_it_does_not_grow_on_what_was_not_asked():
    window = Window(first=50)
    for _ in range(100):
        window.first_token(0.1, 3)
    assert window.size == 50


def test_milliseconds_that_a_busy_gateway_adds_are_no_queue():
    window = Window()
    for _ in range(20):
        window.first_token(0.0002, window.size)
    before = window.size
    for _ in range(200):
        window.first_token(0.015, window.size)
    assert window.size > 2 * before


def test_a_refusal_halves_it_down_to_one():
    window = Window(first=8)
    window.refused()
    assert window.size == 4
    for _ in range(10):
        window.refused()
    assert window.size == 1
