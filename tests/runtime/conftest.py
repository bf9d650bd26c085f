"""Graphs of a GPU on a CPU."""

from __future__ import annotations

import mmaccel_kernels.decode
import pytest
import recorded

from mmaccel.method import results
from mmaccel.runtime.graphs import replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded and replayed here as they are on a GPU, and a kernel is one thing in a recording as it is there."""
    monkeypatch.setattr(mmaccel_kernels.decode, "attend", mmaccel_kernels.decode.traced)
    monkeypatch.setattr(replay, "recordable", lambda device: True)
    monkeypatch.setattr(replay, "record", recorded.record)
    # on a GPU the host would wait for what methods return
    monkeypatch.setattr(results, "on_host", lambda made: False)
