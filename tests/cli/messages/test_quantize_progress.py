"""What `crelle quantize` shows while it works: stages by name, and time left that is not time elapsed."""

import pytest

from crelle.cli.views.quantize_plan import duration
from crelle.cli.views.quantize_progress import StageClock

PARTS = {"writing": 2.0, "sampling": 60.0, "search": 100.0, "layers": 200.0, "training": 100.0}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_stage_has_a_name_from_its_start() -> None:
    seen, clock = [], StageClock(PARTS, 3)
    assert clock.note == "starting"
    for done, total, note in (
        (1, 100, "sampling calibration text"),
        (1, 13, "search, forward"),
        (10, 40, "model.embed_tokens"),
        (20, 40, "model.layers.0"),
        (30, 40, "model.layers.1"),
        (38, 40, "model.layers.2"),
        (40, 40, "rest"),
        (1, 9, "sampling training text"),
        (1, 9, "full-precision model"),
        (10, 90, "training, loss 0.5"),
    ):
        began = clock.update(done, total, note)
        seen.append((began, clock.stage, clock.note))
    assert seen == [
        (True, "sampling", "sampling calibration text"),
        (True, "search", "search, forward"),
        (True, "layers", "layer 1 of 3"),
        (False, "layers", "layer 2 of 3"),
        (False, "layers", "layer 3 of 3"),
        (True, "writing", "writing"),
        (False, "writing", "writing"),
        (True, "sampling for training", "sampling training text"),
        (True, "teacher", "full-precision model"),
        (True, "end to end", "training, loss 0.5"),
    ]


def test_time_left_is_that_of_the_estimate_corrected_by_the_pace() -> None:
    now = Clock()
    clock = StageClock(PARTS, 10, now)
    clock.update(0, 100, "sampling calibration text")
    assert clock.left() == pytest.approx(462)  # nothing done: the estimate
    now.now += 60
    clock.update(50, 100, "sampling calibration text")  # twice as long as estimated
    assert clock.elapsed == 60
    later = (60 + 0.25 * 462) / (30 + 0.25 * 462) * 402  # slower too, but not by as much: little of the run is seen
    assert clock.left() == pytest.approx(60 + later)
    now.now += 20  # no news: time goes on
    assert clock.left() == pytest.approx(40 + later)
    now.now += 40
    clock.update(100, 100, "sampling calibration text")
    clock.update(0, 41, "search, forward")
    assert clock.left() == pytest.approx((120 + 0.25 * 462) / (60 + 0.25 * 462) * 402)
    assert "elapsed 2 min, left 9 min" in clock.sentence()


def test_without_an_estimate_time_left_is_unknown_until_a_stage_has_a_pace() -> None:
    now = Clock()
    clock = StageClock(None, 10, now)
    now.now += 90
    clock.update(0, 100, "sampling calibration text")
    assert clock.left() is None
    assert clock.sentence().endswith("left ?")  # never the time that has passed
    now.now += 10
    clock.update(10, 100, "sampling calibration text")
    assert clock.left() == pytest.approx(900)  # the stage began with the run


def test_durations_read_as_people_say_them() -> None:
    assert [duration(s) for s in (3.2, 89, 91, 600, 5300, 9000)] == [
        "3 s",
        "89 s",
        "2 min",
        "10 min",
        "88 min",
        "2.5 h",
    ]


def test_the_seconds_of_all_stages_are_those_that_have_passed() -> None:
    now = Clock()
    clock = StageClock(PARTS, 2, now)
    for seconds, note in ((3, "sampling calibration text"), (5, "search, forward"), (7, "model.layers.0"), (2, "rest")):
        now.now += seconds
        clock.update(1, 4, note)
    now.now += 4
    taken = clock.taken()
    assert sum(taken.values()) == pytest.approx(clock.elapsed)
    assert taken["writing"] >= 4
    assert set(taken) <= {"starting", *PARTS}
