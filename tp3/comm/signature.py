"""What a rank calls, as the text that ranks compare and that errors show: ``all_reduce SUM
float32[4, 1024]``.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

from tp3.comm.layout import SIGNATURE_BYTES


@lru_cache(maxsize=4096)
def signature(
    kind: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    op: str = "",
    root: int | None = None,
) -> bytes:
    """The signature padded to ``SIGNATURE_BYTES``; a text too long for it ends in its checksum."""
    words = [kind]
    if op:
        words.append(op)
    if dtype is not None:
        words.append(f"{str(dtype)[6:]}{list(shape) if shape is not None else ''}")
    if root is not None:
        words.append(f"root {root}")
    text = " ".join(words).encode()
    if len(text) > SIGNATURE_BYTES:
        text = text[: SIGNATURE_BYTES - 12] + b"... %08x" % zlib.crc32(text)
    return text.ljust(SIGNATURE_BYTES, b"\0")
