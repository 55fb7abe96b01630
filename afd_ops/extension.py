"""Loads the C++ half, or says what to run.

setup.py loads this file on its own, before the package exists, for `source_digest`.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from types import ModuleType

BUILD = "pip install -e . --no-build-isolation"


def source_digest(csrc: Path) -> str:
    """Names the C++ sources; the binary carries the name of those it was built from."""
    digest = hashlib.sha256()
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        digest.update(path.relative_to(csrc).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load() -> None:
    """Imports afd_ops._C, which registers the ops.

    Raises:
        ImportError: the extension is missing, or older than the checkout's csrc/; the text says what to run.
    """
    import torch  # loads libtorch, against which the extension is linked

    halves = ["_C"]
    if torch.version.cuda and (Path(__file__).parent / "_C_cuda.abi3.so").exists():
        halves.append("_C_cuda")
    for half in halves:
        try:
            extension = importlib.import_module(f"afd_ops.{half}")
        except ImportError as error:
            raise ImportError(
                f"the extension of afd_ops does not load ({half}: {error}); build it with: {BUILD}"
            ) from error
        _refuse_if_stale(extension)


def _refuse_if_stale(extension: ModuleType) -> None:
    csrc = Path(__file__).parent.parent / "csrc"
    if csrc.is_dir() and source_digest(csrc) != extension.SOURCE_DIGEST:
        raise ImportError(
            f"the extension of afd_ops was built from other sources ({extension.SOURCE_DIGEST}) than {csrc} holds "
            f"({source_digest(csrc)}); build it again with: {BUILD}"
        )
