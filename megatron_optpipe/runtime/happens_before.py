"""What a run has really proven to be ordered, by vector clocks, and what follows from it.

A run that gave right numbers may have been lucky. ``History`` keeps, for every op, which ends of
other ops were known to have passed when it began, through the waits, marks and messages that the
run really used. ``violations`` then finds every fault that another timing could bring out:

* two ops touch one activation, one of them writing or freeing, and nothing orders them;
* a read that is ordered where its data are not there (before the write, or after the free);
* two transfers of one link at the same time;
* device or host memory above its limit at some moment of some timing that the waits allow.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Problem

Thread = tuple[int, str]
"""(device, lane): lane is ``compute``, ``offload`` or ``reload``."""

Clock = Mapping[Thread, int]
"""How many ops of each thread are known to have ended."""

LANE_OF = {"O": "offload", "R": "reload"}

ACCESSES: dict[str, tuple[tuple[str, str], ...]] = {
    "F": (("device", "write"),),
    "O": (("device", "read"), ("host", "write"), ("device", "free")),
    "R": (("host", "read"), ("device", "write"), ("host", "free")),
    "B": (("device", "read"), ("device", "free")),
    "W": (),
}
"""What each kind of op does to the activations of its stage and microbatch."""


@dataclass(slots=True)
class Span:
    """One op of the run: its thread, its place there, and what it knew when it began."""

    op: Op
    thread: Thread
    index: int
    known: dict[Thread, int]

    def after(self, other: Span) -> bool:
        """Whether ``other`` is proven to have ended before this began."""
        return self.known.get(other.thread, 0) > other.index


class Violation(NamedTuple):
    """A fault that some timing brings out."""

    rule: str
    message: str


@dataclass
class History:
    """The order that one run proved; filled by the wrappers of ``traced`` from all threads."""

    spans: dict[Op, Span] = field(default_factory=dict)
    faults: list[Violation] = field(default_factory=list)
    _now: dict[Thread, dict[Thread, int]] = field(default_factory=dict)
    _ended: dict[Op, dict[Thread, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, thread: Thread, clock: Clock) -> None:
        """``thread`` now knows what ``clock`` knows."""
        with self._lock:
            now = self._now.setdefault(thread, {})
            for other, count in clock.items():
                now[other] = max(now.get(other, 0), count)

    def learn_end(self, thread: Thread, op: Op) -> None:
        """``thread`` has waited for the end of ``op``; a fault if it had not ended."""
        clock = self._ended.get(op)
        if clock is None:
            self.faults.append(Violation("event", f"a wait for {op} passed before {op} ended"))
        else:
            self.learn(thread, clock)

    def begin(self, thread: Thread, op: Op) -> None:
        """``op`` begins on ``thread``."""
        with self._lock:
            now = self._now.setdefault(thread, {})
            self.spans[op] = Span(op, thread, now.get(thread, 0), dict(now))

    def end(self, thread: Thread, op: Op) -> None:
        """``op`` ends."""
        with self._lock:
            now = self._now[thread]
            now[thread] = now.get(thread, 0) + 1
            self._ended[op] = dict(now)

    def clock(self, thread: Thread) -> dict[Thread, int]:
        """What ``thread`` knows now: what a message from it carries."""
        with self._lock:
            return dict(self._now.get(thread, {}))

    def ordered(self, before: Op, then: Op) -> bool:
        """Whether the run proved that ``before`` ends before ``then`` begins."""
        return self.spans[then].after(self.spans[before])

    def violations(self, problem: Problem) -> list[Violation]:
        """Every fault of every timing that the proven order allows."""
        return [
            *self.faults,
            *_races(self),
            *_shared_links(self, problem),
            *_device_memory(self, problem),
            *_host_memory(self, problem),
        ]


def _races(history: History) -> Iterator[Violation]:
    touched: dict[tuple[str, int, int], list[tuple[Span, str]]] = {}
    for span in history.spans.values():
        for place, access in ACCESSES[span.op.kind]:
            key = (place, span.op.stage, span.op.microbatch)
            touched.setdefault(key, []).append((span, access))
    for (place, stage, microbatch), accesses in touched.items():
        what = f"{place} activations of stage {stage}, microbatch {microbatch}"
        for (one, a), (two, b) in itertools.combinations(accesses, 2):
            if one is two or (a == "read" and b == "read"):
                continue
            if not one.after(two) and not two.after(one):
                yield Violation("race", f"{one.op} ({a}) and {two.op} ({b}) on the {what}")
        # All conflicts are ordered (or reported): replay them by how much each one knew.
        accesses.sort(key=lambda entry: sum(entry[0].known.values()))
        filled = False
        for span, access in accesses:
            if access != "write" and not filled:
                yield Violation("stale", f"{span.op} ({access}) without data in the {what}")
            filled = access != "free" if access != "read" else filled


def _shared_links(history: History, problem: Problem) -> Iterator[Violation]:
    on_link: dict[str, list[Span]] = {}
    for span in history.spans.values():
        if span.op.kind in LANE_OF:
            on_link.setdefault(problem.link_name(span.op), []).append(span)
    for link, spans in on_link.items():
        for one, two in itertools.combinations(spans, 2):
            if not one.after(two) and not two.after(one):
                yield Violation("link", f"{one.op} and {two.op} at once on link {link}")


def _device_memory(history: History, problem: Problem) -> Iterator[Violation]:
    """Rule 7 over all cuts: how far the compute and reload lanes may be, with as few releases of
    the offload lane as that proves. Exact: offloads only release."""
    for device, entry in enumerate(problem.devices):
        moments = {
            lane: _moments(history, problem, (device, lane)) for lane in ("compute", "reload")
        }
        freed = [0]
        for span in _in_order(history, (device, "offload")):
            freed.append(freed[-1] - problem.memory_change(span.op).at_end_bytes)
        worst, where = 0, ""
        for compute, reload in itertools.product(moments["compute"], moments["reload"]):
            if compute.needs((device, "reload")) > reload.ended:
                continue
            if reload.needs((device, "compute")) > compute.ended:
                continue
            offload = (device, "offload")
            proven = max(compute.needs(offload), reload.needs(offload))
            held = compute.held_bytes + reload.held_bytes - freed[proven]
            if held > worst:
                worst, where = held, f"{compute.what} with {reload.what}"
        if worst > entry.memory_bytes:
            yield Violation(
                "memory", f"device {device}: {worst} of {entry.memory_bytes} bytes at {where}"
            )


class _Moment(NamedTuple):
    """A point of one lane: just after a begin or an end."""

    known: Mapping[Thread, int]
    ended: int
    held_bytes: int
    what: str

    def needs(self, thread: Thread) -> int:
        return self.known.get(thread, 0)


def _moments(history: History, problem: Problem, thread: Thread) -> list[_Moment]:
    held = 0
    moments = [_Moment({}, 0, 0, f"nothing of {thread[1]}")]
    for span in _in_order(history, thread):
        change = problem.memory_change(span.op)
        held += change.at_start_bytes
        moments.append(_Moment(span.known, span.index, held, f"the start of {span.op}"))
        held += change.at_end_bytes
        moments.append(_Moment(span.known, span.index + 1, held, f"the end of {span.op}"))
    return moments


def _in_order(history: History, thread: Thread) -> list[Span]:
    spans = [span for span in history.spans.values() if span.thread == thread]
    return sorted(spans, key=lambda span: span.index)


def _host_memory(history: History, problem: Problem) -> Iterator[Violation]:
    """Rule 8 over all cuts of the offload lanes (few devices only: their product is tried)."""
    limit = problem.host_memory_bytes
    if limit is None:
        return
    lanes = [_in_order(history, (d, "offload")) for d in range(problem.num_devices)]
    back = {
        thread: [0, *itertools.accumulate(_wire(problem, s) for s in _in_order(history, thread))]
        for thread in ((d, "reload") for d in range(problem.num_devices))
    }
    for heads in itertools.product(*(range(len(lane) + 1) for lane in lanes)):
        begun = [lane[:count] for lane, count in zip(lanes, heads)]
        last = [spans[-1] for spans in begun if spans]
        begun_of = {(d, "offload"): count for d, count in enumerate(heads)}
        if any(s.known.get(t, 0) > count for s in last for t, count in begun_of.items()):
            continue
        held = sum(_wire(problem, span) for spans in begun for span in spans)
        for thread, total in back.items():
            held -= total[max((s.known.get(thread, 0) for s in last), default=0)]
        if held > limit:
            yield Violation("host", f"{held} of {limit} host bytes at {[str(s.op) for s in last]}")
            return


def _wire(problem: Problem, span: Span) -> int:
    return problem.stages[span.op.stage].wire_bytes
