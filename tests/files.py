"""Files that tests write many times."""

from pathlib import Path


def rewrite(path: Path, content: bytes) -> None:
    """Write a file anew: ext4 waits for the disk, some milliseconds, when one is overwritten."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
