"""What a user meets before there is any window: importing, building, errors, copies."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import harness
import mutants
import pytest
import torch

import afd_ops
from afd_ops import _C, errors

PACKAGE = Path(afd_ops.__file__).parent
BUILD = "pip install -e . --no-build-isolation"


def python(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=60)


IMPORT = """
import json, logging, multiprocessing, os, signal, sys, threading, warnings
import torch, torch.distributed

def state():
    return {
        "environment": dict(os.environ),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": [thread.name for thread in threading.enumerate()],
        "open files": len(os.listdir("/proc/self/fd")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "signal handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": str((sys.excepthook, threading.excepthook)),
        "log handlers": str(logging.root.handlers),
        "warning filters": len(warnings.filters),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "seed": torch.initial_seed(),
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
    }

torch.manual_seed(1)
before = state()
import afd_ops
print(json.dumps([before, state()]))
"""


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    """fault: importing initialises a device, a process group or threads, or changes the environment."""
    result = python(IMPORT, tmp_path)
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout)
    assert after == before
    assert (after["cuda"], after["process group"]) == (False, False)
    assert result.stderr == ""


@pytest.mark.parametrize("mutant", [*mutants.MUTANTS, *mutants.CUDA_MUTANTS], ids=lambda mutant: mutant.name)
def test_every_planted_mistake_still_fits_its_source(mutant: mutants.Mutant) -> None:
    """fault: the soak's mutants are built seldom, and those of GPUs on no CI; the sources move on without them."""
    assert mutants.planted(mutant) != (mutants.ROOT / mutant.file).read_text()


def checkout(tmp_path: Path, *, extension: bool = True, sources: bool = True) -> Path:
    """A copy of the package, as in a checkout of its own."""
    shutil.copytree(
        PACKAGE, tmp_path / "afd_ops", ignore=shutil.ignore_patterns("__pycache__", *([] if extension else ["*.so"]))
    )
    if sources:
        shutil.copytree(PACKAGE.parent / "csrc", tmp_path / "csrc")
    return tmp_path


# Without the finder of an editable installation, which would lend the copy the extension of the original.
LOAD = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")]
import afd_ops, torch
print(afd_ops.__file__)
print(torch.ops.afd.plan.default)
"""


@pytest.mark.parametrize("sources", [True, False])
def test_a_built_checkout_and_an_installed_package_load(sources: bool, tmp_path: Path) -> None:
    result = python(LOAD, checkout(tmp_path, sources=sources))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(tmp_path / "afd_ops" / "__init__.py"), "afd.plan.default"]


def test_a_missing_extension_says_what_to_run(tmp_path: Path) -> None:
    result = python(LOAD, checkout(tmp_path, extension=False))
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the extension of afd_ops does not load"), result.stderr
    assert last.endswith(f"build it with: {BUILD}")


def test_a_stale_extension_says_what_to_run(tmp_path: Path) -> None:
    """fault: after a pull, new Python calls an old binary, and memory is laid out in two ways."""
    with (checkout(tmp_path) / "csrc" / "cpu" / "plan.cpp").open("a") as source:
        source.write("// changed\n")
    last = python(LOAD, tmp_path).stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the extension of afd_ops was built from other sources ({_C.SOURCE_DIGEST})")
    assert last.endswith(f"build it again with: {BUILD}")


def test_a_cuda_half_that_does_not_load_says_what_to_run(tmp_path: Path) -> None:
    """fault: a bare error of the dynamic linker, from `import afd_ops`."""
    (checkout(tmp_path) / "afd_ops" / "_C_cuda.abi3.so").write_bytes(b"not a library")
    last = python(
        LOAD.replace("import afd_ops, torch", "import torch; torch.version.cuda = '13.0'; import afd_ops"), tmp_path
    )
    line = last.stderr.splitlines()[-1]
    assert line.startswith("ImportError: the extension of afd_ops does not load (_C_cuda: "), last.stderr
    assert line.endswith(f"build it with: {BUILD}")


def test_a_source_distribution_holds_every_source(tmp_path: Path) -> None:
    """fault: built without a CUDA toolkit it lacks the kernels, and where there is one an empty half is built."""
    root = PACKAGE.parent
    checkout(tmp_path, extension=False)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(root / name, tmp_path)
    result = python("import setup; print(setup.build_sdist('dist'))", tmp_path)
    assert result.returncode == 0, result.stderr
    with tarfile.open(tmp_path / "dist" / result.stdout.splitlines()[-1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(root)) for path in (root / "csrc").rglob("*") if path.is_file()}
    assert sources <= held, sources - held


def test_torch_of_the_system_is_seen_from_a_venv_that_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fault: a venv made with --system-site-packages downloads torch a second time to build against."""
    spec = importlib.util.spec_from_file_location("afd_setup", PACKAGE.parent / "setup.py")
    assert spec and spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    (tmp_path / "system" / "torch").mkdir(parents=True)
    config = tmp_path / "pyvenv.cfg"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda scheme: str(tmp_path / "venv"))
    monkeypatch.setattr(setup.site, "getsitepackages", lambda prefixes: [str(tmp_path / "system")])
    config.write_text("include-system-site-packages = false\n")
    assert not setup.torch_is_visible()
    config.write_text("home = /usr\ninclude-system-site-packages = true\n")
    assert setup.torch_is_visible() and sys.path[-1] == str(tmp_path / "system")


