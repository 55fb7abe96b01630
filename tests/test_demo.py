"""The main job, small and eager: its verdict can say both things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
SMALL = ("--eager", "--layers", "2", "--bytes", "90", "--more", "11", "--tokens", "64")


@pytest.mark.parametrize(("swapped", "status", "verdict"), [((), 0, "PASS"), (("--swap-experts",), 1, "FAIL")])
def test_the_demo_tells_right_experts_from_swapped_ones(swapped: tuple[str, ...], status: int, verdict: str) -> None:
    run = subprocess.run([sys.executable, str(DEMO), *SMALL, *swapped], capture_output=True, text=True, timeout=120)
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith(verdict), run.stdout
