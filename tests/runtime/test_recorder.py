"""Measured times in the shape of a plan."""

from __future__ import annotations

import json

from megatron_optpipe.core import Op
from megatron_optpipe.runtime.recorder import Recorder


def test_times_are_milliseconds_since_the_start() -> None:
    now = [5.0]
    recorder = Recorder(3, lambda: now[0])
    recorder.start()
    for op, begin_s, end_s in (
        (Op("F", 0, 0), 5.010, 5.020),
        (Op("O", 0, 0), 5.020, 5.050),
        (Op("B", 0, 0), 5.030, 5.042),
    ):
        now[0] = begin_s
        recorder.begin(op)
        now[0] = end_s
        recorder.end(op)
    recorder.peak_bytes = 7
    document = json.loads(recorder.to_json())
    assert document == {
        "schema": "optpipe.measurement/1",
        "device": 3,
        "compute": [["F", 0, 0, 10.0, 20.0], ["B", 0, 0, 30.0, 42.0]],
        "offload": [["O", 0, 0, 20.0, 50.0]],
        "reload": [],
        "peak_bytes": 7,
    }
    begin, end = recorder.span_ms
    assert (round(begin, 6), round(end, 6)) == (10.0, 42.0)


def test_a_new_iteration_forgets_the_last_one() -> None:
    recorder = Recorder(0)
    recorder.begin(Op("F", 0, 0))
    recorder.end(Op("F", 0, 0))
    recorder.start()
    assert recorder.times_ms == {}
    assert recorder.span_ms == (0.0, 0.0)
