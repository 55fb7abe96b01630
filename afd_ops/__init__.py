"""Attention-FFN disaggregation of Mixture-of-Experts models as a pair of torch ops.

Importing registers `torch.ops.afd.*` and does nothing else: no device is touched, no process group made.
"""

from __future__ import annotations

import sys

from afd_ops import extension

# This package is imported before its module; the doctor must answer where what follows fails or hangs.
if sys.argv[:1] == ["-m"] and "afd_ops.doctor" in sys.orig_argv:
    from afd_ops import doctor

    sys.exit(doctor.main())

extension.load()

from afd_ops import ops  # noqa: E402, F401  (registers the fakes)
from afd_ops.attention import RemoteExperts, attach  # noqa: E402
from afd_ops.bootstrap import Bootstrap  # noqa: E402
from afd_ops.buckets import expected_rows, ladder  # noqa: E402
from afd_ops.captured import CapturedExperts, Experts, ItemBuffers  # noqa: E402
from afd_ops.errors import (  # noqa: E402
    AbortedError,
    AfdError,
    ArgumentError,
    BootstrapError,
    ClosedError,
    GeometryError,
    PeerError,
    PeerFailedError,
    PeerLeftError,
    PeerTimeoutError,
    ProtocolError,
    RankFailedError,
    RingBusyError,
    StaleError,
)
from afd_ops.ffn import ExpertServer, GroupedSwiGLU, dequantize  # noqa: E402
from afd_ops.heap import Heap, Segment  # noqa: E402
from afd_ops.heap.local import LocalHeap  # noqa: E402
from afd_ops.heap.shm import ShmHeap  # noqa: E402
from afd_ops.layout import Geometry  # noqa: E402
from afd_ops.topology import Topology  # noqa: E402
from afd_ops.ubatch import attention_costs, choose_ubatches, split_requests, split_step  # noqa: E402
from afd_ops.window import Window, open_local  # noqa: E402

__all__ = [
    "AbortedError",
    "AfdError",
    "ArgumentError",
    "Bootstrap",
    "BootstrapError",
    "CapturedExperts",
    "ClosedError",
    "ExpertServer",
    "Experts",
    "Geometry",
    "GeometryError",
    "GroupedSwiGLU",
    "Heap",
    "ItemBuffers",
    "LocalHeap",
    "PeerError",
    "PeerFailedError",
    "PeerLeftError",
    "PeerTimeoutError",
    "ProtocolError",
    "RankFailedError",
    "RemoteExperts",
    "RingBusyError",
    "Segment",
    "ShmHeap",
    "StaleError",
    "Topology",
    "Window",
    "attach",
    "attention_costs",
    "choose_ubatches",
    "dequantize",
    "expected_rows",
    "ladder",
    "open_local",
    "split_requests",
    "split_step",
]
