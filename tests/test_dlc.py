"""dlc.py against what shares none of its code: loops over all sequences, textbook formulas, weights
copied aside. A docstring says what a failure would mean. CPU only."""

import functools
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dlc

NAMES = "reinforce is tis mis sc tis_sc ppo_anchor ppo_stale ppo_sampler dlc dlc_tis".split()
CENTRED = ("sc", "tis_sc", "dlc", "dlc_tis")
GATED = dict(ppo_anchor="anchor", ppo_stale="stale", ppo_sampler="q", dlc="stale", dlc_tis="stale")
INF, NAN = float("inf"), float("nan")

# ---- the bias, against loops over sequences and prefixes (NumPy, the score written as e_a - π)


def rule(name, p, q, s, n, K, C):
    """(w, c, r) at one prefix, each (V,): the table of the eleven, from probabilities."""
    H, one, c, cut = np.argsort(-q)[:K], np.ones_like(p), np.zeros_like(p), np.minimum
    out, band = lambda x: max(1 - x[H].sum(), 1e-6), (p / q >= 0.5) & (p / q <= 5)
    rho, rho_s = out(q) / out(p), out(q) / out(s)
    w, m, alpha = {
        "reinforce": (one, 0, 0), "is": (p / q, 0, 0), "tis": (cut(p / q, C), 0, 0),
        "mis": (p / q * band, 0, 0), "sc": (one, q, rho),
        "tis_sc": (cut(p / q, C), cut(p, C * q), min(1, C * rho)),
        "ppo_anchor": (p / n, 0, 0), "ppo_stale": (p / s, 0, 0), "ppo_sampler": (p / q, 0, 0),
        "dlc": (p / s, q * p / s, rho_s),
        "dlc_tis": (p / s * cut(s / q, C), p / s * cut(s, C * q), min(1, C * rho_s)),
    }[name]  # fmt: skip
    c[H] = (m - alpha * p)[H]
    return w, c, p / dict(anchor=n, stale=s, q=q)[GATED[name]] if name in GATED else None


def enumerate_bias(name, p, q, s, n, R, K, C, eps):
    T, V, of = R.ndim, len(R), dict(p=p, q=q)
    out = defaultdict(lambda: [np.zeros_like(x) for x in p])

    @functools.cache
    def reach(who, h):
        return reach(who, h[:-1]) * of[who][len(h) - 1][h] if h else 1

    @functools.cache
    def value(who, h):
        after = [h + (a,) for a in range(V)] if len(h) < T else ()
        return sum(of[who][len(h)][k] * value(who, k) for k in after) if after else R[h]

    for h in (h for t in range(T) for h in itertools.product(range(V), repeat=t)):
        t = len(h)
        pi, mu, score = p[t][h], q[t][h], np.eye(V) - p[t][h]  # score[a] = ∇ log π(a | h)
        w, c, r = rule(name, pi, mu, s[t][h], n[t][h], K, C)
        Q_p, Q_q = (np.array([value(who, h + (a,)) for a in range(V)]) for who in "pq")
        d_p, d_q, V_q, centre = reach("p", h), reach("q", h), mu @ Q_q, c @ score
        out["prefix"][t][h] += (d_q - d_p) * (pi * Q_p) @ score
        out["continuation"][t][h] += d_q * (pi * (Q_q - Q_p)) @ score
        out["token"][t][h] += d_q * ((mu * w - pi) * (Q_q - V_q)) @ score
        out["drift"][t][h] += d_q * V_q * ((mu * w) @ score - centre)
        for y in (h + rest for rest in itertools.product(range(V), repeat=T - t)):
            a, A = y[t], R[y]
            shut = r is not None and ((A > 0 and r[a] > 1 + eps) or (A < 0 and r[a] < 1 - eps))
            step = reach("q", y) * A * (w[a] * score[a] - centre)
            out["estimate"][t][h] += step * (not shut)
            out["clip"][t][h] -= step * shut
            out["true"][t][h] += reach("p", y) * A * score[a]
    return {k: np.concatenate([x.ravel() for x in out[k]]) for k in out}


def tables(seed, V=4, T=3):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: [torch.randn((V,) * (t + 1), generator=g).double() for t in range(T)]
    p = draw()
    near = lambda: [x + 0.6 * y for x, y in zip(p, draw())]
    return p, near(), near(), near(), torch.randn((V,) * T, generator=g).double()


