"""Rows reach exactly one rank, loads differ by at most a row, and all ranks make the same number of passes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.row_assignment import assign_passes, assign_rows

LENGTHS = st.lists(st.integers(0, 50), max_size=40).map(lambda lengths: np.array(lengths, np.int64))


@given(LENGTHS, st.integers(1, 8))
def test_every_row_with_tokens_has_one_rank_and_no_rank_has_a_row_too_many(
    lengths: np.ndarray, ranks: int
) -> None:
    shares = assign_rows(lengths, ranks)
    assert sorted(np.concatenate(shares).tolist()) == np.flatnonzero(lengths).tolist()
    loads = [int(lengths[share].sum()) for share in shares]
    assert all(
        load - lengths[share[-1]] <= min(loads)
        for load, share in zip(loads, shares, strict=True)
        if len(share)
    )


@given(LENGTHS, st.integers(1, 8), st.integers(1, 100))
def test_all_ranks_make_the_same_number_of_passes_within_the_limit(
    lengths: np.ndarray, ranks: int, limit: int
) -> None:
    plan = assign_passes(lengths, limit, ranks)
    assert len({len(mine) for mine in plan}) == 1
    assert (
        sorted(np.concatenate([rows for mine in plan for rows in mine] or [np.zeros(0)]).tolist())
        == np.flatnonzero(lengths).tolist()
    )
    for rows in (rows for mine in plan for rows in mine if len(rows) > 1):
        assert len(rows) * lengths[rows].max() <= limit


def test_fewer_rows_than_ranks_leave_some_with_nothing_to_do_but_the_same_passes() -> None:
    assert [
        [rows.tolist() for rows in mine] for mine in assign_passes(np.array([3, 9]), 100, 4)
    ] == [
        [[1]],
        [[0]],
        [[]],
        [[]],
    ]
