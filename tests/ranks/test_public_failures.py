"""Public failures of all-reduce back ends: each row of the catalogue that applies to CPU is a test.

A row is an issue or a pull request of another project. Its test is here, under the row's number,
or elsewhere (`ROWS`); what only a GPU can get wrong is in `NOT_CPU`, for the tests of those paths.
"""

import gc
import importlib
import sys
import time
import warnings
from subprocess import PIPE, Popen

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import CALLS, LARGE, TIMEOUT, new_group, ones
from tests.ranks.reference import same, tensor
from tests.ranks.test_exact import inputs_of
from tp3.comm.launch import launch
from tp3.comm.reduce import Reduction
from tp3.comm.transport import host

F32 = torch.float32
# fmt: off
NUMBERS = [
    1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 14, 16, 18, 19, 20, 21, 23, 25, 26, 27, 28, 29, 30, 31, 32,
    33, 34, 36, 37, 38, 40, 41, 42, 43, 44, 45, 46, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 59,
    60, 61, 62, 63, 64, 65, 67,
]
# fmt: on
CATALOGUE = {*map(str, NUMBERS), *(f"T{number}" for number in range(1, 9))}

ROWS = {
    "4": "ranks.test_lifecycle::test_one_rank_that_fails_fails_all_with_its_reason",
    "5": "ranks.test_sequence::test_mixed_sizes_interleaved_1000_times_with_a_late_rank",
    "6": "ranks.test_groups::test_groups_interleaved_with_works_out_of_order",
    "7": "ranks.test_faults::test_a_rank_that_never_calls_is_named",
    "8": "ranks.test_lifecycle::test_a_rank_that_does_not_come_to_the_creation_is_named",
    "13": "comm.test_select::test_the_choice_depends_on_nothing_that_ranks_do_not_share",
    "18": "ranks.test_groups::test_groups_interleaved_with_works_out_of_order",
    "20": "ranks.test_sequence::test_mixed_sizes_interleaved_1000_times_with_a_late_rank",
    "21": "ranks.test_sequence::test_mixed_sizes_interleaved_1000_times_with_a_late_rank",
    "23": "ranks.test_exact::test_views_at_every_element_offset_and_not_contiguous",
    "26": "ranks.test_lifecycle::test_200_rounds_of_create_and_destroy_leave_nothing",
    "27": "ranks.test_lifecycle::test_200_rounds_of_create_and_destroy_leave_nothing",
    "30": "ranks.test_lifecycle::test_one_rank_that_fails_fails_all_with_its_reason",
    "31": "ranks.test_sequence::test_the_sequence_wraps",
    "32": "ranks.test_guards::test_a_long_wait_sleeps",
    "33": "ranks.test_faults::test_a_rank_that_never_calls_is_named",
    "37": "ranks.test_exact::test_a_result_does_not_depend_on_the_batch",
    "38": "comm.test_select::test_every_request_finds_a_row_and_the_first_that_fits",
    "40": "ranks.test_groups::test_new_group_with_scattered_ranks",
    "43": "ranks.test_guards::test_peers_in_other_pid_namespaces",
    "46": "ranks.test_guards::test_names_are_unlinked",
    "48": "ranks.test_groups::test_new_group_with_scattered_ranks",
    "49": "ranks.test_disagreement::test_calls_that_differ",
    "51": "ranks.test_exact::test_views_at_every_element_offset_and_not_contiguous",
    "52": "ranks.test_reductions::test_all_reduce_of_every_dtype_and_op",
    "54": "ranks.test_lifecycle::test_200_rounds_of_create_and_destroy_leave_nothing",
    "56": "ranks.test_lifecycle::test_a_forked_child_is_inert",
    "60": "ranks.test_guards::test_one_slot_in_place_of_two",
    "61": "ranks.test_sequence::test_mixed_sizes_interleaved_1000_times_with_a_late_rank",
    "63": "comm.test_select::test_every_launcher_can_be_imported",
    "T5": "comm.test_layout::test_a_flag_reaches_what_it_has_passed",
    "T6": "ranks.test_guards::test_a_flag_before_its_payload",
    "T8": "ranks.test_guards::test_one_slot_in_place_of_two",
}
NOT_CPU = {
    "1": "CUDA IPC of expandable segments",
    "2": "HIP IPC of expandable segments",
    "3": "CUDA IPC of a sleep-mode pool",
    "11": "programmatic dependent launch",
    "16": "index of a GPU",
    "19": "graph replay",
    "25": "memory of graph temporaries",
    "34": "scope of GPU loads",
    "36": "compressed all-reduce",
    "41": "several ranks on one GPU",
    "44": "peer-to-peer over PCIe",
    "45": "no peer-to-peer",
    "53": "CUDA MPS",
    "55": "fused all-reduce",
    "57": "RCCL's low-latency protocol",
    "62": "pull kernels",
    "64": "a benchmark at each size, not a test",
    "65": "compressed all-reduce",
    "67": "co-resident blocks",
    "T1": "what Triton makes of a scalar atomic",
    "T2": "locks in Triton",
    "T3": "atomics on gfx950",
    "T4": "polling on other Triton back ends",
    "T7": "barriers of a block",
}