def probs(logits):
    return [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (y.numpy() for y in logits)]


@pytest.mark.parametrize("name", NAMES)
def test_exact_bias_equals_an_enumeration(name):
    """A correction, a term or the layout of the gradient is wrong: every claim rests on this."""
    assert list(dlc.CORRECTIONS) == NAMES
    p, q, s, n, R = tables(1)
    for K, eps in itertools.product((4, 2), (0.2, INF)):
        mine = enumerate_bias(name, *map(probs, (p, q, s, n)), R.numpy(), K, 1.3, eps)
        got = dlc.exact_bias(name, p, q, R, K, 1.3, eps, stale_logits=s, anchor_logits=n)
        for key, want in mine.items():
            assert np.abs(got[key].numpy() - want).max() < 1e-12, (key, K, eps)
        terms = sum(got[k] for k in ("prefix", "continuation", "token", "drift", "clip"))
        assert (terms - (got["estimate"] - got["true"])).abs().max() < 1e-12
        assert (got["clip"].abs().max() > 1e-3) == (name in GATED and eps < 1)
    default = dlc.exact_bias(name, p, q, R)["estimate"]  # None: the same as p
    spelled = dlc.exact_bias(name, p, q, R, head_k=4, stale_logits=p, anchor_logits=p)["estimate"]
    assert torch.equal(default, spelled)


def test_full_sequence_importance_sampling_has_no_bias():
    p, q, _, _, R = tables(2)
    P, Q, leaves, loss = probs(p), probs(q), [x.clone().requires_grad_() for x in p], 0
    for y in itertools.product(range(4), repeat=3):
        of_p, of_q = (math.prod(pol[t][y[: t + 1]] for t in range(3)) for pol in (P, Q))
        logp = torch.stack([x.log_softmax(-1)[y[: t + 1]] for t, x in enumerate(leaves)])[None]
        A = torch.tensor([of_q * (of_p / of_q) * float(R[y])])  # E_q[π(y)/q(y) R Σ_t score]
        loss += dlc.policy_loss("reinforce", logp, logp.detach(), A, logp < 1, num_tokens=1)[0]
    got = torch.cat([-x.flatten() for x in torch.autograd.grad(loss, leaves)])
    want = dlc.exact_bias("reinforce", p, q, R)["true"]
    assert (got - want).abs().max() < 1e-6 < 1e-2 < want.abs().max()


def test_the_drift_of_dlc_is_zero_under_both_gaps(monkeypatch):
    """The limits below do not pin DLC down: two wrong centres pass them, and both leave a drift."""

    def no_lag_ratio(logp, logp_stale, head_logp, head_logq, **_):
        r = (logp - logp_stale).exp()
        return r, (head_logq.exp(), torch.ones_like(head_logp[..., 0])), r

    def difference(logp, logp_stale, head_logq, head_logp_stale, **_):
        r = (logp - logp_stale).exp()
        return r, (head_logq.exp() - head_logp_stale.exp(), torch.zeros_like(head_logq[..., 0])), r

    p, q, s, _, R = tables(3)
    drift = lambda k: dlc.exact_bias(k, p, q, R, clip=INF, stale_logits=s)["drift"].abs().max()
    assert drift("dlc") < 1e-14
    for wrong in (no_lag_ratio, difference):
        monkeypatch.setitem(dlc.CORRECTIONS, wrong.__name__, wrong)
        assert drift(wrong.__name__) > 1e-3


# ---- the loss, by its gradients; K < V, sampled tokens in and outside the head


def batch(seed=0, B=40, T=3, V=7, K=3):
    g = torch.Generator().manual_seed(seed)
    p, *noise = (torch.randn(B, T, V, generator=g).double() for _ in range(4))
    p, q, stale, anchor = (x.log_softmax(-1) for x in (p, *(p + 0.7 * x for x in noise)))
    return SimpleNamespace(
        p=p, q=q, stale=stale, anchor=anchor, K=K, A=torch.randn(B, generator=g).double(),
        y=torch.randint(V, (B, T), generator=g),
        mask=torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g))  # fmt: skip


