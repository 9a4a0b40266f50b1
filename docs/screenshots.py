"""Make the pictures of the page of a run: train two small runs, then open their report in Chromium.

Usage: python docs/screenshots.py [RUN_DIR …]     (with run directories, nothing is trained)

Writes docs/images/page.png and docs/images/page_samples.png. About a minute on two cores.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paceline.page.report import write_report  # noqa: E402
from tests.chromium import Browser, find_chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 200_000
COMMON = ["data.task=reverse:5", "steps=100", "evaluation.task=reverse:5", "evaluation.limit=64"]


def main() -> None:
    if find_chromium() is None:
        sys.exit("Chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="paceline-screenshots-") as folder:
        runs = [Path(name) for name in sys.argv[1:]] or train(Path(folder))
        report = Path(folder) / "report.html"
        write_report(runs, report)
        with Browser() as browser:
            take(browser, report)


def train(folder: Path) -> list[Path]:
    recipes = ("fully_async", "hybrid")
    for recipe in recipes:
        command = [sys.executable, "-m", "paceline", "train", recipe, *COMMON]
        subprocess.run([*command, f"run_dir={folder / recipe}"], cwd=ROOT, check=True)
    return [folder / recipe for recipe in recipes]


def take(browser: Browser, report: Path) -> None:
    browser.resize(1240, 720)
    browser.open(report.as_uri())
    browser.wait("document.querySelector('.chart:not([hidden]) canvas')")
    settle = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    browser.run(settle)
    save(browser, "page.png")
    browser.resize(1240, 560)
    browser.press("2")
    browser.wait("document.querySelector('.token')")
    browser.run("document.querySelector('#order').value = 'old', parts.samples.chosen = null")
    browser.run("parts.samples.filter()")
    browser.wait("document.querySelector('#detail').textContent.startsWith('step 1')")
    browser.run(settle)
    save(browser, "page_samples.png")


def save(browser: Browser, name: str) -> None:
    path = IMAGES / name
    browser.screenshot(path)
    if path.stat().st_size > MAX_BYTES:
        sys.exit(f"{path} has {path.stat().st_size:,} bytes; expected at most {MAX_BYTES:,}")


if __name__ == "__main__":
    main()
