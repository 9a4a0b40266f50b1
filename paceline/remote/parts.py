"""Parts of a worker: objects whose methods the controller calls by the part's name."""

from collections.abc import Collection, Mapping
from typing import Any


class Parts(dict[str, Any]):
    """A worker's parts and their names. Those in `concurrent` work on a second thread."""

    def __init__(self, parts: Mapping[str, Any], concurrent: Collection[str] = ()) -> None:
        super().__init__(parts)
        self.concurrent = frozenset(concurrent)


def concurrent_parts(parts: Mapping[str, Any]) -> frozenset[str]:
    return parts.concurrent if isinstance(parts, Parts) else frozenset()