def arguments(s, live=None):
    """Of policy_loss."""
    live, H = s.p if live is None else live, s.q.topk(s.K).indices
    token = dict(logp=live, logq=s.q, logp_stale=s.stale, logp_anchor=s.anchor)
    head = dict(head_logp=live, head_logq=s.q, head_logp_stale=s.stale)
    args = {k: x.gather(-1, s.y[..., None])[..., 0] for k, x in token.items()}
    return args | {k: x.gather(-1, H) for k, x in head.items()} | dict(advantage=s.A, mask=s.mask)


def gradient(name, s, **how):
    """Of -loss * N in the logits of π, (B, T, V)."""
    z = s.p.clone().requires_grad_()
    loss, _ = dlc.policy_loss(name, **arguments(s, z.log_softmax(-1)), **{"num_tokens": 1} | how)
    return -torch.autograd.grad(loss, z)[0]


def direct(name, args, **how):
    """Loss, its gradients in logp and head_logp, stats."""
    live = {k: args[k].detach().clone().requires_grad_() for k in ("logp", "head_logp")}
    loss, stats = dlc.policy_loss(name, **args | live, **how)
    on_logp, on_head = torch.autograd.grad(loss, live.values(), allow_unused=True)
    on_head = torch.zeros_like(args["head_logp"]) if on_head is None else on_head
    return loss.detach(), on_logp, on_head, stats


def gap(name, other, s):
    return (gradient(name, s) - gradient(other, s)).abs().max()


def test_limits_of_dlc_and_dlc_tis():
    """DLC would centre lag, or see a discrepancy where there is none."""
    s = batch()
    assert min(gap("dlc", k, s) for k in ("ppo_stale", "sc", "dlc_tis")) > 1e-2
    s.stale = s.q  # no discrepancy
    assert gap("dlc", "ppo_stale", s) < 1e-12 > gap("dlc_tis", "ppo_stale", s)
    s = batch()
    s.anchor = s.stale = s.p  # no lag; one update a batch
    assert gap("dlc", "sc", s) < 1e-12 > gap("dlc_tis", "tis_sc", s)
    assert gap("ppo_anchor", "reinforce", s) < 1e-12 < 1e-2 < gap("ppo_sampler", "reinforce", s)
    s.q = s.p  # neither
    assert max(gap(name, "reinforce", s) for name in NAMES) < 1e-12


@pytest.mark.parametrize("name", CENTRED)
def test_outside_the_head_the_sampler_is_rho_times_the_trainer(name):
    """The centre spelled out over the whole vocabulary, where the loss sees K tokens of it."""
    s, C, cut = batch(), 1.5, "tis" in name
    p, q, e = s.p.exp(), s.q.exp(), torch.eye(7).double()[s.y]
    inside = torch.zeros_like(p).scatter(-1, s.q.topk(3).indices, 1).bool()
    ref = s.stale.exp() if "dlc" in name else p
    out = lambda x: 1 - x.where(inside, 0).sum(-1, keepdim=True)
    model = q.where(inside, out(q) / out(ref) * ref)  # of q
    centre = p / ref * ((C * model).minimum(ref) if cut else model)
    w = p / ref * ((ref / q).clamp_max(C) if cut else 1)
    assert 0.1 < (inside * e).sum(-1)[s.mask].mean() < 0.9  # sampled tokens of both kinds
    want = (w * e).sum(-1, keepdim=True) * (e - p) - (centre - centre.sum(-1, keepdim=True) * p)
    want = (s.A[:, None, None] * want).where(s.mask[..., None], 0)
    assert (gradient(name, s, clip=INF, cap=C) - want).abs().max() < 1e-12


def test_score_centering():
    s = batch(B=6, T=1, V=6, K=6)
    s.p, s.q = (x[:1].expand(6, 1, 6) for x in (s.p, s.q))  # one place, every token drawn there
    s.y, s.A, s.mask = torch.arange(6)[:, None], torch.ones(6).double(), s.mask | True
    got, q = gradient("sc", s)[:, 0], s.q[0, 0].exp()
    assert (got - (torch.eye(6) - q)).abs().max() < 1e-12  # (e_a - π) - E_q[e - π] = e_a - q
    assert (q @ got).abs().max() < 1e-12 < 1e-2 < (q @ gradient("reinforce", s)[:, 0]).abs().max()
    s.q, s.K = s.p, 2  # q = π, K < V: nothing to correct
    assert gap("sc", "reinforce", s) < 1e-12


