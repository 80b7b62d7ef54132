"""Problems in the form of the peers' figures, and those figures.

Unit of time: F of a device for one microbatch = 1 ms. Unit of memory: the activations of a device
for one microbatch = 1e9 bytes. With v chunks on a device every op and its activations are 1/v. B
frees half of the activations, W the rest; a hop takes ``comm``. ``offload_time`` t: the one-way
transfer of a chunk takes t x its F + B + W. Devices 2i and 2i+1 share one D2H and one H2D link
(``shared``), or every device has its own two (``full``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_optpipe.core import Device, Link, Problem, Stage

UNIT_BYTES = 10**9
DATA = Path(__file__).parent / "data" / "peers.json"
PLACEMENTS = ("1", "2", "4", "2v", "4v")
"""Chunks on a device; ``v``: every second run of stages goes back (V shape, zigzag)."""


class Peer(NamedTuple):
    """One schedule of a peer: what it needs and how long it takes, in the units above."""

    name: str
    offload_time: float | None
    peak: float
    makespan: float


@dataclass(frozen=True)
class Size:
    """One block of the peers' figures."""

    devices: int
    microbatches: int
    fbw: tuple[float, float, float]
    hop: float
    peers: tuple[Peer, ...]

    @property
    def work(self) -> float:
        """Compute time of one device."""
        return sum(self.fbw) * self.microbatches

    @property
    def peak_1f1b(self) -> float:
        return min(peer.peak for peer in self.peers if peer.name == "1f1b")

    def best_peer(self, level: float, offload_time: float | None) -> Peer:
        """The shortest peer that needs at most ``level``, moving nothing or at this speed."""
        usable = [
            peer
            for peer in self.peers
            if peer.peak <= level and peer.offload_time in (None, offload_time)
        ]
        return min(usable, key=lambda peer: peer.makespan)

    def points(self) -> list[tuple[float, float | None]]:
        """Every (memory level, offload time) at which a peer stands."""
        return sorted(
            {(peer.peak, peer.offload_time) for peer in self.peers},
            key=lambda point: (point[0], point[1] or 0.0),
        )

    def __str__(self) -> str:
        times = ":".join(f"{t:g}" for t in self.fbw)
        return f"{self.devices}x{self.microbatches} {times}"


@cache
def sizes() -> tuple[Size, ...]:
    """The peers' figures, smallest size first."""
    return tuple(
        Size(
            devices=block["p"],
            microbatches=block["m"],
            fbw=tuple(block["fbw"]),
            hop=block["comm"],
            peers=tuple(
                Peer(s["name"], s["offload_time"], s["peak"], s["makespan"])
                for s in block["schedules"]
            ),
        )
        for block in json.loads(DATA.read_text())
    )


def stage_device(devices: int, placement: str) -> tuple[int, ...]:
    """The placement by its short name."""
    there = list(range(devices))
    back = there[::-1] if placement.endswith("v") else there
    chunks = int(placement.rstrip("v"))
    return tuple(d for chunk in range(chunks) for d in (back if chunk % 2 else there))


def peer_problem(
    devices: int,
    microbatches: int,
    fbw: tuple[float, float, float],
    *,
    hop: float,
    placement: str,
    level: float,
    offload_time: float | None = None,
    links: str = "shared",
) -> Problem:
    """A problem in the peers' units at memory ``level`` (see the module's words)."""
    owners = stage_device(devices, placement)
    chunks = len(owners) // devices
    chunk_bytes = UNIT_BYTES // chunks
    stage = Stage(
        forward_ms=fbw[0] / chunks,
        backward_input_ms=fbw[1] / chunks,
        backward_weight_ms=fbw[2] / chunks,
        activation_bytes=chunk_bytes,
        backward_frees_bytes=chunk_bytes // 2,
        offload_bytes=0 if offload_time is None else chunk_bytes,
    )
    named: dict[str, Link] = {}
    pairs: list[tuple[str | None, str | None]] = [(None, None)] * devices
    if offload_time is not None:
        gbps = chunk_bytes / (offload_time * sum(fbw) / chunks) / 1e6
        switch = [d // 2 if links == "shared" else d for d in range(devices)]
        pairs = [(f"d2h{s}", f"h2d{s}") for s in switch]
        named = {name: Link(gbps) for pair in pairs for name in pair if name is not None}
    memory = round(level * UNIT_BYTES)
    return Problem(
        num_microbatches=microbatches,
        stage_device=owners,
        stages=(stage,) * len(owners),
        devices=tuple(Device(memory, *pair) for pair in pairs),
        links=named,
        p2p_ms=hop,
        name=f"{devices}x{microbatches} {placement} at {level:g}, t {offload_time}",
    )
