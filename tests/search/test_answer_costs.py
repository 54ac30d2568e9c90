"""The seconds that are kept for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from measurements import took
from tables import BF16, FP16

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import STOCK, Policy
from amptune.search.answer_costs import turn_s
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
