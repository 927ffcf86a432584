"""What a repeated call costs the host, and that it asks the same of the device as the first one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from simulated_host import Host
from torch.overrides import TorchFunctionMode

import ringattn


class Keep(TorchFunctionMode):
    """Keeps every tensor that is made, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


def both(host: Host, q, k, v, dout) -> None:  # type: ignore[no-untyped-def]
    torch.autograd.grad(ringattn.attention(q, k, v, host.plan, kernel='hopper'), (q, k, v), dout)


def test_try(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 2048, causal=True, dataflow="gather")
    q, k, v = host.tensors(32, 8, 128)
    dout = torch.randn_like(q)
    with torch.autograd.set_multithreading_enabled(False):
        for i in range(8):
            host.log.clear()
            both(host, q, k, v, dout)
            print(i, len(host.log), [x[0] for x in host.log], [type(x).__name__ for x in host.plan.programs._kept._kept.values()])
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append((event, frame.f_code.co_name if event == "call" else arg)) if event in ("call", "c_call") else None)
        try:
            both(host, q, k, v, dout)
        finally:
            sys.setprofile(None)
        print(len(calls))
        import collections
        print(collections.Counter(str(c[1])[:60] for c in calls).most_common(60))
