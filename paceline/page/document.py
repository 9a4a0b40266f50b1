"""The page as one HTML document that loads nothing: style and scripts are part of it.

The document lists the hashes of the style and the script in it, so a browser runs no other script,
even if one were in the data.
"""

import json
import math
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

STYLES = ("uplot.css", "page.css")
SCRIPTS = (
    *("uplot.js", "format.js", "data.js", "charts.js"),
    *("distributions.js", "samples.js", "settings.js", "main.js"),
)


def document(data: dict[str, Any] | None = None) -> str:
    """Return the page with embedded data, or the page that polls its server for data."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    source = "'self'" if data is None else "'none'"
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"img-src data:; connect-src {source}; base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "data": embedded(data), "script": script}
    return "".join(
        parts.get(piece, piece) for piece in _static("page.html").replace("}}", "{{").split("{{")
    )


def embedded(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in, whatever its texts contain."""
    text = to_json(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def to_json(data: Any) -> str:
    """Return JSON with null for nan and infinity, which browsers reject."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(map(_static, names))


@cache
def _static(name: str) -> str:
    return files("paceline.page").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
