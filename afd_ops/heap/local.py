"""N ranks inside one process: unit tests, opcheck, single-process work.

On CPU, on one GPU, or over all GPUs of the process by peer access.
"""

from __future__ import annotations

import os

import torch

from afd_ops.heap.shm import available_memory


class LocalSegment:
    def __init__(self, heap: LocalHeap, nbytes: int) -> None:
        self._heap = heap
        self._memory = torch.zeros(nbytes + 256, dtype=torch.uint8, device=heap.device)
        if heap.device.type == "cuda":
            torch.cuda.synchronize(heap.device)  # the zeros must be there before a peer's first store
        self.address = (self._memory.data_ptr() + 255) // 256 * 256
        self.handle = f"{os.getpid()}:{self.address}:{heap.device}"
        heap.segments.append(self._memory)

    def peer(self, handle: str) -> int:
        pid, address, device = handle.split(":", 2)
        if int(pid) != os.getpid():
            raise RuntimeError(
                f"a local heap reaches one process, but a rank is in process {pid}, this one in {os.getpid()}"
            )
        if device != str(self._heap.device):
            self._heap.enable_access(torch.device(device))
        return int(address)

    def seal(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalHeap:
    """Memory of this process, shared by all its ranks; freed when the heap object is.

    Args:
        device: "cpu", or a GPU as "cuda:0".
        shared: ranks on different GPUs have a heap each; this list then keeps their memory alive together.
    """

    per_role = True
    reach = "process"

    def __init__(self, device: torch.device | str = "cpu", shared: list[torch.Tensor] | None = None) -> None:
        self.device = torch.device(device)
        self.capturable = self.device.type == "cuda"
        self.segments: list[torch.Tensor] = [] if shared is None else shared

    def free_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return available_memory()

    def allocate(self, nbytes: int) -> LocalSegment:
        return LocalSegment(self, nbytes)

    def enable_access(self, other: torch.device) -> None:
        """Lets kernels of this heap's device store to `other`'s memory.

        Raises:
            RuntimeError: the devices cannot reach each other.
        """
        if self.device.type != "cuda" or other.type != "cuda":
            raise RuntimeError(f"ranks on {self.device} and {other} cannot reach each other's memory")
        from afd_ops import _C_cuda

        _C_cuda.enable_peer_access(self.device.index, other.index)
