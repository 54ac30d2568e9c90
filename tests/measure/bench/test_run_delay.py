"""How long threads waited for a CPU, read from files as Linux writes them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from amptune.measure.bench.run_delay import RunDelays, host_delay, read_run_delays


def delays(at_s: float, **threads: float) -> RunDelays:
    return RunDelays(waited_s=tuple((ord(name), seconds) for name, seconds in threads.items()), at_s=at_s)


@pytest.mark.parametrize(
    ("threads", "waiting"),
    [
        ({"17": "9000000000 1500000000 42\n", "18": "1000 0 7\n"}, {17: 1.5, 18: 0.0}),  # the second field, in ns
        ({"17": "9 2000000000 3", "18": None}, {17: 2.0}),  # a thread that ends meanwhile
        ({"17": "9000 0 3\n"}, {17: 0.0}),  # a counter that stands still beside counted work
        ({"17": "0 0 0\n", "18": "0 0 0\n"}, None),  # the kernel does not count
        ({"17": None}, None),  # a system without the files
    ],
)
def test_the_waiting_times_of_all_threads_are_read(
    tmp_path: Path, threads: dict[str, str | None], waiting: dict[int, float] | None
) -> None:
    for thread, text in threads.items():
        (tmp_path / thread).mkdir()
        if text is not None:  # else it has ended
            (tmp_path / thread / "schedstat").write_text(text)
    reading = read_run_delays(tmp_path)
    assert (None if reading is None else dict(reading.waited_s)) == waiting
    assert reading is None or reading.at_s <= time.monotonic()
    assert read_run_delays(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("before", "after", "delay"),
    [
        (delays(1.0, a=5.0, b=7.0), delays(3.0, a=5.2, b=7.6), 0.3),  # of the thread that waited longest
        (delays(1.0, a=5.0, b=90.0), delays(2.0, a=5.4), 0.4),  # another has ended
        (delays(1.0, a=5.0), delays(2.0, a=5.0, b=0.4), 0.4),  # it began between the readings
        (delays(1.0, a=5.0), delays(2.0, a=0.1), 0.0),  # a new thread with the id of an ended one
        (delays(1.0), delays(2.0), 0.0),
        (None, delays(2.0, a=1.0), None),
        (delays(1.0, a=1.0), None, None),
        (delays(2.0, a=1.0), delays(2.0, a=1.0), None),  # no time between them
    ],
)
def test_the_delay_is_that_of_the_thread_that_waited_longest(
    before: RunDelays | None, after: RunDelays | None, delay: float | None
) -> None:
    found = host_delay(before, after)
    assert found == (None if delay is None else pytest.approx(delay))
