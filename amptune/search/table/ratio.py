"""A ratio of two policies with its interval and its probabilities. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

__all__ = ["CONFIRMED", "LIKELY", "Confidence", "Ratio", "chance_in_words", "confidence_of"]

# A gain is confirmed, or likely, with this probability. A likely one is written as provisional if its whole
# interval lies above 1 as well; with less, the baseline stays.
CONFIRMED, LIKELY = 0.995, 0.9
# An interval that holds 1 and reaches so many times the value says nothing.
TOO_WIDE = 4.0
# A ratio so near to 1 is shown with one decimal more.
SMALL, MOST_DIGITS = 0.05, 3
Confidence = Literal["confirmed", "likely", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio in a later sitting, with its 95 % interval; above 1 is better; `launches` is the fewer of the two's.

    On the logarithm it is Student's t with the scale `deviation` and so many degrees of `freedom`.
    """

    value: float
    low: float
    high: float
    launches: int = 0
    deviation: float = 0.0
    freedom: float = math.inf

    @staticmethod
    def of_log(log: float, deviation: float, *, freedom: float, launches: int) -> Ratio:
        """Returns the ratio whose logarithm is `log`, with that deviation."""
        half = _t(round(max(1.0, freedom), 2)) * deviation
        return Ratio(
            value=_exp(log),
            low=_exp(log - half),
            high=_exp(log + half),
            launches=launches,
            deviation=deviation,
            freedom=freedom,
        )

    def chance_above(self, value: float) -> float:
        """Returns the probability that the ratio is above `value`."""
        from scipy.special import stdtr

        distance = math.log(self.value / value)
        if self.deviation == 0.0:
            return float(distance > 0)
        return float(stdtr(max(1.0, self.freedom), distance / self.deviation))

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def inverse(self) -> Ratio:
        """The ratio of the same two policies in the other order."""
        return Ratio(
            value=1 / self.value,
            low=1 / self.high,
            high=1 / self.low if self.low > 0 else math.inf,
            launches=self.launches,
            deviation=self.deviation,
            freedom=self.freedom,
        )

    def __str__(self) -> str:
        return self.in_words("×")

    def in_words(self, unit: str = "") -> str:
        """Returns the value and its interval, such as "1.52× [1.50, 1.54]"; the value alone if it reads the same."""
        if self._says_nothing:
            return f"{self.number}{unit} (too noisy to tell)"
        low, high = (f"{limit:.{self.digits}f}" for limit in (self.low, self.high))
        return f"{self.number}{unit}" + ("" if low == high else f" [{low}, {high}]")

    @property
    def number(self) -> str:
        """The value alone, such as "1.52"."""
        return f"{self.value:.1g}" if self._says_nothing else f"{self.value:.{self.digits}f}"

    @property
    def _says_nothing(self) -> bool:
        return self.low < 1 < self.high and self.high > TOO_WIDE * self.value

    @property
    def digits(self) -> int:
        """The number of decimals to show: as many as the interval carries."""
        half = (self.high - self.low) / 2
        most = MOST_DIGITS if abs(self.value - 1) < SMALL else 2
        return min(most, max(1, math.ceil(-math.log10(half)))) if half > 0 else most


def confidence_of(chance: float) -> Confidence:
    """Returns how sure something of this probability is."""
    return "confirmed" if chance >= CONFIRMED else "likely" if chance >= LIKELY else "undecided"


def chance_in_words(chance: float) -> str:
    """Formats a probability: "97.2 %", and nothing nearer to certainty than "over 99.9 %"."""
    return "over 99.9 %" if chance > 0.999 else f"{100 * chance:.1f} %"


@cache
def _t(freedom: float) -> float:
    """Returns the 97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf
