"""python -m afd_ops.doctor: what this machine has, which windows work on it, and what to do about those that do not.

It answers even where the package does not load: afd_ops/__init__.py hands over to it before it loads anything, and
every look at a library is a process of its own with a deadline. One that hangs or crashes is a line of the report.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    import afd_ops

HERE = Path(__file__).parent
EXTENSION = runpy.run_path(str(HERE / "extension.py"))  # not as afd_ops.extension: the package may not load
BUILD: str = EXTENSION["BUILD"]
PACKAGES = ["torch", "numpy", "cuda-python", "cuda-bindings", "cuda-core"]
PACKAGES += [f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)]
HALVES = {"CPU half": "_C", "CUDA half": "_C_cuda"}
# Of the windows that are tried. Less than a probe has, so that ranks can say who was missing.
EXCHANGE_SECONDS, DEADLINE = 20.0, 10.0
SIZES: dict[str, Any] = {"hidden": 16, "topk": 2, "tokens": 4, "deadline": DEADLINE}


def main() -> int:
    """Prints the report; 0 if windows on the CPU work, else 1."""
    parser = argparse.ArgumentParser(prog="python -m afd_ops.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="the same facts for a bug report")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a probe is given up (default: 60)")
    args = parser.parse_args()
    facts = machine()
    facts |= dict(zip(FACTS, together(*((name,) for name in FACTS), seconds=args.seconds), strict=True))
    facts["works"] = windows(facts, args.seconds)
    print(json.dumps(facts, indent=1) if args.json else report(facts))
    return 0 if facts["works"][0]["ok"] else 1


# What this machine has.


def machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "afd_ops": str(HERE),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": versions,
        "memory": memory(),
    }


def memory() -> dict[str, Any]:
    """What windows between processes need of the host, in bytes."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    facts: dict[str, Any] = {"available": int(meminfo["MemAvailable"].split()[0]) * 1024}
    with suppress(OSError):
        facts["dev_shm"] = shutil.disk_usage("/dev/shm").free  # NVSHMEM takes some; our own windows do not use it
    try:
        file = os.memfd_create("afd_ops", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, 1 << 20)
        os.close(file)
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # refused by a sandbox, or by a Python built for older kernels
        facts["error"] = f"windows between processes need memfd and pidfd: {error}"
    return facts


def driver() -> dict[str, Any]:
    """The NVIDIA driver and its GPUs, whatever torch thinks of them. No device is touched."""
    cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    require(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    facts = {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "version": "unknown", "gpus": "unknown"}
    with suppress(OSError, RuntimeError):  # a container may have CUDA and lack NVML
        nvml, text, count = load_nvml(), ctypes.create_string_buffer(96), ctypes.c_uint()
        require(nvml.nvmlSystemGetDriverVersion(text, len(text)), "nvmlSystemGetDriverVersion")
        facts["version"] = text.value.decode()
        require(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        facts["gpus"] = str(count.value)
    return facts


def torch_gpus() -> dict[str, Any]:
    """torch, the GPUs that it sees, and for every ordered pair of them how one reaches the other's memory."""
    import torch

    facts: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda, "gpus": [], "peers": []}
    count = torch.cuda.device_count()
    if torch.version.cuda and count == 0:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            facts["why_no_gpus"] = first_line(error)
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    for index, gpu in enumerate(properties):
        facts["gpus"].append(
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory": gpu.total_memory,
                "free": None,
            }
        )
        with suppress(RuntimeError):  # taken by another process, exclusively or to the last byte
            facts["gpus"][-1]["free"] = torch.cuda.mem_get_info(index)[0]
    uuids = [f"GPU-{gpu.uuid}" for gpu in properties]
    for index in range(count):
        for peer in range(count):
            if peer != index:
                access = torch.cuda.can_device_access_peer(index, peer)
                facts["peers"].append([index, peer, link(uuids[index], uuids[peer]) if access else "none"])
    return facts


def link(gpu: str, peer: str) -> str:
    """What connects two GPUs that reach each other, by their UUIDs."""
    try:
        nvml, handles, status = load_nvml(), [ctypes.c_void_p(), ctypes.c_void_p()], ctypes.c_int()
        for uuid, handle in zip((gpu, peer), handles, strict=True):
            require(nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)), "nvmlDeviceGetHandleByUUID")
        nvlink = 2  # NVML_P2P_CAPS_INDEX_NVLINK; status 0 = NVML_P2P_STATUS_OK
        require(nvml.nvmlDeviceGetP2PStatus(*handles, nvlink, ctypes.byref(status)), "nvmlDeviceGetP2PStatus")
    except (OSError, RuntimeError):
        return "unknown"
    return "PCIe" if status.value else "NVLink"


