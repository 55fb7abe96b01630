"""How the examples start their ranks, and where each of them computes."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import afd_ops

DEVICES = ("auto", "cpu", "cuda")
NEEDED = {"afd_ops._C_cuda": "the CUDA half of afd_ops is not built", "nvshmem": "nvshmem4py-cu13 is not installed"}


def launch(script: str, world_size: int) -> int:
    """Starts a script again with the same arguments, once per rank, as torchrun would; returns its exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    command = ["--standalone", f"--nproc-per-node={world_size}", script, *sys.argv[1:]]
    try:
        run.run(run.parse_args(command))
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            # A rank that ended with 1 has said why; one that got SIGTERM had to follow another.
            if failure.exitcode not in (1, -signal.SIGTERM):
                print(f"rank {rank} ended with exit status {failure.exitcode}", file=sys.stderr)
        return 1
    return 0


def place(wanted: str, topology: afd_ops.Topology, rank: int) -> torch.device:
    """Where a rank computes; all ranks of a host come to the same answer.

    On GPUs if there are at least two: attention ranks on the first half of them, FFN ranks on the second, several ranks
    to a GPU if there are more ranks. Else on the CPU; rank 0 says why if there are GPUs.

    Args:
        wanted: one of DEVICES; "cuda" ends the program where "auto" would take the CPU.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    lacking = [text for module, text in NEEDED.items() if importlib.util.find_spec(module) is None]
    if gpus >= 2 and not lacking:
        half = gpus // 2
        first, count = (0, half) if topology.role(rank) == "attention" else (half, gpus - half)
        return torch.device("cuda", first + topology.role_rank(rank) % count)
    why = lacking[0] if gpus >= 2 else "at least 2 are needed"
    if wanted == "cuda":
        raise SystemExit(f"--device cuda: there are {gpus} GPUs, but {why}" if rank == 0 else 1)
    if gpus and rank == 0:
        print(f"on the CPU: there are {gpus} GPUs, but {why}", flush=True)
    return torch.device("cpu")


@contextmanager
def heap_on(device: torch.device, bootstrap: afd_ops.Bootstrap) -> Iterator[afd_ops.Heap | None]:
    """What a window is built with: NVSHMEM's memory between GPUs, the default between CPU processes."""
    if device.type == "cpu":
        yield None
        return
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast is needed
    from afd_ops.heap.nvshmem import NvshmemHeap

    heap = NvshmemHeap(bootstrap, device)
    yield heap
    heap.finalize()  # collective: only where no rank has failed
