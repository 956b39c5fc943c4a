"""What a kernel is started with: whose page, and for how long it may wait. No GPU needed."""

from contextlib import nullcontext
from types import SimpleNamespace

from tp3.comm.transport import device
from tp3.comm.transport.device import DeviceTransport

FLAGS, TABLE, STREAM = 7, 99, 5
PAGE = SimpleNamespace(address=100, longest_wait=float("inf"))
TRIAL = SimpleNamespace(address=200, longest_wait=60.0)


def started(monkeypatch, timeout, start):
    """The arguments of the kernel that ``start(transport, kept)`` has started."""
    transport, calls = object.__new__(DeviceTransport), []
    memory = SimpleNamespace(flags=FLAGS, runtime=SimpleNamespace(relaxed=nullcontext))
    tables = SimpleNamespace(put=lambda rows: TABLE, read=lambda: None)
    vars(transport).update(
        _page=PAGE, _trial_page=TRIAL, _memory=memory, _tables=tables,
        _host=SimpleNamespace(timeout=timeout), device=SimpleNamespace(index=0),
    )  # fmt: skip
    monkeypatch.setattr(device, "_current_stream", lambda index: STREAM)
    start(transport, lambda *call: calls.append(call))
    ((grid, arguments, stream),) = calls
    assert (grid, stream) == ((2, 1), STREAM)
    return arguments


def test_a_call_waits_for_the_timeout_of_its_group(monkeypatch):
    found = started(monkeypatch, 1800.0, lambda t, kept: t.start(kept, (2, 1), 11, 12))
    assert found == (FLAGS, 11, 12, 1_800_000_000_000, PAGE.address)


def test_a_table_takes_its_place(monkeypatch):
    found = started(
        monkeypatch, 30.0, lambda t, kept: t.start_with_table(kept, (2, 1), [1, 2], 1, 11, 12)
    )
    assert found == (FLAGS, 11, TABLE, 12, 30_000_000_000, PAGE.address)


def test_what_is_on_trial_has_its_own_page_and_a_minute_at_most(monkeypatch):
    for timeout, seconds in ((1800.0, 60), (2.0, 2)):
        found = started(
            monkeypatch,
            timeout,
            lambda t, kept: t.start_with_table(kept, (2, 1), [1], 0, 11, trial=True),
        )
        assert found == (FLAGS, TABLE, 11, seconds * 1_000_000_000, TRIAL.address)
