"""DLC: reinforcement learning when sampler and trainer disagree. Every correction, one file.

    python dlc.py          # a tiny model, an FP8 sampler on delayed weights; about a minute
    python dlc.py --bias   # how wrong each correction is, exactly, by enumeration; a second

GRPO, less all that does not bear on one question: which policy drew the token?

    letter    code         what it is                                                    gradient
    q         logq         what a token was drawn from: narrow weights and KV, delayed   no
    π_stale   logp_stale   the trainer's numerics at the weights that drew the token     no
    π_anchor  logp_anchor  the trainer just before this batch's first update             no
    π         logp         the trainer now                                               yes
    H, K      head_*       the sampler's K likeliest tokens at a position                π only
    Q_H, P_H               the mass of H under q and under π
    A         advantage    reward minus the mean of its prompt's group                   no
    w, m, α                weight of the sampled token; centring mass on H, on the tail  no

    log_discrepancy = logp_stale - logq   numerics: set by weights and format, not by the steps
    log_lag         = logp - logp_stale   delayed weights: 0 at a sync, then it grows until a clip

All corrections are one loss; a correction says what w, m, α and the clipped ratio r are:

    loss = - Σ_t A_t gate_t ( w_t logπ(y_t) - Σ_{v in H} c_v logπ(v) ) / N,    c_v = m_v - α π(v)

[1] DLC, November 2026; a public summary is all we had.  [2] Score centering, arXiv 2609.20807.
[3] PPO, arXiv 1707.06347.  [4] Truncated importance sampling, Yao, 2025.  [5] IcePop, 2025.
"""

import inspect
import itertools
import json
import os
import resource
import runpy
import shutil
import sys
import time
import zlib
from concurrent.futures import BrokenExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import torch
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm
from transformers.utils.peft_utils import find_adapter_config_file

from sampler import (FORMATS, KV_FORMATS, DelayedSampler, TorchSampler, VLLMSampler, checksum,
                     context, mismatch, stop_tokens, tail, token_logps)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # load_model says what is wrong, in one line

# ---- The corrections. ----------------------------------------------------------------------------
# The arguments are the policies that a correction looks at, or the mask; it returns w, (m, α) and
# the ratio r that PPO clips (None: no gate). logp*, logq, mask are (B, T), head_* (B, T, K). A new
# one is a function here and a line in CORRECTIONS: the command, the tests and --bias find it there.

def ratio(log_p, log_q):
    return (log_p - log_q).clamp(-20, 20).exp()  # clamped before the exponential

def reinforce(logp, **_):
    return torch.ones_like(logp), None, None

def importance(logp, logq, **_):
    return ratio(logp, logq), None, None

def tis(logp, logq, cap, **_):  # [4]
    return ratio(logp, logq).clamp_max(cap), None, None

def mis(logp, logq, mis, **_):  # [5]
    r = ratio(logp, logq)
    return r.where((mis[0] <= r) & (r <= mis[1]), 0), None, None

def sc(logp, head_logp, head_logq, **_):  # [2]: centre on E_q ∇logπ, with q ≈ ρπ outside H
    rho = tail(head_logq) / tail(head_logp)  # (1 - Q_H) / (1 - P_H)
    return torch.ones_like(logp), (head_logq.exp(), rho), None

def tis_sc(logp, logq, head_logp, head_logq, cap, **_):  # [2]
    m = head_logp.exp().minimum(cap * head_logq.exp())
    alpha = (cap * tail(head_logq) / tail(head_logp)).clamp_max(1)
    return ratio(logp, logq).clamp_max(cap), (m, alpha), None

def ppo_anchor(logp, logp_anchor, **_):  # [3]
    return (r := ratio(logp, logp_anchor)), None, r

def ppo_stale(logp, logp_stale, **_):
    return (r := ratio(logp, logp_stale)), None, r

def ppo_sampler(logp, logq, **_):
    return (r := ratio(logp, logq)), None, r

def dlc(logp, logp_stale, head_logp, head_logq, head_logp_stale, **_):  # [1]
    lag, m = ratio(logp, logp_stale), head_logq.exp() * ratio(head_logp, head_logp_stale)
    return lag, (m, tail(head_logq) / tail(head_logp_stale)), lag

def dlc_tis(logp, logq, logp_stale, head_logp, head_logq, head_logp_stale, cap, **_):  # ours
    lag, head_lag = ratio(logp, logp_stale), ratio(head_logp, head_logp_stale)
    m = head_lag * head_logp_stale.exp().minimum(cap * head_logq.exp())
    alpha = (cap * tail(head_logq) / tail(head_logp_stale)).clamp_max(1)
    return lag * ratio(logp_stale, logq).clamp_max(cap), (m, alpha), lag

CORRECTIONS = {"reinforce": reinforce, "is": importance, "tis": tis, "mis": mis, "sc": sc,
               "tis_sc": tis_sc, "ppo_anchor": ppo_anchor, "ppo_stale": ppo_stale,
               "ppo_sampler": ppo_sampler, "dlc": dlc, "dlc_tis": dlc_tis}

