"""Exchange between ranks while a window is built, over a torch.distributed Store.

Needs nothing but a rendezvous address or a Store that exists already, and never touches the default process group.
Every exchange has a deadline; a rank that does not come is named. Only text crosses: nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from afd_ops.errors import BootstrapError


class Bootstrap:
    """Collectives of one group of ranks.

    Args:
        store: any torch.distributed Store that all ranks reach.
        rank, world_size: this rank and how many there are.
        name: separates groups that share a store; all ranks of a group give the same.
        timeout: seconds after which an exchange gives up and names who is missing.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, name: str = "afd", timeout: float = 60.0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.timeout = timeout
        self._exchanges = 0
        # A group that meets again on one store must not read what was said the time before.
        self._attempt = store.add(f"{name}/attempt/{rank}", 1)

    @staticmethod
    def connect(address: str, rank: int, world_size: int, *, name: str = "afd", timeout: float = 60.0) -> Bootstrap:
        """Rendezvous at "host:port"; rank 0 listens there, on that address only.

        Raises:
            BootstrapError: rank 0 did not open the address in time, or it is taken.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address is {address!r}, expected host:port")
        listener: socket.socket | None = None
        try:
            if rank == 0:
                # TCPStore on its own listens on every interface.
                listener = socket.create_server((host, int(port)), backlog=2 * world_size + 16)
            store = TCPStore(
                host,
                int(port),
                is_master=rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=listener.detach() if listener else None,
            )
        except (OSError, RuntimeError) as error:
            raise BootstrapError(f"rank {rank} could not meet rank 0 at {address} in {timeout} s: {error}") from error
        return Bootstrap(store, rank, world_size, name=name, timeout=timeout)

    @staticmethod
    def from_env(*, name: str = "afd", timeout: float = 60.0) -> Bootstrap:
        """Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), reusing the agent's store if there is one."""
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return Bootstrap(store, rank, world_size, name=name, timeout=timeout)

    def all_gather(self, payload: str = "") -> list[str]:
        """Every rank's payload, in rank order.

        Raises:
            BootstrapError: a rank did not take part within the timeout; all missing ranks are named.
        """
        self._exchanges += 1
        try:
            return self._exchange(payload)
        except BootstrapError:
            raise
        except RuntimeError as error:
            raise BootstrapError(
                f"rank {self.rank} lost the store (group {self.name!r}, exchange {self._exchanges}): {error}"
            ) from error

    def _exchange(self, payload: str) -> list[str]:
        keys = [self._key(self._exchanges, rank) for rank in range(self.world_size)]
        deadline = time.monotonic() + self.timeout
        self.store.set(keys[self.rank], payload)
        for key in keys:
            try:
                self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                missing = [rank for rank, k in enumerate(keys) if not self.store.check([k])]
                if missing:  # else it came while we were looking
                    raise BootstrapError(
                        f"rank {self.rank} waited {self.timeout} s for rank{'s' if len(missing) > 1 else ''} "
                        f"{', '.join(map(str, missing))} (group {self.name!r}, exchange {self._exchanges})"
                    ) from error
        values = [self.store.get(key).decode() for key in keys]
        # Whoever took part in this exchange has read the one before: its key may go, so that a store stays small.
        if self._exchanges > 1:
            self.store.delete_key(self._key(self._exchanges - 1, self.rank))
        return values

    def barrier(self) -> None:
        self.all_gather()

    def collective(self, step: str, action: Callable[[], str]) -> list[str]:
        """Runs `action` on every rank and gathers what it returns; if it raises anywhere, all ranks raise.

        Raises:
            BootstrapError: on the other ranks, naming the rank that failed and the step. The rank that failed raises
                what `action` raised.
        """
        failure: Exception | None = None
        try:
            payload = json.dumps({"value": action()})
        except Exception as error:
            failure = error
            payload = json.dumps({"error": f"{type(error).__name__}: {error}"})
        try:
            answers = [json.loads(answer) for answer in self.all_gather(payload)]
        except BootstrapError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise BootstrapError(f"rank {rank} failed in step {step!r}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def broadcast(self, payload: str, root: int = 0) -> str:
        """The root's payload on every rank."""
        return self.all_gather(payload if self.rank == root else "")[root]

    def _key(self, exchange: int, rank: int) -> str:
        return f"{self.name}/{self._attempt}/{exchange}/{rank}"
