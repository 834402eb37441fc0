"""How much will be taken before an entry: a look ahead at the counters, without playing it through.

Inside its leaf an entry has so much service before it, say *D*. It is the turn of its leaf for the entry when the
leaf's counter has gone up by *D* / weight; until then every sibling that waits and stands lower is served up to there,
or until it has nothing left, in whole entries. What the siblings get is before the entry too, so the same question is
asked one level up with a larger *D*.

The estimate takes predictions for truth, and lets everything that runs be charged already. It looks at every sibling up
to 128 and of more at so many, so its cost has a bound.
"""

from math import ceil
from typing import Any

from maitred.fairness.entry import Ahead, Entry
from maitred.fairness.queue import LAST, SAMPLE
from maitred.fairness.tree import Node, Siblings


def before_siblings(node: Node | None, among: Siblings, weight: float, own: Ahead) -> Ahead:
    """What is taken before a node's next entry, among siblings.

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
    records = among.queue.records
    step = -(-len(records) // SAMPLE) or 1
    sampled = entries = 0
    service = 0.0
    for record in records[::step]:
        sibling = record[2]
        if among.queue.live.get(sibling) is not record:
            continue
        sampled += 1
        if sibling is node or sibling.counter > target or (sibling.counter == target and sibling.turn > turn):
            continue
        mean = sibling.service / sibling.waiting
        due = (target - sibling.counter) / sibling.rate
        turns = min(sibling.waiting, max(1, ceil(due / mean)) if mean else sibling.waiting)
        entries += turns
        service += turns * mean
    scale = len(among.queue) / sampled if step > 1 and sampled else 1.0
    return Ahead(own.entries + round(entries * scale), own.service + service * scale)


def in_leaf(leaf: Node | None, entry: Entry[Any], key: float) -> Ahead:
    """What its own key has before an entry."""
    if leaf is None:
        return Ahead(0, 0.0)
    return leaf.entries.before(key, entry.number if entry in leaf.entries else LAST)
