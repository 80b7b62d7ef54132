"""The contract: problems, plans, their checker, their clock, and what each rank does.

Plain Python; imports nothing from the layers above and neither scipy nor torch.
"""

from megatron_optpipe.core.check import Violation, check, render_grid, require_valid
from megatron_optpipe.core.errors import (
    Deadlock,
    OptPipeError,
    PlanError,
    PlanInvalid,
    ProblemError,
)
from megatron_optpipe.core.op import COMPUTE, TRANSFER, Op
from megatron_optpipe.core.plan import DevicePlan, Plan, TimedOp, load_plan, save_plan
from megatron_optpipe.core.problem import (
    Device,
    Link,
    MemoryChange,
    Problem,
    Stage,
    load_problem,
    save_problem,
)
from megatron_optpipe.core.program import (
    Compute,
    Message,
    Program,
    Recv,
    Send,
    input_of,
    lower,
    prove_ends,
)
from megatron_optpipe.core.timing import Orders, Summary, retime, summarize, time_orders

__all__ = [
    "COMPUTE",
    "TRANSFER",
    "Compute",
    "Deadlock",
    "Device",
    "DevicePlan",
    "Link",
    "MemoryChange",
    "Message",
    "Op",
    "OptPipeError",
    "Orders",
    "Plan",
    "PlanError",
    "PlanInvalid",
    "Problem",
    "ProblemError",
    "Program",
    "Recv",
    "Send",
    "Stage",
    "Summary",
    "TimedOp",
    "Violation",
    "check",
    "input_of",
    "load_plan",
    "load_problem",
    "lower",
    "prove_ends",
    "render_grid",
    "require_valid",
    "retime",
    "save_plan",
    "save_problem",
    "summarize",
    "time_orders",
]
