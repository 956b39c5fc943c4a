"""One rank runs the kernels, its peers are arrays: an oracle of the layout that no kernel wrote.

The addresses here follow the text of ``comm.layout`` and ``kernels.rounds``, not their code: sender
i writes region i or i - 1 of receiver j, each with two slots, by the parity of the round.
"""

from pathlib import Path

import numpy as np
import torch

from tests.kernels.interpreted import Interpreted, create, layout_of
from tp3.comm.layout import MAX_BLOCKS

CHUNK = 64 << 10
SENT, RECEIVED, ARRIVED, ACKNOWLEDGED = range(4)


class Alone(Interpreted):
    """Rank ``rank``; ``start`` rounds, launches and chunks are over on all ranks."""

    def __init__(self, folder: Path, rank: int = 1, world_size: int = 3, start: int = 0) -> None:
        layout = layout_of(world_size)
        create(folder, layout, start)
        super().__init__(folder, rank, layout)
        self.limit_seconds, self.start_count = 0.2, start
        self.idle, self.ends = slice(0), self.count(0)
        self.others = [r for r in range(world_size) if r != rank]
        self.flag_words = [np.frombuffer(flags, np.uint32) for flags, _ in self.memories]
        self.data = [np.frombuffer(data, np.uint8) for _, data in self.memories]
        self.expected = [(f.copy(), d.copy()) for f, d in zip(self.flag_words, self.data)]

    def count(self, number: int) -> np.uint32:
        """The sequence number of round (launch, chunk) ``number`` = 1, 2, … from now."""
        return np.uint32((self.start_count + number) % 2**32)

    def slot(self, receiver: int, sender: int, number: int, *, sentinel: bool = False) -> slice:
        """Bytes in the receiver's data that the sender writes in round ``number``."""
        region = sender if sender < receiver else sender - 1
        size = self.layout.sentinel_bytes if sentinel else self.layout.slot_bytes
        begin = size * (2 * region + (self.start_count + number) % 2)
        begin += 2 * (self.world_size - 1) * self.layout.slot_bytes if sentinel else 0
        return slice(begin, begin + size)

    def flag(self, sender: int, block: int) -> int:
        """The word in the receiver's flags where the sender publishes."""
        return self.layout.FLAGS // 4 + MAX_BLOCKS * sender + block

    def channel(self, array: int, peer: int, channel: int) -> int:
        """The word of a channel of the first set in one of the four arrays of counts."""
        size = 2 * self.world_size * self.layout.channels
        return self.layout.channel_words // 4 + array * size + peer * self.layout.channels + channel

    def header(self, sender: int, channel: int, number: int) -> slice:
        """Words in the receiver's flags: bytes and tag (int64) of a message that starts there."""
        chunk = (self.start_count + number - 1) % 2
        size = 2 * self.world_size * self.layout.channels
        begin = self.layout.channel_words // 4 + 4 * size
        begin += 4 * (2 * (sender * self.layout.channels + channel) + chunk)
        return slice(begin, begin + 4)

    def chunk(self, receiver: int, sender: int, channel: int, number: int, length: int) -> slice:
        """Bytes in the receiver's data of chunk ``number`` of a channel of the first set."""
        region = sender if sender < receiver else sender - 1
        begin = 2 * (self.world_size - 1) * (self.layout.slot_bytes + self.layout.sentinel_bytes)
        begin += CHUNK * (2 * (region * self.layout.channels + channel))
        begin += CHUNK * ((self.start_count + number - 1) % 2)
        return slice(begin, begin + length)

    def arrive(self, sender: int, blocks: int, rounds: int) -> None:
        """The peer has published all rounds of a launch, as a fast one may have."""
        for block in range(blocks):
            self.flag_words[self.rank][self.flag(sender, block)] = self.count(rounds)

    def publish(self, receiver: int, blocks: int, rounds: int) -> None:
        """Expect this rank's flags of a launch; those of blocks beyond the grid may come along."""
        want = self.expected[receiver][0]
        want[self.flag(self.rank, 0) : self.flag(self.rank, blocks)] = self.count(rounds)
        self.idle = slice(self.flag(self.rank, blocks), self.flag(self.rank, MAX_BLOCKS))
        self.ends = self.count(rounds)

    def check_peers(self, label: str) -> None:
        """The peers' memory is ``expected``: what was to be pushed and published, and no more."""
        for r in self.others:
            flags = self.flag_words[r][self.idle]
            if (flags == self.ends).all():
                self.expected[r][0][self.idle] = self.ends
            for what, got, want in zip(
                ("flags", "data"), (self.flag_words[r], self.data[r]), self.expected[r]
            ):
                wrong = (got != want).nonzero()[0]
                assert not wrong.size, (
                    f"{label}: {what} of rank {r} differ at {wrong[:5]}: got {got[wrong[:5]]}, "
                    f"expected {want[wrong[:5]]}"
                )

    def check_counter(self, label: str, offset: int, number: int) -> None:
        """All copies of a sequence number stand at round ``number``."""
        copies = self.flag_words[self.rank][offset // 4 :][:MAX_BLOCKS]
        assert (copies == self.count(number)).all(), f"{label}: {copies[:8]} …"
        assert not self.page.any(), f"{label}: reported {self.page[:32]}"


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()
