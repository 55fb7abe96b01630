"""N processes on one CPU host, over anonymous shared memory.

A memfd has no name, so nothing outlives a crash and no stranger can guess it: a peer opens it through its owner's
/proc entry, which the kernel allows to the same user only, and checks that it got the file it was promised.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch

_libc = ctypes.CDLL(None, use_errno=True)  # Python's mmap would keep a copy of the descriptor
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(fd: int, nbytes: int) -> int:
    address: int = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"{nbytes} bytes of shared memory cannot be mapped: {os.strerror(error)}")
    return address


def available_memory() -> int:
    """Bytes of host memory that can be had: what is free, and what the kernel would give up for it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class ShmSegment:
    def __init__(self, nbytes: int) -> None:
        self._fd: int | None = os.memfd_create("afd_ops", os.MFD_CLOEXEC)
        self._maps: list[tuple[int, int]] = []  # addresses and sizes
        try:
            os.fchmod(self._fd, 0o600)
            os.posix_fallocate(self._fd, 0, nbytes)  # too little memory raises here, not as a SIGBUS in the first op
            self.address = _map(self._fd, nbytes)
        except BaseException:
            self.close()
            raise
        self._maps.append((self.address, nbytes))
        stat = os.fstat(self._fd)
        self.handle = f"{os.getpid()}:{self._fd}:{stat.st_dev}:{stat.st_ino}:{nbytes}"

    def peer(self, handle: str) -> int:
        if handle == self.handle:
            return self.address
        pid, fd, device, inode, nbytes = map(int, handle.split(":"))
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"cannot open the shared memory of process {pid} ({error}); ranks must run on one host, as one user, "
                "in one pid namespace"
            ) from error
        try:
            stat = os.fstat(opened)
            if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, nbytes):
                raise RuntimeError(
                    f"{path} is not the shared memory its rank announced; are ranks in other containers?"
                )
            address = _map(opened, nbytes)
        finally:
            os.close(opened)
        self._maps.append((address, nbytes))
        return address

    def seal(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self.seal()
        while self._maps:
            _libc.munmap(*self._maps.pop())


class ShmHeap:
    """Shared memory between the processes of one host; each role allocates only what it receives."""

    capturable = False
    per_role = True
    reach = "host"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def free_bytes(self) -> int:
        return available_memory()

    def allocate(self, nbytes: int) -> ShmSegment:
        return ShmSegment(nbytes)
