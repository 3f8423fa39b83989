"""Properties over random shapes, masks, lengths, head sizes and extreme values: finite, blind to
what the mask hides, and equal to a reference in float64 that shares no code with the
implementation."""

import math

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

import dlc
import opd
import sampler as S

INF, NAN = float("inf"), float("nan")
FEW = settings(max_examples=40, deadline=None, derandomize=True)
SEED, SCALE = st.integers(0, 2**31), st.sampled_from((1e-3, 1.0, 30.0, 1e4))


def garbage(x, mask, g):
    """`x` with NaN, infinities and huge numbers wherever the mask hides them."""
    bad = torch.tensor([NAN, INF, -INF, 1e30])[torch.randint(4, x.shape, generator=g)].to(x.dtype)
    return x.where(mask.view(mask.shape + (1,) * (x.dim() - mask.dim())), bad)


# ---- policy_loss


def reference(name, lp, lq, ls, la, hp, hq, hs, A, C, eps):
    """(w, c over the head, gate) of one token, from Python floats: README's table, with its floors
    and clamps."""
    ratio = lambda a, b: math.exp(max(-20.0, min(20.0, a - b)))
    tail = lambda x: max(1e-6, 1 - math.fsum(map(math.exp, x)))
    P, Q, St = ([math.exp(v) for v in x] for x in (hp, hq, hs))
    w, m, alpha, r = 1.0, [0.0] * len(P), 0.0, None
    lag = [ratio(a, b) for a, b in zip(hp, hs)]
    if name in ("is", "tis", "mis", "tis_sc"):
        w = ratio(lp, lq)
    if name in ("tis", "tis_sc"):
        w = min(w, C)
    if name == "mis" and not 0.5 <= w <= 5:
        w = 0.0
    if name == "sc":
        m, alpha = Q, tail(hq) / tail(hp)
    if name == "tis_sc":
        m, alpha = [min(p, C * q) for p, q in zip(P, Q)], min(1, C * tail(hq) / tail(hp))
    if name.startswith("ppo"):
        w = r = ratio(lp, dict(ppo_anchor=la, ppo_stale=ls, ppo_sampler=lq)[name])
    if name.startswith("dlc"):
        w = r = ratio(lp, ls)
        m, alpha = [x * q for x, q in zip(lag, Q)], tail(hq) / tail(hs)
    if name == "dlc_tis":
        w = r * min(ratio(ls, lq), C)
        m = [x * min(s, C * q) for x, s, q in zip(lag, St, Q)]
        alpha = min(1, C * tail(hq) / tail(hs))
    closed = r is not None and (A > 0 and r > 1 + eps or A < 0 and r < 1 - eps)
    return w, [x - alpha * p for x, p in zip(m, P)], 0.0 if closed else 1.0


@FEW
@given(SEED, SCALE, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.booleans(),
       st.sampled_from((1.0, 2.0, 50.0)), st.sampled_from((0.0, 0.2, 3.0)))
def test_policy_loss(seed, scale, B, T, K, by_token, cap, clip):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.7
    base = -draw(B, T).abs() * scale
    head = (draw(B, T, K + 2) * min(scale, 30)).log_softmax(-1)[..., :K]
    # Policies that differ, some by a lot:
    near = lambda x: (x + draw(*x.shape) * min(scale, 3)).clamp_max(0)
    args = dict(logp=base, logq=near(base), logp_stale=near(base), logp_anchor=near(base),
                head_logp=head, head_logq=near(head) - 1, head_logp_stale=near(head) - 1)
    for x in args.values():
        x[torch.rand(x.shape, generator=g) < 0.05] = -INF
    A = (draw(B, T) if by_token else draw(B)) * 10 ** float(torch.randint(-3, 4, (), generator=g))
    args = {k: garbage(x, mask, g) for k, x in args.items()}
    learns = lambda k: k in ("logp", "head_logp")
    for name in dlc.CORRECTIONS:
        leaves = {k: x.clone().requires_grad_(learns(k)) for k, x in args.items()}
        loss, stats = dlc.policy_loss(
            name, advantage=A, mask=mask, num_tokens=7, cap=cap, clip=clip, **leaves)
        loss.backward()
        d_logp, d_head = (
            torch.zeros_like(x) if x.grad is None else x.grad
            for x in (leaves["logp"], leaves["head_logp"]))
        total, clipped, largest = 0.0, 0, 0.0
        for b, t in torch.cartesian_prod(torch.arange(B), torch.arange(T)).tolist():
            if not mask[b, t]:
                assert d_logp[b, t] == 0 and not d_head[b, t].any(), name
                continue
            low = {k: x[b, t].clamp_min(-100).tolist() for k, x in args.items()}
            a = float(A[b, t] if by_token else A[b])
            w, c, gate = reference(name, *low.values(), a, cap, clip)
            raw = args["logp"][b, t] >= -100  # below, the clamp lets no gradient through
            want = -a * gate * w / 7 * bool(raw)
            assert float(d_logp[b, t]) == pytest.approx(want, rel=1e-9, abs=1e-12)
            for k, raw in enumerate(args["head_logp"][b, t].tolist()):
                want = a * gate * c[k] / 7 * (raw >= -100)
                near = pytest.approx(want, rel=1e-7, abs=1e-9 * abs(a))
                assert float(d_head[b, t, k]) == near, name
            centre = math.fsum(x * y for x, y in zip(c, low["head_logp"]))
            total -= a * gate * (w * low["logp"] - centre) / 7
            clipped, largest = clipped + (gate == 0), max(largest, w)
        near = pytest.approx(total, rel=1e-6, abs=1e-6 * float(A.abs().max() + 1))
        assert float(loss.detach()) == near, name
        assert (stats["tokens"], stats["clipped"]) == (int(mask.sum()), clipped)
        assert stats["weight_max"] == pytest.approx(largest, rel=1e-9)
        small = {k: x.float().requires_grad_(learns(k)) for k, x in args.items()}
        loss, _ = dlc.policy_loss(
            name, advantage=A.float(), mask=mask, cap=cap, clip=clip, **small)
        loss.backward()  # in float32: finite, whatever it was given
        assert loss.isfinite(), name
        assert all(x.grad is None or x.grad.isfinite().all() for x in small.values()), name


