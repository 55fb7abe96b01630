"""examples/deepseek_v4 against transformers, in float32: whole and split, prompts and decode, eager and compiled.

Weights and tokens come from fixed seeds: a near tie of two scores, which two correct programs may rank differently,
would otherwise fail a run now and then. All logits must agree within ATOL.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import cudagraph_trees
from torch._inductor.utils import run_and_get_code
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

import afd_ops
from afd_ops.reference import routed_sum

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import deepseek_v4
from deepseek_v4 import Checkpoint, Config, DeepseekV4, LocalExperts, Random, RemoteExperts
from deepseek_v4.config import CSA, HASH, HCA, LEARNED, SLIDING
from small_v4 import SMALL

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ATOL = 5e-5
ROWS, LENGTH = 3, 61
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Two layers route by token id, a token visits three experts, and the clamp of the SwiGLU acts.
    "variant": dict(
        mlp_layer_types=[HASH, HASH, LEARNED, LEARNED],
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        swiglu_limit=0.5,
    ),
}


class Reference:
    """A model of transformers with random weights, saved by save_pretrained, and what it computes."""

    def __init__(self, changes: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**SMALL, **changes})).eval()
        self._fill(model)
        model.save_pretrained(folder, max_shard_size="500KB")
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(2, 256, (ROWS, LENGTH), generator=generator)
        with torch.no_grad():
            self.logits = model(self.tokens, use_cache=False).logits
        self.config = Config.from_folder(folder)
        self.experts = deepseek_v4.load_experts(self.config, Checkpoint(folder), range(self.config.n_routed_experts))

    @staticmethod
    @torch.no_grad()
    def _fill(model: Any) -> None:
        """Also what transformers leaves at zero: routing table, biases, sinks, position biases, hyper-connections."""
        generator = torch.Generator().manual_seed(0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "inv_freq" in name:
                continue
            if name.endswith("tid2eid"):
                chances = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
                tensor.copy_(chances.argsort(-1)[:, : tensor.shape[1]])
            elif "norm" in name:
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("scale"):
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() == 1 or name.endswith("position_bias"):
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)

    def model(self, make_experts: Any, stages: int = 1) -> DeepseekV4:
        model = DeepseekV4(self.config, make_experts, rows=ROWS, positions=64, stages=stages)
        deepseek_v4.load(model, Checkpoint(self.folder))
        return model

    def whole(self) -> DeepseekV4:
        return self.model(lambda layer, _: LocalExperts(layer, self.experts, self.config.n_routed_experts))

    @contextmanager
    def split(self, ffn_size: int, stages: int = 1) -> Iterator[DeepseekV4]:
        """The model of an attention rank; FFN ranks serve from threads of this process, each with its own experts."""
        topology = afd_ops.Topology(1, ffn_size, self.config.n_routed_experts)
        sizes: dict[str, Any] = dict(hidden=64, topk=self.config.num_experts_per_tok, tokens=ROWS * LENGTH)

        def experts_of(topology: afd_ops.Topology, rank: int) -> afd_ops.Experts:
            own, devices = topology.experts_of(rank), harness.devices(topology)
            device = devices if isinstance(devices, str) else devices[-1]
            return deepseek_v4.load_experts(self.config, Checkpoint(self.folder), own, device=device)

        with harness.serving(topology, experts_of, **sizes, stages=stages, poll_interval=0.1) as (window,):
            model = self.model(RemoteExperts, stages).to(harness.DEVICE)
            assert afd_ops.attach(model, window) == stages * self.config.layers
            yield model

    def agrees(self, logits: Tensor, begin: int = 0) -> bool:
        """logits [B, S, V] of the first B rows, from position `begin`."""
        expected = self.logits[: logits.shape[0], begin : begin + logits.shape[1]]
        return torch.allclose(logits, expected, rtol=0, atol=ATOL)


@pytest.fixture(scope="module", params=list(VARIANTS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made("plain", tmp_path_factory)


MADE: dict[str, Reference] = {}


def made(name: str, factory: pytest.TempPathFactory) -> Reference:
    if name not in MADE:
        MADE[name] = Reference(VARIANTS[name], factory.mktemp(name))
    return MADE[name]


def zeros(count: int = ROWS) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def ragged(reference: Reference, model: Any, step: Any, starts: list[int], steps: int) -> bool:
    """Prompts of different lengths into the rows, then `steps` decode steps of all rows together."""
    every, device = torch.arange(ROWS), harness.DEVICE
    for row, length in enumerate(starts):
        if length:
            model(reference.tokens[row : row + 1, :length].to(device), zeros(1).to(device), row)
    fine = True
    for turn in range(steps):
        positions = torch.tensor(starts) + turn
        logits = step(reference.tokens[every, positions][:, None].to(device), positions.to(device))[:, 0].cpu()
        fine &= torch.allclose(logits, reference.logits[every, positions], rtol=0, atol=ATOL)
    return fine


# Results.


def test_a_whole_prompt_gives_the_reference_logits(reference: Reference) -> None:
    assert reference.agrees(reference.whole()(reference.tokens, zeros()))


@pytest.mark.parametrize("ffn_size", [2, 3])
def test_split_over_ffn_ranks_prompt_and_decode_give_the_reference_logits(reference: Reference, ffn_size: int) -> None:
    """61 decode steps: seven windows of every kind and more."""
    with reference.split(ffn_size) as model:
        assert reference.agrees(model(reference.tokens, zeros()))
        for position in range(LENGTH):
            logits = model(reference.tokens[:, position : position + 1], torch.full((ROWS,), position))
            assert reference.agrees(logits, position), position


@pytest.mark.parametrize("chunk", [5, 17])
def test_a_prompt_may_come_in_chunks(plain: Reference, chunk: int) -> None:
    model = plain.whole()
    for start in range(0, LENGTH, chunk):
        logits = model(plain.tokens[:, start : start + chunk], torch.full((ROWS,), start))
        assert plain.agrees(logits, start), start


def test_rows_stand_at_different_positions_and_start_again_without_clearing(plain: Reference) -> None:
    with plain.split(2) as model:
        assert ragged(plain, model, model, [0, 7, 30], 31)
        assert ragged(plain, model, model, [3, 0, 12], 20)


def test_clear_removes_what_a_failed_step_left(plain: Reference) -> None:
    """fault: NaN in a slot that is masked still reaches the output, as 0 x NaN."""
    model = plain.whole()
    model.embed_tokens.weight.mul_(float("nan"))
    assert model(plain.tokens, zeros()).isnan().all()
    deepseek_v4.load(model, Checkpoint(plain.folder))
    assert not plain.agrees(model(plain.tokens[:, :1], zeros()))
    model.clear()
    assert plain.agrees(model(plain.tokens[:, :1], zeros()))


def test_two_ubatches_interleave_between_dispatch_and_combine(plain: Reference) -> None:
    """Each has its own stage of the window and its own rows of the state."""
    with plain.split(2, stages=2) as model:
        lanes = [(0, 2), (2, 1)]  # first row, rows
        for start, length in ((0, 20), (20, 1), (21, 1)):
            tokens = [plain.tokens[row : row + count, start : start + length] for row, count in lanes]
            begin = [torch.full((count,), start) for _, count in lanes]
            streams = [model.streams(t) for t in tokens]
            for layer in model.layers:
                pending = [
                    layer.before(streams[stage], tokens[stage], begin[stage], row, stage)
                    for stage, (row, _) in enumerate(lanes)
                ]
                streams = [layer.after(pending[stage], stage) for stage in range(2)]
            assert plain.agrees(torch.cat([model.logits(s) for s in streams]), start)


def test_the_clamp_acts_in_the_variant(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else its parity would say nothing about the clamp."""
    reference = made("variant", tmp_path_factory)
    model = reference.whole()
    for layer in model.layers:
        layer.ffn.shared_experts.limit = 10.0
    assert not reference.agrees(model(reference.tokens, zeros()))
    model = reference.whole()
    for layer in model.layers:
        layer.ffn.experts[0].experts = afd_ops.GroupedSwiGLU(
            list(reference.experts.gate_up), list(reference.experts.down), limit=10.0
        )
    assert not reference.agrees(model(reference.tokens, zeros()))


