"""Hostile bytes: a peer that is broken, or writes while we read, costs its own region and nothing else.

The kernels are compiled here without torch, together with the drivers in tests/fuzz: `decoder` under ASan and UBSan,
with windows between guard pages; `adversary`, which overwrites a word before every single access; `race` under TSan.
What they check stands at the head of each. Planted mistakes show that they would see one.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import ROOT, Mutant

from afd_ops import _C

CSRC, FUZZ = ROOT / "csrc", ROOT / "tests" / "fuzz"
KERNELS = (CSRC / "control.cpp", *sorted(p for p in (CSRC / "cpu").glob("*.cpp") if p.name != "bindings.cpp"))
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-ffp-contract=off", "-fno-sanitize-recover=all"]
FLAGS += [f"-I{p}" for p in (CSRC, CSRC / "cpu", Path(torch.__file__).parent / "include")]
# vptr: its runtime probes memory through a pipe that TSan then sees shared.
ADDRESS, THREAD = ("-fsanitize=address,undefined",), ("-fsanitize=thread,undefined", "-fno-sanitize=vptr")
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=0",  # LeakSanitizer needs ptrace, and a Control is never freed anyway
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
}
TSAN_FOUND_A_RACE = 66
FUZZ_SECONDS = int(os.environ.get("AFD_FUZZ_SECONDS", "0"))


@dataclass(frozen=True)
class Driver:
    """A program of tests/fuzz: how it and the kernels are instrumented, and which runtime is linked."""

    name: str
    kernels: Sequence[str]
    own: Sequence[str]
    link: Sequence[str]


DECODER = Driver("decoder", ADDRESS, ("-fsanitize=address",), ADDRESS)
RACE = Driver("race", THREAD, ("-fsanitize=thread",), THREAD)
ADVERSARY = Driver("adversary", THREAD, (), ("-fsanitize=undefined",))  # it is its own thread sanitizer


class Builder:
    """Compiles in the background, each object once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self.object = functools.cache(self._object)
        self.program = functools.cache(self._program)
        for driver in (DECODER, RACE, ADVERSARY):
            self.objects(driver)

    def objects(self, driver: Driver, mutant: Mutant | None = None) -> list[Future[Path]]:
        sources = [(source, driver.kernels) for source in KERNELS] + [(FUZZ / f"{driver.name}.cpp", driver.own)]
        planted = [mutant if mutant and ROOT / mutant.file == source else None for source, _ in sources]
        assert mutant is None or mutant in planted
        return [self.object(source, tuple(flags), m) for (source, flags), m in zip(sources, planted, strict=True)]

    def _object(self, source: Path, flags: Sequence[str], mutant: Mutant | None) -> Future[Path]:
        out = self.folder / f"{source.stem}{len(list(self.folder.iterdir()))}"
        out.mkdir()
        if mutant is not None:
            text = source.read_text()
            for old, new in mutant.edits:
                assert text.count(old) == 1, f"{mutant.name}: {mutant.file} holds {text.count(old)} x {old!r}"
                text = text.replace(old, new)
            source = out / source.name
            source.write_text(text)
        return self.pool.submit(self._compile, [*FLAGS, *flags, "-c", str(source)], out / "object.o")

    def _program(self, driver: Driver, mutant: Mutant | None = None) -> Path:
        objects = [str(o.result()) for o in self.objects(driver, mutant)]
        return self._compile([*driver.link, *objects, "-lpthread"], Path(objects[-1]).with_name(f"run{hash(mutant)}"))

    def _compile(self, arguments: Sequence[str], out: Path) -> Path:
        done = subprocess.run(["g++", *arguments, "-o", str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out


@functools.cache
def prefix(sanitizer: str) -> tuple[str, ...]:
    """What to put before a program built with `sanitizer` for it to start here; skips, saying why, if nothing helps."""
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    with tempfile.TemporaryDirectory() as folder:
        probe = f"{folder}/probe"
        command = ["g++", f"-fsanitize={sanitizer}", "-xc++", "-", "-o", probe]
        done = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"g++ cannot link -fsanitize={sanitizer}: {done.stderr.strip().splitlines()[-1]}")
        # TSan wants fixed addresses, which a kernel that randomises more bits than it knows of has given away.
        for attempt in ((), ("setarch", platform.machine(), "-R")):
            if attempt and not shutil.which(attempt[0]):
                continue
            done = subprocess.run([*attempt, probe], capture_output=True, text=True, env=ENVIRONMENT)
            if done.returncode == 0:
                return attempt
    pytest.skip(f"-fsanitize={sanitizer} does not start here: {done.stderr.strip()[:200]}")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    prefix("undefined")
    built = Builder(tmp_path_factory.mktemp("hostile"))
    yield built
    built.pool.shutdown(cancel_futures=True)


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def run(builder: Builder) -> Run:
    """run(driver, *arguments, stdin=, mutant=): the driver's process, ended."""

    def start(
        driver: Driver, *arguments: object, stdin: bytes = b"", mutant: Mutant | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        before = () if driver is ADVERSARY else prefix("thread" if driver is RACE else "address")
        command = [*before, str(builder.program(driver, mutant)), *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=120)

    return start


def output(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stderr.decode()[-4000:]}"
    return done.stdout.decode().splitlines()


@dataclass(frozen=True)
class Encoding:
    """Writes programs for the decoder, in the decoder's own words."""

    fields: list[str]
    values: list[str]
    moments: list[str]
    modes: list[str]

    def start(self, *modes: str, sizes: Sequence[int] = (2, 2, 5, 2, 2, 4, 2), dtype: int = 0, seed: int = 3) -> bytes:
        """sizes: attention, ffn, experts, stages, depth, tokens, topk. By the default seed the first two choices of
        attention 0 in slot 0 are for ffn 0 and ffn 1."""
        return bytes([*(s - 1 for s in sizes), dtype, 0, sum(1 << self.modes.index(m) for m in modes), seed])

    def write(
        self,
        field: str,
        value: str | int,
        moment: str = "arrive",
        *,
        of: tuple[str, int] = ("f", 0),
        slot: int = 0,
        index: int = 0,
        round: int = 0,
    ) -> bytes:
        """Before `moment`, in slot `slot` of the window of rank `of`."""
        raw = struct.pack("<i", value) if isinstance(value, int) else b""
        number = self.values.index(value if isinstance(value, str) else "raw")
        place = [round, self.moments.index(moment), "fa".index(of[0]), of[1], slot, self.fields.index(field)]
        return bytes([*place, index, number]) + raw


@pytest.fixture(scope="module")
def encoding(run: Run) -> Encoding:
    names = [line.split() for line in output(run(DECODER, "names"))]
    return Encoding(**{of: values for of, *values in names})


Decode = Callable[..., list[str]]


@pytest.fixture(scope="module")
def decode(run: Run) -> Decode:
    """decode(programs): the decoder's line of outcome for each, in one process."""

    def start(programs: Sequence[bytes], *arguments: str) -> list[str]:
        lines = output(run(DECODER, *arguments, stdin=b"".join(struct.pack("<I", len(p)) + p for p in programs)))
        assert len(lines) == len(programs)
        return lines

    return start


VALUES = ("lowest", "minus_one", "zero", "one", "capacity", "beyond", "highest")  # of every word; capacity is 4 or 8
HEADER = ("magic", "version", "generation", "layer", "num_tokens", "flags", "sequence", "routed", "reserved", "counts")
# Which of VALUES the protocol refuses whatever else the header says, and what the record then names.
REFUSED = {
    "magic": {value: "magic" for value in VALUES},
    "version": {value: "version" for value in VALUES},
    "generation": {value: "generation" for value in VALUES},
    "layer": {value: "layer" for value in ("lowest", "minus_one", "capacity", "beyond", "highest")},
    "num_tokens": {value: "num_tokens" for value in ("lowest", "minus_one", "beyond", "highest")},
    "flags": {value: "flags" for value in VALUES if value != "zero"},
    "sequence": {"lowest": "sequence", "minus_one": "sequence", "one": "ring", "beyond": "ring", "highest": "ring"},
    "routed": {value: "counts" for value in ("lowest", "minus_one", "beyond", "highest")},
    "reserved": {},
    "counts": {value: "counts" for value in ("lowest", "minus_one", "beyond", "highest")},
    "expert": {value: "position" for value in ("lowest", "capacity", "beyond", "highest")},
    "rank": {value: "position" for value in ("lowest", "minus_one", "capacity", "beyond", "highest")},
    "flag": {},
    "sticky": {},
}


@pytest.mark.parametrize("field", REFUSED)
def test_every_word_of_a_dispatch_at_every_extreme(field: str, decode: Decode, encoding: Encoding) -> None:
    for moment in encoding.moments:
        for mode in ((), ("one_by_one",), ("tight",)):
            programs = [encoding.start(*mode) + encoding.write(field, value, moment) for value in VALUES]
            for value, line in zip(VALUES, decode(programs), strict=True):
                if field in HEADER and moment != "arrive":
                    # The header was checked and copied by arrive: it is not read again.
                    assert "f0.0=" not in line.replace("f0.0=PeerFailed", ""), (value, line)
                elif value in REFUSED[field] and moment != "combine":
                    assert f"f0.0=Protocol:{REFUSED[field][value]}" in line, (moment, value, line)


@pytest.mark.parametrize("field", [*HEADER, "payload", "flag", "sticky"])
def test_every_word_of_a_reply_at_every_extreme(field: str, decode: Decode, encoding: Encoding) -> None:
    programs = [encoding.start() + encoding.write(field, value, "combine", of=("a", 0)) for value in VALUES]
    for value, line in zip(VALUES, decode(programs), strict=True):
        if field in ("routed", "reserved", "counts", "payload"):
            assert "a0." not in line, (value, line)
        elif field in ("flag", "sticky"):
            silent = field == "sticky" or value == "capacity"  # the marker; once answered, a peer may end
            assert silent != ("a0.0=Timeout" in line or "a0.0=Protocol:flags" in line), (value, line)
        elif value in REFUSED[field]:
            named = "sequence" if field == "sequence" else REFUSED[field][value]
            assert f"a0.0=Protocol:{named}" in line, (value, line)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_slot_that_is_only_strange_is_answered(dtype: str, decode: Decode, encoding: Encoding) -> None:
    start = encoding.start(dtype=_C.DTYPES.index(dtype))

    def write(*arguments: str | int, **places: int) -> bytes:
        return start + encoding.write(*arguments, **places)  # type: ignore[arg-type]

    programs = {
        "nothing": start,
        "NaN weights": write("weight", "minus_one") + encoding.write("weight", "minus_one", index=1),
        "NaN payload": write("payload", "minus_one"),
        "NaN scale": write("scale", "minus_one"),
        "num_tokens shrinks once arrived": write("num_tokens", "zero", "receive"),
        "num_tokens grows once arrived": write("num_tokens", "highest", "receive"),
        "counts change once arrived": write("counts", "highest", "receive"),
        "counts change once received": write("counts", "zero", "reply"),
        "sequence changes once arrived": write("sequence", "minus_one", "receive"),
    }
    lines = dict(zip(programs, decode(list(programs.values())), strict=True))
    assert set(lines.values()) == {lines["nothing"]} and "=0" not in lines["nothing"]


def test_each_kind_of_ill_formed_slot_closes_its_region(decode: Decode, encoding: Encoding) -> None:
    write = encoding.write
    wrap = [write("counts", 2**31 - 1, index=e) for e in (0, 1)] + [write("counts", 2, index=2)]  # their sum is 2^32
    programs = {
        "counts that overflow to routed": ([*wrap, write("routed", "zero")], "Protocol:counts"),
        "rows for an expert nobody owns": (
            [write(field, "more", of=("f", 1), index=2) for field in ("counts", "routed")],
            "f1.0=Protocol:counts",
        ),
        "a rank of its expert's count": ([write("rank", "capacity")], "Protocol:position"),
        "a position out of range once received": ([write("expert", "highest", "reply")], "Protocol:position"),
        "a rank out of range once received": ([write("rank", "highest", "reply")], "Protocol:position"),
        "an expert below none": ([write("expert", -2)], "Protocol:position"),
        "a flag on an empty slot": ([write("flag", "ready", slot=1), write("magic", "zero", slot=1)], "Protocol:magic"),
        "a peer that is gone": ([write("sticky", "capacity")], "PeerFailed"),
        "a sticky word of no meaning": ([write("sticky", "lowest")], "PeerFailed"),
        "an item older than the deadline": ([], "Timeout"),
    }
    for mode in ((), ("one_by_one",)):
        starts = [encoding.start(*mode, *(["late"] if not writes else [])) for writes, _ in programs.values()]
        encoded = [start + b"".join(writes) for start, (writes, _) in zip(starts, programs.values(), strict=True)]
        for what, line in zip(programs, decode(encoded), strict=True):
            named = programs[what][1]
            assert (named if "." in named else f"f0.0={named}") in line, (what, line)


# Well inside what memory safety asks for, but an error all the same: the sender is broken and should hear of it.
STRANGER = {
    "two choices with one row": [(word, "zero", choice) for word in ("expert", "rank") for choice in (0, 1)],
    "a row of no choice": [("expert", "minus_one", n) for n in range(8)],
    "a dispatch flag of no meaning": [("flag", "one", 0)],
}


@pytest.mark.parametrize("what", STRANGER)
def test_a_slot_that_cannot_come_from_dispatch_is_reported(what: str, decode: Decode, encoding: Encoding) -> None:
    writes = b"".join(encoding.write(field, value, index=index) for field, value, index in STRANGER[what])
    decode([encoding.start() + writes], "strict")


def test_random_programs_find_nothing(run: Run, seed: int) -> None:
    counts = {word: int(n) for word, n in (line.split() for line in output(run(DECODER, "random", seed, 4000)))}
    named = "magic version generation num_tokens flags sequence layer"
    expected = {f"{side}=Protocol:{word}" for side in "af" for word in named.split()}
    expected |= {f"f=Protocol:{word}" for word in ("ring", "counts", "position")}
    expected |= {"f=PeerFailed", "f=Timeout", "a=PeerFailed", "a=PeerLeft", "a=Timeout", "answered", "combined"}
    assert expected <= counts.keys(), "what never happened was not tested"


@st.composite
def programs(draw: st.DrawFn, encoding: Encoding) -> bytes:
    sizes = [draw(st.integers(1, most)) for most in (3, 2, 5, 2, 3, 4, 3)]
    modes = draw(st.sets(st.sampled_from(encoding.modes)))
    program = encoding.start(
        *modes, sizes=sizes, dtype=draw(st.integers(0, len(_C.DTYPES) - 1)), seed=draw(st.integers(0, 255))
    )
    value = st.sampled_from(encoding.values[:-1]) | st.integers(-(2**31), 2**31 - 1)
    for _ in range(draw(st.integers(0, 6))):
        program += encoding.write(
            draw(st.sampled_from(encoding.fields)),
            draw(value),
            draw(st.sampled_from(encoding.moments)),
            of=(draw(st.sampled_from("fa")), draw(st.integers(0, 2))),
            slot=draw(st.integers(0, 17)),
            index=draw(st.integers(0, 31)),
            round=draw(st.integers(0, 1)),
        )
    return program


def test_no_program_finds_anything(decode: Decode, encoding: Encoding) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(programs(encoding) | st.binary(max_size=80), min_size=1, max_size=16))
    def check(batch: list[bytes]) -> None:
        decode(batch)

    check()


def test_a_peer_that_writes_before_any_access_is_harmless(run: Run) -> None:
    lines = [line.split() for line in output(run(ADVERSARY))]
    assert [line[0] for line in lines] == ["dispatch", "arrive", "receive", "reply", "combine"]
    assert all(int(accesses) >= 10 and int(attacks) >= 1000 for _, accesses, _, attacks, _ in lines)


def test_every_payload_access_is_ordered_by_a_flag(run: Run) -> None:
    (line,) = output(run(RACE, 1000))
    assert line.startswith("4000 round trips")


def test_lanes_that_fail_together_share_one_record(run: Run) -> None:
    output(run(RACE, "fail", 50))


RELEASE, ACQUIRE, RELAXED = "std::memory_order_release", "std::memory_order_acquire", "std::memory_order_relaxed"
PUBLISH = f"store(kReady, {RELEASE})"
RELAXED_FLAGS = [
    Mutant("dispatch publishes relaxed", "csrc/cpu/dispatch.cpp", ((PUBLISH, PUBLISH.replace(RELEASE, RELAXED)),)),
    Mutant("reply publishes relaxed", "csrc/cpu/reply.cpp", ((PUBLISH, PUBLISH.replace(RELEASE, RELAXED)),)),
    Mutant(
        "arrive looks at flags relaxed",
        "csrc/cpu/arrive.cpp",
        ((f"flag(c.window, c.layout, index).load({ACQUIRE})", f"flag(c.window, c.layout, index).load({RELAXED})"),),
    ),
    Mutant(
        "combine looks at flags relaxed",
        "csrc/cpu/combine.cpp",
        ((f"c.slot(f, k.stage, k.ring)).load({ACQUIRE})", f"c.slot(f, k.stage, k.ring)).load({RELAXED})"),),
    ),
]
MISSING_CHECKS = [
    Mutant(
        "num_tokens has no limit",
        "csrc/cpu/arrive.cpp",
        (
            (
                "header_fails(g, h,",
                "header_fails(g, [h] { SlotHeader t = h; if (t.num_tokens > 0) t.num_tokens = 0; return t; }(),",
            ),
        ),
    ),
    Mutant("routed is believed", "csrc/cpu/arrive.cpp", (("sum != h.routed || ", ""),)),
    Mutant("receive believes positions", "csrc/cpu/receive.cpp", (("!position_ok(c, s, p)", "false"),)),
    Mutant("reply believes positions", "csrc/cpu/reply.cpp", (("!position_ok(c, s, p)", "false"),)),
    Mutant(
        "combine takes the reply of another dispatch",
        "csrc/cpu/combine.cpp",
        (("reply_header_fails(k,", "reply_header_fails([&] { Ticket t = k; t.sequence = h.sequence; return t; }(),"),),
    ),
]
DOUBLE_READS = [
    Mutant(
        "arrive reads the sequence twice",
        "csrc/cpu/arrive.cpp",
        (("taken.sequence = h.sequence;", "taken.sequence = Slot(c.window, c.layout, index).header->sequence;"),),
    ),
    Mutant(
        "receive reads a position twice",
        "csrc/cpu/receive.cpp",
        (("const Position p = slot.position[n];", "const Position& p = slot.position[n];"),),
    ),
]


@pytest.mark.parametrize("mutant", RELAXED_FLAGS, ids=lambda m: m.name)
def test_tsan_sees_a_flag_that_orders_nothing(mutant: Mutant, run: Run) -> None:
    done = run(RACE, 100, mutant=mutant)
    assert done.returncode == TSAN_FOUND_A_RACE and b"data race" in done.stderr


@pytest.mark.parametrize("mutant", MISSING_CHECKS, ids=lambda m: m.name)
def test_the_decoder_sees_a_missing_check(mutant: Mutant, run: Run) -> None:
    done = run(DECODER, "random", 1, 4000, mutant=mutant)
    assert done.returncode != 0 and b"hostile: in " in done.stderr


@pytest.mark.parametrize("mutant", DOUBLE_READS, ids=lambda m: m.name)
def test_the_adversary_sees_a_value_that_is_read_twice(mutant: Mutant, run: Run) -> None:
    done = run(ADVERSARY, mutant=mutant)
    assert done.returncode != 0 and done.stdout.startswith(b"dispatch ")  # which it had got through


def test_coverage_guided_programs_find_nothing(tmp_path: Path, encoding: Encoding) -> None:
    if not FUZZ_SECONDS:
        pytest.skip("AFD_FUZZ_SECONDS says how long to fuzz with libFuzzer; it is not set")
    if not shutil.which("clang++"):
        pytest.skip("no clang++ here, which libFuzzer needs")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, field in enumerate(encoding.fields):
        for moment in encoding.moments:
            for side in "fa":
                program = encoding.start() + encoding.write(field, "flip", moment, of=(side, 0), index=number)
                (corpus / f"{field}_{moment}_{side}").write_bytes(program)
    target = tmp_path / "target"
    # Coverage of the kernels, not of the driver that judges them.
    built = [(source, "-fsanitize=fuzzer-no-link,address,undefined") for source in KERNELS]
    built += [(FUZZ / "decoder.cpp", "-fsanitize=address")]
    objects = [str(tmp_path / f"{source.stem}.o") for source, _ in built]
    for (source, sanitize), out in zip(built, objects, strict=True):
        subprocess.run(["clang++", *FLAGS, sanitize, "-DAFD_LIBFUZZER", "-c", str(source), "-o", out], check=True)
    subprocess.run(["clang++", "-fsanitize=fuzzer,address,undefined", *objects, "-o", str(target)], check=True)
    faulthandler.dump_traceback_later(FUZZ_SECONDS + 150, exit=True)  # in place of the watchdog
    command = [str(target), f"-max_total_time={FUZZ_SECONDS}", "-max_len=300", "-timeout=10", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr[-300:], file=sys.stderr)
