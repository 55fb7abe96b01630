"""Windows over NVSHMEM: processes that open, use, lose and end them."""

from __future__ import annotations

import base64
import importlib
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from cuda_cluster import FUSED, SPLIT, capturing
from torch import Tensor
from torch.distributed import HashStore

import afd_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]


PERMUTED = """
import faulthandler, sys
import torch
import afd_ops, harness

faulthandler.dump_traceback_later(55, exit=True)
rank, address = int(sys.argv[1]), sys.argv[2]
topology = afd_ops.Topology(1, 1, 5)
harness.DEVICE = f"cuda:{rank}"
bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=30)
sizes = {**harness.SIZES, "dtype": torch.bfloat16, "deadline": 10.0}
with harness.process_window(topology, bootstrap, sizes) as window:
    if window.role == "ffn":
        harness.serve(topology, window)
    for turn in range(30 if window.role == "attention" else 0):
        step = harness.random_step(topology, turn % 17, **sizes)
        out = harness.remote(window, turn)(*step)
        assert torch.equal(out, harness.expected(topology, *step)), turn
print("exact", torch.cuda.get_device_properties(harness.DEVICE).uuid)
"""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_permuted_visible_devices_reach_each_other() -> None:
    """fault: device numbers of the process and of the machine are confused, and peers map each other's wrong GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    names = visible.split(",")[1::-1]
    address = f"127.0.0.1:{harness.free_port()}"
    outputs = harness.run_scripts(
        PERMUTED, ("0", address), ("1", address), environment={"CUDA_VISIBLE_DEVICES": ",".join(names)}
    )
    used = [re.findall(r"^exact (\S+)$", output, re.MULTILINE) for output in outputs]
    mine = [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]
    assert used == [[mine[1]], [mine[0]]], (outputs, mine)


LOST = """
import faulthandler, os, signal, sys, time
import torch
import afd_ops, harness
from afd_ops.heap.nvshmem import NvshmemHeap

faulthandler.dump_traceback_later(85, exit=True)
rank, address, victim = int(sys.argv[1]), sys.argv[2], sys.argv[3]
LAST, DEADLINE = 9, 30.0  # layer of the step in which somebody dies; seconds
topology = afd_ops.Topology(1, 1, 5)
harness.DEVICE = f"cuda:{rank % torch.cuda.device_count()}"
bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=30)
heap = NvshmemHeap(bootstrap, harness.DEVICE)
window = afd_ops.Window(topology, bootstrap, heap=heap, **{**harness.SIZES, "deadline": DEADLINE})
begun = 0.0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def named(act):
    try:
        act()
    except afd_ops.PeerFailedError as error:
        assert error.peer == 0 and "'s process ended without closing its window" in str(error), error
        print("named", error, f"{time.monotonic() - begun:.1f} s", flush=True)
    else:
        raise AssertionError("nobody was named")


def experts(rows, scales, offsets, layer):
    if layer == LAST:
        die()
    return harness.experts_of(topology, 0)(rows, scales, offsets, layer)


if window.role == "ffn":
    begun = time.monotonic()
    named(afd_ops.ExpertServer(window, experts).run)
else:
    for layer in (0, 1, 2, LAST):
        module, (x, ids, weights, base) = harness.remote(window, layer), harness.random_step(topology, 6)
        ids = ids.abs()
        want = harness.expected(topology, x, ids, weights, base)
        if layer == LAST and victim == "attention":
            time.sleep(0.3)  # the FFN rank waits in arrive
            die()
        begun = time.monotonic()
        out = module.combine(module.dispatch(x, ids, weights), base)
        torch.cuda.synchronize()
        if layer == LAST:
            assert time.monotonic() - begun < DEADLINE
            named(window.check)
            assert bool(out.isnan().all())
        else:
            window.check()
            assert torch.equal(out, want), layer