def test_the_bias_changes_the_selection_and_not_the_weights(plain: Reference) -> None:
    gate = plain.whole().layers[1].ffn.gate
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    ids, weights = gate(x, zeros(200))
    score = nn.functional.softplus(x @ gate.weight.T).sqrt().gather(1, ids)
    torch.testing.assert_close(weights, score / score.sum(1, keepdim=True) * gate.scale)
    gate.bias.zero_()
    changed = (ids.sort(1).values != gate(x, zeros(200))[0].sort(1).values).any(1)
    assert 0 < changed.sum() < 200


def test_local_experts_skip_padding_and_count_duplicates_twice(plain: Reference) -> None:
    local = LocalExperts(1, plain.experts, 8)
    generator = torch.Generator().manual_seed(4)
    x, weights = torch.randn(9, 64, generator=generator), torch.rand(9, 3, generator=generator)
    ids = torch.randint(-1, 3, (9, 3), generator=generator)  # most experts get nothing

    def expert(index: int, row: Tensor) -> Tensor:
        gate, up = (plain.experts.gate_up[1][index] @ row).chunk(2)
        hidden = nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        return plain.experts.down[1][index] @ hidden

    base = torch.randn(9, 64, generator=generator)
    expected = base + routed_sum(x, ids, weights, expert)
    torch.testing.assert_close(local.combine(local.dispatch(x, ids, weights), base), expected)


