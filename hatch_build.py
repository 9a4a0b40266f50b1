"""Build hook: sdist and wheel get the commit that they are built from.

`paceline --version` reads it. The version does not tell the commit if it is that of a tag.
"""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds paceline/commit.txt. The wheel of an unpacked sdist takes the file from the sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = runpy.run_path(str(Path(self.root, "paceline", "version.py")))
        commit = source["commit_of_clone"]()
        if commit is None or version == "editable":  # an editable installation asks git itself
            return
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, source["COMMIT_FILE"])
        path.write_text(f"{commit}\n")
        build_data["force_include"][str(path)] = f"paceline/{path.name}"
