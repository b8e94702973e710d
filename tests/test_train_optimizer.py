"""MuonAdamW against torch's optimizers and against the exact polar factor."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.train.optimizer import MuonAdamW, is_hidden_matrix, orthogonalise


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20, bias=False)
        self.down = nn.Linear(20, 12, bias=False)
        self.norm = nn.Parameter(torch.ones(12))
        self.lm_head = nn.Linear(12, 30, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm * self.down(torch.relu(self.up(x))))


def model() -> Small:
    torch.manual_seed(0)
    return Small()


def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 6) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(16, 12, generator=generator), torch.randint(30, (16,), generator=generator)
        nn.functional.cross_entropy(net(x), y).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()


def test_parameters_are_shared_out() -> None:
    assert {n for n, p in model().named_parameters() if is_hidden_matrix(n, p)} == {"up.weight", "down.weight"}


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (64, 64)])
def test_singular_values_move_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    values = torch.logspace(0, math.log10(0.06), len(vt))  # a spectrum that decays to 6 % of its top
    found = orthogonalise([u @ torch.diag(values) @ vt * 1e-5])[0]
    inside = u.t() @ found @ vt.t()
    moved = inside.diagonal()
    assert (inside - torch.diag(moved)).abs().max() < 1e-3
    assert moved.min() > 0.6
    assert moved.max() < 1.4


def test_matrices_go_together_or_alone_alike_and_zero_stays_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(8, 16), (16, 8), (8, 8), (8, 40), (12, 16)]
    matrices = [torch.randn(s, generator=generator) for s in shapes] + [torch.zeros(8, 16)]
    together = orthogonalise(matrices)
    for x, y in zip(matrices, together, strict=True):
        torch.testing.assert_close(orthogonalise([x])[0], y, rtol=1e-4, atol=1e-5)
        assert y.shape == x.shape
    assert not together[-1].any()


def test_equals_torch_muon_and_adamw_given_the_same_polar_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import _muon

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda g, *_: orthogonalise([g])[0])
    ours, theirs = model(), model()
    options: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
    train(ours, [MuonAdamW(ours.named_parameters(), lr_matrix=0.02, lr_other=0.01, momentum=0.9, **options)])
    muon = torch.optim.Muon(
        [theirs.up.weight, theirs.down.weight], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    train(theirs, [muon, torch.optim.AdamW([theirs.norm, theirs.lm_head.weight], lr=0.01, **options)])
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_about_as_close_to_the_polar_factor_as_torchs_newton_schulz() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    gradient = torch.randn(48, 128, generator=torch.Generator().manual_seed(4))
    u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
    exact = (u @ vt).flatten()
    theirs = _zeropower_via_newtonschulz(gradient, (3.4445, -4.7750, 2.0315), 5, 1e-7).float().flatten()
    ours = orthogonalise([gradient])[0].flatten()
    assert torch.cosine_similarity(ours, exact, 0) > 0.95
    assert torch.cosine_similarity(ours, exact, 0) > torch.cosine_similarity(theirs, exact, 0) - 0.03
    assert ours.norm() / exact.norm() == pytest.approx(1, abs=0.15)


def test_steps_that_are_not_finite_or_unwanted_change_nothing() -> None:
    net = model()
    optimizer = MuonAdamW(net.named_parameters(), lr_matrix=0.02, lr_other=0.01)
    train(net, [optimizer], 2)
    before, state = copy.deepcopy(net.state_dict()), {k: v.clone() for k, v in optimizer.named_state().items()}
    for poison in (True, False):
        net(torch.ones(1, 12)).sum().backward()
        if poison:
            assert net.up.weight.grad is not None
            net.up.weight.grad[0, 0] = float("inf")
        else:
            optimizer.skip = True
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(torch.equal(v, state[k]) for k, v in optimizer.named_state().items())
    assert optimizer.updates == 2
    train(net, [optimizer], 1)
    assert not optimizer.skipped


def test_state_by_name_goes_on_bit_for_bit() -> None:
    whole = model()
    one = MuonAdamW(whole.named_parameters(), lr_matrix=0.02, lr_other=0.01)
    train(whole, [one], 3)
    half = copy.deepcopy(whole)
    two = MuonAdamW(half.named_parameters(), lr_matrix=0.02, lr_other=0.01)
    two.load_named_state({k: v.clone() for k, v in one.named_state().items()}, one.updates)
    train(whole, [one], 2)
    train(half, [two], 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))
    state = one.named_state()
    del state["norm.exp_avg"]
    with pytest.raises(ValueError, match=r"'norm.exp_avg' is missing"):
        two.load_named_state(state, 3)


def test_an_adapters_bias_correction_counts_its_own_updates() -> None:
    """After steps of the heads alone it learns as under an AdamW that begins then; the state goes on."""
    names = {"norm": "norm", "lm_head.weight": "adapter.lm_head.weight"}
    ours, theirs = model(), model()
    named = [(names[n], p) for n, p in ours.named_parameters() if n in names]
    options: dict[str, Any] = {"lr_matrix": 0.02, "lr_other": 0.01, "lr_adapter": 0.02, "weight_decay": 0.1}
    one = MuonAdamW(named, **options)
    one.set_lr_factor(1.0, 0.0)
    train(ours, [one], 9)
    assert (one.updates, one.adapter_updates) == (9, 0)
    reference = torch.optim.AdamW([theirs.norm], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    train(theirs, [reference], 9)
    one.set_lr_factor(1.0, 1.0)
    reference.add_param_group({"params": [theirs.lm_head.weight], "lr": 0.02})
    theirs.zero_grad()
    train(ours, [one], 3)
    train(theirs, [reference], 3)
    torch.testing.assert_close(ours.norm, theirs.norm)
    torch.testing.assert_close(ours.lm_head.weight, theirs.lm_head.weight)
    assert (one.updates, one.adapter_updates) == (12, 3)
    half = copy.deepcopy(ours)
    two = MuonAdamW([(names[n], p) for n, p in half.named_parameters() if n in names], **options)
    two.load_named_state({k: v.clone() for k, v in one.named_state().items()}, one.updates, one.adapter_updates)
    train(ours, [one], 2)
    train(half, [two], 2)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), half.parameters(), strict=True))
