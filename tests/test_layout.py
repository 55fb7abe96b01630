"""The wire, byte by byte, and the arithmetic of its offsets."""

from __future__ import annotations

import re
from typing import Any

import harness
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import afd_ops
from afd_ops import _C, Geometry, Topology
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES

SIZES: dict[str, Any] = dict(hidden=4, topk=2, tokens=4, dtype=torch.float32, stages=2, depth=2)


def create(attention: int = 2, ffn: int = 3, num_experts: int = 5, **sizes: Any) -> Geometry:
    return Geometry.create(Topology(attention, ffn, num_experts), **{**SIZES, **sizes})


def hexdump(memory: torch.Tensor) -> str:
    """Little-endian 32-bit words, four a line; "x 12" after a line: there are twelve of it."""
    raw, lines = bytes(memory.tolist()), list[str]()
    previous, repeats = b"", 0
    for at in [*range(0, len(raw), 16), len(raw)]:
        line = raw[at : at + 16]
        if line == previous:
            repeats += 1
            continue
        if repeats:
            lines.append(f"      x {repeats + 1}")
        if line:
            words = [f"{int.from_bytes(line[i : i + 4], 'little'):08x}" for i in range(0, len(line), 4)]
            lines.append(f"{at:04x}  " + " ".join(words))
        previous, repeats = line, 0
    return "\n".join(lines)


def flag(window: afd_ops.Window, index: int) -> int:
    return int(harness.word(window, window.geometry.layout["flags"] + index * _C.WORD_STRIDE))


@pytest.mark.usefixtures("device")
def test_a_whole_slot_is_what_the_wire_format_says_in_both_directions() -> None:
    """Generation 1, layer 3, stage 1, ring 1: no word that is pinned here is zero by accident.

    Every byte of a slot that no writer touched is still NaN filling (ffffffff), or the zeros of a fresh header.
    """
    topology = Topology(2, 2, 5)  # ffn 0 owns experts 0 to 2, ffn 1 owns 3 and 4
    with harness.windows(topology, **SIZES) as windows:
        harness.reset(windows)
        _, attention, ffn, _ = windows
        module = harness.remote(attention, 3, 1)
        nothing = torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2)
        module.dispatch(*(t.to(harness.DEVICE) for t in nothing))  # takes ring 0
        x = torch.arange(1.0, 13.0).reshape(3, 4)
        ids = torch.tensor([[2, 0], [4, -1], [2, 2]])
        weights = torch.tensor([[0.5, 1.0], [2.0, 3.0], [4.0, 8.0]])
        ticket = module.dispatch(*(t.to(harness.DEVICE) for t in (x, ids, weights)))

        slot = (1 * 2 + 1) * 2 + 1  # (region 1, stage 1, ring 1) of [regions, stages, depth]
        assert [flag(ffn, index) for index in range(8)] == [0, 0, 0, 0, 0, 0, _C.READY, _C.READY]
        assert_expected_inline(
            hexdump(harness.slots_of(ffn)[slot]),
            """\
0000  53444641 00000003 00000001 00000003
0010  00000003 00000000 00000001 00000000
0020  00000004 00000000 00000001 00000000
0030  00000003 00000000 00000000 00000000
0040  00000000 00000000 00000000 00000000
      x 12
0100  00000002 00000000 00000000 00000000
0110  ffffffff ffffffff ffffffff ffffffff
0120  00000002 00000001 00000002 00000002
0130  ffffffff ffffffff ffffffff ffffffff
      x 13
0200  3f000000 3f800000 40000000 40400000
0210  40800000 41000000 ffffffff ffffffff
0220  ffffffff ffffffff ffffffff ffffffff
      x 14
0300  3f800000 40000000 40400000 40800000
0310  ffffffff ffffffff ffffffff ffffffff
0320  41100000 41200000 41300000 41400000
0330  ffffffff ffffffff ffffffff ffffffff
      x 13""",
        )
        assert_expected_inline(
            "\n".join(str(row.tolist()) for row in ticket),
            """\
[1, 1, 1, 1, 0, 3, 3, 0]
[1, 0, 0, 0, 0, 0, 0, 0]
[2, 0, 0, 0, 0, 0, 0, 0]
[1, 0, 0, 0, 0, 0, 0, 0]""",
        )

        server = afd_ops.ExpertServer(ffn, harness.experts_of(topology, 0))
        assert server.step() == 2
        slot = (0 * 2 + 1) * 2 + 1  # the reply of ffn 0 lies in its region of the attention rank's window
        assert [flag(attention, index) for index in range(8)] == [0, 0, _C.READY, _C.READY, 0, 0, 0, 0]
        assert_expected_inline(
            hexdump(harness.slots_of(attention)[slot]),
            """\
0000  53444641 00000003 00000001 00000003
0010  00000003 00000000 00000001 00000000
0020  00000004 00000000 00000000 00000000
0030  00000000 00000000 00000000 00000000
      x 13
0100  ffffffff ffffffff ffffffff ffffffff
      x 32
0300  40600000 40c00000 41080000 41300000
0310  ffffffff ffffffff ffffffff ffffffff
0320  43ae0000 43c00000 43d20000 43e40000
0330  ffffffff ffffffff ffffffff ffffffff
      x 13""",
        )


