"""The round trip against the oracle, row by row, with expert-specific experts."""

from __future__ import annotations

import itertools
from typing import Any

import harness
import pytest
import torch
from harness import expected, random_step

import afd_ops
from afd_ops.reference import quantize

pytestmark = pytest.mark.usefixtures("device")

SIZES = harness.SIZES
FLOAT8: dict[str, Any] = {**SIZES, "hidden": 256, "dtype": torch.float8_e4m3fn}  # two scales a token
SHAPES = [(1, 1, 4), (1, 3, 7), (3, 1, 5), (3, 2, 5), (2, 2, 1), (2, 3, 2)]  # attention, ffn, experts


@pytest.mark.parametrize(("attention", "ffn", "num_experts"), SHAPES)
@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_row_equals_the_oracle(
    attention: int, ffn: int, num_experts: int, topk: int, dtype: torch.dtype, seed: int
) -> None:
    topology = afd_ops.Topology(attention, ffn, num_experts)
    sizes = dict(topk=topk, dtype=dtype, hidden=256 if dtype == torch.float8_e4m3fn else 16)
    with harness.serving(topology, **sizes) as windows:
        for tokens in (0, 1, 5, 16, 4, 1, 0, 3):  # shrinking too: the tail of an earlier step must not be read
            for layer, window in enumerate(windows):
                count = max(0, tokens - layer)  # differs per rank
                step = random_step(topology, count, **sizes)
                out = harness.remote(window, layer)(*step)
                assert out.dtype == window.wide_dtype
                assert torch.equal(out, expected(topology, *step, dtype)), (tokens, layer)


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_lanes_and_rings_in_any_order(stages: int, depth: int, seed: int) -> None:
    """All lanes full, answers taken in another order than they were asked for."""
    topology = afd_ops.Topology(2, 2, 5)
    with harness.serving(topology, stages=stages, depth=depth) as windows:
        for turn in range(6):
            flights = []
            for window, stage, _ in itertools.product(windows, range(stages), range(depth)):
                step = random_step(topology, 1 + turn)
                module = harness.remote(window, turn, stage)
                flights.append((module, module.dispatch(*step[:3]), step))
            for module, ticket, step in reversed(flights):
                assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))


def test_base_may_have_another_dtype(seed: int) -> None:
    topology = afd_ops.Topology(1, 2, 4)
    with harness.serving(topology, dtype=torch.bfloat16) as (window,):
        x, ids, weights, base = random_step(topology, 9, dtype=torch.bfloat16)
        module = harness.remote(window, 0)
        out = module.combine(module.dispatch(x, ids, weights), base.float())
        assert out.dtype == torch.float32
        assert torch.equal(out, expected(topology, x, ids, weights, base.float()))


def test_no_base_means_zeros(seed: int) -> None:
    topology = afd_ops.Topology(1, 1, 4)
    with harness.serving(topology) as (window,):
        x, ids, weights, base = random_step(topology, 9)
        out = harness.remote(window, 0)(x, ids, weights)
        assert torch.equal(out, expected(topology, x, ids, weights, torch.zeros_like(base)))


@pytest.mark.parametrize("case", ["one expert", "one ffn rank", "nobody", "an ffn rank without experts", "duplicates"])
def test_lopsided_routing(case: str, seed: int) -> None:
    """faults: all tokens to one expert or rank; only padding; a rank that owns nothing; an expert twice in a row."""
    topology = afd_ops.Topology(2, 3, 4)  # blocks of 2: ffn 2 owns nothing
    assert topology.experts_of(2) == []
    with harness.serving(topology) as windows:
        for window in windows:
            x, ids, weights, base = random_step(topology, 16)
            if case == "one expert":
                ids[:] = 3
            elif case == "one ffn rank":
                ids = torch.randint(0, 2, ids.shape, device=ids.device)
            elif case == "nobody":
                ids[:] = -1
            elif case == "duplicates":
                ids = ids[:, :1].expand(-1, 2)
            out = harness.remote(window, 0)(x, ids, weights, base)
            assert torch.equal(out, expected(topology, x, ids, weights, base))


