"""Garbage collection that is paused."""

import gc

import pytest

from paceline.collection import collection_paused


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
