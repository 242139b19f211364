"""A copy in host memory is what torch.save would have written at that moment, whatever becomes of the original."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from recipe.checkpoint.snapshot import restore_snapshot, take_snapshot


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture
def state() -> dict[str, Any]:
    flat = torch.arange(12, dtype=torch.float32)
    module = OrderedDict(a=flat[:6].view(2, 3), b=flat[6:].view(3, 2).t())
    module._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {
        "module": module,
        "tied": nn.Parameter(flat[:6].view(2, 3)),
        "frozen": nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.99)}],
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def test_it_equals_what_torch_save_writes(state: dict[str, Any]) -> None:
    got, want = restore_snapshot(take_snapshot(state)), saved_and_loaded(state)
    assert repr(got) == repr(want)
    for name in ("tied", "frozen", "empty", "scalar", "bytes"):
        assert type(got[name]) is type(want[name])
        assert (got[name].dtype, got[name].requires_grad) == (want[name].dtype, want[name].requires_grad)
    assert got["module"]["b"].stride() == (1, 2)
    assert got["module"]._metadata == {"version": 1}


def test_later_changes_do_not_reach_it(state: dict[str, Any]) -> None:
    want = repr(state)
    snapshot = take_snapshot(state)
    state["module"]["a"].fill_(-1)
    state["frozen"].fill_(-1)
    state["groups"][0]["params"].append(2)
    state["groups"][0]["lr"] = 0.0
    assert repr(restore_snapshot(snapshot)) == want


def test_a_storage_that_several_tensors_share_is_copied_once(state: dict[str, Any]) -> None:
    snapshot = take_snapshot(state)
    assert sum(storage.numel() for storage in snapshot.storages) == 12 * 4 + 2 * 2 + 0 + 8 + 5
    got = restore_snapshot(snapshot)
    got["module"]["a"][0, 0] = 7
    assert got["tied"][0, 0] == 7
