"""The other end of `solve_process`: reads a program from stdin, solves it, answers on stdout.

Run as a file, so that nothing but scipy is imported (and no `__main__` a second time).
"""

import io
import json
import signal
import sys
from typing import Any


def main() -> None:
    """Solve one program; the answer is an npz archive."""
    with io.BytesIO(sys.stdin.buffer.read()) as stream:
        import numpy as np

        data = dict(np.load(stream, allow_pickle=False))
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
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    shape = (data["row_lower"].size, data["objective"].size)
    matrix = coo_array((data["value"], (data["row"], data["col"])), shape=shape).tocsc()
    result = milp(
        data["objective"],
        integrality=data["integrality"],
        bounds=Bounds(data["lower"], data["upper"]),
        constraints=LinearConstraint(matrix, data["row_lower"], data["row_upper"]),
        options=settings["options"],  # scipy takes entries out of it: nobody else has this one
    )
    bound = getattr(result, "mip_dual_bound", None)
    answer = io.BytesIO()
    np.savez(
        answer,
        status=np.int64(result.status),
        x=np.zeros(0) if result.x is None else result.x,
        bound=np.float64("-inf" if bound is None else bound),
        nodes=np.int64(getattr(result, "mip_node_count", None) or 0),
    )
    sys.stdout.buffer.write(answer.getvalue())


if __name__ == "__main__":
    main()
