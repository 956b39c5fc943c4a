"""Where the entries of a weight lie in the tensors that store it, and where zeros go. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tp3.pad.companions import PRIMARY, Companion, row_of, word
from tp3.pad.formats import Format, transposed
from tp3.pad.model import Rule
from tp3.pad.spread import Spread, appended, kept

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """form: set where the tensor is a quantised weight, which wants companions."""

    padded: Shape
    spreads: tuple[Spread, ...]
    fill: float | str = 0.0
    factor: float = 1.0
    group: int = 0
    form: Format | None = None


def place_single(name: str, shape: Shape, stacked: Sequence[Spread]) -> Placed:
    """One number, or one for each stacked expert. Errors: ValueError for more."""
    return _kept_or(name, shape, tuple(stacked), 1.0)


def place_cache(name: str, shape: Shape, heads: Spread | None) -> Placed:
    """A cache's scale: one number, or one for each KV head; 1 for heads that are not trained."""
    return _kept_or(name, shape, (heads,) if heads else (), 1.0)


def _kept_or(name: str, shape: Shape, spreads: tuple[Spread, ...], fill: float) -> Placed:
    real = tuple(size for size in shape if size != 1)
    if not real:
        return Placed(shape, tuple(kept(1) for _ in shape))
    if real != tuple(spread.stock for spread in spreads):
        expected = [spread.stock for spread in spreads]
        raise ValueError(f"tensor {name} has shape {list(shape)}, expected [] or {expected}")
    left = iter(spreads)
    here = tuple(kept(1) if size == 1 else next(left) for size in shape)
    return Placed(tuple(spread.padded for spread in here), here, fill)


def place_companion(
    name: str,
    suffix: str,
    rule: Rule,
    logical: tuple[Spread, ...],
    forms: Iterable[Format],
    shape: Shape,
    scale_fill: str,
) -> Placed | None:
    """The first of the formats that has a tensor of this name and shape; None where none has one of
    this name. Errors: ValueError for another shape, or zeros that would share a block with trained
    entries of another run.
    """
    last = logical[-2:][::-1] if transposed(rule) else logical[-2:]
    expected: Shape | None = None
    for form in forms:
        row = row_of(form, suffix or "weight")
        if row is None:
            continue
        for grid in _grids(form, row):
            sizes = _sizes(row, grid, last)
            whole = (*(s.stock for s in logical[:-2]), *sizes)
            if row.dims in (("K",), ("2",)):
                whole = sizes
            expected = expected or whole
            if shape in _spellings(whole, row, grid):
                spreads = _spreads(name, row, grid, last)
                if row.dims not in (("K",), ("2",)):
                    spreads = (*logical[:-2], *spreads)
                return _placed(name, row, grid, last, spreads, shape, scale_fill)
    if expected is None:
        return None
    raise ValueError(f"tensor {name} has shape {list(shape)}, expected {list(expected)}")


def _grids(form: Format, row: Companion) -> Iterator[Format]:
    """The format, and for scales of 8-bit weights those that a config does not tell apart."""
    yield form
    if form.name in ("fp8", "int8") and row.fill == "scale" and not form.columns:
        for rows, columns in ((1, 0), (0, 0)):
            yield Format(form.name, rows, columns, form.bits)


def _divisor(dim: str, form: Format, whole: int) -> int:
    """What an entry of a dimension stands for, in entries of the weight."""
    by = dim.partition("/")[2]
    if not by:
        return 1
    if by.isdigit():
        return int(by)
    return {"r": form.rows, "c": form.columns, "p": 32 // form.code}[by] or whole


def _sizes(row: Companion, form: Format, last: Sequence[Spread]) -> Shape:
    sizes = []
    for dim in row.dims:
        if dim.isdigit():
            sizes.append(int(dim))
        else:
            stock = last["NK".index(dim[0])].stock
            sizes.append(-(-stock // _divisor(dim, form, stock)))
    return tuple(sizes)


def _spellings(whole: Shape, row: Companion, form: Format) -> set[Shape]:
    """A dimension of one scale for all may be left out; ModelOpt keeps the blocks' own dimensions
    (FP8_PB_WO, read by vLLM's ``modelopt``), of length 1.
    """
    found = {whole}
    if row.fill == "scale" and form.name == "fp8" and form.rows and form.columns:
        found.add((*whole[:-1], 1, whole[-1], 1))
    if row.fill == "scale" and form.columns == 0:
        found.add(whole[:-1])
        if form.rows == 0:
            found |= {whole[:-2], (1,)} if len(whole) == 2 else {whole[:-2]}
    return found


def _spreads(name: str, row: Companion, form: Format, last: Sequence[Spread]) -> tuple[Spread, ...]:
    spreads = []
    for dim in row.dims:
        if dim.isdigit():
            spreads.append(kept(int(dim)))
            continue
        axis = last["NK".index(dim[0])]
        block = _divisor(dim, form, axis.stock)
        if dim.endswith(("/r", "/c")) and block == axis.stock and not _counted(dim, form):
            spreads.append(kept(1))
        elif dim == "K/c" and form.act_order:
            spreads.append(appended(-(-axis.stock // block), -(-axis.padded // block)))
        else:
            spread = axis.in_blocks(block)
            if spread is None:
                raise ValueError(
                    f"tensor {name}: blocks of {block} straddle trained entries and zeros; "
                    "use the strategy append"
                )
            spreads.append(spread)
    return tuple(spreads)


def _counted(dim: str, form: Format) -> bool:
    return bool(form.rows if dim.endswith("r") else form.columns)


def _placed(
    name: str,
    row: Companion,
    form: Format,
    last: Sequence[Spread],
    spreads: tuple[Spread, ...],
    shape: Shape,
    scale_fill: str,
) -> Placed:
    columns = last[1]
    shared = columns.stock % form.columns if form.columns else not columns.inert
    if not form.symmetric and shared and columns.padded != columns.stock:
        group_size = form.columns or "all"
        raise ValueError(
            f"tensor {name}: {columns.stock} columns end inside a group of {group_size}, "
            "whose zero points differ, so that no code is zero for all of it; quantise it with "
            "symmetric zero points, or in groups that divide the columns"
        )
    if len(shape) == len(spreads) + 2:  # [N/r, 1, K/c, 1]
        spreads = (*spreads[:-1], kept(1), spreads[-1], kept(1))
    elif len(spreads) > len(shape) == shape.count(1):  # (1,) for one number
        spreads = tuple(kept(1) for _ in shape)
    else:  # an axis that the file leaves out
        spreads = spreads[: len(shape)]
    padded = tuple(spread.padded for spread in spreads)
    fill: float | str = row.fill
    group = 0
    if fill == "scale":
        fill = scale_fill
    elif fill in ("middle", "zero point"):
        fill = word(form, str(fill))
    elif fill == "group":
        group = 0 if columns.inert else form.columns or columns.padded
        fill = "act order" if form.act_order else "group"
    elif fill == "shape":
        grown = any(not spread.inert for spread in last)
        fill = f"{last[0].padded} {last[1].padded}" if grown else 0.0
        group = int(grown)
    return Placed(padded, spreads, fill, group=group, form=form if row.suffix in PRIMARY else None)
