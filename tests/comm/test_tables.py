"""Tables for kernels, on a machine without a GPU: what calls them in inference mode and outside."""

import ctypes

import torch

from tp3.comm.transport import device


class Event:
    def synchronize(self):
        """Nothing reads."""

    record = synchronize


def test_tables_made_in_inference_mode_are_written_outside_of_it(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **more: empty(*size, **more))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device, "_TABLES", 2)
    tables = device.Tables()
    for turn in range(6):
        with torch.inference_mode(turn < 3):
            address = tables.put([turn, -turn])
            tables.read()
        assert list((ctypes.c_int64 * 2).from_address(address)) == [turn, -turn]
