"""Estimate of the work ahead of an entry, from the counters and without a simulation.

Let *D* be the service ahead of an entry inside its leaf. The entry is next when the counter of its leaf has grown by
*D* / weight. Until then every waiting sibling with a lower counter is served in whole entries, until its counter
reaches that value or it has no entries left. The service of the siblings is also ahead of the entry, so the same
estimate is repeated one level up with a larger *D*.

The estimate assumes that predictions are exact and that all running requests are charged completely. It examines all
siblings up to 64, and about 64 of a larger number, so its cost is bounded.
"""

from itertools import islice
from math import ceil
from typing import Any

from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.sorted_entries import LAST
from maitred.fairness.tree import Node, Siblings

_SIBLINGS = 64


def before_siblings(node: Node | None, among: Siblings, weight: float, own: WorkAhead) -> WorkAhead:
    """Returns the work that is taken before a node's next entry, among its siblings.

    Args:
        node: The node; None if it does not exist yet.
        among: The siblings of the node.
        weight: Weight of the node relative to its siblings.
        own: Work of the node itself that is ahead of the entry.
    """
    level = among.level()
    counter = level if node is None else node.counter if node.waiting else max(node.counter, level)
    # Who begins to wait now comes behind those without a turn, whose numbers are negative, and before all others.
    turn = node.turn if node is not None and (node.waiting or among.parent is None) else 0
    target = counter + own.service / weight
    waiting = among.queue.live
    step = -(-len(waiting) // _SIBLINGS) or 1
    entries, service = 0.0, 0.0
    for sibling in islice(waiting, 0, None, step):
        lag = target - sibling.counter
        if lag < 0 or (lag == 0 and sibling.turn > turn) or sibling is node:
            continue
        count, left = sibling.waiting, sibling.service
        # The sibling is served in whole entries of its mean entry size.
        taken = min(float(count), max(1.0, ceil(lag / sibling.rate * count / left))) if left else float(count)
        entries += taken
        service += taken * left / count
    if step > 1:
        scale = len(waiting) / -(-len(waiting) // step)
        entries, service = entries * scale, service * scale
    return WorkAhead(own.entries + round(entries), own.service + service)


def in_leaf(leaf: Node | None, entry: QueueEntry[Any], key: float) -> WorkAhead:
    """Returns the work ahead of an entry within its own leaf."""
    if leaf is None:
        return WorkAhead(0, 0.0)
    return leaf.entries.before(key, entry.number if entry in leaf.entries else LAST)
