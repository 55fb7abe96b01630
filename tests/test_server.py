"""ExpertServer: what it takes together, whom it serves next, what it counts and says. On every device."""

from __future__ import annotations

import io
import random
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import harness
import pytest
import torch
from batching_model import Arrival, Batching, BatchingModel, BatchingState
from harness import expected, random_step

import afd_ops
from afd_ops import _C, metrics

TOPOLOGY = afd_ops.Topology(2, 1, 4)

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("depth", [2, 5])
def test_a_flood_from_one_rank_does_not_hold_up_another(depth: int, seed: int) -> None:
    """One attention rank keeps all of its rings full, each in a layer of its own: no item holds two of them. The
    other sends now and then, and waits for at most one item of the flood."""
    with harness.windows(TOPOLOGY, depth=depth) as (flooding, slow, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0))
        late, flood = harness.remote(slow, 99), [harness.remote(flooding, layer) for layer in range(depth)]
        step = random_step(TOPOLOGY, 4)
        want = expected(TOPOLOGY, *step)
        in_flight = [(module, module.dispatch(*step[:3])) for module in flood]
        waits = []
        for turn in range(25):
            ticket = late.dispatch(*step[:3])
            served = passed_over = 0
            while served == 0:
                harness.synchronize()
                before = ffn.stats()["slots_taken"]
                assert server.step() == 1
                flooded, served = (b - a for a, b in zip(before, ffn.stats()["slots_taken"], strict=True))
                if flooded:  # its rings are answered in their order
                    passed_over += 1
                    module, oldest = in_flight.pop(0)
                    assert torch.equal(module.combine(oldest, step[3]), want)
                    in_flight.append((module, module.dispatch(*step[:3])))
                assert passed_over <= 1, (turn, waits)
            assert torch.equal(late.combine(ticket, step[3]), want)
            waits.append(passed_over)
            for _ in range(turn % 3):  # from another place of the scan each time
                harness.synchronize()
                assert server.step() == 1
                module, oldest = in_flight.pop(0)
                assert torch.equal(module.combine(oldest, step[3]), want)
                in_flight.append((module, module.dispatch(*step[:3])))
        print("items that went first:", waits)


def test_of_many_ready_slots_an_item_takes_what_the_rule_names(seed: int) -> None:
    """More than 32 of a region, of several layers and of none to many rows; until everything is answered, twice."""
    random.seed(seed)
    each, capacity = 35, 32
    model, cursor = BatchingModel(Batching(regions=2, each=each, capacity=capacity)), 0
    with harness.windows(TOPOLOGY, depth=each, rows=capacity) as (*attention, ffn):
        experts = harness.experts_of(TOPOLOGY, 0)
        server = afd_ops.ExpertServer(ffn, experts)
        for _ in range(2):
            slots, flights = [], []
            for window in attention:
                for _ in range(each):
                    layer, step = random.randrange(3), random_step(TOPOLOGY, random.choice((0, 1, 2, 3, 16)))
                    module = harness.remote(window, layer)
                    flights.append((module, module.dispatch(*step[:3]), step))
                    slots.append(Arrival(layer, int((step[1] >= 0).sum())))
            harness.synchronize()
            items = 0
            while any(slots):
                wanted, cursor = model.choose(BatchingState(cursor, tuple(slots), ()))
                item, layer, rows = harness.take(server)
                found = [region * each + ring for region, _, ring, *_ in item[1 : 1 + len(wanted)].tolist()]
                assert found == wanted, items
                taken = [slots[index] for index in wanted]
                assert (int(item[0, _C.ITEM_COUNT]), layer, rows) == (
                    len(wanted),
                    taken[0].layer,
                    sum(arrival.rows for arrival in taken),
                )
                received = torch.ops.afd.receive(item, server.port, ffn.id, capacity)
                torch.ops.afd.reply(experts(*received, layer), item, server.port, ffn.id)
                for index in wanted:
                    slots[index] = None
                items += 1
            print("items", items)
            for module, ticket, step in flights:
                assert torch.equal(module.combine(ticket, step[3]), expected(TOPOLOGY, *step))
        for window in (*attention, ffn):
            window.check()


