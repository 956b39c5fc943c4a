"""The table of algorithms: every row is reached, verdicts are sentences, bad input is named."""

import dataclasses
import itertools
import subprocess
import sys
from importlib import import_module

import pytest

from tp3.comm.select import (
    COLLECTIVES,
    DEVICES,
    DTYPES,
    EXACT_ACROSS_HOSTS_TO_BYTES,
    ROWS,
    SUMMED,
    TWO_SHOT_FROM_BYTES,
    Request,
    choose,
    explain,
    select,
)
from tp3.comm.settings import ALLREDUCE_CHOICES

SIZES = [
    0,
    4,
    TWO_SHOT_FROM_BYTES - 4,
    TWO_SHOT_FROM_BYTES,
    EXACT_ACROSS_HOSTS_TO_BYTES,
    EXACT_ACROSS_HOSTS_TO_BYTES + 4,
    64 << 20,
]


def requests():
    """Requests on both sides of every condition."""
    cases = itertools.product(
        COLLECTIVES,
        (1, 2, 3, 16),
        ("float32", "bfloat16", "int64", "bool"),
        SIZES,
        (1, 2),
        ("SUM", "BAND"),
        ALLREDUCE_CHOICES,
        (("cpu", False), ("cuda", False), ("cuda", True), ("hip", True)),
    )
    for collective, world_size, dtype, nbytes, hosts, op, force, (device, reach) in cases:
        yield Request(
            collective=collective,
            world_size=world_size,
            dtype=dtype,
            nbytes=nbytes,
            hosts=hosts,
            op=op,
            force=force,
            device=device,
            reach=reach,
        )


def test_every_row_is_chosen_for_something():
    chosen = {ROWS.index(choose(request)) for request in requests()}
    assert chosen == set(range(len(ROWS)))


def test_every_request_finds_a_row_and_the_first_that_fits():
    for request in requests():
        verdicts = explain(request)
        assert [row for row, _ in verdicts] == list(ROWS)
        assert choose(request) is next(row for row, rejection in verdicts if rejection is None)


def test_every_rejection_is_a_sentence():
    for row, rejection in itertools.chain.from_iterable(map(explain, requests())):
        if rejection is not None:
            assert rejection.startswith("needs "), (row.name, rejection)
            assert rejection.removeprefix("needs ") in [needed for needed, _ in row.conditions]


def test_every_condition_of_every_row_rejects_something():
    seen = {
        (index, rejection)
        for request in requests()
        for index, (_, rejection) in enumerate(explain(request))
    }
    for index, row in enumerate(ROWS):
        for needed, _ in row.conditions:
            if any("needs " + needed == text for i, text in seen if i == index):
                continue
            # A later condition can hide behind an earlier one, but must reject when asked alone.
            condition = dict(row.conditions)[needed]
            assert not all(condition(request) for request in requests()), (row.name, needed)


def test_the_threshold_of_two_shot():
    def name(nbytes, force="auto"):
        return select("all_reduce", world_size=3, nbytes=nbytes, force=force).name

    assert name(TWO_SHOT_FROM_BYTES - 1) == "one-shot"
    assert name(TWO_SHOT_FROM_BYTES) == "two-shot"
    assert name(1 << 30, force="one-shot") == "one-shot"
    assert name(4, force="two-shot") == "two-shot"


def test_what_fuses_the_norm():
    def name(world_size=3, nbytes=64 * 10240, device="cuda", **more):
        what = {"dtype": "bfloat16", "reach": device != "cpu", **more}
        return select(
            "all_reduce_rms_norm", world_size=world_size, nbytes=nbytes, device=device, **what
        ).name

    assert name() == name(world_size=2) == name(nbytes=0) == name(force="sentinel") == "gpu-nq"
    assert name(nbytes=10 << 20) == name(world_size=2, nbytes=32 << 20) == "steps"
    assert name(device="cpu") == name(device="hip") == name(reach=False) == "steps"
    assert name(world_size=1) == name(force="one-shot") == name(hosts=2, reach=False) == "steps"


def test_every_launcher_can_be_imported():
    for request in requests():
        module, function = choose(request).launcher.split(":")
        found = getattr(import_module(module), function.format(collective=request.collective))
        assert callable(found)


def test_the_choice_depends_on_nothing_that_ranks_do_not_share():
    shared = {"collective", "world_size", "dtype", "nbytes", "device", "reach", "hosts"}
    shared |= {"op", "force"}
    fields = {field.name for field in dataclasses.fields(Request)}
    assert fields - {"exact"} == shared


@pytest.mark.parametrize(
    ("change", "got", "allowed"),
    [
        ({"collective": "all_scatter"}, "collective is 'all_scatter'", COLLECTIVES),
        ({"dtype": "float31"}, "dtype is 'float31'", DTYPES),
        ({"device": "mps"}, "device is 'mps'", DEVICES),
        ({"world_size": 0}, "world_size 0", ["world_size and hosts start at 1"]),
        ({"nbytes": -1}, "nbytes -1", ["nbytes at 0"]),
        ({"hosts": 0}, "hosts 0", ["world_size and hosts start at 1"]),
        ({"dtype": "float8_e4m3fn"}, "all_reduce cannot add float8_e4m3fn", ["float32"]),
        ({"op": "XOR"}, "op is 'XOR'", ["SUM", "BXOR"]),
        ({"force": "ring"}, "is 'ring'", ALLREDUCE_CHOICES),
    ],
    ids=lambda value: next(iter(value.items()))[0] if isinstance(value, dict) else "",
)
def test_bad_input_names_what_it_got_and_what_is_allowed(change, got, allowed):
    with pytest.raises(ValueError) as caught:
        Request(**{"collective": "all_reduce", "world_size": 3, **change})
    message = str(caught.value)
    assert got in message
    for name in allowed:
        assert name in message


def test_only_sums_refuse_dtypes():
    for collective in COLLECTIVES:
        if collective in SUMMED:
            with pytest.raises(ValueError, match="cannot add float8_e5m2"):
                select(collective, world_size=2, dtype="float8_e5m2")
        else:
            assert select(collective, world_size=2, dtype="float8_e5m2")


@pytest.mark.parametrize("module", ["tp3.comm.select", "tp3.comm.layout"])
def test_it_works_where_torch_is_not_installed(module):
    code = (
        "import sys, importlib\n"
        "sys.modules.update(torch=None, triton=None)\n"  # importing them raises
        f"importlib.import_module({module!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