@pytest.mark.parametrize("sizes", [SIZES, FLOAT8], ids=["float32", "float8"])
def test_padding_rows_may_hold_anything(sizes: dict[str, Any], seed: int) -> None:
    """fault: padding multiplied by zero instead of skipped; NaN would spread."""
    topology = afd_ops.Topology(1, 2, 4)
    with harness.serving(topology, **sizes) as (window,):
        x, ids, weights, base = random_step(topology, 8, **sizes)
        ids[3:] = -1
        x[3:], weights[3:] = float("nan"), float("nan")
        out = harness.remote(window, 0)(x, ids, weights, base)
        assert torch.equal(out[3:], base[3:])
        assert torch.equal(out[:3], expected(topology, x[:3], ids[:3], weights[:3], base[:3], sizes["dtype"]))


def received(window: afd_ops.Window, peer: afd_ops.Window, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as a single expert gets it: rows and scales."""
    ones = torch.ones(len(x), 1, device=x.device)
    module, port = harness.remote(window), peer.port()
    ticket = module.dispatch(x, ones.int() - 1, ones)
    harness.synchronize()
    item = torch.ops.afd.arrive(port, peer.id)
    rows, scales, _ = torch.ops.afd.receive(item, port, peer.id, len(x))
    torch.ops.afd.reply(afd_ops.dequantize(rows, scales), item, port, peer.id)
    harness.synchronize()
    module.combine(ticket, x)
    return rows.to(x.device), scales.to(x.device)


@pytest.mark.parametrize("hidden", [128, 384, 7168])
def test_float8_rows_and_scales_are_the_oracles_bit_for_bit(hidden: int, seed: int) -> None:
    """Any bfloat16 at all: normal blocks, every magnitude in one block, zeros, the least and the largest, inf, NaN."""
    with harness.windows(afd_ops.Topology(1, 1, 1), **{**FLOAT8, "hidden": hidden, "topk": 1, "tokens": 64}) as windows:
        x = torch.randn(64, hidden).bfloat16()
        x[16:32] *= torch.exp2(torch.randint(-12, 12, (16, hidden)).float()).bfloat16()
        x[32:48] = torch.randint(-(2**15), 2**15, (16, hidden)).to(torch.int16).view(torch.bfloat16)
        x[48:56, ::3] = x[32:40, ::3].nan_to_num()
        x[56:60] = torch.tensor([[0.0], [-0.0], [9.2e-41], [3.3895e38]])
        x[60, 5], x[61, 127], x[62, 0] = float("inf"), float("-inf"), float("nan")
        x = x.to(harness.DEVICE)
        rows, scales = received(*windows, x)
        want = quantize(x.cpu())
        # Of a NaN the sign is nobody's promise.
        nan = want[0].float().isnan()
        assert torch.equal(rows.cpu().float().isnan(), nan)
        assert torch.equal(rows.cpu().view(torch.uint8)[~nan], want[0].view(torch.uint8)[~nan])
        torch.testing.assert_close(scales.cpu(), want[1], rtol=0, atol=0, equal_nan=True)
        back = afd_ops.dequantize(rows, scales).cpu()
        assert torch.equal(back[56:58], torch.zeros(2, hidden))
        assert back[60:63, :128].isnan().all() and not back[60:63, 128:].isnan().any()


def test_float8_is_as_close_as_three_bits_of_mantissa_are(seed: int) -> None:
    with harness.windows(afd_ops.Topology(1, 1, 1), **{**FLOAT8, "topk": 1, "tokens": 512}) as windows:
        x = (torch.randn(512, 256) * torch.exp2(torch.randint(-9, 9, (512, 256)).float())).bfloat16()
        x = x.to(harness.DEVICE)
        error = (afd_ops.dequantize(*received(*windows, x), torch.float32) - x.float()).abs()
        amax = x.float().abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1)
        # Half a step: 2^-4 of a normal element, half of 2^-9 of 1 / 448 of a block's largest below that.
        assert (error <= x.float().abs() * 2**-4 * 1.0001 + amax * (2**-10 / 448)).all()
        assert error.max() > 0


def test_float8_rows_are_dequantised_for_the_grouped_gemm(seed: int) -> None:
    topology = afd_ops.Topology(1, 2, 4)
    gate_up, down = torch.randn(4, 2 * 32, 256) / 16, torch.randn(4, 256, 32) / 6
    x, *rest = random_step(topology, 16, **FLOAT8)
    step, outs = (torch.randn_like(x), *rest), []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        with harness.windows(topology, **{**FLOAT8, "dtype": dtype}) as (window, *ffn):
            module = harness.remote(window)
            ticket = module.dispatch(*step[:3])
            harness.synchronize()
            for peer in ffn:
                owned, device = topology.experts_of(peer.role_rank), peer.heap.device
                weights = [w[owned].to(device, torch.bfloat16) for w in (gate_up, down)]
                experts = afd_ops.GroupedSwiGLU(weights[:1], weights[1:], limit=10.0)
                assert afd_ops.ExpertServer(peer, experts).step() == 1
            harness.synchronize()
            outs.append(module.combine(ticket, torch.zeros_like(x)).float())
            harness.synchronize()
            for rank in (window, *ffn):
                rank.check()
    error = (outs[0] - outs[1]).norm() / outs[1].norm()
    assert 0 < error < 0.08  # 400 seeds gave 0.024 to 0.055


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_strided_arguments_are_read_where_they_lie(width: torch.dtype, seed: int) -> None:
    """faults: non-contiguous arguments read with the wrong stride; 32 and 64 bit ids confused."""
    topology = afd_ops.Topology(1, 2, 5)
    with harness.serving(topology) as (window,):
        x, ids, weights, base = random_step(topology, 8)
        wide = torch.cat([torch.full_like(x, 9.0), x, torch.full_like(x, 9.0)], dim=1)[:, 16:32]
        assert not wide.is_contiguous()
        module = harness.remote(window, 0)
        strided_base = torch.stack([base, torch.full_like(base, 9.0)], dim=1)[:, 0]
        out = module(wide, ids.to(width).t().contiguous().t(), weights.t().contiguous().t(), strided_base)
        assert torch.equal(out, expected(topology, x, ids, weights, base))


def test_a_custom_expert_map_is_followed(seed: int) -> None:
    topology = afd_ops.Topology(1, 2, 4, expert_map=((1, 1), (0, 0), (1, 0), (1, 2)))
    with harness.serving(topology) as (window,):
        step = random_step(topology, 16)
        assert torch.equal(harness.remote(window, 0)(*step), expected(topology, *step))


def test_two_runs_are_bit_equal(seed: int) -> None:
    topology = afd_ops.Topology(1, 3, 7)
    with harness.serving(topology, dtype=torch.bfloat16, topk=4) as (window,):
        module = harness.remote(window, 0)
        x, _, weights, _ = random_step(topology, 16, topk=4, dtype=torch.bfloat16)
        x, weights = torch.randn_like(x), torch.rand_like(weights)
        ids = torch.randint(0, 7, (16, 4), device=x.device)
        first, second = module(x, ids, weights), module(x, ids, weights)
        assert torch.equal(first, second)


def test_outputs_alias_nothing(seed: int) -> None:
    """fault: an output that is a view of an input or of the window is overwritten later; opcheck does not notice."""
    topology = afd_ops.Topology(1, 1, 2)
    with harness.windows(topology) as (window, peer):
        x, ids, weights, base = random_step(topology, 4)
        module, server = (
            harness.remote(window, 0),
            afd_ops.ExpertServer(peer, harness.experts_of(topology, 0)),
        )
        ticket = module.dispatch(x, ids, weights)
        harness.synchronize()
        item = torch.ops.afd.arrive(server.port, peer.id)
        rows, scales, offsets = torch.ops.afd.receive(item, server.port, peer.id, int(item[0, 3]))
        torch.ops.afd.reply(server.experts(rows, scales, offsets, 0), item, server.port, peer.id)
        out = module.combine(ticket, base)
        inputs = {t.untyped_storage().data_ptr() for t in (x, ids, weights, base, module.port, server.port)}
        outputs = [t.untyped_storage().data_ptr() for t in (ticket, item, rows, offsets, out)]
        assert not inputs & set(outputs)
        assert len(set(outputs)) == len(outputs)
        for w in (window, peer):
            start = afd_ops._C.addresses(w.id)["window"]
            assert not any(start <= address < start + w.geometry.window_bytes() for address in outputs)


@pytest.mark.memcheck
def test_slots_that_are_ready_together_are_computed_together(seed: int) -> None:
    topology = afd_ops.Topology(3, 1, 4)
    calls: list[int] = []

    def experts(rows: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, layer: int) -> torch.Tensor:
        calls.append(layer)
        return harness.experts_of(topology, 0)(rows, scales, offsets, layer)

    with harness.windows(topology, rows=100) as (*attention, ffn):
        server = afd_ops.ExpertServer(ffn, experts)
        layers = (5, 2, 5)  # the middle one must wait for its own turn, and heads it
        modules = [harness.remote(w, layer) for layer, w in zip(layers, attention, strict=True)]
        steps = [random_step(topology, 8) for _ in modules]
        tickets = [m.dispatch(*s[:3]) for m, s in zip(modules, steps, strict=True)]
        harness.synchronize()
        assert [server.step(), server.step(), server.step()] == [2, 1, 0]
        assert calls == [5, 2]
        for module, ticket, step in zip(modules, tickets, steps, strict=True):
            assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))


@pytest.mark.memcheck
def test_an_arrival_that_does_not_fit_is_next(seed: int) -> None:
    """fault: a region with the largest steps starves while smaller ones fill the items."""
    topology = afd_ops.Topology(4, 1, 2)
    with harness.windows(topology, rows=32) as (*attention, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(topology, 0))
        modules = [harness.remote(w, 0) for w in attention]
        sizes = (8, 12, 4, 2)  # x topk 2: the second does not fit beside the first
        steps = [
            tuple(
                t.to(harness.DEVICE)
                for t in (torch.ones(n, 16), torch.zeros(n, 2, dtype=torch.int32), torch.ones(n, 2), torch.zeros(n, 16))
            )
            for n in sizes
        ]
        tickets = [m.dispatch(*s[:3]) for m, s in zip(modules, steps, strict=True)]
        harness.synchronize()
        assert [server.step(), server.step(), server.step()] == [3, 1, 0]
        for module, ticket, step in zip(modules, tickets, steps, strict=True):
            assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))


def _steps(
    topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int, seed: int
) -> Any:
    with harness.process_window(topology, bootstrap, sizes) as window:
        if window.role == "ffn":
            return harness.serve(topology, window)
        torch.manual_seed(seed + bootstrap.rank)
        for turn in range(turns):
            step = random_step(topology, int(torch.randint(0, sizes["tokens"] + 1, ())), **sizes)
            out = harness.remote(window, turn)(*step)
            assert torch.equal(out, expected(topology, *step, sizes["dtype"])), turn
        harness.synchronize()  # an empty step compares without waiting for its kernels
        return window.stats()


@pytest.mark.parametrize(("attention", "ffn"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_between_processes(attention: int, ffn: int, dtype: torch.dtype, seed: int) -> None:
    """Over shared memory on CPU, over NVSHMEM on GPUs (with more ranks than GPUs, several processes share one)."""
    topology = afd_ops.Topology(attention, ffn, 5)
    turns = 60
    stats = harness.run_processes(topology, _steps, turns, seed, hidden=128, dtype=dtype)
    assert [s["dispatches"] for s in stats] == [turns] * attention + [0] * ffn
    assert sum(s["replies"] for s in stats) == turns * attention * ffn
