"""The other end of `solve_process`: reads a program from stdin, solves it, answers on stdout.

Run as a file, so that nothing but scipy is imported (and no `__main__` a second time).
"""

import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO


def solve_arrays(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Minimise the program of `milp_model.Arrays` (by field name) with `scipy.optimize.milp`."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    shape = (data["row_lower"].size, data["objective"].size)
    matrix = coo_array((data["value"], (data["row"], data["col"])), shape=shape).tocsc()
    fresh: Any = dict(options)  # scipy takes entries out of what it gets
    result = milp(
        data["objective"],
        integrality=data["integrality"],
        bounds=Bounds(data["lower"], data["upper"]),
        constraints=LinearConstraint(matrix, data["row_lower"], data["row_upper"]),
        options=fresh,
    )
    bound = getattr(result, "mip_dual_bound", None)
    return {
        "status": np.int64(result.status),
        "x": np.zeros(0) if result.x is None else np.asarray(result.x),
        "bound": np.float64("-inf" if bound is None else bound),
        "nodes": np.int64(getattr(result, "mip_node_count", None) or 0),
    }


def main() -> None:
    """Solve one program; the answer is an npz archive."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what solvers print must not mix with the answer
        _answer(answers)


def _answer(answers: BinaryIO) -> None:
    import numpy as np

    data = dict(np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False))
    settings: Any = json.loads(str(data["settings"]))
    if hasattr(signal, "alarm"):  # dies by itself, also where the parent is gone
        signal.alarm(int(settings["hard_limit_s"]) + 2)
    if settings["memory_bytes"]:
        try:
            import resource

            limit = int(settings["memory_bytes"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        except (ImportError, ValueError, OSError):
            pass  # not on this system: the parent's wall limit stays
    answer = io.BytesIO()
    np.savez(answer, **solve_arrays(data, settings["options"]))
    answers.write(answer.getvalue())


if __name__ == "__main__":
    main()
