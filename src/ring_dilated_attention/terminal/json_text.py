"""A document as JSON that every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def json_text(document: Mapping[str, Any]) -> str:
    """The document as JSON (RFC 8259), indented by 2, with a line break at its end.

    JSON has no NaN and no infinity: both are written as ``null``.

    Args:
        document: of mappings, sequences, text, numbers, booleans and None.

    Raises:
        TypeError: a value is something else.
    """
    return json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(x) for x in value]
    return value
