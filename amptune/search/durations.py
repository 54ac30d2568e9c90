"""How long each job takes, and what the answer still needs: the one place that estimates seconds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

from amptune.measure.results.outcome import Measurement
from amptune.measure.results.training_runs import THOROUGHNESS
from amptune.policy.setting_effects import graph_of, process_of
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.measuring import turn_of
from amptune.search.plan.budget import SHORT_S
from amptune.search.state import State
from amptune.search.table.contenders import PROCESSES
from amptune.search.table.trial import Trial

__all__ = ["Durations"]

# A trial has at least so many steps, the first ones and some of its warm-up included.
LEAST_STEPS = 12
# Of a trial before any was made; of a kind of trial that looks for cuDNN's plans, which took ResNet-50 10 to 25 s on an
# H200, besides; and of graphs whose kernels are timed.
GUESSED_TRIAL_S, BENCHMARK_S, AUTOTUNE_S = 3.0, 10.0, 300.0
# Compile time by the model's number of leaf modules: VGG16 (53) took 10 to 17 s, BERT-base (105) 15 to 20, ResNet-50
# (155) 25 to 35, SE-ResNeXt50 (235) 40, DeepLabV3+ (334) 54 to 70, DenseNet-161 (489) 91 to 115, each compiled alone
# (on H200s of several hosts; reports/h200/rivals). A graph twice as large takes more than twice as long.
FIXED_S, LEAF_S, PAIR_OF_LEAVES_S = 10.0, 0.1, 0.0002
# A host may need so many times as long: Swin-T's graph took 73 s in place of 27 (reports/h100/foreign), and on a
# slower host it had not come after 100.
SLOW_HOST = 4.0
# Loading a graph from the compiler's cache takes this share of compiling it: 2.5 of 25 to 40 s for ResNet-50
# (reports/h200/oracle). The gate compiles a graph anew for its batches, in so many times the seconds (BERT-base: 31
# instead of 27).
CACHED_GRAPH, JUDGED_GRAPH = 0.1, 1.3
# Each further process that starts beside one makes starting them take longer by this share of one's time: six took 12 s
# on the host of an H200, one 6 s.
BESIDE = 0.2
# Each further graph makes compiling take longer by this share: eight on sixteen cores of a fast host took 1.7 times as
# long as one (reports/h200/oracle), three on those of a slow one twice as long.
BESIDE_GRAPHS = 0.3
# Timing every module takes about this long for each: 3.6 s for 1,000 modules (reports/numerics/h200/sensing.txt).
# What is looked at besides takes some steps, and a while.
MODULE_S, SENSED_STEPS, SENSE_S = 0.004, 4, 2.0
# A cure takes as many judgements.
CURE_JUDGEMENTS = 10
# The comparison is left this share of the time after the workload was built: with a quarter, simulated tunings of 120 s
# lost 7.6 % in place of 4.5 %.
COMPARISON_SHARE = 1 / 6
# Settings of the loader are tried for so many seconds, or this share of the budget: each starts processes.
LOADERS_S, LOADERS_SHARE = 60.0, 0.15


@dataclass(frozen=True)
class Durations:
    """The seconds of jobs, as far as a state tells."""

    state: State

    def trial_s(self, policy: Policy) -> float:
        """Returns the seconds of a trial, compiling included unless that is done in the background or done."""
        if policy in self.state.graphs.known:
            return self.typical_s
        is_new = self._kinds and process_of(policy) not in self._kinds
        seconds = self.typical_s + (self.state.rounds.start_s if is_new else 0.0)
        seconds += BENCHMARK_S if policy.cudnn_benchmark and not self._has_benchmarked else 0.0
        return seconds + self.compile_s(policy) + max(0.0, LEAST_STEPS * self._step_s(policy) - self.typical_s)

    @cached_property
    def _kinds(self) -> set[tuple[bool, ...]]:
        """The kinds of processes that this run's trials were measured in."""
        return {process_of(trial.policy) for trial in self._trials if trial.run == self.state.request.run}

    @cached_property
    def _has_benchmarked(self) -> bool:
        return any(trial.policy.cudnn_benchmark for trial in self._trials)

    def longest_s(self, policy: Policy) -> float:
        """Returns the seconds that a trial may take that compiles its own graph, on a host that may be slow."""
        return self.trial_s(policy) - self.compile_s(policy) + self.slow_compile_s(policy)

    def slow_compile_s(self, policy: Policy) -> float:
        """Returns the seconds to compile a graph on a host that may be slow, unless one was compiled here."""
        compile_s = self.compile_s(policy)
        return compile_s if self._startup_s else SLOW_HOST * compile_s

    def _step_s(self, policy: Policy) -> float:
        """Returns the seconds of a step with another batch, at the leader's speed; 0 if that is unknown."""
        best = self.state.best_trial
        samples = (policy.batch_size or 0) * policy.accumulate
        return samples / best.samples_per_s if best is not None and best.samples_per_s else 0.0

    @cached_property
    def typical_s(self) -> float:
        """The typical seconds of a trial with its graph compiled."""
        return median_low(trial.again_s for trial in self._trials) if self._trials else GUESSED_TRIAL_S

    @property
    def _trials(self) -> Sequence[Trial]:
        return self.state.history.trials

    def compile_s(self, policy: Policy) -> float:
        """Returns the seconds to compile a policy's graph; 0 if it has none or it is in the cache by now."""
        if policy.compile == "off":
            return 0.0
        measured = {one: one_s for one, one_s in self._startup_s.items() if one.compile == policy.compile}
        if any(graph_of(one) == graph_of(policy) for one in measured):
            return 0.0
        blocks = policy.compile == "blocks"
        alike = [seconds for one, seconds in self._startup_s.items() if (one.compile == "blocks") == blocks]
        known = max(measured.values(), default=None) or max(alike, default=None)
        if policy.compile in AUTOTUNED_MODES and not measured:
            return AUTOTUNE_S
        subject = self.state.prepared.subject
        leaves = len(subject.leaves) - (subject.repeated_leaves if blocks else 0)
        return known or FIXED_S + LEAF_S * leaves + PAIR_OF_LEAVES_S * leaves**2

    @cached_property
    def _startup_s(self) -> dict[Policy, float]:
        """The seconds that starting each compiled policy took."""
        compiled = (trial for trial in self._trials if trial.policy.compile != "off")
        return {one.policy: one.outcome.startup_s for one in compiled if isinstance(one.outcome, Measurement)}

    def beside_s(self, policy: Policy) -> float:
        """Returns the seconds to compile a policy's graph beside those that compile now."""
        return self.compile_s(policy) * (1 + BESIDE_GRAPHS * len(self.state.graphs.begun))

    @cached_property
    def is_late(self) -> bool:
        """True if a graph that compiles may come too late to be measured, on a host that may be slow."""
        spent_s, begun = self.state.spent_s, self.state.graphs.begun
        return any(self.slow_compile_s(one) - (spent_s - at_s) > self.spare_s for one, at_s in begun.items())

    def remaining_s(self, policy: Policy) -> float:
        """Returns the seconds until a graph that compiles is ready; less than 0 if it is overdue."""
        return (
            self.compile_s(policy)
            + self.state.rounds.start_s / 2
            - (self.state.spent_s - self.state.graphs.begun[policy])
        )

    def judge_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a policy without its graph; 0 if that is done."""
        if not self.state.judgements.is_open(policy):
            return 0.0
        least = THOROUGHNESS[-1]
        measured = (trial.outcome for trial in self._trials)
        step_ms = max((one.mean_ms for one in measured if isinstance(one, Measurement)), default=0.0)
        # the first one: the fewest steps that tell, in FP32 and in half, and all besides
        guessed_s = SHORT_S + 3 * (least.gradient_steps + least.curve_steps) * step_ms / 1000
        return self.state.judged_s or guessed_s

    def judge_graph_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a compiled policy with its graph, which is compiled anew for that."""
        seen = [seconds for one, seconds in self._startup_s.items() if graph_of(one) == graph_of(policy)]
        return JUDGED_GRAPH * max(seen, default=self.compile_s(policy))

    @property
    def cure_s(self) -> float:
        return CURE_JUDGEMENTS * (self.state.judged_s or SHORT_S)

    @property
    def sense_s(self) -> float:
        """The seconds to time the modules in one memory format, and to look for FP32 products in some steps."""
        steps_s = SENSED_STEPS * (self.state.step_ms(self.state.baseline) or 0.0) / 1000
        return SENSE_S + steps_s + MODULE_S * len(self.state.prepared.subject.leaves)

    @property
    def loaders_s(self) -> float:
        """The seconds to try settings of the loader; 0 if that is done, or the loop does not wait for it."""
        return min(LOADERS_S, LOADERS_SHARE * self.state.request.budget.seconds) if self.state.is_for_loaders else 0.0

    def turn_s(self, policy: Policy) -> float:
        """Returns the seconds of a turn of the user's loop, which has more steps than a trial."""
        if policy in self.state.rounds.costs_s:
            return self.state.rounds.costs_s[policy]
        known = self.state.history.latest.get(policy)
        seconds = self.state.prepared.draw_s + (self.typical_s if known is None else known.again_s)
        if known is not None and isinstance(known.outcome, Measurement):
            more = turn_of(known.outcome.mean_ms).min_steps - len(known.outcome.step_ms)
            seconds += max(0, more) * known.outcome.mean_ms / 1000
        return seconds

    def round_s(self, policies: Sequence[Policy], fresh: bool) -> float:
        """Returns the seconds of a round of these policies."""
        turns_s = sum(map(self.turn_s, policies))
        if not fresh and set(policies) <= set(self.state.running):
            return turns_s
        loads_s = (CACHED_GRAPH * max([self.compile_s(one), self._startup_s.get(one, 0.0)]) for one in policies)
        return self.launch_s(max(loads_s, default=0.0), len(policies)) + turns_s

    def launch_s(self, load_s: float, count: int) -> float:
        """Returns the seconds to start so many processes beside one another."""
        return (self.state.rounds.start_s + load_s) * (1 + BESIDE * (count - 1))

    @cached_property
    def needed_s(self) -> float:
        """The seconds to keep for the answer: for judging the leader and comparing it in fresh processes.

        A trial's time is kept besides, since the last job may take longer than expected. With little time, one turn of
        the baseline and the leader in the processes that run is all.
        """
        if len(self._trials) < 2:
            return 0.0
        judging_s = self.judge_s(self.state.leader)
        pair = self.state.baseline, self.state.leader
        if self.state.rounds.is_over or len(set(pair)) == 1:
            return judging_s
        share_s = COMPARISON_SHARE * (self.state.request.budget.seconds - self.state.built_s)
        fresh_s, count = self.round_s(pair, fresh=True), self.state.rounds.count
        wanted_s = max(0, PROCESSES - count) * fresh_s if count or fresh_s <= share_s else sum(map(self.turn_s, pair))
        compared_s = min(wanted_s, share_s)
        return judging_s + compared_s + self.typical_s

    @property
    def spare_s(self) -> float:
        """The seconds for jobs that the answer does not need."""
        return self.state.left_s - self.needed_s