@pytest.mark.gpu
def test_sinkhorn_is_the_same_on_a_gpu() -> None:
    for shape in ((1, 1, 4, 4), (128, 1, 4, 4), (5, 61, 4, 4)):
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
        expected = torch.ops.deepseek_v4.sinkhorn(logits, 20, 1e-6)
        torch.testing.assert_close(torch.ops.deepseek_v4.sinkhorn(logits.cuda(), 20, 1e-6).cpu(), expected)


# Weights and sizes.


class Spy(Checkpoint):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[str] = []

    def get(self, name: str, shape: Any) -> Tensor:
        self.read.append(name)
        return super().get(name, shape)


def test_a_rank_reads_its_own_weights_and_all_are_read_once(plain: Reference) -> None:
    """fault: a rank that loads the whole model before it keeps its share."""
    model = DeepseekV4(plain.config, RemoteExperts, rows=1, positions=8)
    attention, ffn = Spy(plain.folder), [Spy(plain.folder) for _ in range(3)]
    deepseek_v4.load(model, attention)
    topology = afd_ops.Topology(1, 3, plain.config.n_routed_experts)
    for rank, source in enumerate(ffn):
        own = topology.experts_of(rank)
        deepseek_v4.load_experts(plain.config, source, own)
        assert {int(re.findall(r"\.ffn\.experts\.(\d+)\.w", name)[0]) for name in source.read} == set(own)
    assert not [name for name in attention.read if ".experts." in name]
    everything = sorted(name for source in (attention, *ffn) for name in source.read)
    assert everything == sorted(attention._files), "each weight of the files is read by exactly one rank"


def test_a_missing_or_misshapen_weight_is_named(plain: Reference) -> None:
    source = Checkpoint(plain.folder)
    with pytest.raises(ValueError, match=r"no weight model\.layers\.9\.attn_norm\.weight"):
        source.get("model.layers.9.attn_norm.weight", (64,))
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* has shape \[64\], expected \[65\]"):
        source.get("model.norm.weight", (65,))


def test_random_weights_do_not_depend_on_who_makes_them(plain: Reference) -> None:
    whole = deepseek_v4.load_experts(plain.config, Random(7), range(8))
    part = deepseek_v4.load_experts(plain.config, Random(7), [5, 2])
    assert torch.equal(whole.gate_up[3][[5, 2]], part.gate_up[3])
    assert torch.equal(whole.down[3][[5, 2]], part.down[3])


def test_flash_and_pro_have_their_layers() -> None:
    for config, kinds in ((deepseek_v4.FLASH, (2, 21, 20)), (deepseek_v4.PRO, (0, 30, 31))):
        assert tuple(map(config.layer_types.count, (SLIDING, CSA, HCA))) == kinds
        assert config.mlp_layer_types[:4] == (HASH, HASH, HASH, LEARNED)
        assert config.compress_rates == {CSA: 4, HCA: 128}
    with pytest.raises(ValueError, match="scoring_func is 'softmax', expected 'sqrtsoftplus'"):
        Config.from_dict({**SMALL, "scoring_func": "softmax"})


