"""Known mistakes, planted into a copy of the sources: what the stress test must catch.

The library has no test-only branch; a mutant is the library with a few lines exchanged, built beside it. x86 hardware
keeps stores in order, so a weakened release is planted as what it would allow elsewhere: the flag lands a moment before
the last of the data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    edits: tuple[tuple[str, str], ...]  # (text that must stand there once, what replaces it)


MOMENT = "    for (const int64_t until = now_ns() + 20'000; now_ns() < until;) {\n    }\n"
DISPATCH_FLAGS = """  for (int64_t f = 0; f < g.ffn_size; ++f)
    if (position[f] != nullptr)
      flag(c.peer[f], c.layout, c.slot(c.role_rank, port.stage, ring)).store(kReady, std::memory_order_release);
"""
DISPATCH_COPY = "for (int64_t t = 0; t < tokens; ++t, row += stride)"
REPLY_RESET = "    flag(c.window, c.layout, s.slot).store(kEmpty, std::memory_order_release);\n"
REPLY_TAKEN = "    c.taken[s.slot].sequence = -1;\n"
REPLY_FLAG = "    flag(c.peer[s.region], c.layout, reply_slot).store(kReady, std::memory_order_release);\n"
COMBINE_RESET = """  for (const int32_t f : answers)
    flag(c.window, c.layout, c.slot(f, k.stage, k.ring)).store(kEmpty, std::memory_order_release);
"""

MUTANTS = (
    Mutant(
        "dispatch releases its flag before the last row",
        "csrc/cpu/dispatch.cpp",
        (
            (DISPATCH_COPY, DISPATCH_COPY.replace("t < tokens", "t < tokens - 1")),
            (
                DISPATCH_FLAGS,
                DISPATCH_FLAGS
                + MOMENT
                + """  for (int64_t f = 0; tokens > 0 && f < g.ffn_size; ++f)
    if (in_mask(masks + (tokens - 1) * width, f))
      std::memcpy(slot[f].payload + (tokens - 1) * row_bytes, row, row_bytes);
""",
            ),
        ),
    ),
    Mutant(
        "reply publishes first and resets the dispatch flag after",
        "csrc/cpu/reply.cpp",
        (
            (REPLY_RESET, ""),
            (REPLY_TAKEN, ""),
            (REPLY_FLAG, REPLY_FLAG + MOMENT + REPLY_RESET + REPLY_TAKEN),
        ),
    ),
    Mutant(
        "combine resets the reply flags before it waits for them",
        "csrc/cpu/combine.cpp",
        (
            (COMBINE_RESET, ""),
            (
                "  wait_for_replies(c, k);\n",
                COMBINE_RESET.replace("const int32_t f : answers", "int32_t f = 0; f < c.peers; ++f")
                + "  wait_for_replies(c, k);\n",
            ),
        ),
    ),
)


def build(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package with the mistake in it, compiled in place; for PYTHONPATH.

    Raises:
        AssertionError: the text to exchange does not stand in the source exactly once: the mutant must be kept up.
    """
    for name in ("afd_ops", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    source = folder / mutant.file
    text = source.read_text()
    for old, new in mutant.edits:
        assert text.count(old) == 1, f"{mutant.name}: {mutant.file} holds {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    source.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    return folder