def load_nvml() -> ctypes.CDLL:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    require(nvml.nvmlInit_v2(), "nvmlInit")
    return nvml


def require(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} returned {code}")


def nvshmem_library() -> dict[str, Any]:
    """The NVSHMEM library that nvshmem4py loads."""
    import nvshmem.core  # type: ignore[import-not-found]

    version = nvshmem.core.get_version()
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next((line.split()[-1] for line in maps if "libnvshmem_host" in line), "an unknown place")
    return {"version": version.libnvshmem_version, "library": library}


def extension() -> dict[str, Any]:
    """Both halves, also of an extension that the package refuses to load."""
    import torch  # loads libtorch

    csrc = HERE.parent / "csrc"
    sources = EXTENSION["source_digest"](csrc) if csrc.is_dir() else None
    return {"sources": sources} | {name: load_half(half, torch.version.cuda) for name, half in HALVES.items()}


def load_half(name: str, cuda: str | None) -> dict[str, Any] | None:
    from importlib.util import module_from_spec, spec_from_file_location

    path = HERE / f"{name}.abi3.so"
    if not path.exists():
        return None
    if name == "_C_cuda" and cuda is None:
        return {"error": "torch is built without CUDA"}
    try:
        spec = spec_from_file_location(f"afd_ops.{name}", path)
        assert spec
        module = module_from_spec(spec)
    except ImportError as error:
        return {"error": first_line(error)}
    return {"digest": module.SOURCE_DIGEST, "architectures": getattr(module, "ARCHITECTURES", None)}


# Which windows work: each is tried by a round trip.


