"""The main job, small and eager: its verdict can say both things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GENERATE = Path(__file__).parent.parent / "examples" / "generate.py"
SMALL = ("--device", "cpu", "--compile", "none", "--new", "6", "--check")


@pytest.mark.parametrize(
    ("options", "status", "verdict"),
    [(("--ffn", "2", "--ubatches", "2"), 0, "PASS"), (("--ffn", "1", "--swap-experts"), 1, "FAIL")],
)
def test_generate_tells_right_experts_from_swapped_ones(options: tuple[str, ...], status: int, verdict: str) -> None:
    run = subprocess.run([sys.executable, str(GENERATE), *SMALL, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith(verdict), run.stdout
