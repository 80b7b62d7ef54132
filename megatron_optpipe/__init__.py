"""OptPipe (arXiv 2510.05186) for Megatron-LM: plan a pipeline iteration, then run the plan.

Layers, imports only downwards: ``cli``/``view``, ``megatron``, ``runtime``, ``planner``, ``core``.
Importing this package does nothing but define the version.
"""

__version__ = "0.1.0"
