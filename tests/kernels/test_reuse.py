"""Why two slots suffice (``kernels.rounds``), by trying all interleavings of a model: no slot is
written while somebody may still read it.

The model knows nothing of memory order, which is ``test_compile``'s. It has what the argument rests
on: blocks that run in any order, kernels that share slots and cut them into different tiles,
launches that begin when the one before has ended on that rank. Taking one away must show a clash.
"""

from dataclasses import dataclass
from itertools import product

import pytest


@dataclass(frozen=True)
class Launch:
    """``blocks`` blocks, each with ``width`` cells of a slot, that make ``rounds`` rounds."""

    blocks: int
    rounds: int
    width: int = 1


@dataclass(frozen=True)
class Model:
    """What may be broken.

    ends_first: a launch begins once all blocks of the one before have ended on that rank.
    counts_blocks: the sequence is one per block instead of one per launch.
    leaves_early: the last of several blocks takes part in the first round only.
    waits: a reader waits for the flag.
    """

    world_size: int = 2
    slots: int = 2
    ends_first: bool = True
    counts_blocks: bool = False
    leaves_early: bool = False
    waits: bool = True


@dataclass(frozen=True)
class Step:
    """What a block does next: "push" and "publish" to all peers, or "read" what one has sent."""

    what: str
    launch: int
    sequence: int
    cells: range
    sender: int = -1


Program = tuple[Launch, ...]


def steps(model: Model, program: Program, rank: int, block: int) -> list[Step]:
    """All that a block does, launch by launch."""
    todo: list[Step] = []
    over = own = 0
    for number, launch in enumerate(program):
        if block < launch.blocks:
            cells = range(block * launch.width, (block + 1) * launch.width)
            early = model.leaves_early and block == launch.blocks - 1 > 0
            for turn in range(1 if early else launch.rounds):
                own += 1
                sequence = own if model.counts_blocks else over + turn + 1
                todo += [Step(what, number, sequence, cells) for what in ("push", "publish")]
                senders = (r for r in range(model.world_size) if r != rank)
                todo += [Step("read", number, sequence, cells, r) for r in senders]
        over += launch.rounds
    return todo


class Block:
    """A block's steps and, after each number of them, what it has made others see."""

    def __init__(self, model: Model, todo: list[Step], launches: int) -> None:
        self.todo = todo
        self.published, self.written = [0], [{}]
        for step in todo:
            self.published.append(step.sequence if step.what == "publish" else self.published[-1])
            cells = dict(self.written[-1])
            if step.what == "push":
                place = (step.sequence % model.slots, step.launch, step.sequence)
                cells.update({(place[0], cell): place[1:] for cell in step.cells})
            self.written.append(cells)
        self.begins = [sum(s.launch < n for s in todo) for n in range(launches)]


def clash(model: Model, program: Program) -> str:
    """How a reader may see another round than it expects; "" if no interleaving makes it.

    A state is how far each block is. What lies in a cell follows: the sender's latest push to it.
    """
    every = range(max(launch.blocks for launch in program))
    keys = [(rank, block) for rank in range(model.world_size) for block in every]
    at = {key: index for index, key in enumerate(keys)}
    blocks = [Block(model, steps(model, program, *key), len(program)) for key in keys]
    stack, seen = [(0,) * len(keys)], {(0,) * len(keys)}
    while stack:
        state = stack.pop()
        moved = False
        for index, (rank, number) in enumerate(keys):
            block, done = blocks[index], state[index]
            if done == len(block.todo):
                continue
            step, row = block.todo[done], [at[rank, b] for b in every]
            if model.ends_first and any(state[i] < blocks[i].begins[step.launch] for i in row):
                continue
            if step.what == "read":
                theirs = [at[step.sender, b] for b in every]
                flag = blocks[at[step.sender, number]].published[state[at[step.sender, number]]]
                if model.waits and flag < step.sequence:
                    continue
                for cell in step.cells:
                    place = step.sequence % model.slots, cell
                    found = max(blocks[i].written[state[i]].get(place, (-1, 0)) for i in theirs)[1]
                    if found != step.sequence:
                        return f"rank {rank} reads round {found} instead of {step.sequence}"
            moved = True
            after = (*state[:index], done + 1, *state[index + 1 :])
            if after not in seen:
                seen.add(after)
                stack.append(after)
        if not moved and any(n < len(block.todo) for n, block in zip(state, blocks)):
            return "no block can go on"
    return ""


# One tile or two, one round or two, and a kernel whose tile is two of the other's.
KINDS = [Launch(1, 1), Launch(2, 1), Launch(1, 2), Launch(2, 2), Launch(1, 1, width=2)]
BROKEN = {
    "one-slot": Model(slots=1),
    "launches-overlap": Model(ends_first=False),
    "sequence-per-block": Model(counts_blocks=True),
    "a-block-leaves-early": Model(leaves_early=True),
    "no-wait": Model(waits=False),
}


@pytest.mark.parametrize("last", KINDS, ids=lambda k: f"{k.blocks}x{k.rounds}x{k.width}")
def test_two_ranks_any_three_launches(last):
    for first, second in product(KINDS, repeat=2):
        assert clash(Model(), (first, second, last)) == "", (first, second)


def test_three_ranks_two_small_launches():
    for program in product(KINDS, repeat=2):
        if sum(launch.blocks * launch.rounds for launch in program) > 4:
            continue
        assert clash(Model(world_size=3), program) == "", program


@pytest.mark.parametrize("model", BROKEN.values(), ids=BROKEN)
def test_each_premise_is_needed(model):
    found = [clash(model, program) for program in product(KINDS, repeat=3)]
    assert any(text.startswith("rank") for text in found)