@pytest.mark.usefixtures("device")
def test_a_float8_slot_holds_scales_and_bytes_and_its_reply_is_wide() -> None:
    with harness.windows(
        Topology(1, 1, 1), **{**SIZES, "hidden": 256, "topk": 1, "tokens": 2, "dtype": torch.float8_e4m3fn}
    ) as (attention, ffn):
        x = torch.zeros(2, 256, dtype=torch.bfloat16)
        x[0, :128], x[0, 64:128], x[1, 128:] = 896.0, 2.0, -7.0
        module, ones = harness.remote(attention, 3), torch.ones(2, 1)
        module.dispatch(*(t.to(harness.DEVICE) for t in (x, ones.int() - 1, ones)))
        harness.synchronize()
        layout = ffn.geometry.layout
        assert layout["slot_bytes"] - layout["scale"] == 256 + 2 * 256 * 2
        assert_expected_inline(
            hexdump(harness.slots_of(ffn)[0, layout["scale"] :]),
            """\
0000  40000000 00800000 00800000 3c800000
0010  ffffffff ffffffff ffffffff ffffffff
      x 15
0100  7e7e7e7e 7e7e7e7e 7e7e7e7e 7e7e7e7e
      x 4
0140  38383838 38383838 38383838 38383838
      x 4
0180  00000000 00000000 00000000 00000000
      x 16
0280  fefefefe fefefefe fefefefe fefefefe
      x 8
0300  ffffffff ffffffff ffffffff ffffffff
      x 32""",
        )
        assert afd_ops.ExpertServer(ffn, lambda rows, scales, *_: afd_ops.dequantize(rows, scales)).step() == 1
        harness.synchronize()
        assert_expected_inline(
            hexdump(harness.slots_of(attention)[0, layout["scale"] :]),
            """\
0000  ffffffff ffffffff ffffffff ffffffff
      x 16
0100  44604460 44604460 44604460 44604460
      x 8
0180  40004000 40004000 40004000 40004000
      x 8
0200  00000000 00000000 00000000 00000000
      x 32
0400  c0e0c0e0 c0e0c0e0 c0e0c0e0 c0e0c0e0
      x 16""",
        )


def test_the_wire_version_changes_with_the_wire() -> None:
    """Whoever changes the dumps above, or this one, raises WIRE_VERSION: builds that differ must refuse each other."""
    assert_expected_inline(
        "\n".join(
            f"{name} {getattr(_C, name):#x}"
            for name in ("WIRE_VERSION", "HEADER_MAGIC", "HEADER_BYTES", "PORT_MAGIC", "READY", "WORD_STRIDE")
        )
        + f"\n{' '.join(_C.GEOMETRY)}\n{' '.join(_C.DTYPES)}",
        """\
WIRE_VERSION 0x3
HEADER_MAGIC 0x53444641
HEADER_BYTES 0x28
PORT_MAGIC 0x50444641
READY 0x59444552
WORD_STRIDE 0x40
attention_size ffn_size num_experts local_experts stages depth tokens topk hidden dtype layers
float32 bfloat16 float16 float8_e4m3fn""",
    )