def policy_loss(correction, logp, logq, advantage, mask, *, logp_stale=None, logp_anchor=None,
                head_logp=None, head_logq=None, head_logp_stale=None, num_tokens=None, cap=2.0,
                clip=0.2, mis=(0.5, 5.0)):
    """(loss, stats): the loss at the top of this file. Its value means nothing; its gradient does.

    logp*, logq, mask (B, T); head_* (B, T, K); advantage (B,) or (B, T). w, m, α and the gate are
    constants to autograd. gate: 0 where A > 0 and r > 1+clip, or A < 0 and r < 1-clip, else 1, on
    the whole bracket: a centre that went on pushing after the clip would undo the trust region.
    num_tokens: N, the tokens of the whole optimizer update (default: those of `mask`), so that the
    split into micro-batches changes nothing. ValueError: no such correction, a missing tensor."""
    if correction not in CORRECTIONS:
        raise ValueError(f"correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    given = dict(logp=logp, logq=logq, logp_stale=logp_stale, logp_anchor=logp_anchor,
                 head_logp=head_logp, head_logq=head_logq, head_logp_stale=head_logp_stale)
    for name in inspect.signature(CORRECTIONS[correction]).parameters:
        if name in given and given[name] is None:
            raise ValueError(f"correction {correction!r} needs {name}, which was not given")
    # Padding may hold anything: out before any arithmetic, so that 0 * inf cannot arise. A token
    # that a policy rules out (-inf) counts as one of exp(-100).
    given = {k: x.where(mask if x.dim() == 2 else mask[..., None], 0).clamp_min(-100)
             for k, x in given.items() if x is not None}
    advantage = advantage[:, None] if advantage.dim() == 1 else advantage
    with torch.no_grad():
        w, centre, r = CORRECTIONS[correction](**given, mask=mask, cap=cap, mis=mis)
        clipped = torch.zeros_like(mask)
        if r is not None:
            clipped = (advantage > 0) & (r > 1 + clip) | (advantage < 0) & (r < 1 - clip)
        signal = (advantage * ~clipped).where(mask, 0)  # A_t gate_t
    bracket = w * given["logp"]  # (B, T)
    if centre is not None:
        m, alpha = centre
        c = m - alpha[..., None] * given["head_logp"].detach().exp()  # (B, T, K)
        bracket = bracket - (c * given["head_logp"]).sum(-1)
    n = int(mask.sum())
    loss = -(signal * bracket).sum() / max(1, n if num_tokens is None else num_tokens)
    weight_max = float(w.where(mask, 0).max())
    return loss, dict(tokens=n, clipped=int((clipped & mask).sum()), weight_max=weight_max)

def ess(log_ratio, mask, level="sequence"):
    """Effective sample size of the lag as a share of the batch: (Σw)² / (B Σw²), in (0, 1].

    log_ratio (B, T), nats: log_lag. sequence: w_i = exp(Σ_t log_ratio_it), B responses; token:
    w = exp(log_ratio), B tokens. Over the whole batch at once: a mean over micro-batches is wrong.
    Scaled by the largest weight, which cancels, so that nothing overflows."""
    if level not in ("sequence", "token"):
        raise ValueError(f"ess level {level!r}: choose sequence or token")
    log_ratio = log_ratio.detach().double().where(mask, 0)
    log_w = log_ratio[mask] if level == "token" else log_ratio.sum(1)[mask.any(1)]
    if len(log_w) == 0:
        return 1.0
    w = (log_w - log_w.max()).exp()
    return min(1.0, float(w.mean() ** 2 / (w**2).mean()))

def measure(r, logp, head_logp, cap):
    """Both gaps, the ESS of the lag and more, on rollout `r`; `logp`: π before the first update."""
    mask, n, log_lag, rest = r.mask, int(r.mask.sum()), logp - r.logp_stale, tail(head_logp)
    numerics = mismatch(r.logp_stale, r.logq, mask, r.head_logp_stale, r.head_logq)
    lag = mismatch(logp, r.logp_stale, mask, head_logp, r.head_logp_stale)
    entropy = -((head_logp.exp() * head_logp).sum(-1) + rest * rest.log())[mask].sum()
    firsts = [2**i for i in range(mask.shape[1].bit_length())]  # the first 1, 2, 4, 8 ... tokens
    row = dict(discrepancy=numerics["kl"], lag=lag["kl"], ess=ess(log_lag, mask),
               ess_token=ess(log_lag, mask, "token"), head_mass=numerics["head_mass"], tokens=n,
               ess_at={str(t): ess(log_lag[:, :t], mask[:, :t]) for t in firsts},
               length=n / max(1, int(mask.any(1).sum())), entropy=float(entropy) / max(1, n),
               cap_share=int((ratio(logp, r.logq) > cap)[mask].sum()) / max(1, n))
    for key in ("k1", "k3", "mean_abs", "max_abs"):
        row |= {f"discrepancy_{key}": numerics[key], f"lag_{key}": lag[key]}
    return row

# ---- The bias, exactly: for a policy that is a table, every expectation is a finite sum. ---------

