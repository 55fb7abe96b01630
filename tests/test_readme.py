"""The first program of README.md runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_first_program_of_the_readme_runs(tmp_path: Path) -> None:
    program = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert program.startswith("# torchrun --nproc-per-node 4 this.py\n")
    script = tmp_path / "this.py"
    script.write_text(program + "print(window.role)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("attention") == run.stdout.count("ffn") == 2, run.stdout
