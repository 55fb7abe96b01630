"""python -m afd_ops.doctor: what it says of this machine, and of machines where something is broken."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_package import BUILD, PACKAGE, checkout

from afd_ops import _C, doctor


def examine(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and facts of the doctor of the package in `folder`."""
    command = [sys.executable, "-m", "afd_ops.doctor", "--json", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=140)
    assert result.stderr == ""
    facts: dict[str, Any] = json.loads(result.stdout)
    assert facts["afd_ops"] == str(folder / "afd_ops")
    return result.returncode, facts


def test_on_this_machine_windows_on_the_cpu_work_by_a_round_trip() -> None:
    status, facts = examine(PACKAGE.parent)
    in_one, between = facts["works"][:2]
    assert (status, in_one, between["what"]) == (
        0,
        {"what": "CPU windows in one process", "ok": True},
        "CPU windows between processes",
    )
    assert between["ok"], between
    assert (facts["torch"]["version"], facts["torch"]["cuda"]) == (torch.__version__, torch.version.cuda)
    assert len(facts["torch"]["gpus"]) == torch.cuda.device_count()
    assert facts["extension"]["CPU half"]["digest"] == facts["extension"]["sources"] == _C.SOURCE_DIGEST
    text = doctor.report(facts)
    assert (
        "\n  yes  CPU windows in one process\n" in text and "\n  extension  CPU half built from these sources\n" in text
    )
    if not torch.cuda.is_available():
        assert [work["ok"] for work in facts["works"][2:]] == [False, False]
        assert "\n  no   GPU windows in one process: " in text


@pytest.mark.gpu
def test_on_gpus_all_of_them_and_their_links_are_reported_and_windows_work() -> None:
    status, facts = examine(PACKAGE.parent)
    count = torch.cuda.device_count()
    assert status == 0
    assert [gpu["name"] for gpu in facts["torch"]["gpus"]] == [torch.cuda.get_device_name(i) for i in range(count)]
    pairs = [(index, peer) for index in range(count) for peer in range(count) if index != peer]
    assert [(index, peer) for index, peer, _ in facts["torch"]["peers"]] == pairs
    assert all(how in ("NVLink", "PCIe") for _, _, how in facts["torch"]["peers"]), "reachable, by a known link"
    assert facts["driver"]["version"][0].isdigit() and facts["driver"]["cuda"] >= "12"
    half = facts["extension"]["CUDA half"]
    assert half["digest"] == _C.SOURCE_DIGEST and half["architectures"]
    gpu, nvshmem = facts["works"][2:]
    assert gpu["ok"], gpu
    if importlib.util.find_spec("nvshmem") is None:
        assert "pip install nvshmem4py" in nvshmem["why"]
    else:
        assert nvshmem["ok"], nvshmem
        assert "libnvshmem_host" in facts["nvshmem"]["library"]


def test_a_broken_extension_is_a_line_of_the_report(tmp_path: Path) -> None:
    """fault: the doctor's own package does not import, and all that is seen is a traceback."""
    (checkout(tmp_path) / "afd_ops" / "_C.abi3.so").write_bytes(b"not a library")
    status, facts = examine(tmp_path)
    assert status == 1 and not any(work["ok"] for work in facts["works"])
    assert facts["works"][0]["why"].startswith("ImportError: the extension of afd_ops does not load")
    assert facts["works"][0]["why"].endswith(f"build it with: {BUILD}")
    assert "error" in facts["extension"]["CPU half"] and facts["torch"]["version"] == torch.__version__
    assert "\n  extension  CPU half does not load: ImportError: " in doctor.report(facts)


def test_a_stale_extension_is_named_with_both_digests(tmp_path: Path) -> None:
    with (checkout(tmp_path) / "csrc" / "cpu" / "plan.cpp").open("a") as source:
        source.write("// changed\n")
    status, facts = examine(tmp_path)
    assert status == 1
    assert facts["works"][0]["why"].endswith(f"build it again with: {BUILD}")
    assert facts["extension"]["CPU half"]["digest"] == _C.SOURCE_DIGEST != facts["extension"]["sources"]
    assert f"built from other sources ({_C.SOURCE_DIGEST}) than csrc/" in doctor.report(facts)