def windows(facts: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """One entry per kind of window: what, ok, and if not, why and what to do."""

    def tried(what: str, *probes: tuple[str, ...]) -> dict[str, Any]:
        answers = together(*probes, seconds=seconds)
        errors = [answer["error"] for answer in answers if "error" in answer]
        # A rank that failed knows more than one that waited for it.
        errors.sort(key=lambda error: error.startswith(("BootstrapError", "Peer")))
        return {"what": what, "ok": not errors, **({"why": errors[0]} if errors else {})}

    def refused(what: str, why: str) -> dict[str, Any]:
        return {"what": what, "ok": False, "why": why}

    cpu = tried("CPU windows in one process", ("one_process", "cpu", "cpu"))
    found = [cpu]
    what = "CPU windows between processes"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as meeting:
        pair = [("process", str(rank), "cpu", f"{meeting}/shm") for rank in (0, 1)]
        found.append(tried(what, *pair) if cpu["ok"] else refused(what, "see CPU windows in one process"))

        first, second = reachable(facts["torch"])
        what, why = "GPU windows in one process", missing_for_gpus(facts)
        if why is None:
            gpu = tried(f"{what} ({first}, {second})", ("one_process", first, second))
            if "no kernel image" in gpu.get("why", ""):
                gpu["why"] += f"; {rebuild(facts['torch'])}"
        else:
            gpu = refused(what, why)
        found.append(gpu)

        what = "NVSHMEM windows between processes"
        pair = [("process", str(rank), device, f"{meeting}/nvshmem") for rank, device in enumerate((first, second))]
        if gpu["ok"]:
            found.append(tried(f"{what} ({first}, {second})", *pair))
        else:
            found.append(refused(what, "see GPU windows in one process"))
    return found


def reachable(torch_facts: dict[str, Any]) -> tuple[str, str]:
    """Two GPUs that reach each other, else the first one twice."""
    access = {(index, peer) for index, peer, how in torch_facts.get("peers", []) if how != "none"}
    pairs = sorted((index, peer) for index, peer in access if (peer, index) in access)
    index, peer = pairs[0] if pairs else (0, 0)
    return f"cuda:{index}", f"cuda:{peer}"


def missing_for_gpus(facts: dict[str, Any]) -> str | None:
    """What GPU windows lack, and what to do; None if nothing is missing."""
    torch_facts, halves = facts["torch"], facts["extension"]
    if "error" in torch_facts:
        return f"torch does not answer ({torch_facts['error']})"
    if not torch_facts["gpus"]:
        if "error" in facts["driver"]:
            return f"no NVIDIA driver answers ({facts['driver']['error']}); they need a GPU and its driver"
        if torch_facts["cuda"] is None:
            return (
                f"torch {torch_facts['version']} is built without CUDA; install a CUDA build of it, 2.11 to 2.14, "
                f"then build the extension again with: {BUILD}"
            )
        return (
            f"torch sees no GPU ({torch_facts.get('why_no_gpus', 'it gives no reason')}); look at CUDA_VISIBLE_DEVICES "
            f"and at the driver, which runs CUDA up to {facts['driver']['cuda']}, while torch is built for "
            f"{torch_facts['cuda']}"
        )
    if halves.get("CUDA half", "unknown") is None:
        return f"the CUDA half of the extension is not built; where there is nvcc: AFD_CUDA=1 {BUILD}"
    return None


def rebuild(torch_facts: dict[str, Any]) -> str:
    capabilities = ";".join(sorted({gpu["capability"] for gpu in torch_facts["gpus"]}))
    return f'build for these GPUs with: TORCH_CUDA_ARCH_LIST="{capabilities}" AFD_CUDA=1 {BUILD}'


def one_process(attention_device: str, ffn_device: str) -> dict[str, Any]:
    """A round trip between two ranks of this process."""
    import threading

    if attention_device == ffn_device != "cpu":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # two streams must not share a hardware queue
    import torch

    import afd_ops

    attention, ffn = afd_ops.open_local(
        afd_ops.Topology(1, 1, 2),
        devices=[attention_device, ffn_device],
        timeout=EXCHANGE_SECONDS,
        dtype=torch.float32,
        **SIZES,
    )
    stream: Any = nullcontext()
    if ffn_device != "cpu":
        torch.cuda.set_device(attention_device)
        stream = torch.cuda.stream(torch.cuda.Stream(ffn_device))  # type: ignore[no-untyped-call]
    server, failures = afd_ops.ExpertServer(ffn, experts), list[BaseException]()
    with stream:  # on a GPU that both share, a first launch or allocation could wait for the combine that waits for it
        experts(*server.inputs.first(len(server.inputs.rows)), 0)

    def serve() -> None:
        try:
            with stream:
                server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        round_trip(attention)
    finally:
        server.stop()
        thread.join(DEADLINE)
        if failures:
            raise failures[0]
    for window in (attention, ffn):
        window.close()
    return {}


def process(rank: str, device: str, meeting: str) -> dict[str, Any]:
    """One of two processes of a round trip: rank 0 is attention, rank 1 ffn. They meet by a file."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # our windows need no multicast
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    import afd_ops

    bootstrap = afd_ops.Bootstrap(FileStore(meeting, 2), int(rank), 2, timeout=EXCHANGE_SECONDS)
    heap: Any = None
    if device != "cpu":
        from afd_ops.heap.nvshmem import NvshmemHeap

        heap = NvshmemHeap(bootstrap, device)
    with afd_ops.Window(afd_ops.Topology(1, 1, 2), bootstrap, heap=heap, dtype=torch.float32, **SIZES) as window:
        if rank == "0":
            round_trip(window)
        else:
            afd_ops.ExpertServer(window, experts).run()
    if heap is not None:
        heap.finalize()
    return {}


def round_trip(window: afd_ops.Window) -> None:
    """Expert e multiplies by e + 1; the numbers are small integers, so that the sum is exact."""
    import torch

    import afd_ops

    device = window.heap.device
    x = (torch.arange(4 * 16, device=device) % 7).to(torch.float32).view(4, 16)
    topk_ids = torch.tensor([[0, 1], [1, -1], [0, 0], [-1, -1]], device=device)
    topk_weights = torch.tensor([[1, 2], [3, 1], [2, 1], [1, 1]], dtype=torch.float32, device=device)
    remote = afd_ops.RemoteExperts(layer=0).to(device).attach(window)
    with torch.inference_mode():
        out = remote(x, topk_ids, topk_weights, x).cpu()
    window.check()
    expected = (x + x * (topk_weights * (topk_ids + 1)).sum(dim=1, keepdim=True)).cpu()
    if not torch.equal(out, expected):
        raise RuntimeError(f"the round trip gave {out.tolist()}, expected {expected.tolist()}")


def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
    import torch

    of_first = torch.arange(rows.shape[0], device=rows.device) < offsets[0]
    return torch.where(of_first[:, None], rows, 2 * rows)


# Probes: functions of this file, each in a process of its own.

FACTS = {"driver": driver, "torch": torch_gpus, "nvshmem": nvshmem_library, "extension": extension}
PROBES: dict[str, Callable[..., dict[str, Any]]] = {**FACTS, "one_process": one_process, "process": process}
# This file is loaded by its path: as afd_ops.doctor it would load the package, which is one of the things to find out.
CHILD = "import runpy, sys; runpy.run_path(sys.argv[1])['answer'](*sys.argv[2:])"


def together(*probes: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    """Runs probes (name, arguments ...) side by side for at most `seconds`; what each found, or {"error": one line}."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        children = []
        for index, probe in enumerate(probes):
            result, stderr = Path(folder, f"{index}.json"), Path(folder, f"{index}.stderr")
            with stderr.open("w") as file:
                command = [sys.executable, "-c", CHILD, __file__, str(result), *probe]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
            children.append((child, result, stderr))
        deadline = time.monotonic() + seconds
        answers = []
        for child, result, stderr in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0.001))
            code = child.poll()
            if code is None:
                child.kill()
                with suppress(subprocess.TimeoutExpired):  # what hangs in a driver cannot be killed
                    child.wait(1)
            if result.exists():
                answers.append(json.loads(result.read_text()))
            elif code is None:
                answers.append({"error": f"no answer within {seconds:g} s"})
            else:
                lines = stderr.read_text(errors="replace").strip().splitlines()
                answers.append({"error": f"its process ended with status {code}: {lines[-1] if lines else 'no word'}"})
        return answers


