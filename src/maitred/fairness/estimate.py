"""How much will be taken before an entry: a look ahead at the counters, without playing it through.

Inside its leaf an entry has so much service before it, say *D*. It is the turn of its leaf for the entry when the
leaf's counter has gone up by *D* / weight; until then every sibling that waits and stands lower is served up to there,
or until it has nothing left, in whole entries. What the siblings get is before the entry too, so the same question is
asked one level up with a larger *D*.

The estimate takes predictions for truth, and lets everything that runs be charged already. It looks at every sibling up
to 64 and of more at about so many, so its cost has a bound.
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
        node: None when it is not there yet.
        among: Its siblings.
        weight: Relative to theirs.
        own: Of the node itself, before the entry.
    """
    level = among.level()
    counter = level if node is None else node.counter if node.waiting else max(node.counter, level)
    turn = node.turn if node is not None and (node.waiting or among.parent is None) else LAST
    target = counter + own.service / weight
    waiting = among.queue.live
    step = -(-len(waiting) // _SIBLINGS) or 1
    entries, service = 0.0, 0.0
    for sibling in islice(waiting, 0, None, step):
        lag = target - sibling.counter
        if lag < 0 or (lag == 0 and sibling.turn > turn) or sibling is node:
            continue
        count, left = sibling.waiting, sibling.service
        # In whole entries, of the mean size of those that it has.
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
