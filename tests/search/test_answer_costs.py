"""The seconds that are kept for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from measurements import took
from tables import BF16, FP16

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import STOCK, Policy
from amptune.search.answer_costs import compared_s, turn_s
from amptune.search.sampler.catalog import Catalog, History
from amptune.search.space.knobs import Space
from amptune.search.table.objective import THROUGHPUT
from amptune.search.table.trial import Trial

RECORDED = replace(BF16, cuda_graphs=True)
NO_KNOBS = Space(architecture="", compute_capability=(), knobs=())


def history_of(blocks: Mapping[Policy, Measurement], seconds: float = 3.0) -> History:
    trials = [Trial(number=i, policy=p, outcome=block, seconds=seconds) for i, (p, block) in enumerate(blocks.items())]
    return History(Catalog(NO_KNOBS, lambda _: STOCK), trials, THROUGHPUT, STOCK)


def test_a_turn_takes_what_the_trial_took_and_draws_its_batches() -> None:
    history = history_of({STOCK: replace(took(), step_ms=(2.0,) * 200)})
    assert turn_s(history, STOCK, 0.5) == 3.5
    assert turn_s(history, BF16, 0.5) == 3.5  # of the others, as nobody has tried it


def test_a_turn_has_more_steps_than_a_trial_of_slow_steps() -> None:
    assert turn_s(history_of({STOCK: replace(took(), step_ms=(50.0,) * 10)}), STOCK, 0.0) == pytest.approx(4.0)
    assert turn_s(history_of({STOCK: replace(took(), step_ms=(200.0,) * 5)}), STOCK, 0.0) == pytest.approx(4.0)


def test_a_graph_that_was_compiled_is_loaded_and_one_that_was_recorded_is_recorded_anew() -> None:
    block = replace(took(startup_s=2.0), step_ms=(2.0,) * 200)
    history = history_of({STOCK: block, FP16.compiled("default"): block, RECORDED: block})
    assert [turn_s(history, policy, 0.0) for policy in (FP16.compiled("default"), RECORDED)] == [1.0, 3.0]


def test_no_time_is_kept_for_a_turn_of_two_that_is_enough_for_one() -> None:
    """With it simulated tunings of 60 s lost 39 % in place of 24: trials were cut short, and 8 s were left."""
    slow, fast = replace(took(100.0), step_ms=(100.0,) * 200), replace(took(10.0), step_ms=(10.0,) * 200)
    of_baseline = Trial(number=0, policy=STOCK, outcome=slow, seconds=9.0)
    of_best = Trial(number=1, policy=BF16, outcome=fast, seconds=2.0)
    history = History(Catalog(NO_KNOBS, lambda _: STOCK), [of_baseline, of_best], THROUGHPUT, STOCK)

    def kept_s(search_s: float, start_s: float) -> float:
        return compared_s(history, STOCK, start_s=start_s, draw_s=0.0, rounds=0, search_s=search_s, awaits_graph=False)

    assert kept_s(600.0, 1.0) > 2 * 11.0  # two rounds in fresh processes
    assert kept_s(72.0, 8.0) == 11.0  # a turn of both, in the processes that run
    assert kept_s(54.0, 8.0) == 2.0
    assert kept_s(6.0, 8.0) == 1.0