def test_lingering_waits_for_the_other_attention_ranks(seed: int) -> None:
    """0 takes what is ready. Lingering ends when as many slots are ready as there are attention ranks, or in time."""
    with harness.windows(TOPOLOGY, poll_interval=2.0, rows=64) as (*attention, ffn):
        modules = [harness.remote(window, 5) for window in attention]
        steps = [random_step(TOPOLOGY, 4) for _ in modules]
        for linger, together, apart in ((0.0, [1, 1], 0.1), (1.5, [2], 0.1), (0.01, [1, 1], 0.2)):
            server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0), linger=linger)
            stream = torch.cuda.Stream(ffn.heap.device) if harness.DEVICE != "cpu" else None
            counts: list[int] = []

            def serve(server: afd_ops.ExpertServer = server, counts: list[int] = counts, stream=stream) -> None:  # type: ignore[no-untyped-def]
                with torch.cuda.stream(stream):
                    while sum(counts) < 2:
                        counts.append(server.step())

            thread = threading.Thread(target=serve, daemon=True)
            tickets = [modules[0].dispatch(*steps[0][:3])]
            harness.synchronize()
            thread.start()
            begun = time.monotonic()
            time.sleep(apart)
            tickets.append(modules[1].dispatch(*steps[1][:3]))
            thread.join(10)
            assert not thread.is_alive() and counts == together, (linger, counts)
            assert time.monotonic() - begun < 1.4, "lingering does not end when everybody is there"
            for module, ticket, step in zip(modules, tickets, steps, strict=True):
                assert torch.equal(module.combine(ticket, step[3]), expected(TOPOLOGY, *step))
    with harness.windows(TOPOLOGY) as (*_, ffn):
        for linger in (-1.0, 0.002):
            with pytest.raises(ValueError, match=f"linger is {linger}, expected 0 to less than poll_interval = 0.002"):
                afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0), linger=linger)


def test_lingering_ends_with_the_poll_interval(seed: int) -> None:
    """fault: a slot that becomes ready late in the interval is lingered for, given up, and lingered for again."""
    with harness.windows(TOPOLOGY, poll_interval=2.0) as (attention, _, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0), linger=1.9)
        module, step = harness.remote(attention), random_step(TOPOLOGY, 4)
        stream = harness.server_stream(ffn)
        counts: list[int] = []

        def serve() -> None:
            with torch.cuda.stream(stream):
                counts.append(server.step())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        time.sleep(0.5)
        ticket = module.dispatch(*step[:3])
        thread.join(10)
        assert counts == [1]
        assert torch.equal(module.combine(ticket, step[3]), expected(TOPOLOGY, *step))


def test_lingering_does_not_wait_for_ranks_that_have_ended(seed: int) -> None:
    """fault: once an attention rank had left, every item waited for it as long as the server lingers."""
    with harness.windows(TOPOLOGY, poll_interval=2.0) as (attention, gone, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0), linger=1.5)
        module, step = harness.remote(attention), random_step(TOPOLOGY, 4)
        gone.close()
        ticket = module.dispatch(*step[:3])
        begun = time.monotonic()
        with torch.cuda.stream(harness.server_stream(ffn)):
            assert server.step() == 1
        assert time.monotonic() - begun < 1.0
        assert torch.equal(module.combine(ticket, step[3]), expected(TOPOLOGY, *step))


def test_drain_answers_what_arrived_after_the_last_look(seed: int) -> None:
    """fault: a request comes while an empty step returns, drain() is called, and the server ends without an answer."""
    with harness.windows(TOPOLOGY) as (attention, _, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0))
        module, step, tickets = harness.remote(attention, 5), random_step(TOPOLOGY, 4), []
        one_step = server.step

        def then_a_request() -> int:
            count = one_step()
            if count == 0 and not tickets:
                tickets.append(module.dispatch(*step[:3]))
                harness.synchronize()
                server.drain()
            return count

        server.step = then_a_request  # type: ignore[method-assign]
        server.run()
        assert ffn.stats()["replies"] == 1
        assert torch.equal(module.combine(tickets[0], step[3]), expected(TOPOLOGY, *step))


def answered(windows: Sequence[afd_ops.Window], server: afd_ops.ExpertServer, sizes: Sequence[int]) -> None:
    """A round trip of both attention ranks, in one item."""
    modules = [harness.remote(window, 3) for window in windows]
    steps = [random_step(TOPOLOGY, size) for size in sizes]
    tickets = [module.dispatch(*step[:3]) for module, step in zip(modules, steps, strict=True)]
    harness.synchronize()
    assert server.step() == 2
    for module, ticket, step in zip(modules, tickets, steps, strict=True):
        assert torch.equal(module.combine(ticket, step[3]), expected(TOPOLOGY, *step))


