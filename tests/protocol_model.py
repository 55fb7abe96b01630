"""Explicit-state model checker of the flag protocol, the host mailbox, the batching cursor and the early receive.

    python tests/protocol_model.py              what was explored, and what each mistake leads to
    python tests/protocol_model.py --large      two larger configurations as well
    python tests/protocol_model.py MISTAKE ...  the counterexamples of these mistakes

What ``model_checker.explore`` checks of four models: ``Protocol`` in a ``Config`` (flag_model.py), ``Mailbox``
(mailbox_model.py), ``Batching`` (batching_model.py) and ``EarlyReceive`` (early_model.py).

The switches of these four are on for the protocol as built; each one turned off is one mistake.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from batching_model import Batching, BatchingModel
from early_model import EarlyModel, EarlyReceive
from flag_model import Config, FlagModel, Protocol
from mailbox_model import Mailbox, MailboxModel
from model_checker import Kind, Model, Result, explore

AnyProtocol = Protocol | Mailbox | Batching | EarlyReceive


def model_of(protocol: AnyProtocol, config: Config | None = None) -> Model[Any]:
    """The model of ``protocol``; of the flag protocol in ``config``."""
    if isinstance(protocol, Mailbox):
        return MailboxModel(protocol)
    if isinstance(protocol, Batching):
        return BatchingModel(protocol)
    if isinstance(protocol, EarlyReceive):
        return EarlyModel(protocol)
    return FlagModel(protocol, config or Config())


def check(protocol: AnyProtocol, config: Config | None = None) -> Result:
    """Explore every reachable state of ``protocol``."""
    return explore(model_of(protocol, config))


@dataclass(frozen=True)
class Case:
    """Something to check; ``expected`` are kinds of violation that must be among those found."""

    name: str
    protocol: AnyProtocol
    config: Config | None = None
    expected: frozenset[Kind] = frozenset()

    def run(self) -> Result:
        """Check it."""
        return check(self.protocol, self.config)


def _as_built(*configs: Config) -> tuple[Case, ...]:
    return tuple(Case(str(config), Protocol(), config) for config in configs)


def _mistake(
    name: str,
    protocol: AnyProtocol,
    expected: str,
    config: Config | None = None,
) -> Case:
    return Case(name, protocol, config, frozenset(Kind[kind] for kind in expected.split()))


ONE: Final = ("DC",)

AS_BUILT: Final = (
    *_as_built(
        Config(),
        Config(depth=2, programs=("DDCDCC",)),
        Config(depth=2, programs=("DDCDCC", "DC")),
        Config(programs=("DCDC", "DCDC")),
        Config(attention_ranks=2),
        Config(ffn_ranks=2),
        Config(crashes=1),
        Config(attention_ranks=2, programs=ONE, crashes=1),
        Config(ffn_ranks=2, programs=ONE, crashes=1),
        Config(attention_ranks=2, programs=ONE, exceptions=1),
        Config(attention_ranks=2, programs=ONE, deadlines=1),
        Config(ffn_ranks=2, programs=ONE, deadlines=1),
        Config(resets=1),
        Config(programs=ONE, resets=2),
        Config(programs=ONE, deadlines=1, resets=1),
        Config(depth=2, programs=("DDCC",), resets=1),
        Config(programs=ONE * 2, resets=1),
        Config(attention_ranks=2, programs=ONE, resets=1),
        Config(ffn_ranks=2, programs=ONE, resets=1),
        Config(attention_ranks=2, programs=ONE, deadlines=1, resets=1),
    ),
    Case("mailbox, N = 1", Mailbox(queued=1)),
    Case("mailbox, N = 2", Mailbox(queued=2)),
    Case("mailbox, N = 3", Mailbox(queued=3)),
    Case("batching, 3 regions", Batching(regions=3, each=1, patience=2, region_patience=2)),
    Case("batching, 3 slots", Batching(regions=1, each=3, patience=2, region_patience=0)),
    Case("batching, 2 regions of 2", Batching()),
    Case("early receive", EarlyReceive()),
)
"""The protocol as built, where the tests check it: no violation, and some run gets all its work done."""

AS_BUILT_LARGE: Final = _as_built(
    Config(attention_ranks=2, ffn_ranks=2, programs=ONE),
    Config(attention_ranks=2, programs=ONE * 2),
)
"""Too long for a test."""

_RESET: Final = Config(programs=ONE, resets=1)
_ONE_ATTENTION_RANK_DIES: Final = Config(attention_ranks=2, programs=ONE, crashes=1)
_ONE_FFN_RANK_DIES: Final = Config(ffn_ranks=2, programs=ONE, crashes=1)
_DEADLINE: Final = Config(attention_ranks=2, programs=ONE, deadlines=1)
_TWO_STAGES: Final = Config(programs=ONE * 2)
_HELD_STAGE: Final = Config(depth=2, programs=("DCDC", "DC"))

MISTAKES: Final = (
    _mistake("flag_not_released_after_data", Protocol(flag_released_after_data=False), "TORN_READ"),
    _mistake("ffn_reset_not_fenced", Protocol(ffn_reset_fenced=False), "LOST_FLAG DEADLOCK"),
    _mistake("ffn_reset_after_publish", Protocol(ffn_reset_before_publish=False), "LOST_FLAG DEADLOCK"),
    _mistake("attention_reset_not_fenced", Protocol(attention_reset_fenced=False), "LOST_FLAG DEADLOCK"),
    _mistake("taken_cleared_before_reset", Protocol(taken_cleared_after_reset=False), "READ_TWICE"),
    _mistake("flag_read_before_taken", Protocol(taken_read_before_flag=False), "READ_TWICE"),
    _mistake("sequence_of_all_stages", Protocol(sequence_per_stage=False), "FALSE_BUSY", _HELD_STAGE),
    _mistake("ring_of_all_stages", Protocol(sequence_per_stage=False), "FALSE_BUSY", _TWO_STAGES),
    _mistake(
        "busy_ring_overwritten",
        Protocol(busy_ring_refused=False),
        "UNREAD_OVERWRITTEN LOST_FLAG DEADLOCK",
        Config(programs=("DDCC",)),
    ),
    _mistake(
        "poison_in_the_flag",
        Protocol(poison_has_own_word=False),
        "POISON_ERASED POISON_OVERWRITTEN NOT_TOLD",
        Config(crashes=1),
    ),
    _mistake("poison_not_passed_on", Protocol(errors_poison_peers=False), "NOT_TOLD", _ONE_FFN_RANK_DIES),
    _mistake("own_deadline_not_told", Protocol(errors_poison_peers=False), "NOT_TOLD", _DEADLINE),
    _mistake(
        "one_failure_stops_all_regions",
        Protocol(failure_closes_one_region=False),
        "COLLATERAL",
        _ONE_ATTENTION_RANK_DIES,
    ),
    _mistake("exception_swallowed", Protocol(exception_ends_loop=False), "NOT_TOLD", Config(exceptions=1)),
    _mistake(
        "reset_without_drain",
        Protocol(reset_drains=False),
        "TORN_READ LOST_FLAG FALSE_PROTOCOL_ERROR NOT_CLEAN",
        _RESET,
    ),
    _mistake("reset_without_barrier_1", Protocol(reset_first_barrier=False), "TORN_READ LOST_FLAG", _RESET),
    _mistake("reset_without_barrier_2", Protocol(reset_second_barrier=False), "DEADLOCK", _RESET),
    _mistake("generation_not_checked", Protocol(generation_checked=False), "MISPAIRED", _RESET),
    _mistake("mailbox_with_fewer_entries", Mailbox(enough_entries=False), "ITEM_LOST ITEM_TORN"),
    _mistake("mailbox_with_fewer_buffers", Mailbox(enough_buffers=False), "ROWS_OVERWRITTEN"),
    _mistake("mailbox_gated_on_read", Mailbox(launched_after_reply=False), "ROWS_OVERWRITTEN"),
    _mistake("mailbox_sequence_first", Mailbox(sequence_last=False), "ITEM_TORN"),
    _mistake(
        "batching_from_region_0",
        Batching(regions_take_turns=False, each=1, patience=8, region_patience=8),
        "STARVED",
    ),
    _mistake(
        "batching_from_slot_0",
        Batching(slots_take_turns=False, regions=1, patience=8, region_patience=8),
        "STARVED",
    ),
    _mistake(
        "batching_keeps_the_round",
        Batching(rounds_are_counted_on=False, rows=(1,), patience=8, region_patience=8),
        "STARVED",
    ),
    _mistake(
        "batching_behind_the_last",
        Batching(behind_the_head=False, regions=3, each=1, patience=8, region_patience=8),
        "STARVED",
    ),
    _mistake("early_receive_does_not_wait", EarlyReceive(receive_waits_for_tag=False), "ITEM_OF_ANOTHER"),
    _mistake("early_receive_by_one_tag_for_all", EarlyReceive(tag_of_its_own=False), "ITEM_OF_ANOTHER"),
    _mistake("early_receive_tag_not_released", EarlyReceive(tag_released=False), "ITEM_OF_ANOTHER"),
    _mistake("early_receive_ends_before_arrive", EarlyReceive(receive_ends_behind_arrive=False), "STATE_OLD"),
    _mistake("early_receive_without_arrive", EarlyReceive(no_receive_without_arrive=False), "DEADLOCK"),
)
"""What the design warns of, each planted alone, in a small setting that shows it."""


def main(arguments: list[str]) -> int:
    """Print the table, or the counterexamples of the mistakes named. 1 if something is not as expected."""
    selected = [case for case in MISTAKES if case.name in arguments]
    if not selected:
        selected = [*AS_BUILT, *(AS_BUILT_LARGE if "--large" in arguments else ()), *MISTAKES]
    failures = 0
    for case in selected:
        result = case.run()
        is_as_expected = case.expected <= result.kinds and bool(case.expected) == bool(result.kinds)
        failures += not is_as_expected
        found = ", ".join(f"{each.kind.name} in {len(each.steps)} steps" for each in result.violations)
        surprise = "" if is_as_expected else "   <-- not as expected"
        print(f"{case.name:32}{result.states:7} states {result.seconds:6.2f} s  {found or 'holds'}{surprise}")
        if case.name in arguments:
            for violation in result.violations:
                kind = violation.kind
                print(f"\n{kind.name}: {kind.value}", *violation.steps, sep="\n    ", end="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