def test_every_row_of_the_catalogue_has_its_place():
    here = {name.split("_")[2] for name in globals() if name.startswith("test_row_")}
    assert here | ROWS.keys() | NOT_CPU.keys() == CATALOGUE
    assert not here & ROWS.keys()
    assert not ROWS.keys() & NOT_CPU.keys()


@pytest.mark.parametrize("place", sorted(set(ROWS.values())))
def test_a_test_that_a_row_points_to_is_there(place):
    module, _, name = place.partition("::")
    assert callable(getattr(importlib.import_module(f"tests.{module}"), name))


def subgroup_only(rank, world_size):
    if rank == 2:
        time.sleep(0.5)  # knows nothing of the group
    else:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(data := ones(), group=group)
        assert data.tolist() == [2.0] * 16
    dist.barrier()


def test_row_14_a_rendezvous_of_members_only():
    """flashinfer#3247, sglang#24452: a rank that is not in the group is waited for."""
    launch(subgroup_only, 3, timeout=TIMEOUT)


def slow_to_read(seconds):
    combine = Reduction.combine

    def slow(self, parts, out):
        time.sleep(seconds)
        combine(self, parts, out)

    Reduction.combine = slow


def free_while_a_peer_reads(rank, world_size):
    group = new_group()
    if rank == 1:
        slow_to_read(0.3)
    dist.all_reduce(data := torch.full((5000,), rank + 1.0), group=group)
    dist.destroy_process_group(group)
    assert (data == 3).all()


def test_row_28_memory_is_freed_while_a_peer_still_reads():
    """DeepEP#497: undefined behaviour when one rank frees before its peers have closed."""
    launch(free_while_a_peer_reads, 2, timeout=TIMEOUT)


def dropped(rank, world_size):
    group = new_group()
    dist.all_reduce(ones(), group=group, async_op=True).wait()
    if rank == 1:
        del group
        gc.collect()
    dist.all_reduce(ones())


SCRIPT = """
import sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("r4d", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
work = dist.all_reduce(torch.ones(3), async_op=True)
slow = work.get_future().then(lambda _: time.sleep(0.2))
work.wait()
dist.isend(torch.ones(3), 1 - rank)
pending = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3 * rank)]
"""


def test_row_29_an_end_without_destroy_is_silent(tmp_path):
    """vllm#215, sglang#33434, flashinfer#2659: destructors call collectives, or fail at exit."""
    launch(dropped, 2, timeout=TIMEOUT)
    for turn in range(3):
        commands = [[sys.executable, "-c", SCRIPT, str(r), tmp_path / f"{turn}"] for r in range(2)]
        running = [Popen(command, stderr=PIPE, text=True) for command in commands]
        assert [process.communicate(timeout=60)[1] for process in running] == ["", ""]
        assert [process.returncode for process in running] == [0, 0]


def permuted(rank, world_size):
    arrays = inputs_of("cancelling", F32, 4)
    members = [1, 2, 3]
    for order in ([1, 2, 3], [3, 1, 2]):
        group = dist.new_group(order)
        if rank in members:
            data = tensor(arrays[rank][:500], F32)
            dist.all_reduce(data, group=group)
            by_rank = sorted(members, key=lambda r: dist.get_group_rank(group, r))
            total = arrays[by_rank[0]] + arrays[by_rank[1]] + arrays[by_rank[2]]
            same(f"group {order}", data, tensor(total[:500], F32))


def test_row_42_the_order_is_that_of_the_group_and_not_of_devices():
    """nccl#1906: wrong rank order when the visible devices are permuted."""
    launch(permuted, 4, timeout=TIMEOUT, env={"CUDA_VISIBLE_DEVICES": "2,0,3,1"})


def zero_sizes(rank, world_size):
    rounds, publish = [], host.HostTransport.sync

    def counting(self):
        rounds.append(1)
        publish(self)

    host.HostTransport.sync = counting
    empties = [ones(0), torch.from_numpy(np.empty(0, np.float32)), torch.ones(3, 0, 2), ones(4)[4:]]
    for empty in empties:
        dist.all_reduce(empty)
        dist.all_reduce(empty, async_op=True).wait()
        dist.broadcast(empty, 1)
        dist.reduce(empty, 0)
        dist.reduce_scatter_tensor(ones(0), empty.reshape(0))
        dist.all_gather_into_tensor(ones(0), empty.reshape(0))
    assert not rounds
    for call in CALLS.values():
        call(0, None)
    dist.all_to_all_single(ones(0), ones(0))
    if rank < 2:
        (dist.recv if rank else dist.send)(ones(0), 1 - rank)
    dist.all_reduce(data := ones())
    assert data.tolist() == [world_size] * 16


def test_row_50_zero_size_is_a_no_op_everywhere():
    """pytorch#20651, #85234, #140741, gloo#309: hangs, SIGFPE, segmentation faults."""
    launch(zero_sizes, 3, timeout=TIMEOUT)


def alone(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, call in CALLS.items():
            if name in ("all_reduce", "broadcast", "reduce", "barrier"):
                call(LARGE, None)
        dist.all_reduce(data := torch.arange(5.0), op=dist.ReduceOp.AVG)
    assert data.tolist() == [0, 1, 2, 3, 4]


def test_row_59_one_rank_is_the_identity_without_a_warning():
    """vllm#2674: a warning at world size 1."""
    launch(alone, 1, timeout=TIMEOUT)
