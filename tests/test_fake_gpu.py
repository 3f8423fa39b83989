"""GPU code on a machine without one: mixed devices, and the branch of the hardware's FP8.

The checks of tests/fake_gpu.py run in a process of their own: its device stays with the process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sampler as S
from sampler import NarrowLinear, TorchSampler, mismatch, quantize

SCRIPT = Path(__file__).with_name("fake_gpu.py")
CHECKS = ("mixed_devices_are_refused", "losses_and_measures", "scoring_by_chunks", "narrow_layers",
          "sampling_and_syncs", "training")  # fmt: skip
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    done = subprocess.run([sys.executable, SCRIPT], cwd=folder, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("check", CHECKS)
def test_on_the_card_as_on_the_cpu(check, said):
    assert f"{check} ok\n" in said, said


def on_cpu(monkeypatch):
    """The hardware's branch on this machine: torch multiplies E4M3 on a CPU too, slowly."""
    calls, product = [], torch._scaled_mm
    monkeypatch.setattr(S, "hardware_fp8", lambda x: True)

    def counted(a, b, *args, **how):
        calls.append((a.shape[0], a.shape[1], b.shape[1]))
        return product(a, b, *args, **how)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    return calls


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("rows", (1, 5, 48))
def test_the_hardwares_product_is_that_of_the_rounded_matrices(rows, bias, monkeypatch):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(64, 48, generator=g) * torch.logspace(-3, 3, 64)[:, None]  # scales differ
    x = (torch.randn(2, rows, 48, generator=g) * torch.logspace(-2, 2, rows)[:, None]).to(BF16)
    b = torch.randn(64, generator=g).to(BF16) if bias else None
    layer = NarrowLinear(b, "fp8")
    layer.load(w, BF16)
    emulated = layer(x)
    calls = on_cpu(monkeypatch)
    got = layer(x)
    assert calls == [(2 * rows, 48, 64)] and got.shape == emulated.shape and got.dtype == BF16
    exact = quantize(x, "fp8").double() @ quantize(w, "fp8").double().t()
    exact = exact if b is None else exact + b.double()
    size = x.double().abs() @ w.double().abs().t() + 1
    off = lambda y: float(((y.double() - exact).abs() / size).max())
    assert off(got) <= max(off(emulated), 2**-9)  # its one rounding; the emulation rounds thrice
    assert off(x.double() @ w.double().t()) > 2 * off(got)  # which nothing unrounded passes


@pytest.mark.parametrize("shape", ((63, 48), (64, 40)))
def test_a_matrix_that_the_hardware_does_not_take_is_emulated(shape, monkeypatch):
    layer = NarrowLinear(None, "fp8")
    layer.load(torch.randn(shape, generator=torch.Generator().manual_seed(0)), BF16)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).to(BF16)
    want, calls = layer(x), on_cpu(monkeypatch)
    assert torch.equal(layer(x), want) and not calls


def test_torch_takes_the_products_arguments_on_a_fake_cuda(monkeypatch):
    """Its own conditions on layout, sizes and scales, for one row and for many."""
    monkeypatch.setattr(S, "hardware_fp8", lambda x: x.is_cuda)
    with FakeTensorMode():
        for bias in (None, torch.empty(3072, device="cuda", dtype=BF16)):
            layer = NarrowLinear(bias, "fp8")
            layer.load(torch.empty(3072, 1024, device="cuda"), BF16)
            for batch, length in ((1, 1), (32, 1), (4, 17)):
                y = layer(torch.empty(batch, length, 1024, device="cuda", dtype=BF16))
                assert y.shape == (batch, length, 3072) and y.dtype == BF16 and y.is_cuda
            assert layer.working is None and layer.codes.is_cuda


def test_a_sampler_on_the_hardwares_fp8_stays_as_near_as_the_emulation(monkeypatch, quick_base):
    import dlc

    model, _ = dlc.load_model(str(quick_base), "float32", "cpu")
    prompts, q = [[3, 4, 5], [6, 7], [8]] * 8, TorchSampler(model, "fp8", "fp8", stop_ids=[])
    r = q.sample(prompts, 6, seed=0)
    calls = on_cpu(monkeypatch)
    s = q.sample(prompts, 6, seed=0)
    assert len(calls) == 6 * len(q.narrow)  # every narrow layer at every step
    same = (r.tokens == s.tokens).all(1)
    assert same.float().mean() > 0.8 and (r.logq - s.logq)[same].abs().max() < 0.05
    scale = lambda x: mismatch(x.logp_stale, x.logq, x.mask, x.head_logp_stale, x.head_logq)["kl"]
    kl = [scale(r), scale(s)]
    assert kl[0] / 2 < kl[1] < kl[0] * 2, kl


def test_the_gpus_table_runs_through_on_a_cpu_and_sees_what_is_wrong(capsys, monkeypatch):
    import gpu_check

    if not torch.cuda.is_available():
        assert gpu_check.main([]) == 2 and "--tiny" in capsys.readouterr().err
    assert gpu_check.main(["--tiny"]) == 0
    table = capsys.readouterr().out
    rows = [line.split(" | ") for line in table.splitlines()[4:-2]]
    assert len(rows) > 25 and {len(r) for r in rows} == {4}
    for part in ("rollouts", "forward and backward", "loss", "engine:", "vLLM"):
        assert f"\n| {part}" in table
    load = S.NarrowKV.load
    monkeypatch.setattr(S.NarrowKV, "load", lambda self, codes, scale, dtype: load(
        self, codes, scale * 1.01, dtype))
    assert gpu_check.main(["--tiny"]) == 3
    assert "KV codes that widen otherwise" in capsys.readouterr().out
