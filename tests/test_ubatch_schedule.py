"""The interleaved schedule of examples/deepseek_v4: what each ubatch computes, in which order, and in one graph.

Weights and tokens come from fixed seeds, because two correct programs may rank a near tie of two scores differently.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import cudagraph_trees
from torch._inductor.graph import GraphLowering

import afd_ops

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import deepseek_v4
from deepseek_v4 import Config, DeepseekV4, LocalExperts, Random, RemoteExperts, Ubatch
from deepseek_v4.attention import Ring, linear
from small_v4 import SMALL

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ATOL = 5e-5  # of float32 logits
ROWS, LENGTH, DIM, WIDTH = 4, 40, 64, 56
LAYERS = 3  # one of each kind of attention
CONFIG = Config.from_dict(
    {**SMALL, "num_hidden_layers": LAYERS, **{f: SMALL[f][:LAYERS] for f in ("layer_types", "mlp_layer_types")}}
)
assert CONFIG.hidden_size == DIM
TOKENS = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
STARTS = [7, 9, 20, 31]  # where the rows stand before the step that is looked at

# Ubatches as (row, rows, new tokens of each); a negative count: so many rows of padding.
SPLITS = {
    "halves": [(0, 2, 1), (2, 2, 1)],
    "unequal, and one token alone": [(0, 3, 1), (3, 1, 1)],
    "three": [(0, 1, 1), (1, 2, 1), (3, 1, 1)],
    "a part of a prompt, and decodes": [(0, 1, 20), (1, 3, 1)],
    "decodes, and parts of prompts": [(0, 2, 1), (2, 2, 5)],
    "nothing but padding": [(0, 2, 1), (2, -2, 1)],
    "padding first": [(0, -1, 1), (1, 3, 1)],
}


def model_of(make_experts: Any, stages: int, dtype: torch.dtype) -> DeepseekV4:
    model = DeepseekV4(CONFIG, make_experts, rows=ROWS, positions=64, stages=stages, dtype=dtype)
    deepseek_v4.load(model, Random(3))
    return model.to(harness.DEVICE)


@contextmanager
def serving(stages: int, dtype: torch.dtype = torch.float32) -> Iterator[afd_ops.Window]:
    topology = afd_ops.Topology(1, 2, CONFIG.n_routed_experts)

    def experts_of(topology: afd_ops.Topology, rank: int) -> afd_ops.Experts:
        devices = harness.devices(topology)
        device = devices if isinstance(devices, str) else devices[-1]
        return deepseek_v4.load_experts(CONFIG, Random(3), topology.experts_of(rank), dtype, device)

    sizes: dict[str, Any] = dict(hidden=DIM, topk=CONFIG.num_experts_per_tok, tokens=ROWS * LENGTH, dtype=dtype)
    with harness.serving(topology, experts_of, **sizes, stages=stages, poll_interval=0.1) as (window,):
        yield window


def remote(window: afd_ops.Window, stages: int) -> DeepseekV4:
    """With a state in which every row stands at its start."""
    model = model_of(RemoteExperts, stages, window.dtype)
    afd_ops.attach(model, window)
    for row, start in enumerate(STARTS):
        begin = torch.zeros(1, dtype=torch.int64, device=harness.DEVICE)
        model(TOKENS[row : row + 1, :start].to(harness.DEVICE), begin, row)
    return model


def ubatch(row: int, count: int, steps: int) -> Ubatch:
    start = STARTS[row : row + abs(count)]
    tokens = torch.stack([TOKENS[row + i, s : s + steps] for i, s in enumerate(start)])
    tokens = tokens if count > 0 else torch.full_like(tokens, -1)
    return Ubatch(tokens.to(harness.DEVICE), torch.tensor(start, device=harness.DEVICE), row)


def whole(layers: int = CONFIG.layers) -> Tensor:
    """All logits of all rows, unsplit and at once, in this process, on the CPU."""
    experts = deepseek_v4.load_experts(CONFIG, Random(3), range(CONFIG.n_routed_experts))
    model = model_of(lambda layer, _: LocalExperts(layer, experts, CONFIG.n_routed_experts), 1, torch.float32).cpu()
    del model.layers[layers:]
    return model(TOKENS, torch.zeros(ROWS, dtype=torch.int64))


def agrees(logits: Tensor, expected: Tensor, piece: tuple[int, int, int]) -> bool:
    row, count, steps = piece
    places = [expected[row + i, STARTS[row + i] : STARTS[row + i] + steps] for i in range(count)]
    return torch.allclose(logits.cpu(), torch.stack(places), rtol=0, atol=ATOL)


# Results.


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_ubatch_gets_what_the_unsplit_model_computes(split: list[tuple[int, int, int]]) -> None:
    """In float32, where the number of rows that an expert meets may change the last bits."""
    expected = whole()
    with serving(stages=len(split)) as window:
        out = remote(window, len(split)).interleaved([ubatch(*piece) for piece in split])
    for piece, logits in zip(split, out, strict=True):
        assert piece[1] < 0 or agrees(logits, expected, piece), piece


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_in_bfloat16_a_ubatch_is_bit_equal_to_its_run_alone(split: list[tuple[int, int, int]]) -> None:
    """faults: state or answers of one ubatch reach another; an answer depends on who else was in the item."""
    with serving(len(split), torch.bfloat16) as window:
        together, alone = remote(window, len(split)), remote(window, 1)
        ubatches = [ubatch(*piece) for piece in split]
        for one, logits in zip(ubatches, together.interleaved(ubatches), strict=True):
            assert torch.equal(logits, alone(*one))


def test_padding_visits_no_expert() -> None:
    with serving(stages=1) as window:
        model = remote(window, 1)
        before = window.stats()["bytes_sent"]
        model(torch.full((2, 1), -1), torch.tensor(STARTS[:2]))
        padding = [now - then for now, then in zip(window.stats()["bytes_sent"], before, strict=True)]
        before = window.stats()["bytes_sent"]
        model(TOKENS[:2, :1], torch.tensor(STARTS[:2]))
        live = [now - then for now, then in zip(window.stats()["bytes_sent"], before, strict=True)]
    assert sum(live) - sum(padding) >= 2 * CONFIG.layers * DIM * 4  # every token crosses at least once a layer


# Stages.


def test_more_ubatches_than_stages_are_refused_with_both_numbers() -> None:
    with serving(stages=2) as window:
        with pytest.raises(ValueError, match="stage is 2, expected 0 to 1: the window has 2"):
            remote(window, 3)
        model = remote(window, 2)
        with pytest.raises(ValueError, match="3 ubatches, but the model has 2 stages"):
            model.interleaved([ubatch(row, 1, 1) for row in range(3)])
        assert window.stats()["dispatches"] == window.stats()["combines"], "nothing was sent"


# Compiled.


def test_interleaved_decode_is_one_graph_for_all_positions() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    expected = whole(layers=2)
    with serving(stages=2) as window:
        model = remote(window, 2)
        del model.layers[2:]
        step = torch.compile(model.interleaved, backend=counter, fullgraph=True)
        for turn in range(6):
            assert all(
                torch.allclose(logits[:, 0], expected[rows, positions], rtol=0, atol=ATOL)
                for logits, rows, positions in decoded(step, turn)
            )
    assert counter.frame_count == 1
    called = [str(n.target) for n in counter.graphs[0].graph.nodes if str(n.target).startswith("afd.")]
    turns = ["combine", "dispatch"] * 2
    assert [name.split(".")[1] for name in called] == ["dispatch"] * 2 + turns + ["combine"] * 2


def decoded(step: Any, turn: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One more token for every row, in halves of 3 and 1: logits, rows, positions."""
    halves = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    positions = [torch.tensor(STARTS)[rows] + turn for rows in halves]
    ubatches = [
        Ubatch(TOKENS[rows, at][:, None].to(harness.DEVICE), at.to(harness.DEVICE), int(rows[0]))
        for rows, at in zip(halves, positions, strict=True)
    ]
    for logits, rows, at in zip(step(ubatches), halves, positions, strict=True):
        yield logits.cpu(), rows, at


