"""What a user may get wrong: a sentence with got and allowed, nothing sent, the group goes on."""

import time

import pytest
import torch
import torch.distributed as dist

from tp3.comm.launch import launch
from tp3.comm.reduce import OPS, Reduction, op_name

Op = dist.ReduceOp
WORLD_SIZE = 3


def ones(*shape, **kwargs):
    return torch.ones(shape or (4,), **kwargs)


def many(*shape):
    return [ones(*shape) for _ in range(WORLD_SIZE)]


# name: the call, words of the error (got and allowed). Methods of the group are called directly
# where torch's own checks would come first.
CASES = {
    "bitwise op of floats": (
        lambda g: dist.all_reduce(ones(), op=Op.BAND, group=g),
        ["BAND", "float32", "SUM, AVG"],
    ),
    "ordering of complex": (
        lambda g: g.allreduce([ones(dtype=torch.complex64)], options(Op.MAX)),
        ["MAX", "complex64", "SUM"],
    ),
    "average of bool": (
        lambda g: dist.reduce(ones(dtype=torch.bool), 0, op=Op.AVG, group=g),
        ["AVG", "bool", "BAND"],
    ),
    "sum of fp8": (
        lambda g: dist.all_reduce(ones().to(torch.float8_e4m3fn), group=g),
        ["float8_e4m3fn", "float32", "bfloat16"],
    ),
    "sum of complex32": (
        lambda g: dist.reduce_scatter_tensor(
            ones(1, dtype=torch.complex32), ones(3, dtype=torch.complex32), group=g
        ),
        ["complex32", "complex64"],
    ),
    "device of a sum": (lambda g: dist.all_reduce(ones(device="meta"), group=g), ["meta", "cpu"]),
    "device of a move": (
        lambda g: dist.broadcast(ones(device="meta"), 0, group=g),
        ["meta", "cpu"],
    ),
    "device of one of a list": (
        lambda g: dist.all_gather([ones(), ones(), ones(device="meta")], ones(), group=g),
        ["meta", "cpu"],
    ),
    "device of a message": (
        lambda g: dist.isend(ones(device="meta"), other(), group=g),
        ["meta", "cpu"],
    ),
    "sparse layout of a move": (
        lambda g: dist.broadcast(ones(2, 2).to_sparse_csr(), 0, group=g),
        ["sparse_csr", "strided"],
    ),
    "sparse with an op": (
        lambda g: dist.all_reduce(ones().to_sparse(), op=Op.MAX, group=g),
        ["MAX", "sparse", "SUM"],
    ),
    "elements that share memory": (
        lambda g: dist.all_reduce(ones(1).expand(4), group=g),
        ["all_reduce", "[4]"],
    ),
    "outputs that share memory": (
        lambda g: dist.all_gather([*many()[1:], ones(1).expand(4)], ones(), group=g),
        ["all_gather", "[4]"],
    ),
    "length of an all_gather list": (
        lambda g: dist.all_gather(many()[1:], ones(), group=g),
        ["2", "3"],
    ),
    "length of a reduce_scatter list": (
        lambda g: dist.reduce_scatter(ones(), [*many(), ones()], group=g),
        ["4", "3"],
    ),
    "length of all_to_all lists": (
        lambda g: dist.all_to_all(many(), many()[1:], group=g),
        ["2", "3"],
    ),
    "length of a gather list": (
        lambda g: g.gather([many()[1:]], [ones()], gather_options()),
        ["2", "3"],
    ),
    "output of an all_gather": (
        lambda g: dist.all_gather_into_tensor(ones(13), ones(4), group=g),
        ["13", "12"],
    ),
    "input of a reduce_scatter": (
        lambda g: dist.reduce_scatter_tensor(ones(4), ones(13), group=g),
        ["13", "12"],
    ),
    "own output of an all_gather": (
        lambda g: dist.all_gather(many(5), ones(4), group=g),
        ["[5]", "[4]"],
    ),
    "dtypes in one call": (
        lambda g: g.allgather([[*many()[1:], ones(dtype=torch.int64)]], [ones()]),
        ["float32", "int64"],
    ),
    "splits that do not add up": (
        lambda g: g.alltoall_base(ones(6), ones(6), [2, 2, 2], [3, 3, 3]),
        ["[3, 3, 3]", "6"],
    ),
    "equal splits of 7": (lambda g: dist.all_to_all_single(ones(7), ones(7), group=g), ["7", "3"]),
    "root of a broadcast": (lambda g: g.broadcast([ones()], broadcast_options(7)), ["7", "0..2"]),
    "root below zero": (lambda g: g.broadcast([ones()], broadcast_options(-1)), ["-1", "0..2"]),
    "receiver": (lambda g: g.send([ones()], 3, 0), ["3", "0..2"]),
    "sender": (lambda g: g.recv([ones()], -2, 0), ["-2", "0..2"]),
    "two tensors in a message": (lambda g: g.send([ones(), ones()], other(), 0), ["one", "2"]),
}


def other():
    return (dist.get_rank() + 1) % WORLD_SIZE


def broadcast_options(root):
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def options(op):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def gather_options():
    options = dist.GatherOptions()
    options.rootRank = dist.get_rank()
    return options


def refused(rank, world_size):
    problems = []
    group = dist.new_group()
    for name, (call, words) in CASES.items():
        start = time.monotonic()
        try:
            call(group)
        except (ValueError, RuntimeError) as error:
            text = str(error)
            if any(word not in text for word in words) or "\n" in text.strip():
                problems.append(f"{name}: {text!r} should have {words} in one sentence")
        else:
            problems.append(f"{name}: accepted")
        if time.monotonic() - start > 2:
            problems.append(f"{name}: took {time.monotonic() - start:.1f} s")
        total = torch.full((4,), float(rank))
        try:
            dist.all_reduce(total, group=group)
        except RuntimeError as error:
            problems.append(f"{name}: the group does not go on: {error}")
            group = dist.new_group()
        else:
            if total.tolist() != [3.0] * 4:
                problems.append(f"{name}: the next all_reduce gave {total}")
    return problems


def test_bad_calls_are_refused_and_the_group_goes_on():
    problems = [problem for rank in launch(refused, WORLD_SIZE, timeout=10) for problem in rank]
    assert not problems, "\n".join(sorted(set(problems)))


def non_members(rank, world_size):
    group = dist.new_group([0, 1])
    if rank == 2:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        data = ones()
        with pytest.warns(UserWarning, match="rank 2 which does not belong to the given group"):
            dist.all_reduce(data, group=group)
        assert data.tolist() == [1.0] * 4
    else:
        dist.all_reduce(data := ones(), group=group)
        assert data.tolist() == [2.0] * 4


def test_who_is_not_in_a_group_is_told_by_torch():
    launch(non_members, WORLD_SIZE, timeout=10)


def test_an_unknown_op():
    with pytest.raises(ValueError, match="reduce op is XOR; r4d allows SUM, AVG") as caught:
        op_name("ReduceOp.XOR")
    assert all(op in str(caught.value) for op in OPS)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex32], ids=str)
def test_a_dtype_without_sums(dtype):
    with pytest.raises(ValueError, match=r"cannot reduce torch.*allowed: float64, float32"):
        Reduction("SUM", dtype)
