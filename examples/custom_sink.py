"""Custom metrics sink: a CSV file. Sinks run on their own threads and cannot delay a run.

paceline train recipes/hybrid.toml track=examples/custom_sink.py:CsvFile
"""

from pathlib import Path


class CsvFile:
    def __init__(self, run_dir: Path) -> None:
        self.file = (run_dir / "reward.csv").open("a")
        self.close = self.file.close

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.file.write(f"{step},{metrics['reward/mean']:.4f}\n")