@pytest.mark.gpu
def test_on_gpus_interleaved_decode_is_recorded_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor: so the order it chose runs."""
    monkeypatch.setattr(harness, "DEVICE", "cuda:0")
    counters.clear()
    options = {"triton.cudagraphs": True, "reorder_for_peak_memory": False}
    expected = whole()
    with serving(stages=2) as window:
        model = remote(window, 2)
        step = torch.compile(model.interleaved, fullgraph=True, options=options)
        for turn in range(6):
            for logits, rows, positions in decoded(step, turn):
                assert torch.allclose(logits[:, 0], expected[rows, positions], rtol=0, atol=ATOL)
        manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
        assert manager is not None
        assert manager.new_graph_id().id == 1  # counts recordings from 0
    assert (counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]) == (1, 0)


class Remembering(nn.Module):
    """Attention in small, with state: two products of a width that no other product has."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = linear(DIM, WIDTH, torch.float32), linear(WIDTH, DIM, torch.float32)
        self.recent = Ring(ROWS, 8, WIDTH, torch.float32)

    def forward(self, x: Tensor, start: Tensor, row: int) -> Tensor:
        return self.outward(self.recent.extend(self.inward(x), start, row).mean(1, keepdim=True))


class Enough(Exception):
    """The code is there."""