def one(name, r, A=1.0, **over):
    """Gradients of -loss in logp and in the head, and stats, of one token. The ratio that the
    correction looks at is r, the others are 1/r: a gate on the wrong reference shows."""
    seen, tensor = GATED.get(name, "q"), lambda x: torch.tensor([[x]]).double()
    token = {k: r if k.endswith(seen) else 1 / r for k in ("logq", "logp_stale", "logp_anchor")}
    args = {k: tensor(-1 - math.log(x)) for k, x in token.items()} | dict(logp=tensor(-1))
    head = dict(head_logp=[0.5, 0.2], head_logq=[0.1, 0.3], head_logp_stale=[0.4, 0.2])
    args |= {k: tensor(over.pop(k, x)).log() for k, x in head.items()}
    args |= dict(advantage=torch.tensor([A]), mask=torch.ones(1, 1) > 0)
    _, on_logp, on_head, stats = direct(name, args, **over)
    return -float(on_logp), -on_head[0, 0], stats


@pytest.mark.parametrize("name", NAMES)
def test_gate_by_the_signs(name):
    """A > 0 is shut above 1+ε only, A < 0 below 1-ε only, and the centre is shut with the token:
    else it goes on pushing after the clip and the trust region is lost."""
    for A, r in itertools.product((1.0, -1.0), (0.79, 0.81, 1.19, 1.21)):
        shut = name in GATED and (r > 1.2 if A > 0 else r < 0.8)
        on_logp, on_head, stats = one(name, r, A)
        assert (on_logp == 0) == shut == stats["clipped"] and (shut or on_logp * A > 0), (A, r)
        assert (on_head == 0).all() == (shut or name not in CENTRED), (A, r)


@pytest.mark.parametrize("name", ("ppo_anchor", "ppo_stale", "ppo_sampler"))
def test_ppo_has_the_textbook_gradient(name):
    s = batch(seed=4)
    z = s.p.clone().requires_grad_()
    r = (z.log_softmax(-1) - getattr(s, GATED[name])).exp().gather(-1, s.y[..., None])[..., 0]
    surrogate = torch.min(r * s.A[:, None], r.clamp(0.9, 1.1) * s.A[:, None])
    want = torch.autograd.grad(surrogate[s.mask].sum(), z)[0]
    assert (gradient(name, s, clip=0.1) - want).abs().max() < 1e-12


def test_weights_at_their_bounds():
    w = lambda name, *r, **how: pytest.approx([one(name, x, **how)[0] for x in r])
    assert [0.3, 1.9, 2, 2] == w("tis", 0.3, 1.9, 2.1, 50) and [50] == w("is", 50)
    assert [2.9, 3] == w("tis_sc", 2.9, 3.1, cap=3.0)
    assert [0, 0.501, 4.99, 0] == w("mis", 0.499, 0.501, 4.99, 5.01)
    assert [1] == w("mis", 1.0, mis=(1.0, 1.0))  # both ends belong to the band
    assert [0.5 * 2, 1 / 0.9] == w("dlc_tis", 0.5, 0.9)  # π/π_stale = r, π_stale/q = 1/r² here
    far = dict(head_logq=[0.6, 0.01], head_logp_stale=[0.02, 0.5])
    c = lambda name: -one(name, 1.0, cap=1.5, **far)[1]
    pi = torch.tensor([0.5, 0.2])
    assert (c("dlc_tis") <= 1.5 * pi).all() and (c("tis_sc") <= 1.5 * pi).all()
    assert c("dlc")[0] > 10 * pi[0]  # unbounded: what dlc_tis is for


