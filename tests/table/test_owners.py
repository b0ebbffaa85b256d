"""The rows of processes: their lives, whether they are ready, and their beats."""

from __future__ import annotations

from pdrt.shm_status import StatusTable
from tests.table.views import NOW, THEM, US


def test_a_process_is_ready_in_the_life_that_said_so_and_in_no_other(
    pair: list[StatusTable],
) -> None:
    process, supervisor = pair
    assert not supervisor.ready(US.row)
    supervisor.incarnate(US.row, US.incarnation, 4_000_000, "worker0")
    assert supervisor.incarnation(US.row) == US.incarnation
    assert not supervisor.ready(US.row)
    process.announce_ready()
    assert supervisor.ready(US.row)
    supervisor.bury(US.row)
    assert not supervisor.ready(US.row)
    assert supervisor.incarnation(US.row) == 0
    supervisor.incarnate(US.row, US.incarnation + 1, 4_000_001, "worker0")
    assert not supervisor.ready(US.row)
    expected = [0] * 64
    expected[US.row] = US.incarnation + 1
    assert supervisor.incarnations().tolist() == expected


def test_a_beat_is_a_pulse_and_a_time(pair: list[StatusTable]) -> None:
    process, supervisor = pair
    for beat in range(3):
        assert supervisor.pulse(US.row) == beat
        process.beat(NOW + beat)
        assert supervisor.beat_ns(US.row) == NOW + beat
    assert supervisor.pulse(THEM.row) == 0
