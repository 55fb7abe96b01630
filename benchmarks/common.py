"""What every benchmark shares: the result file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


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


def hardware() -> dict[str, Any]:
    """The host's CPU and memory, and its GPUs if torch sees any."""
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
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            **(versions or {}),
        },
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