bootstrap.timeout = heap._end.timeout = 3.0
for together in (window.reset, heap.finalize):
    begun = time.monotonic()
    try:
        together()
    except afd_ops.BootstrapError as error:
        assert f"for rank {1 - rank} " in str(error) or rank == 1 and "lost the store" in str(error), error  # its host
        assert time.monotonic() - begun < 10.0
        print("refused", together.__name__, error, flush=True)
window.close()
print("closed", flush=True)
os._exit(0)  # NVSHMEM's memory ends with the process
"""


@pytest.mark.parametrize("victim", ["attention", "ffn"])
def test_a_killed_process_is_named_by_the_one_that_waits_for_it(victim: str) -> None:
    """kill -9 while the other waits in arrive, or in combine: a kernel that spins on a GPU of its own. What NVSHMEM
    could only do with all ranks is refused instead of waited for."""
    address, index = f"127.0.0.1:{harness.free_port()}", ("attention", "ffn").index(victim)
    outputs = harness.run_scripts(LOST, ("0", address, victim), ("1", address, victim), seconds=90, killed=index)
    assert re.search(rf"^named rank {index} \({victim} 0\)", outputs[1 - index], re.MULTILINE), outputs
    assert re.findall(r"^refused (\w+)", outputs[1 - index], re.MULTILINE) == ["reset", "finalize"], outputs
    assert "closed" in outputs[1 - index].split(), outputs


def test_a_missing_nvshmem_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults: an ImportError from somewhere below; a library that is there and does not load."""
    from afd_ops.heap.nvshmem import NvshmemHeap

    real: Callable[..., Any] = importlib.import_module
    core: list[Any] = []

    def patched(name: str, *args: Any) -> Any:
        if name != "nvshmem.core":
            return real(name, *args)
        if core:
            return core[0]
        raise ModuleNotFoundError("No module named 'nvshmem'")

    monkeypatch.setattr(importlib, "import_module", patched)
    alone = afd_ops.Bootstrap(HashStore(), 0, 1, timeout=5)
    with pytest.raises(RuntimeError, match=r"needs nvshmem\.core.*No module named 'nvshmem'.*pip install nvshmem4py"):
        NvshmemHeap(alone, "cuda:0")

    def broken(empty: bool = False) -> Any:
        raise OSError("libnvshmem_host.so.3: cannot open shared object file")

    core.append(SimpleNamespace(get_unique_id=broken, init_status=lambda: 0))
    with pytest.raises(RuntimeError, match=r"NVSHMEM does not load.*cannot open shared object.*LD_LIBRARY_PATH"):
        NvshmemHeap(alone, "cuda:0")


class Deaf:
    """Peer memory that takes no store."""

    def __getitem__(self, _: Any) -> Deaf:
        return self

    def view(self, _: torch.dtype) -> Deaf:
        return self

    def fill_(self, _: int) -> Deaf:
        return self

    def zero_(self) -> Deaf:
        return self

    def item(self) -> int:
        return 0


def test_an_unreachable_peer_is_refused_by_name() -> None:
    """fault: stores that arrive nowhere, found out by a deadline."""
    from afd_ops.heap.nvshmem import NvshmemHeap

    def no_address(memory: Tensor, pe: int) -> Tensor:
        raise RuntimeError("nvshmem_ptr returned NULL")

    for peer_memory, says in (
        (no_address, r"PE 0 has no direct address for the memory of PE 1 .*NULL.*peer access"),
        (lambda memory, pe: Deaf(), r"PE 0 wrote \d+ to PE 1 and read back 0: peer access does not work"),
    ):
        heap = object.__new__(NvshmemHeap)
        heap.device, heap._segments = torch.device("cuda:0"), []
        heap.core = SimpleNamespace(
            tensor=lambda shape, dtype: torch.ones(shape, dtype=dtype, device="cuda:0"),
            my_pe=lambda: 0,
            get_peer_tensor=peer_memory,
        )
        segment = heap.allocate(4096)
        assert segment.peer("0") == segment.address
        with pytest.raises(RuntimeError, match=says):
            segment.peer("1")


