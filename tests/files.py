"""Files that tests write many times."""

from pathlib import Path


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file by a new one: overwriting waits for the disk on ext4, some milliseconds."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
