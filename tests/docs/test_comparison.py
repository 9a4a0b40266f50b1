"""The measured part of docs/compare.md is that of the committed results."""

from benchmarks.compare import PAGE, updated


def test_comparison_has_the_committed_results() -> None:
    page = PAGE.read_text()
    assert updated(page) == page, "run: python benchmarks/compare.py"
