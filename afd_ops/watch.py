"""A thread that learns from the kernel when a peer's process ends, so that nobody waits out a deadline for the dead."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path


def process_namespace() -> str:
    """Where a process id of this process means the same: this boot of this host, and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a container may hide it
        boot = os.uname().nodename
    return f"boot {boot}, {Path('/proc/self/ns/pid').readlink()}"


class ProcessWatch:
    """Calls `gone(peer)` once for every process that ends; sleeps in poll(2) otherwise.

    Args:
        processes: process id by peer; this process itself is not watched.
        gone: called on the watching thread.

    Attributes:
        ended: the peers whose processes have ended, noted before `gone` is called.

    Raises:
        ProcessLookupError: a process has ended already.
    """

    def __init__(self, processes: Mapping[int, int], gone: Callable[[int], None]) -> None:
        self._gone = gone
        self.ended: tuple[int, ...] = ()
        self._peers: dict[int, int] = {}  # pidfd -> peer
        self._stop = os.eventfd(0)
        try:
            for peer, process in processes.items():
                if process != os.getpid():
                    self._peers[os.pidfd_open(process)] = peer
        except BaseException:
            self._close()
            raise
        self._thread: threading.Thread | None = None
        if self._peers:
            self._thread = threading.Thread(target=self._run, name="afd_ops peer watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; may be called twice, also from `gone`."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._close()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._stop, *self._peers):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop:
                    return
                poll.unregister(fd)
                peer = self._peers[fd]
                self.ended = (*self.ended, peer)
                self._gone(peer)
                if self._stop < 0:  # gone() has closed this watch
                    return

    def _close(self) -> None:
        for fd in (self._stop, *self._peers):
            os.close(fd)
        self._stop = -1
        self._peers.clear()