# Compiled.


def test_decode_is_one_graph_for_all_steps_and_positions(plain: Reference) -> None:
    """faults: a graph per step or position; a graph break at a layer."""
    counter = CompileCounterWithBackend("aot_eager")
    with plain.split(2) as model:
        step = torch.compile(model, backend=counter, fullgraph=True)
        assert ragged(plain, model, step, [0, 7, 30], 31)
    assert counter.frame_count == 1
    called = [str(n.target) for n in counter.graphs[0].graph.nodes if str(n.target).startswith("afd.")]
    assert [name.split(".")[1] for name in called] == ["dispatch", "combine"] * plain.config.layers


@pytest.mark.gpu
def test_on_gpus_decode_is_recorded_once_and_replayed(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """faults: state that cudagraph trees take for mutated inputs, and skip; a recording per step."""
    monkeypatch.setattr(harness, "DEVICE", "cuda:0")
    counters.clear()
    options = {"triton.cudagraphs": True, "reorder_for_peak_memory": False}
    with plain.split(2) as model:
        step = torch.compile(model, fullgraph=True, options=options)
        assert ragged(plain, model, step, [0, 7, 30], 31)
        manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
        assert manager is not None
        assert manager.new_graph_id().id == 1  # counts recordings from 0
    assert (counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]) == (1, 0)


def test_layers_of_a_kind_share_one_compile(plain: Reference) -> None:
    """Three kinds in four layers: sliding by token id, CSA, HCA."""
    counter = CompileCounterWithBackend("eager")
    with plain.split(2) as model:
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        with torch.compiler.set_stance("force_eager"):
            model(plain.tokens[:, :9], zeros())
        for position in range(9, 14):
            logits = model(plain.tokens[:, position : position + 1], torch.full((ROWS,), position))
            assert plain.agrees(logits, position)
    assert counter.frame_count == 3


class NoAttention(nn.Module):
    def forward(self, x: Tensor, start: Tensor, row: int) -> Tensor:
        return x


def test_inductor_keeps_shared_expert_sinkhorn_and_mixing_between_dispatch_and_combine(
    plain: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fault: all of it behind combine, where nothing overlaps with the experts."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with plain.split(2) as model:
        layer = model.layers[0]
        layer.attn = NoAttention()  # two thirds of the compile, and none of what is looked at
        step = (model.streams(plain.tokens[:, :1]), plain.tokens[:, :1], zeros())
        expected = layer(*step)
        settings = inductor_config.patch(fx_graph_cache=False, compile_threads=1)
        with settings, functorch_config.patch(enable_autograd_cache=False):
            compiled = torch.compile(layer, fullgraph=True, options={"reorder_for_peak_memory": False})
            out, (code,) = run_and_get_code(compiled, *step)
        torch.testing.assert_close(out, expected, rtol=0, atol=ATOL)
        with what_runs(model.config.moe_intermediate_size) as ran:
            compiled(*step)
    begin, end = ran.index("dispatch"), ran.index("combine")
    assert sorted(ran[begin + 1 : end]) == ["computed_by_now", "shared", "shared", "shared", "sinkhorn"], ran
    assert ran[end + 1 :] == []
    # The mixed streams are made by generated code, which the profiler does not see.
    between = code[code.index("afd.dispatch.default(") : code.index("afd.combine.default(")]
    mixed = re.search(r"deepseek_v4\.computed_by_now\.default\(\w+, \[(\w+)\]\)", between)
    assert mixed, code
    assert re.search(rf"\b{mixed[1]} = empty_strided_cpu\(\({ROWS}, 1, 4, 64\)", between), code


@contextmanager
def what_runs(shared: int) -> Iterator[list[str]]:
    """Our ops as they really ran, and the products with a shared expert's matrices, by their inner width."""
    ran: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield ran
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name.startswith(("afd::dispatch", "afd::combine", "deepseek_v4::")):
            ran.append(event.name.split("::")[1])
        elif event.name == "aten::mm" and any(shared in shape for shape in event.input_shapes):
            ran.append("shared")
