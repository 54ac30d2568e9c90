"""Words for gains and goals, for each objective, and for numbers of things. Pure."""

from __future__ import annotations

from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio

__all__ = ["FIGURES", "counted", "gain_in_words", "goal_of", "use_of"]

# The figure of each objective, as a table's heading.
FIGURES = {"throughput": "speed", "memory": "peak memory", "energy": "energy per sample"}
_WHAT = {"memory": "memory of the baseline", "energy": "energy of the baseline per sample"}


def goal_of(objective: Objective) -> str:
    """Returns the goal for a policy: "to be faster", "to use less memory at the baseline's throughput"."""
    match objective.name:
        case "throughput":
            return "to be faster"
        case "energy":
            return "to use less energy per sample"
        case "memory":
            return f"to use less memory at {_least_speed(objective)}"


def gain_in_words(objective: Objective, gain: Ratio | None, speedup: Ratio | None) -> str:
    """Returns the gain of a policy that was compared with the baseline, with intervals if there are any.

    For example "1.52× [1.50, 1.54] the speed of the baseline", or "uses 0.61 times the memory of the baseline at 1.02
    times its throughput".
    """
    if gain is None or speedup is None:
        return "not compared"
    if objective.name == "throughput":
        return f"{gain} the speed of the baseline"
    return f"{use_of(objective, gain)} at {speedup.in_words()} times its throughput"


def use_of(objective: Objective, gain: Ratio) -> str:
    """Returns a policy's use of memory or energy: "uses 0.61 times the memory of the baseline"."""
    return f"uses {gain.inverse.in_words()} times the {_WHAT[objective.name]}"


def counted(number: int, what: str) -> str:
    """Returns a number of things in words: `1 trial`, `2 processes`."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _least_speed(objective: Objective) -> str:
    share = objective.least_speed
    return "the baseline's throughput" if share == 1 else f"{share:g} times the baseline's throughput"
