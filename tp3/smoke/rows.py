"""A row of the smoke test's table."""

from typing import Any

Row = dict[str, Any]


def row(check: str, detail: str, value: bool | float, ok: bool) -> Row:
    """What was checked, what is to say about it, what was measured, and whether it held."""
    return {"check": check, "detail": detail, "value": value, "ok": ok}
