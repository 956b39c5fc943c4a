"""The plugin's log, under vLLM's, which shows nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("vllm.tp3")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, numbers to the right."""
    lines = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right)
        ).rstrip()
        for line in lines
    )
