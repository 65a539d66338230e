"""Silent and hanging workers are given up; slow ones and our own pauses are not."""

from __future__ import annotations

from loongd.vigil import RestartLimit, Vigil


def _vigil() -> Vigil:
    vigil = Vigil(silence_s=10, stall_s=60)
    vigil.begin(b"0.0", 0.0)
    vigil.begin(b"1.0", 0.0)
    return vigil


def _live(vigil: Vigil, name: bytes, until_s: int, *, layers_per_s: int) -> list[tuple[bytes, str]]:
    """Beats of one worker, and a look, each second."""
    found = []
    for second in range(1, until_s + 1):
        vigil.beat(name, second * layers_per_s, float(second))
        found += vigil.overdue(float(second))
    return found


def test_a_silent_worker_is_given_up_once() -> None:
    vigil = _vigil()
    found = _live(vigil, b"0.0", 30, layers_per_s=1)
    assert found == [(b"1.0", "gave no sign of life for 11 s")]


def test_an_idle_worker_may_stand_still() -> None:
    vigil = Vigil(silence_s=10, stall_s=60)
    vigil.begin(b"0.0", 0.0)
    assert _live(vigil, b"0.0", 200, layers_per_s=0) == []


def test_a_worker_that_hangs_in_a_step_is_given_up() -> None:
    vigil = Vigil(silence_s=10, stall_s=60)
    vigil.begin(b"0.0", 0.0)
    vigil.given_step(b"0.0", 5.0)
    assert _live(vigil, b"0.0", 100, layers_per_s=0) == [(b"0.0", "hung in a step for 61 s")]


def test_a_long_step_that_moves_on_is_not_a_hang() -> None:
    vigil = Vigil(silence_s=10, stall_s=60)
    vigil.begin(b"0.0", 0.0)
    vigil.given_step(b"0.0", 1.0)
    assert _live(vigil, b"0.0", 500, layers_per_s=1) == []


def test_finished_steps_end_the_watch_on_them() -> None:
    vigil = Vigil(silence_s=10, stall_s=60)
    vigil.begin(b"0.0", 0.0)
    vigil.given_step(b"0.0", 1.0)
    vigil.step_over(b"0.0", 2.0)
    assert _live(vigil, b"0.0", 200, layers_per_s=0) == []


def test_a_suspended_machine_kills_nobody() -> None:
    vigil = _vigil()
    assert vigil.overdue(1.0) == []
    assert vigil.overdue(3601.0) == []
    assert vigil.overdue(3602.0) == []


def test_unknown_workers_are_ignored() -> None:
    vigil = _vigil()
    vigil.beat(b"7.0", 1, 1.0)
    vigil.given_step(b"7.0", 1.0)
    vigil.step_over(b"7.0", 1.0)
    vigil.clear()
    assert vigil.overdue(100.0) == []


def test_a_crash_loop_is_noticed_and_old_restarts_are_forgotten() -> None:
    limit = RestartLimit(most=2, window_s=100)
    assert [limit.exceeded(now) for now in (0.0, 10.0, 20.0)] == [False, False, True]
    assert not limit.exceeded(1000.0)