def test_the_digest_names_every_source_by_path_and_content(tmp_path: Path) -> None:
    """A renamed file, a changed byte and a new CUDA file each make another build; notes beside the sources do not."""
    from afd_ops.extension import source_digest

    (tmp_path / "cpu").mkdir()
    source = tmp_path / "cpu" / "a.cpp"
    source.write_text("1")
    digests = [source_digest(tmp_path)]
    (tmp_path / "notes.md").write_text("1")
    assert source_digest(tmp_path) == digests[0]
    source.write_text("2")
    digests.append(source_digest(tmp_path))
    source = source.rename(tmp_path / "cpu" / "b.cpp")
    digests.append(source_digest(tmp_path))
    (tmp_path / "c.cu").write_text("1")
    digests.append(source_digest(tmp_path))
    assert len(set(digests)) == 4


# Errors.


def test_every_kind_of_the_extension_has_a_class_of_its_own() -> None:
    assert set(errors.BY_KIND) == set(_C.KINDS)
    assert len(set(errors.BY_KIND.values())) == len(_C.KINDS)
    for kind in errors.BY_KIND.values():
        assert issubclass(kind, afd_ops.AfdError) and getattr(afd_ops, kind.__name__) is kind


@pytest.mark.parametrize("kind", _C.KINDS)
def test_an_op_error_becomes_its_class_and_keeps_its_text(kind: str) -> None:
    text = f"{kind} in afd::combine: window 3 is not what it was"
    error = errors.typed(RuntimeError(f"while running a graph: {text}\nException raised from some file"))
    assert type(error) is errors.BY_KIND[kind]
    assert str(error) == text, "one line, without what the runtime put around it"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch"),
        RuntimeError("Mystery in afd::combine: of no kind we know"),
        RuntimeError("Argument in other::op: not ours"),
        afd_ops.StaleError("Stale in afd::combine: typed already"),
    ],
)
def test_any_other_error_comes_back_as_it_is(error: RuntimeError) -> None:
    assert errors.typed(error) is error


def test_a_peer_error_carries_where_the_protocol_stood() -> None:
    record = dict(
        kind="Timeout", message="late", op="combine", peer=1, layer=5, stage=0, ring=1, sequence=2**40, generation=3
    )
    for error in (errors.typed(RuntimeError("Timeout in afd::combine: late"), record), errors.from_record(record)):
        assert isinstance(error, afd_ops.PeerTimeoutError)
        seen = {name: getattr(error, name) for name in record.keys() - {"kind", "message"}}
        assert seen == {name: record[name] for name in seen}
    assert afd_ops.PeerError("no record").peer is None


def test_an_argument_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="topk_ids"):
        try:
            torch.ops.afd.plan(torch.zeros(3), torch.zeros(1, 2, dtype=torch.int32), 1, 1)
        except RuntimeError as error:
            raise errors.typed(error) from error


# Copies.


def test_a_copied_module_sends_through_the_same_window() -> None:
    with harness.serving(afd_ops.Topology(1, 1, 2)) as (window,):
        assert copy.deepcopy(window) is window
        module = afd_ops.RemoteExperts(2).attach(window)
        copied = copy.deepcopy(module)
        assert copied.window is window and copied.port.data_ptr() != module.port.data_ptr()
        step = harness.random_step(window.topology, 4)
        assert torch.equal(copied(*step), module(*step))


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy])
def test_a_window_cannot_leave_its_process(duplicate: Any) -> None:
    with (
        harness.windows(afd_ops.Topology(1, 1, 2)) as (window, _),
        pytest.raises(TypeError, match="a Window belongs to its process and cannot be pickled"),
    ):
        duplicate(window)


def test_errors_survive_the_way_between_processes() -> None:
    """Launchers send an exception home by pickle; its attributes must arrive."""
    error = afd_ops.PeerTimeoutError("late", dict(op="combine", peer=1, layer=5))
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error) and str(there) == "late"
    assert (there.op, there.peer, there.layer) == ("combine", 1, 5)


def test_every_public_class_and_function_is_documented() -> None:
    public = {name: getattr(afd_ops, name) for name in afd_ops.__all__}
    assert [name for name, value in public.items() if isinstance(value, type) and not value.__doc__] == []
