"""Builds the extension, and is its own PEP 517 backend.

As a backend it is setuptools plus one thing: a plain ``pip install .`` builds in an isolated environment, where torch
would be downloaded a second time. The interpreter that will use the package usually has one, so we build against that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.build_meta import *  # noqa: F403

ROOT = Path(__file__).parent
TORCH_FLOOR = "torch>=2.11"
# The oldest torch and Python the binary must load in; both ABIs are stable upwards.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
PYTHON_TARGET = "-DPy_LIMITED_API=0x030A0000"


def torch_is_visible() -> bool:
    """True once `import torch` works, if need be by the site-packages that build isolation hides."""
    if importlib.util.find_spec("torch"):
        return True
    for scheme in ("purelib", "platlib"):
        site = Path(sysconfig.get_path(scheme))
        if (site / "torch").is_dir():
            sys.path.append(str(site))  # appended, so that the isolated setuptools still wins
            return True
    return False


HAVE_TORCH = torch_is_visible()  # at import: every hook runs in a process of its own


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return [] if HAVE_TORCH else [TORCH_FLOOR]


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel


def source_digest() -> str:
    """Names the sources the binary was built from; afd_ops/extension.py compares it with a checkout's."""
    spec = importlib.util.spec_from_file_location("extension", ROOT / "afd_ops" / "extension.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.source_digest(ROOT / "csrc"))


def build() -> None:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp"))
    flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", TORCH_TARGET, PYTHON_TARGET]
    flags += os.environ.get("AFD_CXXFLAGS", "").split()
    flags.append(f'-DAFD_SOURCE_DIGEST="{source_digest()}"')
    setup(
        ext_modules=[
            CppExtension(
                "afd_ops._C",
                sources,
                depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")),
                extra_compile_args={"cxx": flags},
                py_limited_api=True,
            )
        ],
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


if __name__ == "__main__":
    build()
