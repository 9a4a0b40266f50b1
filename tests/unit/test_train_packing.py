"""Division of a batch into micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.model.packing import micro_batches, select_rows
from paceline.types import Batch

CPU = torch.device("cpu")


def batch_of(masks: list[list[bool]]) -> Batch:
    """Return rows with these masks. Each token's ID is its index in the batch."""
    lengths = np.array([len(m) for m in masks], np.int32)
    total = int(lengths.sum())
    numbers = np.arange(total)
    per_row = np.arange(len(masks))
    mask = np.array([m for row in masks for m in row], np.bool_)
    flat = numbers.astype(np.float32)
    return Batch(
        numbers.astype(np.int32),
        lengths,
        mask,
        flat,
        numbers.astype(np.int32),
        per_row.astype(np.float32),
        per_row.astype(np.int32),
        flat,
    )


rows_strategy = st.lists(
    st.lists(st.booleans(), max_size=12).map(lambda rest: [False, *rest]), min_size=1, max_size=12
)


@given(rows_strategy, st.integers(1, 60))
def test_every_trained_token_is_predicted_once_from_previous_token(
    masks: list[list[bool]], limit: int
) -> None:
    batch = batch_of(masks)
    seen: list[int] = []
    for micro in micro_batches(batch, limit, CPU):
        before = micro.input_ids[0][micro.predict].numpy()
        assert (before + 1 == micro.flat).all() and (micro.targets.numpy() == micro.flat).all()
        position = micro.flat - np.repeat(batch.offsets[:-1], batch.lengths)[micro.flat]
        assert (micro.position_ids[0][micro.predict].numpy() + 1 == position).all()
        assert micro.layout.spread[micro.layout.slots].tolist() == list(
            range(micro.input_ids.shape[1])
        )
        assert micro.layout.rows == 1 or micro.layout.rows * micro.layout.longest <= limit
        seen.extend(micro.flat.tolist())
    assert sorted(seen) == np.flatnonzero(batch.mask).tolist()


def test_micro_batch_drops_tokens_after_last_trained_token() -> None:
    (micro,) = micro_batches(
        batch_of([[False, True, True, False, False], [False, False]]), 100, CPU
    )
    assert micro.input_ids.tolist() == [[0, 1]]


def test_micro_batch_contains_shared_prompt_once() -> None:
    batch = batch_of(
        [
            [False, False, True, True],
            [False, False, True, True],
            [False, True, True, True],
            [False, False, True, True],
        ]
    )
    # The third row starts with the same tokens, but its prompt is shorter.
    tokens = np.array([5, 6, 1, 2, 5, 6, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], np.int32)
    (micro,) = micro_batches(replace(batch, tokens=tokens), 100, CPU)
    assert micro.input_ids.tolist() == [[5, 6, 1, 3, 5, 6, 7, 9, 9, 9]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 2, 0, 1, 2, 0, 1, 2]]
    assert micro.layout.spread.view(4, 3).tolist() == [[0, 1, 2], [0, 1, 3], [4, 5, 6], [7, 8, 9]]
    assert micro.rows.tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert micro.predict.tolist() == [1, 2, 1, 3, 4, 5, 6, 8, 9]
    assert micro.targets.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 9]


def test_micro_batches_reject_trained_first_token() -> None:
    with pytest.raises(DataError, match="first token"):
        list(micro_batches(batch_of([[False, True], [True, True]]), 100, CPU))


def test_select_rows_keeps_tokens_of_rows() -> None:
    chosen = select_rows(batch_of([[False, True], [False, True, True], [False]]), np.array([2, 0]))
    assert chosen.tokens.tolist() == [5, 0, 1] and chosen.lengths.tolist() == [1, 2]
    assert chosen.groups.tolist() == [2, 0] and chosen.rewards.tolist() == [2, 0]
    assert (
        chosen.advantages is not None
        and chosen.advantages.tolist() == [5, 0, 1]
        and chosen.returns is None
    )