def answer(result: str, probe: str, *arguments: str) -> None:
    """In the process of a probe: writes what it found, or how it failed."""
    try:
        facts = PROBES[probe](*arguments)
    except Exception as error:
        facts = {"error": first_line(error)}
    unfinished = Path(f"{result}.unfinished")
    unfinished.write_text(json.dumps(facts))
    unfinished.rename(result)
    os._exit(0)  # a thread that still waits must not keep this process


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# The report.


def report(facts: dict[str, Any]) -> str:
    works = [f"  yes  {e['what']}" if e["ok"] else f"  no   {e['what']}: {e['why']}" for e in facts["works"]]
    return "\n".join(
        [
            f"afd_ops in {facts['afd_ops']}",
            "",
            "This machine has",
            *(f"  {name:<10} {text}" for name, text in has(facts)),
            "",
            "Windows that work",
            *works,
            "",
            "For a bug report: python -m afd_ops.doctor --json",
        ]
    )


def has(facts: dict[str, Any]) -> list[tuple[str, str]]:
    memory, driver, torch_facts, nvshmem, halves = (facts[name] for name in ("memory", *FACTS))
    packages = [f"{name} {version}" for name, version in facts["packages"].items() if name != "torch"]
    host = f"{size(memory['available'])} free, /dev/shm {size(memory.get('dev_shm'))}"
    with_cuda = f"CUDA {torch_facts['cuda']}" if torch_facts.get("cuda") else "built without CUDA"
    lines = [
        ("python", f"{facts['python']}, {facts['system']}, {facts['cores']} cores"),
        ("memory", f"{host}; {memory['error']}" if "error" in memory else host),
        ("torch", torch_facts.get("error") or f"{torch_facts['version']}, {with_cuda}"),
        ("driver", driver.get("error") or "{version}, up to CUDA {cuda}, {gpus} GPUs".format(**driver)),
    ]
    for index, gpu in enumerate(torch_facts.get("gpus", [])):
        free = f"{size(gpu['free'])} of {size(gpu['memory'])} free"
        lines.append((f"cuda:{index}", f"{gpu['name']}, compute capability {gpu['capability']}, {free}"))
    kinds: dict[str, list[str]] = {}
    for index, peer, how in torch_facts.get("peers", []):
        kinds.setdefault(how, []).append(f"{index}->{peer}")
    for how, pairs in kinds.items():
        access = "no access" if how == "none" else f"access, link {how}"
        lines.append(("peers", f"{access}: {'every pair' if len(kinds) == 1 else ', '.join(pairs)}"))
    lines.append(("packages", ", ".join(packages) or "neither cuda-python nor nvshmem4py"))
    lines.append(("nvshmem", nvshmem.get("error") or "{version} at {library}".format(**nvshmem)))
    if "error" in halves:
        lines.append(("extension", halves["error"]))
    else:
        lines += [("extension", f"{name} {built(halves[name], halves['sources'])}") for name in HALVES]
    return lines


def size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e9:.1f} GB"


def built(half: dict[str, Any] | None, sources: str | None) -> str:
    if half is None:
        return "not built"
    if "error" in half:
        return f"does not load: {half['error']}"
    targets = f"for {half['architectures']} " if half["architectures"] else ""
    if sources is None:
        return f"built {targets}from sources {half['digest']}"
    if half["digest"] == sources:
        return f"built {targets}from these sources"
    return f"built {targets}from other sources ({half['digest']}) than csrc/ holds ({sources}); run: {BUILD}"


if __name__ == "__main__":
    sys.exit(main())