@pytest.mark.parametrize("name", NAMES)
def test_padding_split_and_order_change_nothing(name):
    s = batch(B=8)
    args, mask = arguments(s), s.mask
    loss, *want, stats = direct(name, args)
    assert want[0][mask].any() and not want[0][~mask].any() and stats["tokens"] == mask.sum()
    wide = args | dict(advantage=s.A[:, None].expand(mask.shape))  # (B, T) is (B,) expanded
    for bad in (NAN, INF, -INF, 1e30):
        hide = lambda x: x.masked_fill(~mask if x.dim() == 2 else ~mask[..., None], bad)
        dirty = {k: hide(x) for k, x in wide.items()} | dict(mask=mask)
        assert all(map(torch.equal, direct(name, dirty)[:3], (loss, *want))), bad
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    for size in (8, 3):  # N is that of the whole update
        parts = [direct(name, {k: x[i] for k, x in args.items()}, num_tokens=int(mask.sum()))
                 for i in order.split(size)]  # fmt: skip
        for i, whole in enumerate(want):
            assert (torch.cat([p[1 + i] for p in parts]) - whole[order]).abs().max() < 1e-12, size
    assert direct(name, args | dict(mask=mask & False))[0] == 0  # nothing to train on


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 9**9), st.sampled_from((0.1, 30, 1e4)), st.booleans())
def test_extreme_log_probs_stay_finite(name, seed, scale, ruled_out):
    """One overflow in a ratio is NaN in every weight of the model."""
    s, g = batch(seed, B=6), torch.Generator().manual_seed(seed)
    args = {k: (x * scale).float() for k, x in arguments(s).items() if "log" in k}
    for x in args.values() if ruled_out else ():
        x[torch.rand(x.shape, generator=g) < 0.3] = -INF
    loss, *grads, stats = direct(name, args | dict(advantage=s.A.float(), mask=s.mask))
    assert all(x.isfinite().all() for x in (loss, *grads)) and math.isfinite(stats["weight_max"])


def test_what_is_missing_is_named():
    args = arguments(batch())
    head, always = ["head_logp", "head_logq"], ("logp", "logq", "advantage", "mask")
    needs = dict(sc=head, tis_sc=head, ppo_anchor=["logp_anchor"], ppo_stale=["logp_stale"])
    needs |= {k: [*head, "head_logp_stale", "logp_stale"] for k in ("dlc", "dlc_tis")}
    for name in NAMES:
        have = {k: args[k] for k in (*always, *needs.get(name, ()))}
        dlc.policy_loss(name, **have)  # and no more than that
        for key in needs.get(name, ()):
            with pytest.raises(ValueError, match=rf"{name}.*\b{key}\b"):
                dlc.policy_loss(name, **have | {key: None})
    with pytest.raises(ValueError, match="ppo_old.*dlc_tis"):
        dlc.policy_loss("ppo_old", **have)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32), st.floats(-9, 4),
       st.floats(-1e4, 1e4))  # fmt: skip
