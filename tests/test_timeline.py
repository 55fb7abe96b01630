"""benchmarks/timeline.py: kernels of two traces in one picture."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "timeline.py"
spec = importlib.util.spec_from_file_location("timeline", SCRIPT)
assert spec is not None and spec.loader is not None
timeline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timeline)


def trace(path: Path, base: int, *kernels: tuple[str, float, float]) -> Path:
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels
    ]
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1})
    events.append({"ph": "M", "name": "process_name"})
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    return path


def test_two_traces_share_one_clock_and_one_picture(tmp_path: Path) -> None:
    attention = trace(
        tmp_path / "a.json",
        5_000_000,
        ("combine_kernel<float>", 30, 50),
        ("dispatch_kernel", 10, 5),
        ("nvjet<x>", 80, 30),
    )
    ffn = trace(tmp_path / "f.json", 5_010_000, ("cutlass gemm", 12, 20), ("reply_kernel", 32, 4), ("late", 900, 4))
    kernels = timeline.read(attention)
    assert [k.name for k in kernels] == ["dispatch_kernel", "combine_kernel<float>", "nvjet<x>"]
    assert timeline.span(kernels) == (5010, 5110)
    assert timeline.share(kernels, "combine_kernel|await_kernel") == 0.5
    assert timeline.launches(attention) == 1
    out = tmp_path / "step.svg"
    subprocess.run([sys.executable, str(SCRIPT), str(out), f"attention={attention}", f"ffn={ffn}"], check=True)
    root = ElementTree.fromstring(out.read_text())
    boxes = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    titles = [box[0].text for box in boxes]
    assert titles == [
        "dispatch_kernel: 5.0 us",
        "combine_kernel<float>: 50.0 us",
        "nvjet<x>: 30.0 us",
        "cutlass gemm: 20.0 us",
        "reply_kernel: 4.0 us",
    ], "what ends before or begins after the first lane's span is not drawn"
    x = {re.sub(":.*", "", box[0].text or ""): float(box.get("x", 0)) for box in boxes}
    # The second trace began 10 us later: its 12 is the first one's 22.
    assert x["cutlass gemm"] - x["dispatch_kernel"] == timeline.WIDTH * 12 / 100


def test_time_in_which_two_kernels_run_counts_once() -> None:
    """fault: a sum that is let in while await still runs counted twice, and so did what it shares with await."""
    begun = [("await_kernel", 0.0, 10.0), ("combine_kernel", 4.0, 8.0), ("await_kernel", 5.0, 2.0), ("gemm", 12.0, 8.0)]
    kernels = [timeline.Kernel(*kernel) for kernel in begun]
    assert timeline.share(kernels, "combine_kernel|await_kernel") == 0.6
    assert timeline.share(kernels, "gemm") == 0.4


def test_neighbours_are_one_box_and_hide_little_of_other_kinds() -> None:
    def kernels(*lengths: tuple[str, float]) -> list[Any]:
        begin, out = 0.0, []
        for name, length in lengths:
            out.append(timeline.Kernel(name, begin, length))
            begin += length
        return out

    gemm, reply, copy = "gemm", "reply_kernel", "memcpy"
    found = timeline.boxes(kernels((gemm, 10), (gemm, 5), (reply, 0.4), (gemm, 3), (copy, 0.7), (gemm, 1)), 1.0)
    assert [(box.count, round(box.begin, 1), round(box.end, 1), box.busy) for box in found] == [
        (3, 0, 18.4, 18),
        (1, 18.4, 20.1, 1),
    ]
    found = timeline.boxes(kernels((copy, 0.3), (reply, 20), (copy, 0.6), (copy, 0.6)), 1.0)
    kinds = [(timeline.KINDS[box.kind][0], round(box.begin, 1)) for box in found]
    assert kinds == [("dispatch, reply", 0), ("copy", 20.9)]
    apart = [timeline.Kernel(gemm, begin, 1.0) for begin in (0.0, 1.5, 4.0)]
    assert [box.count for box in timeline.boxes(apart, 1.0)] == [2, 1]


def test_what_runs_between_two_kernels_is_named() -> None:
    names = ["a", "dispatch_kernel", "b", "c", "combine_kernel", "d", "dispatch_kernel", "e", "await_kernel", "f"]
    kernels = [timeline.Kernel(name, float(i), 1.0) for i, name in enumerate(names)]
    assert timeline.between(kernels, "dispatch", "combine|await") == [["b", "c"], ["e"]]
