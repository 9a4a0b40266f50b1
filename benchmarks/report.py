"""What scripts share around a measurement: their options, how it was made, and the result file."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def command_line(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the script."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def origin() -> dict[str, str]:
    """Return the command and the day of a measurement."""
    return {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}"


def load_average() -> list[float]:
    return [round(load, 1) for load in os.getloadavg()]


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def circumstances() -> dict[str, Any]:
    """Return how a measurement was made on CPUs, with the load of other programs."""
    return origin() | {"machine": machine(), "load_average": load_average()}


def gpu_circumstances() -> dict[str, Any]:
    """Return how a measurement was made on one GPU."""
    import torch
    import transformers

    return {
        "gpu": device(),
        **origin(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return the metrics of each train step of a run."""
    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
