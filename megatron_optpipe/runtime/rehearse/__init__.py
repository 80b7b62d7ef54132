"""Rehearsal: the same executor without a model, to prove that a plan ends and how well it runs.

One process a device over gloo on the loopback interface. Compute ops sleep for their planned
times, activations are real memory in the real store, transfers go through the real lanes at the
speed of their links, messages arrive when their hop has passed.
"""

from megatron_optpipe.runtime.rehearse.launch import RehearsalFailed, rehearse
from megatron_optpipe.runtime.rehearse.report import DeviceReport, RehearsalReport

__all__ = ["DeviceReport", "RehearsalFailed", "RehearsalReport", "rehearse"]