def inductor_code(step: Any, *inputs: Any) -> str:
    """The program that Inductor makes, which is not built: its C++ kernels would take minutes."""
    codes: list[str] = []

    def keep(code: str, *_: Any) -> None:
        codes.append(code)
        raise Enough

    settings = inductor_config.patch(fx_graph_cache=False, compile_threads=1)
    with (
        settings,
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(GraphLowering, "save_output_code", keep),
        pytest.raises(Exception, match="Enough"),
    ):
        torch.compile(step, fullgraph=True, dynamic=False, options={"reorder_for_peak_memory": False})(*inputs)
    return codes[0]


def test_inductor_keeps_the_schedule() -> None:
    """faults: the attention of one ubatch behind the other's combine, or in front of its dispatch; the state copied.

    A, D, S, C: attention, dispatch, the shared expert, combine; 0 and 1: the ubatch, by its rows or its port.
    """
    with serving(stages=2) as window:
        model = model_of(RemoteExperts, 2, torch.float32)
        del model.layers[2:]
        for layer in model.layers:
            layer.attn = Remembering()
        afd_ops.attach(model, window)

        def step(tokens: Tensor, start: Tensor) -> list[Tensor]:
            ubatches = [Ubatch(tokens[:3], start[:3], 0), Ubatch(tokens[3:], start[3:], 3)]
            return deepseek_v4.interleave(model.layers, ubatches, [model.streams(u.tokens) for u in ubatches])

        code = inductor_code(step, TOKENS[:, :1], torch.tensor(STARTS))
    attention = re.compile(rf"extern_kernels\.mm\(\w+\(\w+, \((3|1), ({DIM}|{WIDTH})\).*\b{WIDTH}\b")
    ran: list[str] = []
    ports: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        if product := attention.search(line):
            ran.append(f"A{'31'.index(product[1])}")
        elif re.search(rf"extern_kernels\.mm\(.*\b{CONFIG.moe_intermediate_size}\b", line):
            ran.append("S")
        elif ours := re.search(r" torch\.ops\.afd\.(dispatch|combine)\.default\(.*, (\w+), \w+, \d+\)", line):
            ports += [ours[2]] if ours[2] not in ports else []
            ran.append(f"{ours[1][0].upper()}{ports.index(ours[2]) % 2}")
    once = [name for i, name in enumerate(ran) if ran[i - 1 : i] != [name]]
    assert " ".join(once) == "A0 D0 A1 D1 S C0 A0 D0 S C1 A1 D1 S C0 S C1"
    assert len(ports) == 4
    assert not re.search(rf"empty_strided_cpu\(\({ROWS}, \d+, {WIDTH}\)", code), "the state was copied"
