"""The runtime: executes any valid plan with torch; imports torch, never megatron.

``executor`` walks a lowered program, ``lanes`` carry offloads and reloads beside the compute,
``store`` owns the saved activations, ``transport`` carries messages between ranks, ``abort``
makes one rank's failure everyone's, ``recorder`` keeps what really happened.
"""