@pytest.mark.parametrize(
    ("torch_does", "said"),
    [
        ("import time; time.sleep(600)", "no answer within 2 s"),
        ("import os; os.abort()", "its process ended with status -6: no word"),
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    ],
)
def test_a_library_that_hangs_or_crashes_is_a_line_of_the_report(torch_does: str, said: str, tmp_path: Path) -> None:
    (checkout(tmp_path) / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch_does)
    begin = time.monotonic()
    status, facts = examine(tmp_path, "--seconds", "2")
    assert status == 1 and time.monotonic() - begin < 20
    assert facts["works"][0]["why"] == facts["torch"]["error"] == facts["extension"]["error"] == said
    assert f"\n  no   CPU windows in one process: {said}\n" in doctor.report(facts)


# GPUs that this machine need not have.

TWO_GPUS: dict[str, Any] = {
    "afd_ops": "/afd_ops",
    "python": "3.12.3",
    "system": "Linux",
    "cores": 32,
    "packages": {"torch": "2.11.0+cu130", "cuda-core": "0.5.0"},
    "memory": {"available": 10**10, "dev_shm": 2 * 10**9},
    "driver": {"version": "580.1", "cuda": "13.0", "gpus": "2"},
    "torch": {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "gpus": [{"name": "GPU", "capability": "9.0", "memory": 10**11, "free": None}] * 2,
        "peers": [[0, 1, "NVLink"], [1, 0, "NVLink"]],
    },
    "nvshmem": {"version": "3.4.5", "library": "/libnvshmem_host.so.3"},
    "extension": {
        "sources": None,
        "CPU half": {"digest": "1", "architectures": None},
        "CUDA half": {"digest": "1", "architectures": "9.0;10.0+PTX"},
    },
    "works": [],
}


def test_the_report_of_two_gpus() -> None:
    text = doctor.report(TWO_GPUS)
    for line in (
        "memory     10.0 GB free, /dev/shm 2.0 GB",
        "torch      2.11.0+cu130, CUDA 13.0",
        "driver     580.1, up to CUDA 13.0, 2 GPUs",
        "cuda:1     GPU, compute capability 9.0, unknown of 100.0 GB free",
        "peers      access, link NVLink: every pair",
        "packages   cuda-core 0.5.0",
        "nvshmem    3.4.5 at /libnvshmem_host.so.3",
        "extension  CUDA half built for 9.0;10.0+PTX from sources 1",
    ):
        assert f"\n  {line}\n" in text
    apart = copy.deepcopy(TWO_GPUS)
    apart["torch"]["peers"][1][2] = "none"
    assert "\n  peers      access, link NVLink: 0->1\n  peers      no access: 1->0\n" in doctor.report(apart)


def test_windows_are_tried_between_gpus_that_reach_each_other() -> None:
    peers = [[0, 1, "none"], [1, 0, "none"], [0, 2, "NVLink"], [2, 0, "none"], [1, 2, "PCIe"], [2, 1, "unknown"]]
    assert doctor.reachable({"peers": peers}) == ("cuda:1", "cuda:2")
    assert doctor.reachable({"peers": peers[:4]}) == doctor.reachable({}) == ("cuda:0", "cuda:0")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("torch",), {"error": "no answer within 60 s"}, "torch does not answer (no answer within 60 s)"),
        (("extension", "CUDA half"), None, f"not built; where there is nvcc: AFD_CUDA=1 {BUILD}"),
        (
            ("torch", "gpus"),
            [],
            "torch sees no GPU (it gives no reason); look at CUDA_VISIBLE_DEVICES and at the driver",
        ),
    ],
)
def test_what_gpu_windows_lack_is_said_with_what_to_do(path: tuple[str, ...], value: Any, said: str) -> None:
    assert doctor.missing_for_gpus(TWO_GPUS) is None
    facts = part = copy.deepcopy(TWO_GPUS)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert said in str(doctor.missing_for_gpus(facts))


def test_no_driver_and_a_torch_without_cuda_are_told_apart() -> None:
    facts = copy.deepcopy(TWO_GPUS)
    facts["torch"] |= {"version": "2.13.0+cpu", "cuda": None, "gpus": [], "peers": []}
    assert str(doctor.missing_for_gpus(facts)).startswith("torch 2.13.0+cpu is built without CUDA; install")
    facts["driver"] = {"error": "OSError: libcuda.so.1"}
    assert str(doctor.missing_for_gpus(facts)).startswith("no NVIDIA driver answers (OSError: libcuda.so.1)")
