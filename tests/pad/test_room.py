"""Pages are used again once nobody refers to them, and never before."""

import pytest
import torch

from tp3.pad import room as rooms
from tp3.pad.room import PLACES, SMALL_BYTES, Room

LIKE = torch.empty(0, dtype=torch.float32)
LARGE = (SMALL_BYTES // 4 + 3,)


def test_a_loop_goes_round_in_two_places():
    room, addresses = Room(), []
    for value in range(6):
        held = room(LIKE, LARGE)  # as a loop's variable: the one before lives on meanwhile
        held.fill_(value)
        addresses.append(held.data_ptr())
    assert addresses == addresses[:PLACES] * 3


@pytest.mark.parametrize(
    "kept",
    [lambda t: t, lambda t: t[5:9], lambda t: t.numpy()[1:], lambda t: t.view(torch.int32)],
    ids=["itself", "a-slice", "an-array", "a-view"],
)
def test_what_is_referred_to_is_left_alone(kept):
    room, parts = Room(), []
    for value in range(5):
        parts.append(kept(room(LIKE, LARGE).fill_(value)))
    for value, part in enumerate(parts):
        want = torch.tensor(float(value)).view(torch.int32) if "int" in str(part.dtype) else value
        assert (torch.as_tensor(part) == want).all()


def test_a_larger_tensor_gets_larger_pages_and_a_small_one_none():
    room = Room()
    first = room(LIKE, LARGE)
    del first
    wide = room(LIKE, (2, *LARGE))
    assert wide.shape == (2, *LARGE)
    wide.fill_(1)
    assert room(LIKE, (3, 4)).shape == (3, 4)
    assert len(room._pages) <= PLACES


class SmallPages(rooms.mmap.mmap):
    def madvise(self, *args):
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_will_do(monkeypatch):
    monkeypatch.setattr(rooms.mmap, "mmap", SmallPages)
    assert (Room()(LIKE, LARGE).fill_(3) == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_any_dtype(dtype):
    like = torch.empty(0, dtype=dtype)
    assert Room()(like, (3, SMALL_BYTES)).dtype == dtype
