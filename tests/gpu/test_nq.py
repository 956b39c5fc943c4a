"""The fused all-reduce and norm on the GPUs at hand, three ranks that share them: bit by bit what
the separate steps make of the exact sum, eager, in graphs, among plain all-reduces.
"""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.gpu import ranks
from tests.gpu.ranks import MARKS, W, group
from tests.kernels import norms
from tests.kernels.norms import BF16, NORMS
from tests.ranks.reference import same
from tp3.comm.errors import CollectiveTimeout
from tp3.comm.fused import all_reduce_rms_norm
from tp3.kernels import reference
from tp3.kernels.normed import Norm

pytestmark = MARKS
# One block, several, blocks with several rows: of widths that take every norm, and of others.
SHAPES = [(1, 5120), (64, 5120), (120, 5120), (3, 1000)]
OTHERS = [(0, 8), (1, 8), (300, 24), (5, 16384)]
LARGE = (2000, 5120)  # too long for one kernel
FUSED, STEPS = "all_reduce_rms_norm/gpu-nq", "all_reduce_rms_norm/steps"


on_gpus = partial(ranks.on_gpus, timeout=200)


def on_gpu(*tensors):
    return [tensor.cuda() for tensor in tensors]


class Case:
    """Operands of a call on the GPU, and what must come of them."""

    def __init__(self, rank, rows, width, norm, salt=0):
        xs, self.total = norms.terms(W, rows, width, salt)
        self.norm, self.label = norm, f"[{rows}, {width}] {norm}, data {salt}"
        self.residual, self.weight = norms.values(width, rows, salt), norms.values(width, salt=1)[0]
        self.given = on_gpu(xs[rank], self.residual, self.weight)

    def __call__(self):
        norm = self.norm
        return all_reduce_rms_norm(*self.given, norm.eps, plus_one=norm.plus_one, quant=norm.quant)

    def want(self):
        """By the plain kernel."""
        from tp3.kernels.norm import add_rms_norm

        return add_rms_norm(*on_gpu(self.total, self.residual, self.weight), self.norm)

    def check(self, result):
        for name, got, wanted in zip(result._fields, result, self.want(), strict=True):
            if wanted is not None:
                same(f"{name} of {self.label}", got, wanted)


def every_norm(rank, world_size):
    for shape in [*SHAPES, LARGE, *OTHERS]:
        for norm in NORMS if shape not in OTHERS else NORMS[OTHERS.index(shape) :][:1]:
            case = Case(rank, *shape, norm)
            case.check(case())
    return group().stats()


def test_every_norm_and_shape():
    for stats in on_gpus(every_norm):
        assert stats[FUSED] == len(NORMS) * len(SHAPES) + len(OTHERS)
        assert stats[STEPS] == len(NORMS)
        assert not any(name.endswith("through-host") for name in stats)


def against_numpy(rank, world_size):
    """The largest error over PyTorch's on the CPU; bits of scales and codes from n."""
    worst = 0.0
    for width in (1000, 5120, 16384):
        for norm in NORMS[::2]:
            case = Case(rank, 7, width, norm)
            operands = case.total, case.residual, case.weight
            result = [t if t is None else t.cpu() for t in case()]
            result = reference.Normed(*result)
            kept = torch.from_numpy(norms.kept(case.total.float().numpy(), case.residual)).to(BF16)
            same("residual_out", result.residual_out, kept)
            if norm.quant:
                case.norm = Norm(norm.eps, norm.plus_one)
                out, scale = norms.codes(case().out.cpu(), norm.quant)
                same(f"scale of {case.label}", result.scale, scale)
                same(f"out of {case.label}", result.out, out)
            want = norms.exact(*operands, norm)
            theirs = norms.read(reference.add_rms_norm(*operands, norm))
            worst = max(worst, abs(norms.read(result) - want).max() / abs(theirs - want).max())
    return float(worst)