# Every size an engine may ask for, and far beyond.
def geometries_of(dtype: torch.dtype) -> st.SearchStrategy[Geometry]:
    multiple = 128 if dtype == torch.float8_e4m3fn else 8
    return st.builds(
        create,
        attention=st.integers(1, 1024),
        ffn=st.integers(1, 1024),
        num_experts=st.integers(1, 1024),
        hidden=st.integers(1, 2**16 // multiple).map(lambda n: multiple * n),
        topk=st.integers(1, 64),
        tokens=st.integers(1, 2**20),
        dtype=st.just(dtype),
        stages=st.integers(1, 8),
        depth=st.integers(1, 1024),
    )


geometries = st.sampled_from(PAYLOAD_DTYPES).flatmap(geometries_of)


def up(n: int) -> int:
    return -(-n // 256) * 256


@settings(deadline=None)
@given(geometries)
def test_fields_are_aligned_in_order_and_never_overlap(geometry: Geometry) -> None:
    layout, g = geometry.layout, geometry
    assert all(offset % 256 == 0 for name, offset in layout.items() if name != "slots_per_region")
    regions = max(g.attention_size, g.ffn_size)
    sizes = {  # in the order in which they lie
        "flags": regions * g.stages * g.depth * _C.WORD_STRIDE,
        "sticky": regions * _C.WORD_STRIDE,
    }
    end = 0
    for name, size in sizes.items():
        assert layout[name] == end, name
        end = up(end + size)
    assert layout["slots"] == end
    end = up(_C.HEADER_BYTES + 4 * g.local_experts)
    choices = g.tokens * g.topk
    scales = g.tokens * g.hidden // 128 if PAYLOAD_DTYPES[g.dtype] == torch.float8_e4m3fn else 0
    payload = g.tokens * g.hidden * WIDE_DTYPES[g.dtype].itemsize
    for name, size in {"position": 8 * choices, "weight": 4 * choices, "scale": 4 * scales, "payload": payload}.items():
        assert layout[name] == end, name
        end = up(end + size)
    assert layout["slot_bytes"] == end
    assert layout["slots_per_region"] == g.stages * g.depth


@settings(deadline=None)
@given(geometries, st.integers(0, 2048))
def test_window_bytes_is_control_plus_regions_times_slots(geometry: Geometry, regions: int) -> None:
    layout = geometry.layout
    expected = layout["slots"] + regions * geometry.stages * geometry.depth * layout["slot_bytes"]
    assert geometry.window_bytes(regions) == expected
    largest = max(geometry.attention_size, geometry.ffn_size)
    assert geometry.window_bytes() == geometry.window_bytes(largest)


def test_offsets_are_64_bit() -> None:
    """fault: tokens x hidden x ranks beyond 4 GiB wraps around, and two ranks share memory."""
    geometry = create(16, 16, 256, hidden=7168, topk=8, tokens=8192, dtype=torch.bfloat16)
    assert geometry.layout["slot_bytes"] == up(40 + 4 * 16) + up(8192 * 8 * 8) + up(8192 * 8 * 4) + 8192 * 7168 * 2
    assert geometry.window_bytes() // 2**30 == 7
    huge = create(1024, 1024, 1024, hidden=2**16, topk=64, tokens=2**20, stages=8, depth=1024)
    assert huge.layout["slot_bytes"] > 2**38
    assert huge.window_bytes() == huge.layout["slots"] + 1024 * 8 * 1024 * huge.layout["slot_bytes"] > 2**61


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("attention", "ffn"), [(3, 1), (1, 3), (2, 2)])
def test_each_role_allocates_only_what_it_receives(attention: int, ffn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    class Recording(afd_ops.LocalHeap):
        def allocate(self, nbytes: int) -> Any:
            allocated.append(nbytes)
            return super().allocate(nbytes)

    monkeypatch.setattr("afd_ops.window.LocalHeap", Recording)
    with harness.windows(Topology(attention, ffn, 5)) as windows:
        geometry = windows[0].geometry
        expected = [geometry.window_bytes(ffn)] * attention + [geometry.window_bytes(attention)] * ffn
        assert sorted(allocated) == sorted(expected)
        assert max(expected) == geometry.window_bytes()


@pytest.mark.usefixtures("device")
def test_a_heap_without_sizes_per_role_is_asked_for_the_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    class Symmetric(afd_ops.LocalHeap):
        per_role = False

        def allocate(self, nbytes: int) -> Any:
            allocated.append(nbytes)
            return super().allocate(nbytes)

    monkeypatch.setattr("afd_ops.window.LocalHeap", Symmetric)
    with harness.windows(Topology(3, 1, 5)) as windows:
        assert allocated == [windows[0].geometry.window_bytes()] * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(attention=1025), "attention_size is 1025, expected 1 to 1024"),
        (dict(ffn=1025), "ffn_size is 1025, expected 1 to 1024"),
        (dict(hidden=0), "hidden is 0, expected 1 or more"),
        (dict(topk=-1), "topk is -1, expected 1 or more"),
        (dict(tokens=0), "tokens is 0, expected 1 or more"),
        (dict(stages=0), "stages is 0, expected 1 or more"),
        (dict(depth=0), "depth is 0, expected 1 to 1024"),
        (dict(depth=1025), "depth is 1025, expected 1 to 1024"),
        (dict(layers=0), "layers is 0, expected 1 to 2147483648"),
        (dict(dtype=torch.float64), "dtype is torch.float64, expected one of torch.float32, torch.bfloat16"),
        (dict(hidden=3), "hidden is 3: a row of 12 bytes, expected a multiple of 16"),
        (dict(hidden=12, dtype=torch.bfloat16), "hidden is 12: a row of 24 bytes, expected a multiple of 16"),
        (
            dict(hidden=192, dtype=torch.float8_e4m3fn),
            "hidden is 192, expected a multiple of 128 with dtype torch.float8_e4m3fn",
        ),
        (dict(tokens=2**30, topk=2), "tokens x topk is 2147483648, expected less than 2**31"),
    ],
)
def test_a_bad_size_is_named_with_its_value(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        create(**sizes)


def test_a_geometry_has_the_words_of_the_wire_in_its_order() -> None:
    geometry = create(hidden=8, dtype=torch.float16, layers=43)
    assert dict(zip(_C.GEOMETRY, geometry.words, strict=True)) == dict(
        attention_size=2,
        ffn_size=3,
        num_experts=5,
        local_experts=2,
        stages=2,
        depth=2,
        tokens=4,
        topk=2,
        hidden=8,
        dtype=2,
        layers=43,
    )
