"""Flag protocol, mailbox, batching cursor and early receive, in every reachable state of small configurations.

As built nothing is violated, and each mistake that the design warns of is found when it is planted.

What is modelled, and what each kind of violation means, is in ``protocol_model.py`` and the models that it names.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest
from batching_model import Batching
from early_model import EarlyReceive
from flag_model import Config, Protocol
from mailbox_model import Mailbox
from model_checker import Kind, Result, explore
from protocol_model import AS_BUILT, MISTAKES, AnyProtocol, Case, check, model_of


@cache
def explored(case: Case) -> Result:
    return case.run()


@pytest.mark.parametrize("case", AS_BUILT, ids=lambda case: case.name)
def test_as_built_nothing_is_violated(case: Case) -> None:
    result = explored(case)
    assert result.violations == ()
    assert result.finished or isinstance(case.protocol, Batching), "nothing ever got its work done"


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_a_planted_mistake_is_found(case: Case) -> None:
    assert case.expected
    assert case.expected <= explored(case).kinds


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_a_counterexample_can_be_replayed(case: Case) -> None:
    """Each step is possible after the one before it, and the last one shows the violation."""
    model = model_of(case.protocol, case.config)
    for violation in explored(case).violations:
        state, shown = model.initial(), None
        for step in violation.steps:
            assert state is not None, "a step after the end of the path"
            ((_, state, shown),) = [possible for possible in model.steps(state) if possible[0] == step]
        if shown is not violation.kind:
            assert not list(model.steps(state))
            assert model.verdict(state) is violation.kind


def test_every_switch_is_planted_alone() -> None:
    def switches(protocol: AnyProtocol) -> dict[str, bool]:
        values = {field.name: getattr(protocol, field.name) for field in fields(protocol)}
        return {name: value for name, value in values.items() if isinstance(value, bool)}

    as_built = (Protocol(), Mailbox(), Batching(), EarlyReceive())
    assert all(all(switches(protocol).values()) for protocol in as_built)
    planted = [[name for name, is_on in switches(case.protocol).items() if not is_on] for case in MISTAKES]
    assert all(len(names) == 1 for names in planted)
    assert {names[0] for names in planted} == {name for protocol in as_built for name in switches(protocol)}


def test_every_kind_of_violation_has_an_example() -> None:
    assert {kind for case in MISTAKES for kind in explored(case).kinds} == set(Kind)


def test_a_dispatch_beyond_the_depth_is_refused_and_never_written() -> None:
    for depth, program in ((1, "DDCC"), (2, "DDDCCC")):
        result = check(Protocol(), Config(depth=depth, programs=(program,)))
        assert result.violations == ()
        assert result.finished == 0


def test_the_late_flag_of_an_undrained_reset_meets_a_new_header_over_an_empty_payload() -> None:
    case = next(case for case in MISTAKES if case.name == "reset_without_drain")
    torn = next(found for found in explored(case).violations if found.kind is Kind.TORN_READ)
    assert "F0 zeroes its memory" in torn.steps
    assert torn.steps[-1] == (
        "F0 receives from A0 (stage 0, ring 0): header request 0 of stage 0 of generation 1, payload nothing"
    )


def test_poison_in_the_flag_is_lost_in_both_ways() -> None:
    case = next(case for case in MISTAKES if case.name == "poison_in_the_flag")
    last_step = {found.kind: found.steps[-1] for found in explored(case).violations}
    assert last_step[Kind.POISON_ERASED].startswith("EMPTY lands in the flag")
    assert last_step[Kind.POISON_OVERWRITTEN].startswith("READY lands in the flag")


def test_a_configuration_that_is_too_large_is_refused() -> None:
    model = model_of(Protocol(), Config(attention_ranks=2, ffn_ranks=2))
    with pytest.raises(RuntimeError, match="more than 1000 states"):
        explore(model, limit=1000)
