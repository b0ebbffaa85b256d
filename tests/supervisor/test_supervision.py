"""The data and the arithmetic of supervision."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrt.errors import BadConfig
from pdrt.supervision import backoff_s, restarts_allowed
from pdrt.supervisor import ChildSpec

times_ns = st.integers(min_value=0, max_value=30)


@example(deaths_ns=[0], now_ns=1, deaths_max=0, period_ns=1)
@given(st.lists(times_ns), times_ns, st.integers(0, 10), st.integers(1, 30))
def test_restarts_are_refused_exactly_when_too_many_deaths_are_recent(
    deaths_ns: list[int], now_ns: int, deaths_max: int, period_ns: int
) -> None:
    allowed = restarts_allowed(deaths_ns, now_ns, deaths_max=deaths_max, period_ns=period_ns)
    recent = sorted(deaths_ns, reverse=True)[deaths_max : deaths_max + 1]
    assert allowed == (not recent or recent[0] <= now_ns - period_ns)


@given(st.lists(times_ns), times_ns, st.integers(0, 10), st.integers(1, 30))
def test_only_the_last_deaths_matter_so_a_bounded_history_is_enough(
    deaths_ns: list[int], now_ns: int, deaths_max: int, period_ns: int
) -> None:
    deaths_ns.sort()
    limits = {"deaths_max": deaths_max, "period_ns": period_ns}
    kept = deaths_ns[-(deaths_max + 1) :]
    assert restarts_allowed(kept, now_ns, **limits) == restarts_allowed(deaths_ns, now_ns, **limits)


@given(st.integers(0, 10_000))
def test_backoff_starts_at_nothing_grows_and_is_bounded(deaths: int) -> None:
    assert backoff_s(0) == backoff_s(1) == 0.0
    assert backoff_s(deaths) <= backoff_s(deaths + 1) <= 2.0


def test_a_target_of_the_main_module_is_refused() -> None:
    def target() -> None: ...

    target.__module__ = "__main__"
    with pytest.raises(BadConfig, match="main module"):
        ChildSpec(name="x", target=target, row=0)