# ---- ess


@FEW
@given(SEED, SCALE, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_ess(seed, scale, B, T, prefix):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(B, T, generator=g) * scale).clamp(-1e4, 1e4)
    mask = torch.rand(B, T, generator=g) < 0.5
    if prefix:
        mask = torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=g)
    rows = [np.array(r[m].tolist()) for r, m in zip(x, mask) if m.any()]
    each = dict(sequence=[r.sum() for r in rows], token=np.concatenate([*rows, []]))
    for level, logs in each.items():
        got, logs = dlc.ess(garbage(x, mask, g), mask, level), np.asarray(logs, dtype=np.float64)
        want = 1.0
        if len(logs):  # (Σw)² / (B Σw²), in logarithms
            twice = np.logaddexp.reduce(2 * logs)
            want = math.exp(2 * np.logaddexp.reduce(logs) - twice - math.log(len(logs)))
        assert 0 < got <= 1 and got == pytest.approx(want, rel=1e-9), level


# ---- quantize: every value goes to the nearest point of a grid written down by hand


def e4m3():
    normal = [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)]
    return np.array(sorted([m / 8 * 2.0**-6 for m in range(8)] + [x for x in normal if x <= 448]))


def e5m2():
    normal = [2.0**e * (1 + m / 4) for e in range(-14, 16) for m in range(4)]
    return np.array(sorted([m / 4 * 2.0**-14 for m in range(4)] + normal))


GRIDS = dict(fp8=e4m3(), fp8_e5m2=e5m2(), int8=np.arange(128.0), int4=np.arange(8.0),
             int3=np.arange(4.0))


@FEW
@given(SEED, st.sampled_from(S.FORMATS), st.integers(0, 4), st.integers(1, 35),
       st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from((-44, -20, 0, 20, 38)))
def test_quantize(seed, fmt, rows, columns, dtype, magnitude):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g).double() * 10.0**magnitude
    x = x.clamp(-3.3e38, 3.3e38).to(dtype)
    x[torch.rand(x.shape, generator=g) < 0.2] = 0
    if x.numel() and magnitude == 38:
        x[0, 0] = torch.finfo(dtype).max
    y = S.quantize(x, fmt)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    assert torch.equal(y, S.quantize(x, fmt))
    assert ((y == 0) | (y.sign() == x.sign())).all() and (y[x == 0] == 0).all()
    assert torch.equal(S.quantize(-x, fmt), -y)
    if fmt in GRIDS and magnitude > -44:  # below, the scale itself is rounded
        for row, got in zip(x.double().numpy(), y.double().numpy()):
            if (top := np.abs(row).max()) > 0:
                points = GRIDS[fmt] * (top / GRIDS[fmt].max())
                best = np.abs(np.abs(row)[:, None] - points).min(1)  # to the nearest point
                rounding = top * (2e-6 if dtype == torch.float32 else 4e-3)
                assert (np.abs(got - row) <= best + rounding).all()
    for bad in (NAN, INF):
        if x.numel():
            spoilt = x.clone()
            spoilt[-1, -1] = bad
            with pytest.raises(ValueError, match="inf or NaN"):
                S.quantize(spoilt, fmt)


