"""Random problems small enough for an exhaustive search."""

from __future__ import annotations

import random

from megatron_optpipe.core.problem import Device, Link, Problem, Stage

LAYOUTS: tuple[tuple[int, ...], ...] = (
    (0,),
    (0, 1),
    (0, 1),
    (0, 1, 2),
    (0, 1, 2),
    (0, 1, 2),
    (0, 1, 1, 0),
    (0, 1, 0, 1),
    (0, 0),
)


def small_problem(seed: int, *, offload: bool | None = None) -> Problem:
    """At most 3 devices, 4 microbatches (2 where a device owns two stages).

    Durations are multiples of 0.1 ms, memory of 1 MB. A limit may be too small for any plan.
    """
    rng = random.Random(seed)
    layout = rng.choice(LAYOUTS)
    num_devices = max(layout) + 1
    chunks = len(layout) // num_devices
    with_offload = rng.random() < 0.5 if offload is None else offload
    many = rng.randint(2, 4) if chunks == 1 else 2
    if with_offload and num_devices == 3:
        many = min(many, 3) if rng.random() < 0.6 else many
    alike = rng.random() < 0.4
    stages: list[Stage] = []
    for _ in layout:
        if alike and stages:
            stages.append(stages[0])
            continue
        size = rng.choice((2, 4, 6)) * 1_000_000
        frees = rng.choice((size // 2, size // 2, size, 0, size // 4, -1_000_000))
        stages.append(
            Stage(
                forward_ms=rng.randint(5, 15) / 10,
                backward_input_ms=rng.randint(5, 18) / 10,
                backward_weight_ms=rng.choice((0, 4, 8, 10, 12)) / 10,
                activation_bytes=size,
                backward_frees_bytes=frees,
                offload_bytes=rng.choice((size, size, size // 2)) if with_offload else 0,
            )
        )
    links: dict[str, Link] = {}
    kind = rng.choice(("full", "half", "shared"))
    devices: list[Device] = []
    for d in range(num_devices):
        own = [stages[s] for s, owner in enumerate(layout) if owner == d]
        largest = max(stage.activation_bytes + max(0, -stage.backward_frees_bytes) for stage in own)
        factor = rng.choice((1.0, 1.0, 1.5, 2.0, 3.0)) * (1 if chunks == 1 else chunks)
        limit = int(largest * factor) // 1_000_000 * 1_000_000
        if not with_offload:
            devices.append(Device(limit))
            continue
        out = {"full": f"out{d}", "half": f"both{d}", "shared": "out"}[kind]
        back = {"full": f"back{d}", "half": f"both{d}", "shared": "back"}[kind]
        for name in (out, back):
            links.setdefault(name, Link(rng.choice((4.0, 8.0, 2.0)), rng.choice((0.0, 0.1))))
        devices.append(Device(limit, out, back))
    host = None
    if with_offload and rng.random() < 0.2:
        host = max(stage.wire_bytes for stage in stages) * rng.randint(1, 3)
    return Problem(
        num_microbatches=many,
        stage_device=layout,
        stages=tuple(stages),
        devices=tuple(devices),
        links=links,
        p2p_ms=rng.choice((0.0, 0.1, 0.3)),
        host_memory_bytes=host,
    )
