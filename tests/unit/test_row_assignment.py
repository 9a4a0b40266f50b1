"""Assignment of rows to ranks and passes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.training.row_assignment import assign_passes, assign_rows

LENGTHS = st.lists(st.integers(0, 50), max_size=40).map(lambda lengths: np.array(lengths, np.int64))


@given(LENGTHS, st.integers(1, 8))
def test_rows_are_assigned_once_with_balanced_loads(lengths: np.ndarray, ranks: int) -> None:
    assigned = assign_rows(lengths, ranks)
    assert sorted(np.concatenate(assigned).tolist()) == np.flatnonzero(lengths).tolist()
    loads = [int(lengths[rows].sum()) for rows in assigned]
    assert all(
        load - lengths[rows[-1]] <= min(loads)
        for load, rows in zip(loads, assigned, strict=True)
        if len(rows)
    )


@given(LENGTHS, st.integers(1, 8), st.integers(1, 100))
def test_ranks_have_equal_number_of_passes_within_limit(
    lengths: np.ndarray, ranks: int, limit: int
) -> None:
    assigned = assign_passes(lengths, limit, ranks)
    assert len({len(passes) for passes in assigned}) == 1
    all_passes = [rows for passes in assigned for rows in passes]
    all_rows = np.concatenate(all_passes or [np.zeros(0)])
    assert sorted(all_rows.tolist()) == np.flatnonzero(lengths).tolist()
    for rows in all_passes:
        assert len(rows) <= 1 or len(rows) * lengths[rows].max() <= limit


def test_ranks_without_rows_have_empty_passes() -> None:
    assigned = assign_passes(np.array([3, 9]), 100, 4)
    found = [[rows.tolist() for rows in passes] for passes in assigned]
    assert found == [[[1]], [[0]], [[]], [[]]]