def _joining(topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int) -> Any:
    import numpy
    import nvshmem.core as core
    from cuda.core import Device

    from afd_ops.heap.nvshmem import NvshmemHeap

    torch.cuda.set_device(harness.DEVICE)
    device = Device(torch.device(harness.DEVICE).index)
    device.set_current()
    unique = core.get_unique_id(empty=bootstrap.rank != 0)
    text = bootstrap.broadcast(base64.b64encode(unique._data.tobytes()).decode())
    unique._data.view(numpy.int8)[:] = numpy.frombuffer(base64.b64decode(text), dtype=numpy.int8)
    core.init(device=device, uid=unique, rank=bootstrap.rank, nranks=bootstrap.world_size, initializer_method="uid")
    engines_own = core.tensor((64,), dtype=torch.int32)
    engines_own.fill_(bootstrap.rank + 1)
    heap = NvshmemHeap(bootstrap, harness.DEVICE)
    with afd_ops.Window(topology, bootstrap, heap=heap, **sizes) as window:
        if window.role == "ffn":
            harness.serve(topology, window)
        for turn in range(turns if window.role == "attention" else 0):
            step = harness.random_step(topology, turn % 17, **sizes)
            assert torch.equal(harness.remote(window, turn)(*step), harness.expected(topology, *step)), turn
    heap.finalize()  # not its own: leaves everything as it is
    alive, kept = int(core.init_status()) >= 2, int(engines_own.sum().item())
    bootstrap.barrier()
    core.free_tensor(engines_own)
    core.finalize()
    return alive, kept


def test_a_window_joins_an_nvshmem_that_the_engine_began(seed: int) -> None:
    """fault: initialising NVSHMEM a second time, or ending it below the engine that still uses it."""
    results = harness.run_processes(
        afd_ops.Topology(1, 1, 5), _joining, 20, timeout=60, dtype=torch.bfloat16, deadline=10.0
    )
    assert results == [(True, 64 * 1), (True, 64 * 2)]


def _captured_steps(
    topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int, count: int, seed: int
) -> Any:
    with harness.process_window(topology, bootstrap, sizes) as window:
        if window.role == "ffn":
            return harness.serve(topology, window)
        torch.manual_seed(seed + bootstrap.rank)
        module = harness.remote(window, 1)
        steps = [harness.random_step(topology, count, **sizes) for _ in range(turns)]
        want = [harness.expected(topology, *step) for step in steps]
        eager = [module(*step) for step in steps[:3]]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out, expected in zip(eager, want[:3], strict=True))
        buffers, graph = [t.clone() for t in steps[0]], torch.cuda.CUDAGraph()
        with capturing(graph, torch.cuda.Stream(harness.DEVICE)):
            out = module.combine(module.dispatch(*buffers[:3]), buffers[3])
        wrong = []
        for turn, step in enumerate(steps):
            for buffer, fresh in zip(buffers, step, strict=True):
                buffer.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            window.check()
            if not torch.equal(out, want[turn]):
                wrong.append(turn)
        assert wrong == []
        return window.stats()


@two_gpus
@pytest.mark.parametrize(("attention", "ffn", "count", "turns"), [(1, 1, SPLIT, 40), (1, 1, FUSED, 60), (2, 2, 12, 20)])
def test_end_to_end_between_processes_eager_and_replayed(
    attention: int, ffn: int, count: int, turns: int, seed: int
) -> None:
    """The full round trip over NVSHMEM against the reference, the attention half captured and replayed on fresh tokens;
    with more ranks than GPUs, two processes share each."""
    topology = afd_ops.Topology(attention, ffn, 5)
    stats = harness.run_processes(
        topology, _captured_steps, turns, count, seed, timeout=60, tokens=128, dtype=torch.bfloat16, deadline=10.0
    )
    assert [s["dispatches"] for s in stats] == [turns + 3] * attention + [0] * ffn
    assert sum(s["replies"] for s in stats) == (turns + 3) * attention * ffn
