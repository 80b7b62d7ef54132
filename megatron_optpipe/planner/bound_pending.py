"""How much work a device can put off: W that wait hold memory, so only so many can.

When the last B of a stage starts, its own activations lie on the device, and every microbatch whose
B is done and whose W is not holds what W gives back; that cannot be offloaded. So all forwards, all
earlier backwards, and all W but those that fit beside it come first, and the way of that B to the
end of the plan comes after.
"""

from __future__ import annotations

from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.bound_device import Reach


def pending_bound_ms(problem: Problem, reach: Reach) -> float:
    """The best bound of this kind over all devices and stages, ms."""
    best = 0.0
    for d in range(problem.num_devices):
        stages = problem.stages_on(d)
        head = min((float(reach.head["F"][s][0]) for s in stages), default=0.0)
        for s in stages:
            best = max(best, head + _work_before_ms(problem, d, s) + _after_ms(problem, reach, s))
    return best


def _after_ms(problem: Problem, reach: Reach, s: int) -> float:
    return problem.stages[s].backward_input_ms + float(reach.tail["B"][s][-1])


def _work_before_ms(problem: Problem, d: int, s: int) -> float:
    """Least compute time of device ``d`` before the last B of stage ``s`` starts."""
    many = problem.num_microbatches
    own = problem.stages[s]
    work = 0.0
    waiting: list[tuple[float, int, int]] = []  # ms, bytes, how many could wait
    for t in problem.stages_on(d):
        stage = problem.stages[t]
        work += many * stage.forward_ms
        if t < s:
            continue  # its backwards may come later
        done = many - 1 if t == s else many
        work += done * (stage.backward_input_ms + stage.backward_weight_ms)
        rest = stage.activation_bytes - stage.backward_frees_bytes
        waiting.append((stage.backward_weight_ms, rest, done))
    room = float(problem.devices[d].memory_bytes - own.activation_bytes)
    room -= max(0, -own.backward_frees_bytes)
    # The W that may wait: most time for the fewest bytes first, the last of them in part.
    waiting.sort(key=lambda entry: entry[0] / entry[1] if entry[1] > 0 else float("inf"))
    for each_ms, size, count in reversed(waiting):
        fitting = float(count) if size <= 0 else min(float(count), max(0.0, room) / size)
        work -= fitting * each_ms
        room -= fitting * max(0, size)
    return work
