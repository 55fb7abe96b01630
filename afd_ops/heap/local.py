"""N ranks inside one process: unit tests, opcheck, single-process work."""

from __future__ import annotations

import os

import torch


class LocalSegment:
    def __init__(self, heap: LocalHeap, nbytes: int) -> None:
        self._heap = heap
        self._memory = torch.zeros(nbytes + 256, dtype=torch.uint8, device=heap.device)
        self.address = (self._memory.data_ptr() + 255) // 256 * 256
        self.handle = f"{os.getpid()}:{self.address}"
        # Peers keep writing (a poison word, say) after this rank has closed, so the memory goes with the last of them.
        heap.segments.append(self._memory)

    def peer(self, handle: str) -> int:
        pid, address = map(int, handle.split(":"))
        if pid != os.getpid():
            raise RuntimeError(
                f"a local heap reaches one process, but a rank is in process {pid}, this one in {os.getpid()}"
            )
        return address

    def seal(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalHeap:
    """Memory of this process, shared by all its ranks; freed when the heap object is."""

    capturable = False
    per_role = True
    reach = "process"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.segments: list[torch.Tensor] = []

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def allocate(self, nbytes: int) -> LocalSegment:
        return LocalSegment(self, nbytes)
