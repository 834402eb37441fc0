"""A replica that comes back gets its share bit by bit: its caches are cold, and what broke it may break it again."""


def slow_start(since_s: float, rises_s: float, least: float) -> float:
    """The part of its weight that a replica has, in [least, 1].

    It rises in a straight line. A step to the whole would send it, at once, what it had failed under; and as the one
    with nothing to do it would look best to every policy that goes by load.

    Args:
        since_s: Since it came back.
        rises_s: Until it has the whole; 0: at once.
        least: What it begins with.
    """
    if since_s >= rises_s or not rises_s:
        return 1.0
    return least + (1.0 - least) * max(0.0, since_s) / rises_s
