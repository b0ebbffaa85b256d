from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import (
    BUCKET_BASE_NS,
    BUCKETS,
    COUNTERS_MAX,
    Counter,
    bucket_end_s,
    bucket_of,
)
from pdrt.protocol.states import Reason

BLOCKS = {  # counters that are the first of several
    Counter.MALFORMED: len(Malformed),
    Counter.VERDICT_FAILED: max(Reason) + 1,
    Counter.ROOM_BUCKET: BUCKETS,
    Counter.TRANSFER_BUCKET: BUCKETS,
}


def test_no_two_counters_share_a_number() -> None:
    numbers = [n for c in Counter for n in range(c, c + BLOCKS.get(c, 1))]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < COUNTERS_MAX
    assert len(Counter.__members__) == len(Counter), "two names for one number"


@settings(deadline=None)
@given(
    st.integers(-(10**9), 10**16)
    | st.builds(
        lambda i, more: (BUCKET_BASE_NS << i) + more, st.integers(0, 24), st.integers(-1, 1)
    )
)
def test_a_duration_is_in_the_first_bucket_that_does_not_end_before_it(duration_ns: int) -> None:
    bucket = bucket_of(duration_ns)
    assert 0 <= bucket < BUCKETS
    assert bucket_end_s(bucket) == (BUCKET_BASE_NS << bucket) / 1e9
    if bucket < BUCKETS - 1:
        assert duration_ns <= BUCKET_BASE_NS << bucket
    if bucket:
        assert duration_ns > BUCKET_BASE_NS << bucket - 1