def exact_bias(correction, p_logits, q_logits, rewards, head_k=None, cap=2.0, clip=0.2,
               stale_logits=None, anchor_logits=None):
    """E_q[estimate] - ∇E_π[R], and the five terms that sum to it, over all V^T sequences y.

    With Q(h, a) the reward expected after prefix h and token a, V_q = Σ_a q Q_q, s = ∇logπ(.|h):

        prefix        Σ_y (q(y) - π(y)) Σ_t Σ_a π s_a Q_π
        continuation  Σ_y q(y) Σ_t Σ_a π s_a (Q_q - Q_π)
        token         Σ_y q(y) Σ_t Σ_a (q w - π) s_a (Q_q - V_q)
        drift         Σ_y q(y) Σ_t V_q Σ_a (q w - c) s_a                       c_a = 0 outside H
        clip          Σ_y q(y) R(y) Σ_t (gate_t - 1) (w_t s_{y_t} - Σ_a c_a s_a)

    p_logits[t] (V,)*(t+1), the next token last; rewards (V,)*T, the advantage of a sequence.
    Returns a dict of `true`, `estimate` and the terms: flat float64 gradients in p_logits, depth
    after depth, ascending E[R]. `estimate` is autograd through `policy_loss` itself."""
    T, V = rewards.dim(), rewards.shape[0]
    y = torch.cartesian_prod(*[torch.arange(V)] * T).view(-1, T)  # (N, T), N = V^T
    leaves = [x.detach().double().requires_grad_() for x in p_logits]

    def spread(tables):  # what stands at each position's prefix: (N, T, V)
        rows = [x.reshape(-1, V).repeat_interleave(V ** (T - t), 0) for t, x in enumerate(tables)]
        return torch.stack(rows, 1)

    def values(policy):  # Q at every depth, expected under `policy`, then spread
        out = [rewards.double()]
        for logits in reversed(policy[1:]):
            out.insert(0, (logits.double().softmax(-1) * out[0]).sum(-1))
        return spread(out)

    live = spread([x.log_softmax(-1) for x in leaves])
    logp, logq, logp_stale, logp_anchor = (
        spread([x.detach().double().log_softmax(-1) for x in logits or p_logits])
        for logits in (p_logits, q_logits, stale_logits, anchor_logits))
    pick = lambda x: x.gather(-1, y[..., None])[..., 0]  # at the drawn token: (N, T)
    H = logq.topk(min(head_k or V, V)).indices  # (N, T, K)
    R, of_p, of_q = rewards.double().reshape(-1), pick(logp).sum(1).exp(), pick(logq).sum(1).exp()
    every = torch.ones_like(y, dtype=torch.bool)  # the mask
    loss, _ = policy_loss(
        correction, pick(live), pick(logq), R * of_q, every, logp_stale=pick(logp_stale),
        logp_anchor=pick(logp_anchor), head_logp=live.gather(-1, H), head_logq=logq.gather(-1, H),
        head_logp_stale=logp_stale.gather(-1, H), num_tokens=1, cap=cap, clip=clip)

    def gradient(x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)])

    out = dict(estimate=gradient(-loss))
    head = lambda x: x.gather(-1, H)[:, :, None]  # (N, T, 1, K), beside every token a
    w, centre, r = CORRECTIONS[correction](  # w and r at every token a; m and α once a position
        logp=logp, logq=logq, logp_stale=logp_stale, logp_anchor=logp_anchor, head_logp=head(logp),
        head_logq=head(logq), head_logp_stale=head(logp_stale), mask=every[..., None], cap=cap,
        mis=(0.5, 5.0))
    c = torch.zeros_like(logp)
    if centre is not None:
        c = c.scatter(-1, H, (centre[0] - centre[1][..., None] * head(logp).exp())[:, :, 0])
    p, q, Q_p, Q_q = logp.exp(), logq.exp(), values(p_logits), values(q_logits)
    V_q = (q * Q_q).sum(-1, keepdim=True)
    A, gated = R[:, None], ~every
    if r is not None:
        gated = (A > 0) & (pick(r) > 1 + clip) | (A < 0) & (pick(r) < 1 - clip)
    drawn = torch.zeros_like(q).scatter(-1, y[..., None], 1.0)  # onehot(y_t)
    of_p, of_q, clipped = of_p[:, None, None], of_q[:, None, None], (A * gated)[..., None]
    for name, x in dict(  # Σ_a x_a s_a is the gradient of Σ_a x_a logπ(a)
        true=of_p * p * Q_p,
        prefix=(of_q - of_p) * p * Q_p,
        continuation=of_q * p * (Q_q - Q_p),
        token=of_q * (q * w - p) * (Q_q - V_q),
        drift=of_q * V_q * (q * w - c),
        clip=-of_q * clipped * (w * drawn - c),
    ).items():
        out[name] = gradient((x * live).sum())
    return out

# ---- The options and the loop. -------------------------------------------------------------------

@dataclass
class Config:  # a field is an option, and the comment beside it is its help
    correction: Literal[tuple(CORRECTIONS)] = "dlc"  # which of the eleven
    weights: Literal[FORMATS] = "fp8"  # the sampler's weights
    kv: Literal[KV_FORMATS] = "fp8"  # the sampler's KV cache
    keep_bf16: str = ""  # left in BF16: model.layers.0,model.layers.1.kv or @recipe.json
    noise: float = 0.0  # noise on the sampler's matrices, in their standard deviations
    sync_every: int | None = None  # sync the sampler after N steps (0: never)
    sync_ess: float | None = None  # ... when ESS/B < F (0: never; default, with no other rule: 0.5)
    lag: int | None = None  # a sync arrives D steps late; with no rule beside it, a sync each step
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False  # in another process, --lag 1
    ess_level: Literal["sequence", "token"] = "sequence"  # what the ESS counts
    model: str | None = None  # Hugging Face causal LM, folder or name (default: a tiny one)
    base: str | None = None  # another tiny one, as tiny_base makes them
    data: str | None = None  # JSONL of prompt and answer (default: digits; sums with --model)
    digits: int = 16  # how many, in a prompt of the default task
    reward: str | None = None  # FILE.py with reward(completion, row, stopped) (default: see README)
    steps: int | None = None  # batches (default: 100; 20 with --model)
    prompts: int | None = None  # prompts in a batch (default: 16; 8 with --model)
    group_size: int = 8  # responses to each prompt
    minibatches: int = 1  # optimizer updates in a batch
    micro_batch: int | None = None  # responses in one forward pass (default: a minibatch)
    lr: float | None = None  # learning rate (default: 0.0001; 1e-05 with --model)
    optimizer: Literal["adam", "sgd"] = "adam"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward; weights are float32
    scale_advantage: bool = False  # divide the advantage by its group's standard deviation
    clip: float = 0.2  # ε of the PPO clip
    cap: float = 2.0  # C of truncated importance sampling
    sampler: Literal["torch", "vllm"] = "torch"  # vllm: a real engine
    sampler_memory: float | None = None  # vllm's share of the GPU (0.4); on a CPU GiB of KV
    head_k: int = 64  # K, tokens recorded at each position (at most the vocabulary)
    max_new_tokens: int | None = None  # longest response (default: digits + 1; 12 with --model)
    seed: int = 0  # of prompts, sampling and noise
    device: str | None = None  # cpu, cuda, cuda:1 (default: cuda where there is one)
    out: str | None = None  # the run's folder (default: runs/dlc-CORRECTION-1, -2, ...)
    resume: str | None = None  # a run's folder: go on from its last saved step, with its options
    save_every: int | None = None  # steps between saved states (default: 50; 5 with --model)
    eval_rows: int | None = None  # held-out rows, at most a fifth (default: 500; 100 with --model)
    eval_every: int = 0  # steps between held-out accuracies in the log (0: before and after)
    bias: bool = False  # print the exact bias of every correction and stop