@example(3, 1, 0, -8.14453125, 0.0)  # rounding alone must not lift it above 1
def test_ess(B, T, seed, magnitude, shift):
    """A value that is not in (0, 1], or not exactly 1 without lag, and the sync rule misfires."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(B, T, generator=g) * 10**magnitude).clamp(-1e4, 1e4)
    mask = torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=g)
    every, constant = torch.ones(B, T) > 0, torch.full((B, T), shift)
    for level in ("sequence", "token"):
        got = dlc.ess(x.masked_fill(~mask, NAN), mask, level)
        assert 0 < got <= 1 == dlc.ess(constant, every, level) == dlc.ess(x, mask & False, level)
        moved = dlc.ess(x.double() + shift, every, level)  # cancels where lengths are equal
        assert moved == pytest.approx(dlc.ess(x, every, level), rel=1e-6)
        if magnitude < 1:  # small enough for plain exponentials
            rows = [r[m].double().tolist() for r, m in zip(x, mask) if m.any()]
            w = [math.exp(v) for v in (map(sum, rows) if level == "sequence" else sum(rows, []))]
            want = sum(w) ** 2 / len(w) / sum(v * v for v in w) if w else 1
            assert got == pytest.approx(want, rel=1e-9)
    with pytest.raises(ValueError, match="batch"):
        dlc.ess(x, mask, "batch")


def test_reward():
    number = dlc.reward_of(str(Path(dlc.__file__).parent / "notebooks" / "number_reward.py"))
    for text, answer, want in (
        (" 19.", "19", 1), (" 12 + 7 = 19", "19", 0), ("It is 1,234 or 5", "1234", 1),
        ("1234", "1,234", 1), ("-5 degrees", "-5", 1), ("5", "-5", 0), (" 2.50", "2.5", 1),
        ("2.5", "2", 0), ("190", "19", 0), ("no idea", "19", 0), ("", "19", 0),
        ("9007199254740993", "9007199254740992", 0), ("19, or 20", "19", 1),
        (" Paris\n", "Paris", 1), ("Paris, France", "Paris", 0), ("7 is right", "7 is right", 1),
    ):  # fmt: skip
        for stopped in (True, False):
            assert number(text, dict(answer=answer), stopped) == want, (text, answer)
    for text, stopped, want in (  # of the tiny model: no number is read, nothing is stripped
        ("0012", True, 1), ("0012", False, 0), ("001", True, 0), ("00123", True, 0),
        ("12", True, 0), (" 0012", True, 0), ("0012\n", True, 0), ("", True, 0)):
        assert dlc.reward(text, dict(answer="0012"), stopped) == want, (text, stopped)
    assert number("12", dict(answer="0012"), False) == 1


# ---- the loop, on the tiny model; the weights that a step trained and drew from are copied aside


@pytest.fixture(scope="session")
def base(made_base):
    """A digits task so small that both rewards are drawn: half of the answers are right."""
    return made_base(40, digits=3)


@pytest.fixture
def tiny(base, tmp_path, monkeypatch):
    """run(**options) with small batches; drawn[t], trained[t]: weights of q and of π at step t;
    hook(t, rollout) sees a batch as it was drawn, before the sampler has looked for NaN."""
    tiny = SimpleNamespace(drawn=[], trained=[], hook=lambda t, rollout: None)
    finish, score = dlc.TorchSampler._finish, dlc.token_logps
    flat = lambda model: torch.cat([p.detach().float().flatten() for p in model.parameters()])

    def spy_finish(self, rollout):
        tiny.drawn.append(flat(self.engine))
        tiny.hook(len(tiny.drawn) - 1, rollout)
        return finish(self, rollout)

    def spy_score(model, *args, **how):
        if len(tiny.trained) < len(tiny.drawn):  # the first scoring of a step, before its update
            tiny.trained.append(flat(model))
        return score(model, *args, **how)

    def run(**options):
        tiny.drawn.clear(), tiny.trained.clear()
        small = dict(digits=3, prompts=4, group_size=4, lr=1e-3, head_k=5)
        small |= dict(weights="none", kv="none")
        return dlc.train(dlc.Config(**small | options))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dlc, "tiny_base", lambda **_: base)
    monkeypatch.setattr(dlc, "accuracy", lambda *_: (0.0, []))
    monkeypatch.setattr(dlc, "token_logps", spy_score)
    monkeypatch.setattr(dlc.TorchSampler, "_finish", spy_finish)
    tiny.run = run
    return tiny


def weights(folder):
    return (Path(folder) / "model" / "model.safetensors").read_bytes()


def comparable(rows):
    """As JSON, without what a clock says."""
    drop = ("seconds_sample", "seconds_wait", "seconds_train", "tokens_per_second", "memory")
    return [json.dumps({k: v for k, v in r.items() if k not in drop}) for r in rows]


@pytest.mark.parametrize("how, version", [
    (dict(lag=0), lambda t: t), (dict(lag=2), lambda t: max(0, t - 2)),
    (dict(sync_every=1, minibatches=4), lambda t: t), (dict(sync_every=3), lambda t: t // 3 * 3),
    (dict(sync_every=0), lambda t: 0)])  # fmt: skip
def test_the_sampler_has_exactly_the_weights_of_its_version(tiny, how, version):
    """Step t is drawn with the weights before update `version`: off by one would pass as lag."""
    rows = tiny.run(steps=7, lr=2e-4, **how)
    for t, row in enumerate(rows):
        assert row["step"] == t and row["version"] == version(t)
        assert torch.equal(tiny.drawn[t], tiny.trained[version(t)])
        assert t == 0 or not torch.equal(tiny.trained[t], tiny.trained[t - 1])
        assert (row["ess"] == row["ess_token"] == 1 and row["lag"] == 0) == (version(t) == t)
        late = t + how.get("lag", 0)  # the last step that draws with what is published by now
        assert row["synced"] == (version(t + 1) != version(t))
        assert (row["sync_reason"] is not None) == (version(late + 1) != version(late))
        assert abs(row["discrepancy"]) < 1e-6 and row["discrepancy_max_abs"] < 1e-4  # q = π_stale
    if how == dict(sync_every=0):
        assert rows[6]["lag"] > rows[1]["lag"] > 0 and rows[6]["ess"] < rows[1]["ess"]
        assert tiny.run(steps=1, weights="int2")[0]["discrepancy"] > 0.1  # and that is no lag
    for asked, filled in (
        (dict(), (None, 0.5, 0)), (dict(lag=2), (1, None, 2)), (dict(async_=True), (1, None, 1)),
        (dict(lag=2, sync_every=3), (3, None, 2)), (dict(sync_ess=0.1), (None, 0.1, 0)),
    ):
        cfg = dlc.check(dlc.Config(**asked))
        assert (cfg.sync_every, cfg.sync_ess, cfg.lag) == filled, asked


@pytest.mark.parametrize("level, every", [("sequence", None), ("token", None), ("sequence", 3)])
def test_sync_by_ess(tiny, level, every):
    F, version = 0.95 if level == "token" else 0.9, 0
    rows = tiny.run(steps=12, lr=5e-4, sync_ess=F, sync_every=every, ess_level=level)
    for t, row in enumerate(rows):
        low = row["ess" if level == "sequence" else "ess_token"] < F
        due = every is not None and t + 1 - version >= every
        assert row["version"] == version and row["synced"] == (low or due)
        assert t == 0 or not torch.equal(tiny.trained[t], tiny.trained[t - 1])  # it is trained on
        assert version != t or row["ess"] == row["ess_token"] == 1  # just after a sync, exactly
        version = t + 1 if row["synced"] else version
    reasons = {(r["sync_reason"] or "no").split()[0] for r in rows}
    assert reasons == ({"no", "ess"} if every is None else {"no", "ess", "every"})


def test_minibatches_and_micro_batches(tiny):
    for name, count in (("ppo_anchor", 1), ("reinforce", 1), ("ppo_anchor", 4), ("reinforce", 4)):
        tiny.run(steps=3, correction=name, minibatches=count, sync_every=0, out=f"{name}{count}")
    assert weights("ppo_anchor1") == weights("reinforce1")  # its ratio is 1: it cannot see lag
    assert len({weights(x) for x in ("reinforce1", "reinforce4", "ppo_anchor4")}) == 3
    how, moved = dict(steps=2, optimizer="sgd", lr=0.03, correction="reinforce"), []
    for minibatches, micro in ((1, 16), (2, 8), (2, 1)):
        tiny.run(minibatches=minibatches, micro_batch=micro, **how)
        moved.append(tiny.trained[1] - tiny.trained[0])
    assert (moved[1] - moved[2]).norm() < 1e-3 * moved[1].norm()  # to rounding
    assert 1.6 < moved[1].norm() / moved[0].norm() < 2.4  # an update is a mean over its own


@pytest.mark.parametrize("how", [
    dict(sync_ess=0.95), dict(lag=2), dict(optimizer="sgd", lr=0.3, sync_every=2, noise=0.05),
    dict(dtype="bfloat16", weights="int4", kv="fp8", sync_every=2, minibatches=2)])  # fmt: skip
def test_a_killed_run_goes_on_with_the_same_numbers(tiny, how):
    """Some state is not saved: weights, optimizer, the sampler's delayed weights, a generator."""
    whole = tiny.run(steps=6, out="whole", **how)

    def kill(t, rollout):
        if t == 5:
            raise KeyboardInterrupt

    tiny.hook = kill
    with pytest.raises(KeyboardInterrupt):  # steps 0-4 were logged, steps 0-2 saved
        tiny.run(steps=6, out="part", save_every=3, **how)
    tiny.hook = lambda *_: None
    rows = dlc.train(dlc.parse(dlc.Config, ["--resume", "part", "--steps", "6"], ""))
    assert comparable(rows) == comparable(whole) and weights("part") == weights("whole")
    assert comparable(map(json.loads, open("part/metrics.jsonl"))) == comparable(whole)
    assert comparable(tiny.run(steps=2, seed=1, **how))[0] != comparable(whole)[0]


