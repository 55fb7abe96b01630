"""Builds the extension, and is its own PEP 517 backend.

As a backend it is setuptools plus one thing: a plain ``pip install .`` builds in an isolated environment, where torch
would be downloaded a second time. The interpreter that will use the package usually has one, so we build against that.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
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
    places = [sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")]
    if sys.prefix != sys.base_prefix and uses_system_packages(Path(sys.prefix)):
        places += site.getsitepackages([sys.base_prefix])
    for place in places:
        if (Path(place) / "torch").is_dir():
            sys.path.append(place)  # appended, so that the isolated setuptools still wins
            return True
    return False


def uses_system_packages(venv: Path) -> bool:
    """Whether a virtual environment was made with --system-site-packages."""
    config = venv / "pyvenv.cfg"
    lines = config.read_text().splitlines() if config.exists() else []
    return any(line.replace(" ", "").lower() == "include-system-site-packages=true" for line in lines)


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


def cuda_home() -> Path | None:
    """A CUDA toolkit with its headers; an nvcc on the path may be a wrapper that stands alone."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).resolve().parent.parent)]
    for place in (Path(p) for p in places if p):
        if (place / "bin" / "nvcc").exists() and (place / "include" / "cuda_runtime.h").exists():
            return place
    return None


def cuda_wanted() -> bool:
    """AFD_CUDA=1 or 0 decides; else the CUDA half is built where this torch and a toolkit can use it."""
    import torch

    choice = os.environ.get("AFD_CUDA", "auto")
    if choice == "1" and cuda_home() is None:
        sys.exit("AFD_CUDA=1, but no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) was found; set CUDA_HOME")
    return choice == "1" or (choice == "auto" and torch.version.cuda is not None and cuda_home() is not None)


def build() -> None:
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    def sources(*patterns: str) -> list[str]:
        return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in (ROOT / "csrc").glob(pattern))

    headers = sources("*.h", "cpu/*.h", "cuda/*.h", "cuda/*.cuh")
    flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", TORCH_TARGET, PYTHON_TARGET]
    flags += os.environ.get("AFD_CXXFLAGS", "").split()
    # Also makes ninja compile everything again after any change: with a CPU build of torch it does not follow the
    # headers of a .cu file, and objects of two layouts of a struct link without a word.
    digest = f'-DAFD_SOURCE_DIGEST="{source_digest()}"'
    flags.append(digest)
    extensions = [
        CppExtension(
            "afd_ops._C",
            sources("*.cpp", "cpu/*.cpp"),
            depends=headers,
            extra_compile_args={"cxx": flags},
            py_limited_api=True,
        )
    ]
    if cuda_wanted():
        home, kernels = cuda_home(), sources("cuda/*.cpp", "cuda/*.cu")
        if not kernels:
            sys.exit("the CUDA half is wanted, but csrc/cuda has no sources; set AFD_CUDA=0 to build without it")
        targets = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")  # there may be no GPU to ask
        os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(home)
        extensions.append(
            # CppExtension, not CUDAExtension: that one links CUDA parts of torch, which a CPU build has not.
            CppExtension(
                "afd_ops._C_cuda",
                ["csrc/control.cpp", *kernels],
                depends=headers,
                include_dirs=[f"{home}/include"],
                library_dirs=[f"{home}/lib64"],
                libraries=["cudart"],
                extra_link_args=["-Wl,--no-as-needed", "-ltorch"],  # libtorch brings libtorch_cuda at run time
                extra_compile_args={
                    "cxx": [*flags, "-DUSE_CUDA", f'-DAFD_ARCHITECTURES="{targets}"'],
                    "nvcc": ["-O3", "-std=c++20", "-lineinfo", TORCH_TARGET, "-DUSE_CUDA", digest],
                },
                py_limited_api=True,
            )
        )
    setup(
        ext_modules=extensions,
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


if __name__ == "__main__":
    build()
