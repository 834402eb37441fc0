"""Who gives a place up for whom, when all of them are taken."""


def gives_way(held: int, weight: float, newcomer_held: int, newcomer_weight: float, places: int = 1) -> bool:
    """Whether a tenant that gives up so many places still has as many, per weight, as the one who gets them.

    So places move towards equal numbers per weight, and never back and forth.

    Args:
        held: Places of the tenant that would give.
        weight: Its weight.
        newcomer_held: Places of the one who would get.
        newcomer_weight: Its weight.
        places: How many.
    """
    return (held - places) / weight >= (newcomer_held + places) / newcomer_weight
