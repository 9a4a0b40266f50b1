"""Garbage collection that is paused, or rare."""

import gc

import pytest

from paceline.collection import OBJECTS, collection_paused, rare_collections


def test_collection_resumes_when_block_fails() -> None:
    with pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_collection_stays_off_when_program_had_it_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def thresholds_restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_in_context_only() -> None:
    gc.set_threshold(700, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (OBJECTS, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("chosen", [0, 2 * OBJECTS])
def test_threshold_of_program_stays_when_collections_are_off_or_rarer(chosen: int) -> None:
    gc.set_threshold(chosen)
    with rare_collections():
        assert gc.get_threshold()[0] == chosen


def test_collections_stay_rare_until_last_of_overlapping_contexts_ends() -> None:
    gc.set_threshold(700)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == OBJECTS
    second.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 700
