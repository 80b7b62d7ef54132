"""What must have been released before an op can allocate: arcs that the memory limit implies.

When a forward starts it needs its activations, when a backward starts its own lie on the device;
and every other activation of the device holds at least some bytes at that moment, whatever the
plan: those of the most favourable state that the arcs leave it (not yet there, whole, after B,
gone; where it may be offloaded, less what can lie on the host). If memory would not hold without
a B or W having ended, that op comes before. With few activations in flight such arcs tie forwards
to the backwards some microbatches earlier, and the longest path becomes a bound of the period; with
offloading they still tie backwards to earlier W, which cannot be put off for long.
"""

from __future__ import annotations

import time

from megatron_optpipe.core.op import Op
from megatron_optpipe.planner.network import Arc, Network

MAX_ROUNDS = 12


class NeverFits(ValueError):
    """No plan at all keeps the limit (under the arcs given)."""


def memory_arcs(
    network: Network, extra: list[Arc] | None = None, deadline: float | None = None
) -> list[Arc]:
    """Arcs that hold in every plan that obeys ``network`` and ``extra``. Raises ``NeverFits``.

    After ``deadline`` (of ``time.monotonic``) it looks no further; what was found holds.
    """
    found: list[Arc] = list(extra or ())
    known = {(a, b) for a, b, _ in found}
    start = len(found)
    for _ in range(MAX_ROUNDS):
        ancestors = network.ancestors(found)
        descendants = network.descendants(found)
        before = len(found)
        for d in range(network.problem.num_devices):
            if deadline is not None and time.monotonic() > deadline:
                return found[start:]
            for arc in _device_arcs(network, d, ancestors, descendants):
                if arc[:2] not in known:
                    known.add(arc[:2])
                    found.append(arc)
        if len(found) == before:
            break
    return found[start:]


def _device_arcs(
    network: Network, d: int, ancestors: list[int], descendants: list[int]
) -> list[Arc]:
    problem, at = network.problem, network.index
    stages = problem.stages_on(d)
    limit = problem.devices[d].memory_bytes
    many = problem.num_microbatches
    total = sum(problem.stages[s].activation_bytes for s in stages) * many
    if total + many * sum(max(0, -problem.stages[s].backward_frees_bytes) for s in stages) <= limit:
        return []
    arcs: list[Arc] = []
    for s in stages:
        for kind in "FB":
            for j in range(many):
                a = at[Op(kind, s, j)]
                arcs += _arcs_into(network, a, stages, limit, ancestors[a], descendants[a])
    return arcs


def _arcs_into(
    network: Network, a: int, stages: tuple[int, ...], limit: int, above: int, below: int
) -> list[Arc]:
    """Releases that must end before ``a`` starts."""
    problem, at = network.problem, network.index
    op = network.ops[a]
    many = problem.num_microbatches
    room = limit - problem.memory_change(op).at_start_bytes
    held: dict[int, list[tuple[int, int, int]]] = {}  # bytes at least: free, without W, without B
    for s in stages:
        stage = problem.stages[s]
        whole, rest = stage.activation_bytes, stage.activation_bytes - stage.backward_frees_bytes
        away = whole - (stage.offload_bytes if problem.can_offload(s) else 0)
        held[s] = []
        for j in range(many):
            f, b, w = at[Op("F", s, j)], at[Op("B", s, j)], at[Op("W", s, j)]
            if w == a or above >> w & 1:
                held[s].append((0, 0, 0))
                continue
            least = 2 if above >> b & 1 else 1 if above >> f & 1 else 0
            if a == b:  # what B itself takes is in `room`; its activations lie there whole
                held[s].append((whole, whole, whole))
                continue
            if a == f:
                held[s].append((0, 0, 0))
                continue
            most = 0 if below >> f & 1 else 1 if below >> b & 1 else 2 if below >> w & 1 else 3
            states = (0, min(whole, away), rest, 0)
            free = min(states[least : most + 1])
            without_w = min(states[least : min(most, 2) + 1])
            without_b = min(states[least : min(most, 1) + 1]) if least < 2 else without_w
            held[s].append((free, without_w, without_b))
        room -= sum(free for free, _, _ in held[s])
    if room < 0:
        raise NeverFits(f"{op} never fits")
    arcs: list[Arc] = []
    for s in stages:
        for which, kind in ((1, "W"), (2, "B")):
            more = 0
            for j in range(many - 1, -1, -1):
                more += held[s][j][which] - held[s][j][0]
                if more > room:
                    release = at[Op(kind, s, j)]
                    if not above >> release & 1:
                        arcs.append((release, a, 0.0))
                    break
    return arcs
