"""N processes on GPUs, through nvshmem4py (nvshmem.core) and cuda.core.

Memory stays allocated until `finalize()`: freeing is collective in NVSHMEM, and close() of a window is not.
"""

from __future__ import annotations

import base64
import importlib
from typing import Any

import torch

from afd_ops.bootstrap import Bootstrap

INSTALL = (
    "pip install nvshmem4py-cu13 cuda-python; where packages are not in site-packages, put the folder of "
    "libnvshmem_host.so.3 on LD_LIBRARY_PATH"
)
INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED, and above it the kinds of multi-process sharing
PROBE = 0x61666470726F6265  # "afdprobe"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise RuntimeError(f"the NVSHMEM heap needs {name}, which does not load ({error}); {INSTALL}") from error


class NvshmemSegment:
    def __init__(self, heap: NvshmemHeap, nbytes: int) -> None:
        self._heap = heap
        self._memory = heap.core.tensor((nbytes,), dtype=torch.uint8)
        heap.keep(self._memory)
        self._memory.zero_()
        torch.cuda.synchronize(heap.device)
        self.address: int = self._memory.data_ptr()
        if self.address % 256:
            raise RuntimeError(f"NVSHMEM gave memory at {self.address:#x}, expected a multiple of 256")
        self.handle = str(heap.core.my_pe())
        self._peers: list[torch.Tensor] = []

    def peer(self, handle: str) -> int:
        pe, me = int(handle), int(self.handle)
        if pe == me:
            return self.address
        try:
            memory = self._heap.core.get_peer_tensor(self._memory, pe)
        except Exception as error:
            raise RuntimeError(
                f"PE {me} has no direct address for the memory of PE {pe} ({error}); our kernels store to it, so all "
                "ranks must be GPUs of one host with peer access"
            ) from error
        # A store that does not arrive would be waited for until the deadline: try one now.
        word = memory[8 * me : 8 * me + 8].view(torch.int64)
        word.fill_(PROBE + me)
        seen = int(word.item())
        word.zero_()
        torch.cuda.synchronize(self._heap.device)
        if seen != PROBE + me:
            raise RuntimeError(f"PE {me} wrote {PROBE + me} to PE {pe} and read back {seen}: peer access does not work")
        self._peers.append(memory)
        return int(memory.data_ptr())

    def seal(self) -> None:
        pass

    def close(self) -> None:
        pass


class NvshmemHeap:
    """Symmetric memory of GPUs. Building one is collective; it joins an NVSHMEM that this process has initialised.

    Args:
        bootstrap: the ranks; their order becomes the order of PEs.
        device: this rank's GPU, "cuda:0"; the current one if left out.

    Raises:
        RuntimeError: a library is missing, or NVSHMEM does not start; says what to do.
    """

    capturable = True
    per_role = False
    reach = "host"

    def __init__(self, bootstrap: Bootstrap, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device if device is not None else f"cuda:{torch.cuda.current_device()}")
        torch.cuda.set_device(self.device)
        self.core = _import("nvshmem.core")
        self._segments: list[torch.Tensor] = []
        # A group of its own: windows use the other one, and not all ranks as often once one has failed.
        self._end = Bootstrap(
            bootstrap.store,
            bootstrap.rank,
            bootstrap.world_size,
            name=f"{bootstrap.name}/nvshmem",
            timeout=bootstrap.timeout,
        )
        empty = self._load()
        self._owner = int(self.core.init_status()) < INITIALIZED
        if self._owner:
            cuda_device = _import("cuda.core").Device(self.device.index)
            cuda_device.set_current()
            unique = bootstrap.broadcast(self._unique_id_text() if bootstrap.rank == 0 else "")
            self.core.init(
                device=cuda_device,
                uid=self._filled(empty, unique),
                rank=bootstrap.rank,
                nranks=bootstrap.world_size,
                initializer_method="uid",
            )

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocate(self, nbytes: int) -> NvshmemSegment:
        return NvshmemSegment(self, nbytes)

    def finalize(self) -> None:
        """Collective: gives all symmetric memory back, and ends NVSHMEM if this heap began it. May be called twice.

        Raises:
            BootstrapError: a rank did not come; names it. NVSHMEM would have waited for it without end, so nothing was
                given back: what is left is to end the process.
        """
        torch.cuda.synchronize(self.device)
        if self._segments or self._owner:
            self._end.barrier()
        while self._segments:
            self.core.free_tensor(self._segments.pop())
        if self._owner:
            self._owner = False
            self.core.finalize()

    def keep(self, memory: torch.Tensor) -> None:
        """Until `finalize()`, which frees it together with all ranks."""
        self._segments.append(memory)

    def _load(self) -> Any:
        try:
            return self.core.get_unique_id(empty=True)  # loads the library, needs no driver
        except Exception as error:
            raise RuntimeError(f"NVSHMEM does not load ({error}); {INSTALL}") from error

    def _unique_id_text(self) -> str:
        return base64.b64encode(self.core.get_unique_id()._data.tobytes()).decode()

    @staticmethod
    def _filled(unique: Any, text: str) -> Any:
        import numpy

        unique._data.view(numpy.int8)[:] = numpy.frombuffer(base64.b64decode(text), dtype=numpy.int8)
        return unique
