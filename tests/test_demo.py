"""The main job, small and eager: its verdict can say both things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
SMALL = ("--eager", "--layers", "2", "--bytes", "90", "--more", "11", "--tokens", "64")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("swapped", "status", "verdict"), [((), 0, "PASS"), (("--swap-experts",), 1, "FAIL")])
def test_the_demo_tells_right_experts_from_swapped_ones(
    swapped: tuple[str, ...], status: int, verdict: str, device: str
) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, str(DEMO), *SMALL, "--device", device, *swapped]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith(verdict), run.stdout