def test_bfloat16_keeps_small_steps(tiny):
    """The forward rounds and the weights do not: an update below half a bfloat16 ulp is kept."""
    rows = tiny.run(steps=2, dtype="bfloat16", lr=1e-4, sync_every=0)
    first, second = tiny.trained
    big = first.abs() > 0.13  # half an ulp is 5e-4 there: five steps of Adam
    moved = (second - first)[big].abs()
    assert big.sum() > 50 and moved.max() < 5e-4 and (moved > 0).float().mean() > 0.9
    gap = abs(rows[0]["entropy"] - tiny.run(steps=1)[0]["entropy"])
    assert 1e-6 < gap < 1e-2


def test_broken_rows_gradients_and_equal_rewards(tiny, monkeypatch):
    """A single NaN would be in every weight one step later; a constant reward teaches nothing."""

    def spoil(t, rollout):
        if t == 1:
            rollout.logq[1, 0], rollout.logq[2, 0], rollout.head_logq[3, 0, 1] = NAN, INF, NAN
        if t == 2:
            rollout.logq[:] = NAN

    tiny.hook = spoil
    rows = tiny.run(steps=4)
    assert [r["dropped"] for r in rows] == [0, 3, 16, 0] and rows[1]["tokens"] < rows[0]["tokens"]
    assert all(math.isfinite(v) for r in rows for v in r.values() if isinstance(v, (int, float)))
    assert tiny.trained[3].isfinite().all() and not torch.equal(*tiny.trained[1:3])
    tiny.hook, loss = lambda *_: None, dlc.policy_loss

    def explode(*args, **how):
        value, stats = loss(*args, **how)
        return value * (INF if len(tiny.drawn) == 2 else 1), stats

    monkeypatch.setattr(dlc, "policy_loss", explode)
    assert [r["skipped"] for r in tiny.run(steps=3, minibatches=2, sync_every=1)] == [0, 2, 0]
    assert torch.equal(*tiny.trained[1:]) and not torch.equal(*tiny.trained[:2])
    monkeypatch.setattr(dlc, "policy_loss", loss)

    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda *_: 1 / 3)
    for scale, group in ((False, 8), (True, 8), (False, 7), (True, 7)):
        rows = tiny.run(steps=2, group_size=group, scale_advantage=scale)
        assert rows[0]["grad_norm"] == 0 and torch.equal(*tiny.trained), (scale, group)