def test_stats_count_items_rows_batches_times_and_regions(seed: int) -> None:
    with harness.windows(TOPOLOGY, rows=64) as (*attention, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0))
        assert server.stats()["items"] == 0 and server.stats()["coverage"] == 0.0
        assert server.step() == 0
        turns = 40
        for _ in range(turns):
            answered(attention, server, (7, 2))
        answered(attention, server, (0, 0))
        harness.synchronize()
        server.step()  # finds the last events done
        found = server.stats()
        assert found["items"] == turns + 1 and found["batch_sizes"] == {2: turns + 1}
        assert (found["replayed"], found["eager"], found["coverage"]) == (0, turns, 0.0)
        assert sum(found["row_counts"].values()) == turns + 1 and found["row_counts"][0] == 1
        assert found["rows"] == sum(region["rows"] for region in found["regions"]) == ffn.stats()["rows"]
        assert [region["slots"] for region in found["regions"]] == [turns + 1] * 2
        assert found["regions"][0]["rows"] > found["regions"][1]["rows"] > 0
        assert [found[f"{phase}_us"]["count"] for phase in metrics.PHASES] == [
            3
        ] * 3  # of 41 items the first of each 16
        assert all(found[f"{phase}_us"]["total"] > 0 for phase in metrics.PHASES)
        assert afd_ops.ladder(found["row_counts"], 64)[-1] <= 64


def test_a_layer_that_there_is_not_closes_the_region_that_names_it_and_no_other(seed: int) -> None:
    """fault: a wild layer from one peer makes the experts raise, and every attention rank is poisoned for it."""
    with harness.windows(TOPOLOGY, layers=4) as (good, bad, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0))
        module, wild = harness.remote(good, 3), harness.remote(bad, 3)
        with pytest.raises(ValueError, match="layer is 4, expected below 4"):
            harness.remote(bad, 4)
        step = random_step(TOPOLOGY, 4)
        if harness.DEVICE == "cpu":
            wild.port[1] = 4
            with pytest.raises(RuntimeError, match="port is for layer 4, expected 0 to 3"):
                wild.dispatch(*step[:3])
            wild.port[1] = 3
        tickets = [wild.dispatch(*step[:3]), module.dispatch(*step[:3])]
        harness.synchronize()
        harness.poke(ffn, ffn.geometry.layout["slots_per_region"], "layer", 4)  # region 1, stage 0, ring 0
        assert server.step() == 1
        assert torch.equal(module.combine(tickets[1], step[3]), expected(TOPOLOGY, *step))
        assert not ffn.errors(), "a slot that has to wait is not checked before its turn"
        assert server.step() == 0
        (record,) = ffn.errors()
        assert (record["kind"], record["peer"]) == ("Protocol", 1)
        assert "rank 1 (attention 1) broke the protocol: layer is 4, expected 3" in record["message"]


def test_buffers_of_another_window_are_refused_by_name() -> None:
    """fault: a server receives into addresses, and would write past the end of a buffer that is too small."""
    if harness.DEVICE != "cpu":
        pytest.skip("these buffers are on the CPU")

    class Experts:
        def __init__(self, inputs: afd_ops.ItemBuffers) -> None:
            self.inputs = inputs

        def __call__(self, *arguments: object) -> torch.Tensor:
            raise NotImplementedError

    fits = afd_ops.ItemBuffers.create(40, 16, 4, torch.float32, "cpu")
    few = afd_ops.ItemBuffers.create(8, 16, 4, torch.float32, "cpu")
    with harness.windows(TOPOLOGY) as (*_, ffn):
        afd_ops.ExpertServer(ffn, Experts(fits))
        for inputs, says in (
            (few, "rows is torch.float32 [8, 16], strides [16, 1], on cpu, this window needs torch.float32 [32, 16]"),
            (replace(fits, rows=torch.empty(16, 40).T), "rows is torch.float32 [40, 16], strides [1, 40]"),
            (replace(fits, rows=fits.rows.bfloat16()), "rows is torch.bfloat16"),
            (replace(fits, scales=torch.empty(40, 1)), "scales is torch.float32 [40, 1]"),
            (replace(fits, offsets=fits.offsets[:3]), "offsets is torch.int32 [3]"),
            (replace(fits, offsets=fits.offsets.to("meta")), "offsets is torch.int32 [4], strides [1], on meta"),
        ):
            with pytest.raises(ValueError, match=re.escape(f"experts.inputs.{says}")):
                afd_ops.ExpertServer(ffn, Experts(inputs))
    with pytest.raises(ValueError, match="device is cpu, expected a GPU"):
        afd_ops.CapturedExperts(Experts(few), rows=8, hidden=16, owned=4, dtype=torch.float32, device="cpu")


