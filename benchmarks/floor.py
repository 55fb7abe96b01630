"""What the round trip cannot beat: bytes put to the other GPU, and expert-grouped rows written and read once."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import common
import torch
import workload
from torch import Tensor

CTAS = (4, 16, 32, 64, 132)
# Microseconds of a put of rows of 7168 bfloat16 between two H200: a run that cannot repeat them within a tenth measures
# something else.
KNOWN_PUTS = {1: 4.0, 64: 6.5, 128: 8.9, 256: 13.9, 1024: 43.8, 4096: 163.0}
SLACK = 1.1


def build(folder: str) -> Path:
    """floor.cu as a shared library."""
    source, target = Path(__file__).with_suffix(".cu"), Path(folder) / "floor.so"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    flags = ["-O3", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([nvcc, *flags, str(source), "-o", str(target)], check=True)
    return target


class Floor:
    """The attention rank's, while the FFN rank does nothing.

    Args:
        library: from `build`.
        peer: memory of the other GPU, uint8; longer than any put by 256 bytes.
    """

    def __init__(self, library: Path, peer: Tensor) -> None:
        self._put = ctypes.CDLL(str(library)).floor_put
        self._put.argtypes = (
            [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_void_p]
        )
        self._peer = peer
        self._source = torch.empty(peer.numel(), dtype=torch.uint8, device="cuda").random_(0, 255)
        self.put_us = functools.cache(self._put_us)
        self.bytes_per_us = copy_rate()

    def round_trip_us(self, case: workload.Case) -> float:
        """Two puts of T rows, and one write and one read of the expert-grouped rows at the measured copy rate."""
        there, back = (case.tokens * case.hidden * dtype.itemsize for dtype in (case.dtype, case.wide))
        return self.put_us(there) + self.put_us(back) + case.topk * (there + back) / self.bytes_per_us

    def void(self) -> list[str]:
        """Puts that took too long for this run to count."""
        found = ((rows, us, self.put_us(rows * 7168 * 2)) for rows, us in KNOWN_PUTS.items())
        return [f"put of {rows} rows {took:.1f} us, known {us}" for rows, us, took in found if took > SLACK * us]

    def _put_us(self, nbytes: int) -> float:
        """Best over the CTA sweep, per put inside a replayed graph."""
        done = torch.zeros(1, dtype=torch.int32, device="cuda")
        flag = self._peer[-256:].view(torch.int32)

        def put(ctas: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            addresses = self._source.data_ptr(), self._peer.data_ptr()
            status = self._put(*addresses, nbytes, done.data_ptr(), flag.data_ptr(), ctas, stream)
            assert status == 0, status

        return min(graph_us(lambda c=ctas: put(c), 20) for ctas in CTAS)  # type: ignore[misc]


def graph_us(call: Callable[[], object], count: int) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return common.period_us(graph.replay, count, 1)


def copy_rate() -> float:
    """Bytes read plus written per microsecond on one GPU: the best of the copy engine's node and of plain kernels.

    A slow copy would make the floor too high and every ratio too kind.
    """
    a = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    ways: tuple[Callable[[], object], ...] = (
        lambda: b.copy_(a),
        lambda: torch.neg(a, out=b),
        lambda: torch.neg(a.view(torch.int64), out=b.view(torch.int64)),
    )
    return 2 * a.numel() * a.element_size() / min(graph_us(way, 5) for way in ways)
