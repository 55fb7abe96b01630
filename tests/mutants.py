"""Known mistakes, planted into a copy of the sources: what the stress test must catch.

The library has no test-only branch; a mutant is the library with a few lines exchanged, built beside it. x86 hardware
keeps stores in order, so a weakened release is planted as what it would allow elsewhere: the flag lands a moment before
the last of the data. A GPU does not: there each weakening is planted as such, too, and one that the hardware at hand
forgives is no fault of the stress test.

    python tests/mutants.py FOLDER    builds the CUDA mutants, each in a folder of its number; needs nvcc, but no GPU
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
    forgiven: bool = False  # no order that the hardware must break


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


DISPATCH_PUBLISH = """      if (!bit(skip, f)) store_release(flag_of(peer_window(c, f), c.layout, flight.slot), kReady);
"""
DISPATCH_LAST = "  bool spoiled;\n  const int64_t stage = flight.lane.stage < 0"
GPU_REPLY_RESET = """  store_relaxed(flag_of(c.window, c.layout, at.slot), kEmpty);
  c.taken[at.slot].sequence = -1;
"""
GPU_REPLY_FLAG = (
    "  store_release(flag_of(peer_window(c, at.region), c.layout, c.slot(c.role_rank, at.stage, at.ring)), kReady);\n"
)
GPU_MOMENT = "  for (const int64_t until = global_ns() + 20'000; global_ns() < until;) {\n  }\n"
GPU_AWAIT = "  bool late = false;\n  int32_t seen, sticky = kAlive;\n"
ITEM_AWAITED = "    if (threadIdx.x == 0)\n      while (behind(load_acquire_gpu(&c.state->ready))) {\n      }\n"

CUDA_MUTANTS = (
    Mutant(
        "dispatch's flag is stored by its plan CTA, while others still copy",
        "csrc/cuda/dispatch.cu",
        (
            (DISPATCH_PUBLISH, "      {\n      }\n"),
            (
                DISPATCH_LAST,
                """  if (blockIdx.x == 0) {
    __syncthreads();
    for (int32_t f = threadIdx.x; flight.ok && f < c.peers; f += blockDim.x)
      if (!bit(skip, f)) store_release(flag_of(peer_window(c, f), c.layout, flight.slot), kReady);
  }
"""
                + DISPATCH_LAST,
            ),
        ),
    ),
    Mutant(
        "reply publishes first and resets the dispatch flag after",
        "csrc/cuda/reply.cu",
        ((GPU_REPLY_RESET, ""), (GPU_REPLY_FLAG, GPU_REPLY_FLAG + GPU_MOMENT + GPU_REPLY_RESET)),
    ),
    Mutant(
        "combine resets a reply flag before it waits for it",
        "csrc/cuda/combine.cu",
        (
            (
                GPU_AWAIT,
                "  store_relaxed(flag_of(c.window, c.layout, c.slot(f, k.stage, k.ring)), kEmpty);\n" + GPU_AWAIT,
            ),
        ),
    ),
    Mutant("a receive that begins early does not wait for its item", "csrc/cuda/receive.cu", ((ITEM_AWAITED, ""),)),
    Mutant(
        "the op receive does not wait for arrive's end",
        "csrc/cuda/receive.cu",
        (("  if (tag == 0) {\n    await_previous();\n  } else {\n", "  if (tag != 0) {\n"),),
    ),
    Mutant(
        "dispatch's flag is stored without release",
        "csrc/cuda/dispatch.cu",
        ((DISPATCH_PUBLISH, DISPATCH_PUBLISH.replace("store_release", "store_relaxed")),),
        forgiven=True,
    ),
    Mutant(
        "reply's flag is stored without release",
        "csrc/cuda/reply.cu",
        ((GPU_REPLY_FLAG, GPU_REPLY_FLAG.replace("store_release", "store_relaxed")),),
        forgiven=True,
    ),
    Mutant(
        "flags are released to the GPU, not to the system",
        "csrc/cuda/device.cuh",
        (("st.release.sys.global.s32", "st.release.gpu.global.s32"),),
        forgiven=True,
    ),
    Mutant(
        "an item's tag is stored without release",
        "csrc/cuda/device.cuh",
        (("st.release.gpu.global.s32", "st.relaxed.gpu.global.s32"),),
        forgiven=True,
    ),
    Mutant(
        "a receive that begins early ends without waiting for arrive's end",
        "csrc/cuda/receive.cu",
        (("  if (tag != 0) await_previous();\n", ""),),
        forgiven=True,
    ),
    Mutant(
        "CTAs count themselves done without release and acquire",
        "csrc/cuda/device.cuh",
        (("atom.add.acq_rel.gpu.global.u32", "atom.add.relaxed.gpu.global.u32"),),
        forgiven=True,
    ),
    Mutant(
        "flags are read without acquire",
        "csrc/cuda/device.cuh",
        (("ld.acquire.sys.global.s32", "ld.relaxed.sys.global.s32"),),
        forgiven=True,
    ),
)


def planted(mutant: Mutant) -> str:
    """The source file with the mistake in it.

    Raises:
        AssertionError: the text to exchange does not stand in the source exactly once: the mutant must be kept up.
    """
    text = (ROOT / mutant.file).read_text()
    for old, new in mutant.edits:
        assert text.count(old) == 1, f"{mutant.name}: {mutant.file} holds {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    return text


def build(mutant: Mutant, folder: Path, **settings: str) -> Path:
    """A copy of the package with the mistake in it, compiled in place; for PYTHONPATH.

    Args:
        settings: variables of the build's environment.
    """
    for name in ("afd_ops", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    (folder / mutant.file).write_text(planted(mutant))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    return folder


def main() -> None:
    root = Path(sys.argv[1])
    for index, mutant in enumerate(CUDA_MUTANTS):
        place = root / str(index)
        shutil.rmtree(place, ignore_errors=True)
        build(mutant, place, AFD_CUDA="1", TORCH_CUDA_ARCH_LIST=os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"))
        shutil.rmtree(place / "build")
        for library in (place / "afd_ops").glob("*.so"):
            subprocess.run(["strip", "--strip-debug", str(library)], check=True)
        print(f"{place}: {mutant.name}", flush=True)


if __name__ == "__main__":
    main()