def test_expert_weights_that_do_not_fit_are_named() -> None:
    """symptom: a stacked tensor in the place of a list of layers gave answers of uninitialised memory, and no error."""
    gate_up, down = torch.zeros(4, 2 * 8, 16), torch.zeros(4, 16, 8)
    with pytest.raises(ValueError, match=re.escape("gate_up[0] is [16, 16] and down[0] [16, 8], expected a tensor")):
        afd_ops.GroupedSwiGLU(gate_up, down)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("down[0] is [4, 8, 16], expected [4, 16, 8]")):
        afd_ops.GroupedSwiGLU([gate_up], [down.transpose(1, 2)])
    with pytest.raises(ValueError, match=re.escape("down[0] is torch.float64, but gate_up[0] is torch.float32")):
        afd_ops.GroupedSwiGLU([gate_up], [down.double()])
    experts, nothing = afd_ops.GroupedSwiGLU([gate_up], [down]), torch.empty(0)
    two, four = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 1, 2, 2], dtype=torch.int32)
    assert experts(torch.ones(2, 16), nothing, four, 0).shape == (2, 16)
    for rows, offsets, needs in (
        (torch.ones(2, 16), two, "(2, 16, torch.float32)"),
        (torch.ones(2, 24), four, "(4, 24, torch.float32)"),
        (torch.ones(2, 16).bfloat16(), four, "(4, 16, torch.bfloat16)"),
    ):
        says = f"gate_up[0] has (experts, H, dtype) (4, 16, torch.float32), but the items of this rank need {needs}"
        with pytest.raises(ValueError, match=re.escape(says)):
            experts(rows, nothing, offsets, 0)


def test_quantiles_are_upper_bounds() -> None:
    histogram = metrics.Histogram()
    assert histogram.quantile(0.5) == 0.0
    for microseconds in (0.2, 1.0, 1.5, 3.0, 4.0, 100.0, 1e12):
        histogram.add(microseconds)
    assert histogram.counts[:3] == [2, 1, 2] and histogram.counts[7] == 1 and histogram.counts[-1] == 1
    assert histogram.count == 7 and histogram.quantile(0.5) == 4.0 and histogram.quantile(0.8) == 128.0


def test_metrics_are_printed_while_a_server_works(seed: int) -> None:
    with harness.windows(TOPOLOGY, rows=64) as (*attention, ffn):
        server, text = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0)), io.StringIO()
        with metrics.printing(server, text, every=0.2):
            until = time.monotonic() + 0.7
            while time.monotonic() < until:
                answered(attention, server, (3, 3))
        header, *lines = text.getvalue().splitlines()
        assert header == " " * 5 + metrics.HEADER and 2 <= len(lines) <= 4
        for said in lines:
            *name, rate, rows, slots, graphs = said.split()[:6]
            assert name == ["ffn", "0"] and int(rate) > 0 and int(rows) > 0 and slots == "2.00" and graphs == "0%"


def test_prometheus_is_answered_on_request_and_its_absence_is_explained(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    with harness.windows(TOPOLOGY, rows=64) as (*attention, ffn):
        server = afd_ops.ExpertServer(ffn, harness.experts_of(TOPOLOGY, 0))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "prometheus_client", None)  # type: ignore[arg-type]
            with pytest.raises(ImportError, match=re.escape("pip install 'afd_ops[metrics]'")):
                metrics.serve_prometheus(server, 0)
        client: ModuleType = pytest.importorskip("prometheus_client")
        assert client is not None
        answered(attention, server, (3, 3))
        http, thread = metrics.serve_prometheus(server, 0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http.server_port}/metrics", timeout=10) as reply:
                text = reply.read().decode()
        finally:
            http.shutdown()
            http.server_close()
            thread.join(10)
        for said in ("afd_ffn_items_total 1.0", 'afd_ffn_batches_total{slots="2"} 1.0', "afd_ffn_eager_total 1.0"):
            assert said in text
        assert 'afd_ffn_region_slots_total{region="1"} 1.0' in text and "afd_ffn_compute_seconds_bucket" in text
