"""A slice of PyTorch's own distributed suite; `torch_suite.py` beside this file runs all of it."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

BACKEND = os.environ.get("TP3_TEST_BACKEND", "r4d")
TIME_LIMIT_S = 100
# Lists of uneven tensors, where the suite can be tried out on Gloo.
GLOO_REFUSES = ("test_all_to_all", "test_all_to_all_complex", "test_all_to_all_group")

SLICE = [
    "test_DistributedDataParallelCPU",
    "test_Backend_enum_class",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_max",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_min",
    "test_all_reduce_group_product",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_group",
    "test_all_to_all_single_equal_split_full_group",
    "test_all_to_all_single_unequal_split",
    "test_all_to_all_single_unequal_split_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_broadcast_group",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather",
    "test_gather_checks",
    "test_get_backend",
    "test_get_future",
    "test_get_rank_size_group",
    "test_isend",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_wait_all_ranks",
    "test_reduce_full_group_max",
    "test_reduce_group_product",
    "test_reduce_sum_twice",
    "test_scatter_checks",
    "test_scatter_group",
    "test_scatter_object_list",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


def test_slice_of_the_torch_suite():
    runner = str(Path(__file__).with_name("torch_suite.py"))
    names = [name for name in SLICE if BACKEND != "gloo" or name not in GLOO_REFUSES]
    command = [sys.executable, runner, "--backend", BACKEND, "-w", "3", *names]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, log = process.communicate(timeout=TIME_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    records = [json.loads(line) for line in output.splitlines()[:-1]]
    assert len(records) == len(names), log[-3000:]
    bad = [record for record in records if record["status"] in ("FAIL", "LOST")]
    assert not bad, "\n".join(f"{b['status']} {b['test']}\n{b['message'][-800:]}" for b in bad)
    assert Counter(record["status"] for record in records) == {"PASS": len(names)}