# ---- token_logps, against one row at a time through the model's own head, in float64


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=19, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.4)
    return hf.Qwen3ForCausalLM(config).double().eval()


@FEW
@given(SEED, st.integers(1, 4), st.integers(1, 5), st.integers(1, 19),
       st.sampled_from((None, 1, 2, 3)), st.sampled_from((1, 40, 2**23)))
def test_token_logps(model, seed, B, T, K, rows, chunk):
    g = torch.Generator().manual_seed(seed)
    length, n = torch.randint(1, 7, (B,), generator=g), torch.randint(0, T + 1, (B,), generator=g)
    P = int(length.max())
    holes = torch.rand(B, T, generator=g) < 0.9  # as dropped tokens leave
    mask = (torch.arange(T) < n[:, None]) & holes
    tokens = torch.randint(19, (B, P + T), generator=g)
    ids = torch.randint(19, (B, T, K), generator=g)
    r = S.Rollout(tokens, length, mask, None, None, ids, None, None, None)
    rows = None if rows is not None and rows >= B else rows
    with pytest.MonkeyPatch.context() as m, torch.no_grad():
        m.setattr(S.LinearLogps, "CHUNK", chunk)
        parts = [r[i : i + (rows or B)] for i in range(0, B, rows or B)]
        both = [S.token_logps(model, part, head=True) for part in parts]
        logp, head = (torch.cat(x) for x in zip(*both))
        whole, _ = S.token_logps(model, r, head=True, rows=None)
        assert torch.allclose(logp, whole, atol=1e-9)
        assert torch.allclose(logp, S.token_logps(model, r), atol=1e-9)
        for b in range(B):
            z = model(tokens[b : b + 1, P - length[b] :]).logits[0].numpy()  # by itself: no padding
            for t in range(T):
                row = z[int(length[b]) - 1 + t]
                want = row - np.logaddexp.reduce(row)
                if mask[b, t]:
                    assert float(logp[b, t]) == pytest.approx(want[tokens[b, P + t]], abs=1e-6)
                    assert head[b, t].numpy() == pytest.approx(want[ids[b, t].numpy()], abs=1e-6)
                else:
                    assert logp[b, t] == 0 and not head[b, t].any()


# ---- distill_loss


@FEW
@given(SEED, SCALE, st.integers(1, 3), st.integers(1, 4), st.integers(2, 9), st.integers(1, 10))
def test_distill_loss(seed, scale, B, T, V, k):
    g = torch.Generator().manual_seed(seed)
    s, t = (torch.randn(B, T, V, generator=g, dtype=torch.float64) * scale for _ in range(2))
    mask = torch.rand(B, T, generator=g) < 0.7
    tokens = torch.randint(V, (B, T), generator=g)
    want = dict.fromkeys(opd.LOSSES, 0.0)
    for b, i in mask.nonzero().tolist():
        x, y = (z[b, i].numpy() - np.logaddexp.reduce(z[b, i].numpy()) for z in (s, t))
        x, y = np.maximum(-100, x), np.maximum(-100, y)  # ruled out: exp(-100)
        kl = lambda a, c: float((np.exp(a) * (a - c)).sum())
        mix = np.logaddexp(x, y) - math.log(2)
        H = np.argsort(-x, kind="stable")[:k]
        rest = [max(1e-6, 1 - math.fsum(np.exp(z[H]))) for z in (x, y)]
        want["full"] += kl(x, y)
        want["forward"] += kl(y, x)
        want["jsd"] += (kl(x, mix) + kl(y, mix)) / 2
        want["topk"] += kl(x[H], y[H]) + rest[0] * math.log(rest[0] / rest[1])
        want["sampled"] -= (y - x)[tokens[b, i]] * max(-100, x[tokens[b, i]])
    hidden_s, hidden_t = garbage(s, mask, g), garbage(t, mask, g)
    for loss in opd.LOSSES:
        leaf = hidden_s.clone().requires_grad_()
        got = opd.distill_loss(loss, leaf, hidden_t, mask, tokens, k=k)
        got.backward()
        near = pytest.approx(want[loss] / max(1, int(mask.sum())), rel=1e-7, abs=1e-8)
        assert float(got.detach()) == near, loss
        assert leaf.grad.isfinite().all() and not leaf.grad[~mask].any(), loss
        leaf = hidden_s.float().requires_grad_()
        got = opd.distill_loss(loss, leaf, hidden_t.float(), mask, tokens, k=k)
        got.backward()
        assert got.isfinite() and leaf.grad.isfinite().all(), loss
        assert loss == "sampled" or got > -1e-4 * (1 + scale), loss