def train(cfg):
    """Run `cfg`; one dict a step. The last one also holds the accuracies, before and after."""
    cfg = check(cfg)
    path = cfg.model or cfg.base or tiny_base(digits=cfg.digits)
    model, tokenizer = load_model(path, "float32", cfg.device)
    with autocast(cfg), Run(cfg, model, tokenizer, f"dlc-{cfg.correction}") as run:
        print(f"{run.folder}: {cfg.correction}, {cfg.sampler} sampler, {cfg.weights}, KV {cfg.kv}")
        print(" step version  reward  discrepancy      lag    ESS  clipped  syncs  tokens/s")
        done, alike = len(run.rows), 0
        for step in tqdm(range(done, cfg.steps), initial=done, total=cfg.steps, disable=None):
            # 1. Sample a group of responses to each prompt from q.
            batch, rollout = run.batch(step), run.sampler.draw(step)

            # 2. Reward, centred over the group of its prompt; a dropped response is in no mean.
            graded = grade(rollout, batch, run.stop_ids, tokenizer, cfg)
            R = torch.tensor([x["reward"] for x in graded], device=cfg.device)
            R = R.where(rollout.mask.any(1), float("nan")).view(cfg.prompts, cfg.group_size)
            A = R - R.nanmedian(1, keepdim=True).values  # so that it is 0 where all are equal
            A = A - A.nanmean(1, keepdim=True)
            if cfg.scale_advantage:
                A = A / (torch.stack([a[~a.isnan()].std() for a in A])[:, None] + 1e-6)
            A = A.nan_to_num(0).flatten()
            alike = 0 if A.any() else alike + 1

            # 3. Update: one optimizer step a minibatch, its gradient summed over micro-batches.
            fresh = None  # π before the first update; with one minibatch, the update's own forward
            if cfg.minibatches > 1:
                with torch.no_grad():
                    fresh = token_logps(model, rollout, head=True, rows=cfg.micro_batch)
            seen, stats, norms = [], [], []
            for mini in torch.arange(len(batch)).chunk(cfg.minibatches):
                for micro in mini.split(cfg.micro_batch):
                    part = rollout[micro]
                    logp, head_logp = token_logps(model, part, head=True)
                    seen.append((logp.detach(), head_logp.detach()))
                    loss, stat = policy_loss(
                        cfg.correction, logp, part.logq, A[micro], part.mask,
                        logp_stale=part.logp_stale,
                        logp_anchor=seen[-1][0] if fresh is None else fresh[0][micro],
                        head_logp=head_logp, head_logq=part.head_logq,
                        head_logp_stale=part.head_logp_stale, cap=cfg.cap, clip=cfg.clip,
                        num_tokens=int(rollout.mask[mini].sum()))
                    loss.backward()
                    stats.append(stat)
                norms.append(update(model, run.optimizer))

            # 4. Measure both gaps and the ESS, on the batch as it was before its first update.
            fresh = [torch.cat(x) for x in zip(*seen)] if fresh is None else fresh
            reward = float(R.nanmean().nan_to_num(0))
            row = dict(step=step, version=int(rollout.version[0, 0]), reward=reward)
            row |= measure(rollout, *fresh, cfg.cap)
            row |= dict(clip_share=sum(s["clipped"] for s in stats) / max(1, row["tokens"]),
                        weight_max=max(s["weight_max"] for s in stats), grad_norm=max(norms),
                        skipped=sum(not x < inf for x in norms))

            # 5. Sync the sampler, if a rule says so; log, save, show.
            run.end_step(row, rollout, graded)
            if step % 10 == 0 or cfg.model:
                tqdm.write("{step:5d} {version:7d} {reward:7.3f} {discrepancy:12.5f} {lag:8.5f} "
                           "{ess:6.3f} {clip_share:8.1%} {syncs:6d} {tokens_per_second:9.0f}"
                           .format(**row))
            if alike == min(5, cfg.steps):  # too hard, or cut off by --max-new-tokens?
                tqdm.write(f"{alike} steps: no group had two different rewards: {row['sample']}")
        return run.finish()

def update(model, optimizer):
    """One optimizer step; the gradient's norm. A gradient that is not finite moves nothing."""
    params = [p for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in params]))
    if norm < inf:
        optimizer.step()
        if not torch.nn.utils.get_total_norm(params) < inf:
            raise ValueError("--lr: a step took the weights to inf or NaN; make it smaller")
    optimizer.zero_grad()
    return norm

