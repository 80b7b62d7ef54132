"""Shapes that long searches ended at: together they are good nearly everywhere.

Chosen from some three hundred so that the best of the first n is, on average over eighty problems,
as close as can be to what thousands of schedules found for each: 5 % longer with four, 1.1 % with
twelve, 0.4 % with all. The problems: 4x8, 8x16 and 16x32 (devices x microbatches), 1, 2 and 4
chunks, V shaped or interleaved, F:B:W = 1:1:1 and 1:1.2:0.8, memory from 1/16 of 1F1B's to more
than it, with offload at several speeds and without.
"""

from __future__ import annotations

import dataclasses

from megatron_optpipe.planner.families import Family, Shape, known_shapes

_PORTFOLIO: tuple[tuple[str | int, Shape], ...] = (
    (
        "half",
        Shape(pace_x=0.5, pace_y=0.8, slope_y=2.03, odd_x=0.5, gap_y=-0.25, turn=0.07,
            z_lag=100, ahead_slope=1.29, ahead_more=1.9, patience=0.7, margin=0.37, rank=0.3),
    ),
    (
        "devices",
        Shape(slots=1, warm_more=1, z_lag=100, slack=2, patience=0.3, lead=0.29, margin=0.12),
    ),
    (
        2,
        Shape(pace_x=1.12, pace_y=0.77, gap_x=-0.1, gap_y=-0.11, turn=-3, z_lag=5,
            ahead_slope=1, ahead_more=2, slack=4, patience=0.7, lead=0.45, margin=0.5, rank=1),
    ),
    ("half", Shape(slots=1, warm_more=-1, z_lag=0.26, slack=0.3, patience=0.7, water=1)),
    (
        "all",
        Shape(pace_x=0.84, pace_y=0.8, slope_x=1.53, slope_y=0.8, odd_x=0.78, odd_y=0.5,
            gap_x=-0.05, gap_y=1.71, turn=1.04, z_lag=5.55, slack=3.42, keep=1, patience=0.3,
            lead=0.3, margin=0.42, rank=0.3),
    ),
    (
        "all",
        Shape(pace_x=0.8, pace_y=1.4, slope_y=1.5, odd_y=1.27, gap_x=1.43, gap_y=0.96,
            turn=-0.89, z_lag=98.4, patience=0.3, lead=0.02),
    ),
    (
        "devices",
        Shape(pace_x=0.88, pace_y=0.94, slope_y=2.32, odd_x=2, odd_y=0.5, gap_x=-0.03,
            gap_y=0.43, turn=0.17, z_lag=100, slack=1, patience=0.7, lead=-0.19, margin=-0.37,
            water=1, rank=0.01),
    ),
    (
        "half",
        Shape(pace_x=0.5, pace_y=0.56, slope_x=0.55, slope_y=0.83, odd_y=1.35, gap_y=0.3,
            turn=0.03, z_lag=100, ahead_slope=1, ahead_more=1.87, slack=1, lead=-0.1,
            margin=-0.12, water=1, rank=1),
    ),
    (
        1,
        Shape(pace_x=0.3, pace_y=0.3, slope_x=0.47, odd_x=0.5, odd_y=2.69, gap_x=0.26, gap_y=1,
            z_lag=5, slack=4.76, patience=0.7, lead=-0.05, margin=0.5, water=0.5, rank=0.3),
    ),
    (
        "all",
        Shape(slope_x=0.5, slope_y=0.6, odd_x=2, gap_x=0.02, gap_y=1.18, z_lag=6.54, slack=2.39,
            lead=0.02, margin=1, water=0.8, rank=2.26),
    ),
    ("devices", Shape(slots=1, warm_more=-1, z_lag=100, slack=0.38)),
    ("devices", Shape(slots=1, warm_device=2, warm_more=-1, z_lag=100, lead=0.3, water=0.8)),
    (
        "all",
        Shape(pace_x=0.84, pace_y=0.8, slope_x=1.5, slope_y=1.42, odd_x=1.7, odd_y=1.35,
            gap_x=0.18, gap_y=-0.02, turn=-0.36, z_lag=100, slack=1.75, patience=0.7, lead=-0.1,
            margin=0.27, water=0.8, rank=0.39),
    ),
    (
        "all",
        Shape(pace_x=0.77, pace_y=0.8, slope_x=1.5, slope_y=0.97, odd_x=0.5, odd_y=2,
            gap_x=0.22, gap_y=1.36, z_lag=8.32, keep=2, patience=0.3, lead=0.2, margin=0.46,
            rank=0.3),
    ),
    (
        "devices",
        Shape(pace_x=0.8, pace_y=0.5, slope_x=0.5, odd_x=2.27, odd_y=1.45, gap_x=0.62,
            gap_y=0.3, z_lag=8.63, ahead_slope=1.89, ahead_more=2, slack=1.34, keep=1,
            patience=0.3, lead=0.31, rank=1),
    ),
    (
        "devices",
        Shape(pace_x=0.3, pace_y=0.5, slope_x=1.5, gap_x=-0.13, turn=3, z_lag=100, lead=0.05,
            margin=0.12),
    ),
    (
        "all",
        Shape(pace_y=0.62, slope_x=1.5, slope_y=1.5, odd_x=2, gap_x=0.3, z_lag=100,
            ahead_slope=1.3, ahead_more=1.5, patience=1, lead=0.1, margin=1, water=0.5, rank=3),
    ),
    (
        1,
        Shape(pace_x=0.1, pace_y=-0.04, slope_x=1.08, odd_x=0.91, odd_y=1.25, gap_x=0.36,
            gap_y=0.49, turn=-0.05, z_lag=1.87, ahead_slope=1.57, ahead_more=1.5, slack=1.17,
            keep=1, lead=0.3, water=1, rank=0.3),
    ),
    (
        "devices",
        Shape(slots=1, warm_more=-1, z_lag=100, slack=2.12, patience=0.3, lead=0.3,
            margin=-0.12),
    ),
    (
        "half",
        Shape(pace_x=0.5, pace_y=0.5, slope_x=1.5, odd_x=1.16, odd_y=2, turn=0.25, z_lag=100,
            slack=4, patience=0.7, rank=2.1),
    ),
    (
        1,
        Shape(slope_y=1.93, odd_x=2.05, odd_y=0.5, gap_x=0.04, gap_y=0.33, turn=0.17, z_lag=1,
            slack=0.37),
    ),
    (
        "half",
        Shape(pace_x=0.1, pace_y=0.3, slope_x=-0.37, slope_y=0.76, odd_x=2.11, odd_y=0.75,
            gap_x=1.91, gap_y=6.52, turn=-3, z_lag=10.88, keep=1, patience=0.3, lead=0.55,
            margin=1.66, rank=3),
    ),
    (
        "devices",
        Shape(pace_x=0.1, pace_y=0.29, slope_x=0.23, slope_y=1.23, odd_y=0.5, turn=-30,
            z_lag=100, patience=0.3, lead=0.71, water=0.8),
    ),
    (
        1,
        Shape(pace_x=0.05, pace_y=0.3, slope_x=2.59, slope_y=1.77, odd_y=1.42, gap_x=0.29,
            gap_y=0.3, turn=0.25, z_lag=100, slack=1.2, patience=0.7, water=1, rank=1),
    ),
    (
        1,
        Shape(pace_x=0.1, pace_y=0.3, slope_x=0, slope_y=1.25, odd_y=0.69, gap_x=0.62,
            gap_y=-0.06, z_lag=0.3, ahead_slope=0.7, ahead_more=1.5, slack=1, patience=1,
            lead=0.1, rank=4.15),
    ),
    (
        "half",
        Shape(pace_x=0.1, pace_y=0.61, slope_x=0.2, odd_x=2.34, odd_y=2, gap_x=0.2, gap_y=0.3,
            turn=-0.23, z_lag=5, slack=1.7, keep=1, lead=0.17, margin=0.02, rank=-0.05),
    ),
)


_MOST_HELP = 8


def first_shapes(family: Family) -> list[Shape]:
    """All shapes to begin with, those that help most first."""
    found = portfolio(family.flat.num_devices, family.flat.num_microbatches)
    return [*found[:_MOST_HELP], *known_shapes(family), *found[_MOST_HELP:]]


def portfolio(devices: int, microbatches: int) -> list[Shape]:
    """The shapes for so many devices, those that help most first."""
    groups = {"all": microbatches, "devices": devices, "half": max(1, devices // 2)}
    return [
        dataclasses.replace(shape, group=groups[group] if isinstance(group, str) else group)
        for group, shape in _PORTFOLIO
    ]