def test_the_tiny_run_learns_and_leaves_its_files(made_base, tmp_path, monkeypatch):
    """FP8 sampler, delayed weights, a sync by ESS, as by default. The accuracy that the run reports
    is checked by transformers' own `generate` on the saved model."""
    monkeypatch.chdir(tmp_path)
    base = str(made_base(60, digits=6))
    rows = dlc.train(cfg := dlc.Config(digits=6, base=base, steps=60, eval_every=20))
    mean = lambda key, part: sum(r[key] for r in part) / len(part)
    assert mean("reward", rows[-15:]) > mean("reward", rows[:15]) + 0.05
    assert rows[-1]["accuracy"] > rows[-1]["accuracy_base"] + 0.05
    assert mean("discrepancy", rows) > 1e-3 and 0 < sum(r["synced"] for r in rows) < 30
    public = """step version reward discrepancy lag ess ess_token clip_share head_mass synced
        seconds_sample seconds_train"""
    assert all(set(public.split()) <= set(r) for r in rows)
    folder = Path("runs/dlc-dlc-1")
    logged = [json.loads(x) for x in (folder / "metrics.jsonl").open()]
    assert comparable(logged) == comparable(rows) and len(logged) == 60
    told = {"prompt", "answer", "completion", "stopped", "reward"}
    assert all({*r["sample"]} == told for r in logged)
    assert json.loads((folder / "config.json").read_text())["lr"] == 1e-4

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    trained_on, held_out = dlc.load_data(dlc.check(cfg), tokenizer, model)
    assert not {r["prompt"] for r in trained_on} & {r["prompt"] for r in held_out}
    inputs = tokenizer([r["prompt"] for r in held_out], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    drawn = model.generate(**inputs, max_new_tokens=7, do_sample=False)
    texts = tokenizer.batch_decode(drawn[:, -7:])
    right = sum(text == "".join(sorted(r["prompt"][:-1])) + "<eos>"
                for text, r in zip(texts, held_out))
    one = 1.01 / len(held_out)  # a tie may fall otherwise
    assert right / len(held_out) == pytest.approx(rows[-1]["accuracy"], abs=one)