def due(cfg, row, latest):
    """Why the weights of after this step are to be published, or None; latest: those now due."""
    share = row["ess" if cfg.ess_level == "sequence" else "ess_token"]
    if cfg.sync_every and row["step"] + 1 - latest >= cfg.sync_every:
        return f"every {cfg.sync_every}"
    if share < (cfg.sync_ess or 0):
        return f"ess {share:.3f} < {cfg.sync_ess}"

def check(cfg):
    """`cfg` with its defaults filled in. ValueError: what would go wrong late or in silence."""
    fill = dict(steps=100, prompts=16, lr=1e-4, save_every=50, eval_rows=500,
                max_new_tokens=cfg.digits + 1)
    if cfg.model:
        here = Path(__file__).resolve().parent / "notebooks"
        fill = dict(steps=20, prompts=8, lr=1e-5, save_every=5, eval_rows=100, max_new_tokens=12,
                    data=f"{here}/data/additions.jsonl", reward=f"{here}/number_reward.py")
    fill |= dict(lag=int(cfg.async_), device="cuda" if torch.cuda.is_available() else "cpu")
    if cfg.sync_every is cfg.sync_ess is None:
        fill |= dict(sync_ess=0.5) if cfg.lag is None and not cfg.async_ else dict(sync_every=1)
    cfg = replace(cfg, **{k: v for k, v in fill.items() if getattr(cfg, k) is None})
    batch, out = cfg.prompts * cfg.group_size, cfg.out
    may_be_0 = ("sync_every sync_ess lag noise clip cap seed eval_every sampler_memory "
                "tolerance target capacity").split()  # the last three are of opd.py
    rules = [((k not in may_be_0) <= v < 2**40,
              f"--{k.replace('_', '-')} {v}: must be {int(k not in may_be_0)} or more")
             for k, v in vars(cfg).items() if type(v) in (int, float) and k != "lr"]
    rules += [
        (cfg.group_size > 1, f"--group-size {cfg.group_size}: one response has no advantage"),
        (batch % max(1, cfg.minibatches) == 0,
         f"--minibatches {cfg.minibatches}: must divide the batch, {batch} responses"),
        (0 < cfg.lr < inf, f"--lr {cfg.lr}: must be above 0"),
        ((cfg.sync_ess or 0) <= 1, f"--sync-ess {cfg.sync_ess}: is a share, from 0 to 1"),
        (cfg.lag >= cfg.async_, f"--lag {cfg.lag}: must be 1 or more with --async"),
        (cfg.lag <= cfg.async_ or cfg.sync_every or cfg.sync_ess,
         f"--lag {cfg.lag}: there is no sync to delay"),
        (cfg.sampler == "torch" or not cfg.async_, "--async: needs --sampler torch"),
        (cfg.resume or not out or not os.path.exists(out) or not os.listdir(out),
         f"--out {out}: must be a new or an empty folder"),
        (not cfg.data or read_data(cfg.data), f"--data {cfg.data}: holds no rows"),
    ]
    if wrong := [told for good, told in rules if not good]:
        raise ValueError(wrong[0])
    try:
        torch.empty(0, device=cfg.device)
    except (RuntimeError, AssertionError) as e:  # no such device, or a torch without CUDA
        raise ValueError(f"--device {cfg.device}: {str(e).splitlines()[0]}") from None
    keep_list(cfg.keep_bf16, None), reward_of(cfg.reward)  # before a model is made or loaded
    return replace(cfg, micro_batch=cfg.micro_batch or batch // cfg.minibatches)

def autocast(cfg):
    """The context of a run's forwards. No cache: it would keep a weight's cast past its update."""
    device, on = torch.device(cfg.device).type, cfg.dtype == "bfloat16"
    return torch.autocast(device, torch.bfloat16, enabled=on, cache_enabled=False)

# ---- A run: what is trained, what samples, and the folder that both can be resumed from. ---------

def write(path, *saves):
    """Each of `saves` writes to a temporary path, then rename: nobody ever reads half of a file."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for save in saves:
            save(new)
    except Exception as e:  # of torch, safetensors or matplotlib
        raise OSError(f"{path} cannot be written: {e}") from e
    if path.is_dir():  # no folder can be replaced; state.pt holds what a kill here would lose
        shutil.rmtree(path)
    os.replace(new, path)

def compare(folder, now):
    """Refuse other data or weights than a run began with; tell of other versions of libraries."""
    then = json.loads((folder / "config.json").read_text())["versions"]
    if bad := [k for k in ("data", "weights") if then.get(k, now[k]) != now[k]]:
        raise ValueError(f"--resume {folder}: the {bad[0]} are not those it began with; to go on, "
                         "delete them from versions in its config.json")
    if then | now != then:
        print(f"{folder}: begun with {then}, resumed with {now}: numbers may differ")

class Run:
    """Model, optimizer, sampler, data and folder of a run."""

    def __init__(self, cfg, model, tokenizer, name, teacher=None):
        self.cfg, self.model, self.tokenizer, self.rows = cfg, model, tokenizer, []
        self.data, self.held_out = load_data(cfg, tokenizer, model)
        optimizer = torch.optim.Adam if cfg.optimizer == "adam" else torch.optim.SGD
        self.optimizer = optimizer(model.parameters(), lr=cfg.lr, fused=True)
        engines = dict(torch=TorchSampler, vllm=partial(VLLMSampler, memory=cfg.sampler_memory))
        make = partial(
            engines[cfg.sampler], weights=cfg.weights, kv=cfg.kv, noise=cfg.noise, seed=cfg.seed,
            keep_bf16=keep_list(cfg.keep_bf16, model), head_k=cfg.head_k, rows=cfg.micro_batch,
            probe=[(r["ids"] * 32)[:32] for r in self.data[:4]])
        self.sampler = DelayedSampler(make, model, self.request, cfg.steps, cfg.lag, cfg.async_)
        self.stop_ids = self.sampler.sampler.stop_ids
        names = (Path(f"runs/{name}-{i}") for i in itertools.count(1))
        self.folder = Path(cfg.resume or cfg.out or next(f for f in names if not f.exists()))
        now = dict(torch=torch.__version__, transformers=transformers.__version__,
                   threads=torch.get_num_threads(), weights=checksum(model, teacher),
                   data=zlib.crc32(repr([self.data, self.held_out]).encode()))
        if cfg.resume:
            compare(self.folder, now)
            self.restore()
        else:
            config = json.dumps(asdict(cfg) | dict(versions=now), indent=1)
            write(self.folder / "config.json", lambda new: new.write_text(config))
            self.finish()  # what a crash leaves; what cannot be written is known before a step
            self.before = self.accuracies("_base")
        self.log, self.ended = open(self.folder / "metrics.jsonl", "a"), time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.sampler.close()
        if kind is KeyboardInterrupt and (self.folder / "state.pt").exists():
            raise KeyboardInterrupt(f"; go on with --resume {self.folder}") from None

    def accuracies(self, suffix=""):
        """Greedy, held out, of the trainer's model and of the sampler as it is; three samples."""
        exact, how = TorchSampler(self.model, "none", "none"), (self.tokenizer, self.cfg)
        share, shown = accuracy(exact, self.held_out, *how)
        narrow, _ = accuracy(self.sampler.sampler, self.held_out, *how)
        return {f"accuracy{suffix}": share, f"accuracy_sampler{suffix}": narrow,
                f"held_out{suffix}": shown}

    def batch(self, step):
        """The data rows of a step, each for a whole group: a function of (--seed, step)."""
        g = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + step)
        order = torch.randperm(len(self.data), generator=g)[: self.cfg.prompts]
        return [self.data[i] for i in order for _ in range(self.cfg.group_size)]

    def request(self, step):
        """The arguments of `sample` at a step: prompts, longest response, seed."""
        ids = [row["ids"] for row in self.batch(step)]
        return ids, self.cfg.max_new_tokens, self.cfg.seed * 1_000_003 + step

    def end_step(self, row, rollout, graded):
        """Sync by the rules, log the step and a sample of it, save every --save-every steps."""
        step, sampler = row["step"], self.sampler
        reason = due(self.cfg, row, latest=sampler.queue[-1][0])
        synced = sampler.advance(step, self.model, publish=reason is not None)
        seconds, kept = time.perf_counter() - self.ended, int(rollout.mask.any(1).sum())
        row |= dict(
            synced=synced, sync_reason=reason, syncs=synced + sum(r["synced"] for r in self.rows),
            kv_scales=sampler.kv_scales, dropped=len(graded) - kept, sample=graded[0],
            truncated=1 - sum(x["stopped"] for x in graded) / max(1, kept),
            seconds_sample=sampler.seconds, seconds_wait=sampler.waited,
            seconds_train=seconds - sampler.waited, tokens_per_second=row["tokens"] / seconds,
            memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if torch.device(self.cfg.device).type == "cuda":  # bytes that the card has held at most
            row["memory"] = torch.cuda.max_memory_allocated(self.cfg.device)
        row |= self.before if step == 0 else {}
        if step + 1 == self.cfg.steps:
            sampler.sampler.sync(self.model, self.cfg.steps)
            row |= self.before | self.accuracies()
        elif self.cfg.eval_every and (step + 1) % self.cfg.eval_every == 0:
            row["accuracy"] = self.accuracies()["accuracy"]
        row |= {k: None for k, x in row.items() if x != x or x in (inf, -inf)}  # no JSON has NaN
        self.rows.append(row)
        print(json.dumps(row), file=self.log, flush=True)
        if (step + 1) % self.cfg.save_every == 0 or step + 1 == self.cfg.steps:
            state = dict(rows=self.rows, queue=[*sampler.queue], model=self.model.state_dict(),
                         optimizer=self.optimizer.state_dict())
            write(self.folder / "state.pt", lambda new: torch.save(state, new))
        self.ended = time.perf_counter()

    def restore(self):
        """Back to the last saved step. Random numbers are no state: functions of (seed, step)."""
        try:
            state = torch.load(self.folder / "state.pt", weights_only=True, map_location="cpu")
            self.rows, queue = state["rows"], self.sampler.queue
            assert len(state["queue"]) == queue.maxlen and len(self.rows) <= self.cfg.steps
            queue.extend(state["queue"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except Exception as e:  # of many kinds; torch.load's own advice is to trust the file
            raise ValueError(f"--resume {self.folder}: its state.pt is missing, broken, of another "
                             f"lag or beyond --steps ({type(e).__name__})") from None
        for left in self.folder.glob("*.tmp"):  # half a file of a run that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        log = "".join(json.dumps(row) + "\n" for row in self.rows)
        write(self.folder / "metrics.jsonl", lambda new: new.write_text(log))
        self.before = {k: v for k, v in self.rows[0].items() if k.endswith("_base")}

    def finish(self):
        """Write the model in Hugging Face form; all rows."""
        write(self.folder / "model", self.model.save_pretrained, self.tokenizer.save_pretrained)
        return self.rows

# ---- Data, reward and models. --------------------------------------------------------------------

def reward(completion, row, stopped):
    """1 for the very answer and a stop, else 0; --reward FILE.py replaces this."""
    return float(stopped and completion == row["answer"])

@cache
def reward_of(path):
    """The function that --reward names; what is wrong in its file is shown with its traceback."""
    found = runpy.run_path(path) if path else globals()
    if "reward" not in found:
        raise ValueError(f"--reward {path}: has no function reward(completion, row, stopped)")
    return found["reward"]

def grade(rollout, rows, stop_ids, tokenizer, cfg):
    """What a log keeps of each response: prompt, answer, completion, stopped, reward."""
    y, graded = rollout.tokens[:, -rollout.mask.shape[1] :], []
    stops = (torch.isin(y, stop_ids) & rollout.mask).any(1).tolist()
    for row, ids, n, stopped in zip(rows, y.tolist(), rollout.mask.sum(1).tolist(), stops):
        text = tokenizer.decode(ids[: max(0, n - stopped)], skip_special_tokens=bool(cfg.model))
        score = float(reward_of(cfg.reward)(text, row, stopped))
        graded.append(dict(prompt=row["prompt"], answer=row["answer"], completion=text,
                           stopped=stopped, reward=score))
    return graded

def accuracy(sampler, rows, tokenizer, cfg):
    """(share of `rows` whose greedy completion earns the full reward, three of them graded)."""
    size, graded = 25 if cfg.model else 250, []
    told = f"evaluating {len(rows)} held-out prompts"
    for i in tqdm(range(0, len(rows), size), told, disable=None, leave=False):
        some = rows[i : i + size]
        drawn = sampler.sample([r["ids"] for r in some], cfg.max_new_tokens, greedy=True)
        graded += grade(drawn, some, sampler.stop_ids, tokenizer, cfg)
    return sum(x["reward"] >= 1 for x in graded) / len(graded), graded[:3]

def read_data(path):
    """Rows of a JSONL file: "prompt", a text or a chat's messages, or "question", as in GSM8K;
    "answer", a text or a number; and what else there is. ValueError names a bad line."""
    rows = []
    for n, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                rows.append(row := json.loads(line))
                asked = row.setdefault("prompt", row.get("question"))
                turns = asked if isinstance(asked, list) else [dict(role="user", content=asked)]
                if type(row["answer"]) in (int, float):
                    row["answer"] = str(row["answer"])
                assert turns and row["answer"].strip()
                assert all(m["role"].strip() and m["content"].strip().encode() for m in turns)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
            raise ValueError(f'--data {path} line {n}: {line[:40]!r} must be {{"prompt": text or '
                             'messages, "answer": text or number}, none of them empty') from None
    return rows

def load_data(cfg, tokenizer, model):
    """(training rows, held-out rows), with each prompt's `ids`. ValueError: one cannot be read."""
    if cfg.data:
        rows, source = read_data(cfg.data), f"--data {cfg.data}"
    else:  # digits to sort; of a few digits there are fewer strings than are drawn
        g, source = torch.Generator().manual_seed(0), f"--digits {cfg.digits}"
        drawn = torch.randint(10, (5_000, cfg.digits), generator=g).tolist()
        texts = dict.fromkeys("".join(map(str, x)) for x in drawn)
        rows = [dict(prompt=x + "=", answer="".join(sorted(x))) for x in texts]
    held = min(cfg.eval_rows, max(1, len(rows) // 5))
    room, vocab = context(model) - cfg.max_new_tokens, len(model.get_input_embeddings().weight)
    for row in rows:
        chat, text, wrong = isinstance(row["prompt"], list), row["prompt"], None
        if chat:
            text = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
        ids = row["ids"] = tokenizer.encode(text, add_special_tokens=not chat)
        if not ids or max(ids) >= vocab or (not cfg.model and tokenizer.pad_token_id in ids):
            wrong = "is empty, or holds what the model has no token for"
        elif len(ids) > room:
            wrong = f"has {len(ids)} tokens; {room} and --max-new-tokens fill the model's context"
        elif ids[-1] in stop_tokens(model):
            wrong = "ends in a stop token; have its tokenizer add none (add_eos_token: false)"
        if wrong:
            raise ValueError(f"{source}: the prompt {str(row['prompt'])[:40]!r} {wrong}")
    if any(row["ids"][:2] == [tokenizer.bos_token_id] * 2 for row in rows):
        print(f"{source}: prompts begin with {tokenizer.bos_token!r} twice, as text and as added")
    if len(rows) - held < cfg.prompts:
        raise ValueError(f"--prompts {cfg.prompts}: {source} has {len(rows) - held} to train on")
    return rows[held:], rows[:held]

def tiny_base(steps=90, width=64, layers=3, digits=16, seed=0):
    """Folder of a tiny Qwen3 that sorts some `digits`, made once: `steps` supervised batches."""
    folder = Path(f"runs/base-{layers}x{width}-{digits}-{steps}-{seed}")
    if folder.exists():
        return folder
    ids = {c: i for i, c in enumerate([*"0123456789+=", "<pad>", "<eos>"])}  # a digit is its id
    raw = Tokenizer(models.BPE(ids, [], unk_token="<pad>"))  # no merges: a character a token
    raw.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(ids), hidden_size=width, intermediate_size=5 * width // 2,
        num_hidden_layers=layers, num_attention_heads=width // 32, head_dim=32,
        num_key_value_heads=width // 32, bos_token_id=None, eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"], max_position_embeddings=128, tie_word_embeddings=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    g = torch.Generator().manual_seed(1 + seed)  # other digits than those of load_data
    equals, stop = torch.full((128, 1), ids["="]), torch.full((128, 1), ids["<eos>"])
    for i in tqdm(range(steps), desc=f"training the tiny base, once: {folder}", disable=None):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, 100 / (i + 1))
        x = torch.randint(10, (128, digits), generator=g)
        tokens = torch.cat([x, equals, x.sort().values, stop], 1)
        logits = model(tokens[:, :-1]).logits[:, digits:]
        torch.nn.functional.cross_entropy(logits.mT, tokens[:, digits + 1 :]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not folder.exists():  # another process may have been faster, with the same weights
        write(folder, model.save_pretrained, tokenizer.save_pretrained)
    return folder

def load_model(path, dtype, device, option="--model"):
    """(model, tokenizer) of a Hugging Face causal LM, dropout off. ValueError, naming `option`, if
    it cannot be had whole: pickled or missing weights, code of its own, no tokenizer, no stop."""
    try:
        if find_adapter_config_file(path):
            raise ValueError("it holds an adapter; merge that into its base and save the whole")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
            output_loading_info=True)
        if found["missing_keys"]:
            raise ValueError(f"{min(found['missing_keys'])} is missing; give the whole model")
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers made up an empty one
            raise ValueError("no tokenizer: add tokenizer.json and tokenizer_config.json")
        if not stop_tokens(model):
            raise ValueError("no stop token: name its eos_token_id in generation_config.json")
    except Exception as e:  # many kinds, from as many libraries
        raise ValueError(f"{option} {path}: no causal LM can be loaded: {str(e)[:300]}") from None
    real = max(tokenizer.get_vocab().values()) + 1  # no mass on tokens that do not exist
    if real < len(model.get_output_embeddings().weight):
        model.resize_token_embeddings(real)
    return model.to(device).eval(), tokenizer

def keep_list(keep, model):
    """The modules of --keep-bf16: names after commas, or @FILE, of opd.py --sensitivity."""
    if not keep.startswith("@"):
        return [k.strip() for k in keep.split(",") if k.strip()]
    try:
        recipe = json.loads(Path(keep[1:]).read_text())
        kept, found = [*recipe["keep_bf16"]], recipe["model"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--keep-bf16 {keep}: no recipe of opd.py --sensitivity: {e}") from None
    if model is not None and found != checksum(model):
        raise ValueError(f"--keep-bf16 {keep}: was made for other weights than this model's")
    return kept

# ---- The command line. ---------------------------------------------------------------------------

def bias_tables():
    """The terms on one random table, as signed projections on the bias: a row sums to 100 %."""
    print("token-level corrections: w and r are functions of a token and what comes before it")
    g, V, T = torch.Generator().manual_seed(0), 4, 3
    random = lambda s: [s * torch.randn((V,) * (t + 1), generator=g).double() for t in range(T)]
    add = lambda a, b: [x + y for x, y in zip(a, b)]
    p, numerics, lag = random(1.0), random(0.3), random(0.3)
    rewards = (torch.rand((V,) * T, generator=g) < 0.3).double()
    gaps = {"discrepancy only": (add(p, numerics), p), "lag only": (add(p, lag), add(p, lag)),
            "discrepancy and lag": (add(add(p, lag), numerics), add(p, lag))}
    terms = ("prefix", "continuation", "token", "drift", "clip")
    for (gap, (q, stale)), kind in itertools.product(gaps.items(), ("raw", "centred")):
        prob = sum(x.log_softmax(-1).view(x.shape + (1,) * (T - x.dim())) for x in q).exp()
        R = rewards - (prob * rewards).sum() * (kind == "centred")
        print(f"\n{gap}, {kind} reward; terms in % of the bias")
        print(f"{'correction':13}|bias|/|g|" + "".join(f"{k:>14}" for k in terms))
        for name in CORRECTIONS:
            out = exact_bias(name, p, q, R, stale_logits=stale)
            bias = out["estimate"] - out["true"]
            shares = [100 * float(out[k] @ bias / bias.square().sum()) for k in terms]
            print(f"{name:13}{float(bias.norm() / out['true'].norm()):10.3f}"
                  + "".join(f"{share:14.1f}" for share in shares))

def parse(config, argv, description):
    """A dataclass from a command line. --resume starts from that run's options, and argv wins."""
    how = dict(args=argv, description=description, config=(tyro.conf.FlagCreatePairsOff,))
    cfg = tyro.cli(config, **how)
    if cfg.resume:
        stored = json.loads(Path(cfg.resume, "config.json").read_text())
        if {*stored} != {*asdict(cfg), "versions"}:
            raise ValueError(f"--resume {cfg.resume}: is of another script or version of it")
        del stored["versions"]
        cfg = tyro.cli(config, default=config(**stored), **how)
    if not (cfg.model or getattr(cfg, "student", None) or "OMP_NUM_THREADS" in os.environ):
        torch.set_num_threads(1)  # two are little faster on the tiny model, and wait when busy
    return cfg

def command(main):
    """`main(argv)` ends in an exit status: 2, and one line, for bad input or a full disk."""
    def run(argv=None):
        try:
            return main(argv) or 0
        except (ValueError, OSError, torch.OutOfMemoryError, BrokenExecutor) as e:
            print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as e:
            print(f"stopped{e}", file=sys.stderr)
            return 130
    return run

@command
def main(argv=None):
    cfg = parse(Config, argv, __doc__.splitlines()[0])
    if cfg.bias:
        return bias_tables()
    last = train(cfg)[-1]
    print("\ngreedy accuracy, held out       before   after")
    for who, key in (("trainer's model, π", ""), ("π in the sampler's format", "_sampler")):
        print(f"{who:30}{last[f'accuracy{key}_base']:7.3f} {last[f'accuracy{key}']:7.3f}")
    print(*last["held_out"], sep="\n")
    shown = dict(correction=cfg.correction, steps=last["step"] + 1)
    shown |= {k: v for k, v in last.items() if k.startswith("accuracy")}
    print("RESULT " + json.dumps(shown))

if __name__ == "__main__":
    sys.exit(main())
