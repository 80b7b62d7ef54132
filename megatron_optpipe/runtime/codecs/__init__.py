"""Codecs: what happens to the bytes of an activation between device and host.

A codec turns one storage's bytes into what crosses the link and back. Only the lossless copy is
here; a lossy one implements the same ``Codec`` protocol.
"""

from megatron_optpipe.runtime.codecs.codec import Codec
from megatron_optpipe.runtime.codecs.identity import Identity

__all__ = ["Codec", "Identity"]
