"""What every benchmark shares: the clock and the result file."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from afd_ops import _C

HERE = Path(__file__).parent
TRIALS = 5
DRAINED, DROPPED = 64, 16
# Of benchmarks that also run where there is one GPU: attention ranks on the first, FFN ranks on the last.
ATTENTION, FFN = "cuda:0", f"cuda:{max(torch.cuda.device_count() - 1, 0)}"


def period_us(replay: Callable[[], object], pairs: int, replays: int) -> float:
    """Microseconds per pair on the current stream, `pairs` of them in a replay: median over TRIALS.

    `replay` is called TRIALS x replays times.
    """
    times = []
    for _ in range(TRIALS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (replays * pairs))
    return statistics.median(times)


def drained_us(replay: Callable[[], object]) -> float:
    """Microseconds of one replay on an idle GPU, the host's launch and wait included: median of DRAINED calls, the
    first DROPPED left out."""
    times = []
    for _ in range(DRAINED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[DROPPED:])


def free_address() -> str:
    """A free host:port of this host, for a rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def commit() -> str:
    """The checked-out commit, "-dirty" appended if anything but benchmarks/ differs from it; "unknown" without git."""
    try:
        git = ["git", "-C", str(HERE.parent)]
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL)
        changed = subprocess.check_output(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks"], text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("-dirty" if changed.strip() else "")


def _nvidia_smi(*arguments: str) -> list[list[str]]:
    """The words of its output, by line; [] without it."""
    try:
        output = subprocess.check_output(["nvidia-smi", *arguments], text=True, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split() for line in output.splitlines()]


def hardware() -> dict[str, Any]:
    """The host's CPU and memory, and, if torch sees any, its GPUs, their driver and what links the first two."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    found: dict[str, Any] = {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        drivers = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = drivers[0][0] if drivers else None
        links = [words for words in _nvidia_smi("topo", "-m") if words[:1] == ["GPU0"] and "X" in words]
        found["link"] = links[0][2] if links and len(found["gpus"]) > 1 else None  # "NV18": NVLink, 18 of them
    return found


def write(path: Path, rows: list[dict[str, Any]], *, versions: dict[str, str] | None = None, **more: Any) -> None:
    """Writes a result file, replacing the one before.

    Args:
        rows: one per measured path and size; at least path, tokens, hidden, dtype, topk, capacity, period_us,
            drained_us and error, None where a path has no such figure.
        versions: beside those of Python and torch.
        more: facts about the whole run.
    """
    result = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]),
        "csrc": _C.SOURCE_DIGEST,
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release().split("-")[0],
            **(versions or {}),
        },
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
