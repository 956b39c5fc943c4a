"""What a kernel is started with: whose page, and for how long it may wait. No GPU needed."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from tp3.comm import device as side
from tp3.comm.errors import R4DError
from tp3.comm.layout import DeviceLayout
from tp3.comm.transport import device, device_kernels
from tp3.comm.transport.co_residency import Room
from tp3.comm.transport.device import DeviceTransport
from tp3.kernels import primitives

FLAGS, TABLE, STREAM = 7, 99, 5
CALLS, MESSAGES, TRIAL = 100, 200, 300  # addresses of the pages


def page(address, longest_wait=float("inf")):
    return SimpleNamespace(
        address=address, longest_wait=longest_wait, words=np.zeros(1024, np.int32)
    )


class Host:
    """Keeps the first error, as HostTransport does."""

    failure = None

    def __init__(self, timeout):
        self.timeout = timeout

    def fail(self, error):
        self.failure = self.failure or str(error)
        return error


@pytest.fixture
def transport(monkeypatch):
    """The real one, of rank 0 of 3, without a GPU: ``started`` has the arguments of kernels."""
    made, pages = object.__new__(DeviceTransport), {}
    pages["calls"], pages["messages"] = page(CALLS), page(MESSAGES)
    pages["trial"] = page(TRIAL, 60.0)
    vars(made).update(
        rank=0, world_size=3, layout=DeviceLayout(3), target="cuda", _pages=pages,
        _words=pages["calls"].words, _message_words=pages["messages"].words, _reason=None,
        _memory=SimpleNamespace(flags=FLAGS, runtime=SimpleNamespace(relaxed=nullcontext)),
        _tables=SimpleNamespace(put=lambda rows: TABLE, read=lambda: None), _kept={},
        _host=Host(1800.0), device=SimpleNamespace(index=0), _room=Room(132, 4), started=[],
    )  # fmt: skip
    monkeypatch.setattr(device, "_current_stream", lambda index: STREAM)
    monkeypatch.setattr(
        device_kernels,
        "Kept",
        lambda kernel, constants, **options: (
            lambda grid, arguments, stream: made.started.append((constants, arguments, stream))
        ),
    )
    return made


def started(transport):
    ((constants, arguments, stream),) = transport.started
    assert arguments[0] == FLAGS
    assert stream == STREAM
    *_, limit, address = arguments
    return constants["STICKY"], limit / 1e9, address


@pytest.mark.parametrize(
    ("channels", "address"),
    [(device_kernels.COLLECTIVES, CALLS), (device_kernels.MESSAGES, MESSAGES)],
)
def test_moves_wait_for_the_timeout_of_their_group(transport, channels, address):
    device_kernels.exchange(transport, num_bytes=64, lanes=(1, 1), channels=channels)
    assert started(transport) == (DeviceLayout.STICKY, 1800, address)


@pytest.mark.parametrize(("timeout", "seconds"), [(1800.0, 60), (2.0, 2)])
def test_what_is_on_trial_has_its_own_page_and_a_minute_at_most(transport, timeout, seconds):
    transport._host.timeout = timeout
    places = [(0, 0), (4096, 64), (0, 0)]
    device_kernels.exchange_table(transport, places, places, trial=True)
    assert started(transport) == (DeviceLayout.TRIAL, seconds, TRIAL)
    assert transport.started[0][1][6] == TABLE, "in place of the addresses"


def test_a_table_of_a_call(transport):
    places = [(0, 0), (4096, 64), (0, 0)]
    device_kernels.exchange_table(transport, places, places, tag=3)
    assert started(transport) == (DeviceLayout.STICKY, 1800, CALLS)


def reports(transport, name, late=1):
    """As a kernel does: a timeout of the exchange, for want of a rank."""
    words = transport._pages[name].words
    words[device._CODE], words[device._KIND] = 1, 4
    words[device._LATE + late] = 1


def test_a_failed_trial_fails_no_group(transport):
    reports(transport, "trial")
    transport.check()
    assert "timeout of 60 s on rank 0: rank(s) 1 did not arrive" in transport.wrong()


@pytest.mark.parametrize("name", ["calls", "messages"])
def test_a_failed_call_or_message_does_and_ends_all_others(transport, name):
    assert not transport.unsent()
    reports(transport, name, late=2)
    with pytest.raises(R4DError, match=r"timeout of 1800 s on rank 0: rank\(s\) 2 did not arrive"):
        transport.check()
    assert [each.words[0] for each in transport._pages.values()] == [1, 1, 1]


def test_the_host_and_the_kernels_mean_the_same_by_haste():
    assert primitives.HURRY_NS.value == device._HURRY_SECONDS * 1e9
    assert side._CLOSING_SECONDS > device._HURRY_SECONDS


def test_a_group_that_is_destroyed_hurries_messages_alone(transport):
    transport.hurry()
    assert [each.words[0] for each in transport._pages.values()] == [0, 2, 0]
    reports(transport, "messages")
    assert "timeout of 30 s" in transport.unsent()
    transport.abort(R4DError("r4d: enough"))
    transport.hurry()
    assert [each.words[0] for each in transport._pages.values()] == [1, 1, 1]
