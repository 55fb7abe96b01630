"""The ops one by one, on every device: schemas, opcheck, fakes, strides, the refusal of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import harness
import pytest
import torch
from op_trips import (
    State,
    argument_names,
    by_hand,
    columns_first,
    finish,
    overload,
    rows_apart,
    sizes_of,
    stop_before,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import afd_ops

pytestmark = pytest.mark.usefixtures("device")

SCHEMAS = {
    "plan": "plan(Tensor topk_ids, Tensor expert_map, int ffn_size, int local_experts) -> (Tensor, Tensor, Tensor)",
    "dispatch": (
        "dispatch(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor port, Tensor(a!) order, int window) -> Tensor"
    ),
    "arrive": "arrive(Tensor(a!) port, int window) -> Tensor",
    "receive": "receive(Tensor item, Tensor(a!) port, int window, int rows) -> (Tensor, Tensor, Tensor)",
    "receive_into": (
        "receive_into(Tensor item, Tensor(a!) rows, Tensor(b!) scales, Tensor(c!) offsets, Tensor(d!) port, int window)"
        " -> ()"
    ),
    "reply": "reply(Tensor expert_out, Tensor item, Tensor(a!) port, int window) -> ()",
    "combine": "combine(Tensor ticket, Tensor base, Tensor port, Tensor(a!) order, int window) -> Tensor",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
MODES: list[Callable[[], AbstractContextManager[Any]]] = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch fills fresh tensors, so that what an op leaves unwritten is the same in two runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Rearmed(TorchDispatchMode):
    """Puts all ranks back to where they are now before every call of `op` on real tensors: each call sees the first."""

    supports_higher_order_operators = True  # after functionalisation the op is called where no mode sees it

    def __init__(self, op: Any, windows: list[afd_ops.Window]) -> None:
        super().__init__()
        self.op, self.state, self.calls = op, State(windows), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.arg_tree_leaves(*args, **kwargs)
        real = not any(isinstance(leaf, FakeTensor) or getattr(leaf, "is_meta", False) for leaf in leaves)
        if real and (func is self.op or args[:1] == (self.op,)):
            self.state.restore()
            self.calls += 1
        return func(*args, **kwargs)


# Schemas and opcheck.


def test_every_op_has_its_documented_schema_and_no_other_exists(device: str) -> None:
    """fault: a schema that does not parse, or a kernel under another name, is a silent no-op of the extension."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("afd::")}
    assert names == {f"afd::{name}" for name in SCHEMAS}
    for name, schema in SCHEMAS.items():
        assert str(overload(name)._schema) == f"afd::{schema}"
        assert getattr(torch.ops.afd, name).overloads() == ["default"]
        for key in (torch.device(device).type.upper(), "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"afd::{name}", key), (name, key)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(cluster: list[afd_ops.Window], name: str, dtype: torch.dtype, tokens: int, seed: int) -> None:
    """faults: undeclared mutation, an alias, a missing fake, one whose sizes, strides or dtype differ, a static T."""
    if name == "receive_into" and dtype == torch.float8_e4m3fn:
        pytest.skip("opcheck compares an argument that is written to by arithmetic that the CPU lacks for float8")
    trip = by_hand(cluster, tokens, dtype, strided=tokens == 5)
    args = stop_before(name, trip)
    with Rearmed(overload(name), cluster) as rearmed:
        results = torch.library.opcheck(overload(name), args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4
    assert rearmed.calls >= 4
    rearmed.state.restore()
    finish(trip)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("dtype", "strided"), [(torch.float32, False), (torch.float32, True), (torch.float8_e4m3fn, False)]
)
def test_fakes_are_like_the_real_thing_in_every_mode(
    cluster: list[afd_ops.Window], tokens: int, dtype: torch.dtype, strided: bool, seed: int
) -> None:
    """fault: a fake's strides differ from the real ones, and compiled code reads the rows at the wrong place."""

    def look(t: Tensor) -> tuple[Any, ...]:
        return [*map(int, t.shape)], [*map(int, t.stride())], t.dtype, t.device, t.layout, int(t.storage_offset())

    trip = by_hand(cluster, tokens, dtype, strided=strided)
    for name, args in trip:
        fakes = []
        for mode in MODES:
            for shape_env in (None, ShapeEnv()):
                with mode(), FakeTensorMode(shape_env=shape_env) as fake:
                    out = overload(name)(*(fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
                outs = [t for t in (out if isinstance(out, tuple) else [out]) if t is not None]
                if shape_env is not None and tokens == 5 and name in ("plan", "dispatch", "combine"):
                    assert any(isinstance(s, torch.SymInt) for t in outs for s in t.shape), f"{name}: T became static"
                fakes.append([look(t) for t in outs])
        before = State(cluster)
        for mode, pair in zip(MODES, zip(fakes[::2], fakes[1::2], strict=True), strict=True):
            before.restore()
            with mode():
                out = overload(name)(*args)
            real = [look(t) for t in (out if isinstance(out, tuple) else [out]) if t is not None]
            assert pair == (real, real), (name, mode)
        before.restore()


@pytest.mark.parametrize("dtype", DTYPES)
def test_receive_gives_the_bucket_that_was_asked_for(
    cluster: list[afd_ops.Window], dtype: torch.dtype, seed: int
) -> None:
    trip = by_hand(cluster, 5, dtype)
    item, port, window, rows = stop_before("receive", trip)
    exact, factors, ends = torch.ops.afd.receive(item, port, window, rows)
    bucket, scales, offsets = torch.ops.afd.receive(item, port, window, rows + 7)
    assert exact.dtype == dtype and bucket.shape == (rows + 7, sizes_of(dtype)["hidden"])
    assert torch.equal(bucket[:rows].float(), exact.float()) and torch.equal(offsets, ends)
    if dtype == torch.float8_e4m3fn:
        assert scales.shape == (rows + 7, 2) and torch.equal(scales[:rows], factors)
    else:
        assert scales.shape == factors.shape == (0,)
    finish(trip)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn])
@pytest.mark.parametrize(("name", "argument"), [("dispatch", "x"), ("reply", "expert_out")])
def test_a_float8_window_takes_and_gives_bfloat16(
    cluster: list[afd_ops.Window], dtype: torch.dtype, name: str, argument: str, seed: int
) -> None:
    trip = by_hand(cluster, 5, dtype)
    good = stop_before(name, trip)
    at, state = argument_names(name).index(argument), State(cluster)
    for wrong in (torch.float32, torch.float16, dtype):
        with pytest.raises(
            RuntimeError, match=f"^Argument in afd::{name}: {argument} is .*, expected bfloat16"
        ) as told:
            overload(name)(*good[:at], good[at].to(wrong), *good[at + 1 :])
        assert f"{argument} is {str(wrong).removeprefix('torch.')}" in str(told.value)
    assert State(cluster) == state
    finish(trip)


@pytest.mark.memcheck
@pytest.mark.parametrize(("ffn_size", "num_experts"), [(2, 5), (40, 77)])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_plan_is_what_its_definition_says(ffn_size: int, num_experts: int, width: torch.dtype, seed: int) -> None:
    topology = afd_ops.Topology(1, ffn_size, num_experts)
    ids = torch.randint(-1, num_experts, (9, 3)).to(width)
    ids[4], ids[5] = ids[5, 0], -1  # one expert three times, and padding
    expert_map = torch.tensor(topology.expert_map, dtype=torch.int32)
    on_device = [t.to(harness.DEVICE) for t in (columns_first(ids), expert_map)]
    got = [t.cpu() for t in torch.ops.afd.plan(*on_device, ffn_size, topology.local_experts)]
    position = torch.full((ffn_size, 9, 3, 2), -1, dtype=torch.int32)
    counts = torch.zeros(ffn_size, topology.local_experts, dtype=torch.int32)
    masks = [[0] * -(-ffn_size // 32) for _ in range(9)]
    for t, k in itertools.product(range(9), range(3)):
        index = int(ids[t, k])
        if index < 0:
            continue
        rank, local = topology.expert_map[index]
        position[rank, t, k] = torch.tensor([local, counts[rank, local]])
        counts[rank, local] += 1
        masks[t][rank // 32] |= 1 << rank % 32
    wrapped = torch.tensor(masks).to(torch.int32)  # bit 31 makes an int32 negative
    assert torch.equal(got[0], position) and torch.equal(got[1], counts) and torch.equal(got[2], wrapped)


# What they read and write.


@pytest.mark.memcheck
@pytest.mark.parametrize("name", ["dispatch", "combine", "reply"])
def test_row_strides_are_honoured_even_zero(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    trip = by_hand(cluster, 5)
    args = stop_before(name, trip)
    before = State(cluster)
    data = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
    same = args[data][:1].expand(args[data].shape)
    assert same.stride(0) == 0
    after = []
    for tensor in (same, same.contiguous(), rows_apart(same)):
        before.restore()
        out = overload(name)(*args[:data], tensor, *args[data + 1 :])
        after.append((State(cluster), out))
    assert all(state == after[0][0] for state, _ in after)
    assert all(out is None or torch.equal(out, after[0][1]) for _, out in after)
    before.restore()
    finish(trip)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "receive_into"])
def test_no_op_writes_to_its_arguments(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    """order, or port, is declared mutated only to keep the ops in order; a compiler may hand an op a clone of it."""
    trip = by_hand(cluster, 5)
    args = stop_before(name, trip)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    state = State(cluster)
    overload(name)(*args)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(args, before, strict=True))
    state.restore()
    finish(trip)


# Gradients.

TRAINED = [("dispatch", "x"), ("dispatch", "topk_weights"), ("combine", "base"), ("reply", "expert_out")]


@pytest.mark.parametrize(("name", "argument"), TRAINED)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_training_by_accident_is_refused_in_forward(
    cluster: list[afd_ops.Window], name: str, argument: str, how: str, seed: int
) -> None:
    """fault: the ticket is int32, so a backward would run through and silently treat the experts as a constant."""
    trip = by_hand(cluster, 5)
    good = stop_before(name, trip)
    names = argument_names(name)
    grad = tuple(a.clone().requires_grad_() if n == argument else a for n, a in zip(names, good, strict=True))
    state, call = State(cluster), overload(name)
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(lambda *args: overload(name)(*args), backend="aot_eager", fullgraph=True)
    with torch.enable_grad(), pytest.raises(RuntimeError) as raised:
        call(*grad)
    assert f"Argument in afd::{name}: {argument} requires grad" in str(raised.value)
    assert "inference" in str(raised.value)
    assert type(afd_ops.errors.typed(raised.value)) is afd_ops.ArgumentError
    assert State(cluster) == state
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = call(*grad)
            assert out is None or not out.requires_grad
        state.restore()
    finish(trip)


@pytest.mark.memcheck
@pytest.mark.parametrize("mode", MODES)
def test_a_round_trip_works_in_every_mode(cluster: list[afd_ops.Window], mode: Any, seed: int) -> None:
    with mode():
        finish(by_hand(cluster, 5))
