"""Saying who waits for whom, in one line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)

MAX_SHOWN_WAITS = 12
"""Longest chain of waits that a message spells out."""


def describe_cycle[Node: Hashable](
    waits: Mapping[Node, tuple[Node | None, str]], head_of: Mapping[Node, Node]
) -> str:
    """One line for a set of stuck things.

    ``waits[x]`` is what x waits for (``None``: nothing that could come) and the words for it;
    ``head_of[y]`` is the stuck thing that stands before y in y's own queue.
    """
    start = next((x for x, (need, _) in waits.items() if need is None), None)
    if start is not None:  # somebody waits for what nobody will do: that is the root
        return f"deadlock: {start} {waits[start][1]}; change the order or raise the limit"
    node = next(iter(waits))
    seen: dict[Node, int] = {}
    chain: list[Node] = []
    while node not in seen and node in waits:
        seen[node] = len(chain)
        chain.append(node)
        need = waits[node][0]
        assert need is not None
        node = head_of.get(need, need)
    cycle = chain[seen.get(node, 0) :]
    words = []
    for x in cycle[:MAX_SHOWN_WAITS]:
        need, text = waits[x]
        behind = head_of.get(need, need) if need is not None else None
        queued = f", queued behind {behind}" if behind is not None and behind != need else ""
        words.append(f"{x} {text}{queued}")
    if len(cycle) > MAX_SHOWN_WAITS:
        words.append(f"and {len(cycle) - MAX_SHOWN_WAITS} more")
    return "deadlock: " + "; ".join(words) + "; change the order"