def test_errors_are_those_of_pytorch():
    assert max(on_gpus(against_numpy)) <= 2


def graphs(rank, world_size):
    """A graph of an odd number of calls among plain sums, replayed with new data, a rank late."""
    shapes = [(1, 5120), (64, 5120), (3, 1000)]
    cases = [Case(rank, *shape, NORMS[2 * i]) for i, shape in enumerate(shapes)]
    plain = torch.full((5000,), 1.0, dtype=BF16, device="cuda")

    def step():
        results = []
        for case in cases:
            results.append(case())
            dist.all_reduce(plain.fill_(1.0))
        return results

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for salt in range(1, 12):
        for case, shape in zip(cases, shapes):
            new = Case(rank, *shape, case.norm, salt)
            case.total, case.residual = new.total, new.residual
            for to, tensor in zip(case.given, new.given):
                to.copy_(tensor)
        if salt % world_size == rank:
            torch.cuda._sleep(2_000_000)  # about a millisecond late
        graph.replay()
        eager = Case(rank, *shapes[salt % 3], NORMS[salt % len(NORMS)], salt)
        eager.check(eager())
        for case, result in zip(cases, results):
            case.check(result)
        assert (plain == world_size).all()
    return group().stats()


def test_graphs_replay_with_other_data_among_plain_and_eager_calls():
    for stats in on_gpus(graphs):
        assert stats[FUSED] == 3 + 3 + 11
        assert "all_reduce/gpu-sentinel" in stats


def with_nan(rank, world_size):
    x = torch.ones(3, 5120, dtype=BF16, device="cuda")
    if rank == 1:
        x.view(torch.int16)[0, 4000] = -1
        x[1, 4000] = torch.inf
    residual = torch.ones(3, 5120, dtype=BF16, device="cuda")
    for quant in (None, "token", "group"):
        out, kept, scale = all_reduce_rms_norm(x, residual, residual[0], 1e-6, quant=quant)
        bad = out[:2, 4000].float() if scale is None else scale.view(3, -1)[:2].amax(1)
        assert bad.isnan().all()
        assert kept[0, 4000].isnan()
        assert kept[1, 4000] == torch.inf
        assert not out[2].float().isnan().any()


def test_nan_and_infinity_come_out_as_such():
    on_gpus(with_nan)


def absent(rank, world_size):
    case = Case(rank, 3, 1000, Norm(1e-6, quant="token"))
    case.check(case())
    torch.cuda.synchronize()
    dist.barrier()
    group().set_timeout(timedelta(seconds=2))
    if rank == 2:
        time.sleep(6)
        return ""
    result = case()
    torch.cuda.synchronize()
    assert all(tensor.float().isnan().all() for tensor in result)
    with pytest.raises(CollectiveTimeout) as error:
        case()
    return str(error.value)


def test_a_rank_that_does_not_come_is_named_and_all_is_nan():
    for text in on_gpus(absent)[:2]:
        assert "rank(s) 2 did not arrive" in text


def forced(rank, world_size):
    for norm in NORMS[::2]:
        case = Case(rank, 3, 5120, norm)
        case.check(case())
    return group().stats()


@pytest.mark.parametrize("choice", ["one-shot", "two-shot", "sentinel"])
def test_the_steps_give_the_same_bits(choice):
    name = FUSED if choice == "sentinel" else STEPS
    for stats in on_gpus(forced, env={"TP3_ALLREDUCE": choice}):
        assert stats[name] == 3


def through_the_host(rank, world_size):
    from tp3.comm import device

    device._refusal = lambda host: "a test says so"
    for norm in NORMS[::2]:
        case = Case(rank, 3, 1000, norm)
        case.check(case())
    return group().stats()


def test_ranks_that_share_no_memory_take_the_steps():
    for stats in on_gpus(through_the_host):
        assert stats[STEPS] == stats["all_reduce/gpu-through-host"] == 3
