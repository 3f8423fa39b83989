"""DLC: reinforcement learning when the sampler and the trainer disagree. Every correction, one file.

    python dlc.py          # a tiny model, an FP8 sampler on delayed weights; about a minute
    python dlc.py --bias   # how wrong each correction is, exactly, by enumeration; a second

It starts from GRPO and takes away: the reference model and its KL penalty, sequence-level ratios,
schedules, gradient clipping, temperature and top-p (sampler.py says why), adapters, several GPUs.
What is left is one question: which policy drew the token?

    letter    code         what it is                                                    gradient
    q         logq         what a token was drawn from: narrow weights and KV, delayed   no
    π_stale   logp_stale   the trainer's numerics at the weights that drew the token     no
    π_anchor  logp_anchor  the trainer just before this batch's first update             no
    π         logp         the trainer now                                               yes
    H, K      head_*       the sampler's K likeliest tokens at a position                π only
    Q_H, P_H               the mass of H under q and under π
    A         advantage    reward minus the mean of its prompt's group                   no
    w, m, α                weight of the sampled token; centring mass on H, on the tail  no

    log_discrepancy = logp_stale - logq   numerics: about constant over training
    log_lag         = logp - logp_stale   delayed weights: grows with every update since the sync

All corrections are one loss; a correction says what w, m, α and the clipped ratio r are:

    loss = - Σ_t A_t gate_t ( w_t logπ(y_t) - Σ_{v in H} c_v logπ(v) ) / N,    c_v = m_v - α π(v)

[1] DLC, November 2026; known to us from a public summary only, so README lists our readings.
[2] Score centering, arXiv 2609.20807.  [3] PPO, arXiv 1707.06347.
[4] Truncated importance sampling, Yao et al. 2025.  [5] IcePop (masked ratios), 2025.
"""

import argparse
import contextlib
import copy
import dataclasses
import errno
import functools
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import typing
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import huggingface_hub
import matplotlib
import torch
import transformers
from matplotlib import pyplot as plt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from sampler import (FORMATS, KV_FORMATS, ProcessSampler, Rollout, TorchSampler, VLLMSampler, mismatch,
                     positions, tail, token_logps)  # fmt: skip

matplotlib.use("Agg")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # load_model says itself what is wrong, in one line


@dataclass
class Config:  # a field is an option, and the comment beside it is its help
    correction: str = "dlc"  # one of the eleven in CORRECTIONS
    weights: str = "fp8"  # sampler's weights: none bf16 fp8 fp8_e5m2 int8 int4 int3 int2 nvfp4
    kv: str = "fp8"  # sampler's KV cache: none bf16 fp8 fp8_e5m2
    keep_bf16: str = ""  # modules left in BF16: model.layers.0,model.layers.1.kv or @recipe.json
    noise: float = 0.0  # noise on the sampler's matrices, in their standard deviations
    sync_every: int | None = None  # sampler takes over the weights after N steps (0: never)
    sync_ess: float | None = None  # ... when ESS/B < F (0: off; 0.5 if no sync option is given)
    lag: int | None = None  # ... sampler has the weights of D steps ago; excludes the other two
    async_: bool = False  # sample in another process while training; a sync acts D steps later
    max_lag: int | None = None  # D of --async; with no sync rule, as --lag D (default: 1)
    ess_level: str = "sequence"  # what the ESS counts: sequence or token
    model: str | None = None  # Hugging Face causal LM, folder or name (default: a tiny one)
    data: str | None = None  # JSONL of {"prompt": text, "answer": text} (default: sums)
    steps: int | None = None  # batches (default: 500; 20 with --model)
    prompts: int | None = None  # prompts in a batch (default: 32; 8 with --model)
    group_size: int = 8  # responses to each prompt
    minibatches: int = 1  # optimizer updates in a batch
    micro_batch: int | None = None  # responses in one forward pass (default: a minibatch)
    lr: float | None = None  # learning rate (default: 0.0002; 1e-05 with --model)
    optimizer: str = "adam"  # adam or sgd
    dtype: str = "float32"  # trainer's forward: float32 or bfloat16; master weights are float32
    scale_advantage: bool = False  # divide the advantage by its group's standard deviation
    clip: float = 0.2  # ε of the PPO clip
    cap: float = 2.0  # C of truncated importance sampling
    sampler: str = "torch"  # torch, or vllm: a real engine
    sampler_memory: float | None = None  # vllm: its share of the GPU (default: 0.4); on a CPU GiB of KV (1)
    head_k: int = 64  # K, tokens recorded at each position (at most the vocabulary)
    max_new_tokens: int | None = None  # longest response (default: 4; 12 with --model)
    seed: int = 0  # of prompts, sampling and noise
    device: str | None = None  # cpu, cuda, cuda:1 (default: cuda where there is one)
    out: str | None = None  # the run's folder (default: runs/dlc-CORRECTION-1, -2, ...)
    resume: str | None = None  # a run's folder: go on from its last saved step, to --steps
    save_every: int = 50  # steps between saved states
    bias: bool = False  # print the exact bias of every correction and stop


# --------------------------------------------------------------------------------------------------
# The corrections. The arguments are the policies that a correction looks at; it returns w, m, α and
# the ratio r that PPO clips (None: no gate). logp* and logq are (B, T), head_* are (B, T, K).


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

CORRECTIONS = {"reinforce": reinforce, "is": importance, "tis": tis, "mis": mis, "sc": sc, "tis_sc": tis_sc,
               "ppo_anchor": ppo_anchor, "ppo_stale": ppo_stale, "ppo_sampler": ppo_sampler,
               "dlc": dlc, "dlc_tis": dlc_tis}  # fmt: skip


def policy_loss(correction, logp, logq, advantage, mask, *, logp_stale=None, logp_anchor=None,
                head_logp=None, head_logq=None, head_logp_stale=None, num_tokens=None, cap=2.0,
                clip=0.2, mis=(0.5, 5.0)):  # fmt: skip
    """(loss, stats): the loss at the top of this file. Its value means nothing; its gradient does.

    logp*, logq, mask (B, T); head_* (B, T, K); advantage (B,) or (B, T). w, m, α and the gate are
    constants to autograd. gate: 0 where A > 0 and r > 1+clip, or A < 0 and r < 1-clip, else 1, on
    the whole bracket: a centre that went on pushing after the clip would undo the trust region.
    num_tokens: N, the tokens of the whole optimizer update (default: those of `mask`), so that the
    split into micro-batches changes nothing. ValueError: an unknown correction, a missing tensor."""
    if correction not in CORRECTIONS:
        raise ValueError(f"correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    given = dict(logp=logp, logq=logq, logp_stale=logp_stale, logp_anchor=logp_anchor,
                 head_logp=head_logp, head_logq=head_logq, head_logp_stale=head_logp_stale)  # fmt: skip
    for name in inspect.signature(CORRECTIONS[correction]).parameters:
        if name in given and given[name] is None:
            raise ValueError(f"correction {correction!r} needs {name}, which was not given")
    # Padding may hold anything: out before any arithmetic, so that 0 * inf cannot arise. A token
    # that a policy rules out (-inf) counts as one of exp(-100).
    given = {k: x.where(mask if x.dim() == 2 else mask[..., None], 0).clamp_min(-100)
             for k, x in given.items() if x is not None}  # fmt: skip
    advantage = advantage[:, None] if advantage.dim() == 1 else advantage
    with torch.no_grad():
        w, centre, r = CORRECTIONS[correction](**given, cap=cap, mis=mis)
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
    stats = dict(tokens=n, clipped=int((clipped & mask).sum()), weight_max=float(w.where(mask, 0).max()))
    return loss, stats


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


# --------------------------------------------------------------------------------------------------
# The bias, exactly: for a policy that is a table, every expectation is a finite sum.


def exact_bias(correction, p_logits, q_logits, rewards, head_k=None, cap=2.0, clip=0.2,
               stale_logits=None, anchor_logits=None):  # fmt: skip
    """E_q[estimate] - ∇E_π[R], and the five terms that sum to it, over all V^T sequences y.

    With Q(h, a) the reward expected after prefix h and token a, V_q = Σ_a q Q_q, s = ∇logπ(.|h):

        prefix        Σ_y (q(y) - π(y)) Σ_t Σ_a π s_a Q_π
        continuation  Σ_y q(y) Σ_t Σ_a π s_a (Q_q - Q_π)
        token         Σ_y q(y) Σ_t Σ_a (q w - π) s_a (Q_q - V_q)
        drift         Σ_y q(y) Σ_t V_q Σ_a (q w - c) s_a                       c_a = 0 outside H
        clip          Σ_y q(y) R(y) Σ_t (gate_t - 1) (w_t s_{y_t} - Σ_a c_a s_a)

    p_logits[t] (V,)*(t+1), the next token last; rewards (V,)*T, the advantage of a sequence. Returns
    a dict of `true`, `estimate` and the terms: flat float64 gradients in p_logits, depth after
    depth, ascending E[R]. `estimate` is autograd through `policy_loss` itself."""
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
        for logits in (p_logits, q_logits, stale_logits, anchor_logits))  # fmt: skip
    pick = lambda x: x.gather(-1, y[..., None])[..., 0]  # at the drawn token: (N, T)
    H = logq.topk(min(head_k or V, V)).indices  # (N, T, K)
    R, of_p, of_q = rewards.double().reshape(-1), pick(logp).sum(1).exp(), pick(logq).sum(1).exp()

    loss, _ = policy_loss(
        correction, pick(live), pick(logq), R * of_q, torch.ones_like(y, dtype=torch.bool),
        logp_stale=pick(logp_stale), logp_anchor=pick(logp_anchor), head_logp=live.gather(-1, H),
        head_logq=logq.gather(-1, H), head_logp_stale=logp_stale.gather(-1, H), num_tokens=1,
        cap=cap, clip=clip)  # fmt: skip
    gradient = lambda x: torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)])
    out = dict(estimate=gradient(-loss))

    head = lambda x: x.gather(-1, H)[:, :, None]  # (N, T, 1, K), beside every token a
    w, centre, r = CORRECTIONS[correction](  # w and r at every token a; m and α once a position
        logp=logp, logq=logq, logp_stale=logp_stale, logp_anchor=logp_anchor, head_logp=head(logp),
        head_logq=head(logq), head_logp_stale=head(logp_stale), cap=cap, mis=(0.5, 5.0))  # fmt: skip
    c = torch.zeros_like(logp)
    if centre is not None:
        c = c.scatter(-1, H, (centre[0] - centre[1][..., None] * head(logp).exp())[:, :, 0])
    p, q, Q_p, Q_q = logp.exp(), logq.exp(), values(p_logits), values(q_logits)
    V_q = (q * Q_q).sum(-1, keepdim=True)
    A, gated = R[:, None], torch.zeros_like(y, dtype=torch.bool)
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


def bias_tables():
    """Print the terms on one random table, as signed projections on the bias: a row sums to 100 %."""
    g, V, T = torch.Generator().manual_seed(0), 4, 3
    random = lambda s: [s * torch.randn((V,) * (t + 1), generator=g).double() for t in range(T)]
    add = lambda a, b: [x + y for x, y in zip(a, b)]
    p, numerics, lag = random(1.0), random(0.3), random(0.3)
    rewards = (torch.rand((V,) * T, generator=g) < 0.3).double()
    gaps = {"discrepancy only": (add(p, numerics), p), "lag only": (add(p, lag), add(p, lag)),
            "discrepancy and lag": (add(add(p, lag), numerics), add(p, lag))}  # fmt: skip
    terms = ("prefix", "continuation", "token", "drift", "clip")
    for (gap, (q, stale)), baseline in itertools.product(gaps.items(), (False, True)):
        prob = sum(x.log_softmax(-1).view(x.shape + (1,) * (T - x.dim())) for x in q).exp()
        R = rewards - (prob * rewards).sum() if baseline else rewards
        print(f"\n{gap}, {'reward minus its mean' if baseline else 'raw reward'}; terms in % of the bias")
        print(f"{'correction':13}|bias|/|g|" + "".join(f"{k:>14}" for k in terms))
        for name in CORRECTIONS:
            out = exact_bias(name, p, q, R, stale_logits=stale)
            bias = out["estimate"] - out["true"]
            print(f"{name:13}{float(bias.norm() / out['true'].norm()):10.3f}"
                  + "".join(f"{100 * float(out[k] @ bias / bias.square().sum()):14.1f}" for k in terms))  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Data, reward and the tiny base.


def reward(completion, answer, stopped, partial):
    """In [0, 1]; a fork replaces this. Where the answer is a number: 1 if the completion's first
    number equals it; else 1 if the stripped text up to the stop does. `partial`, the tiny task: the
    share of leading characters that are right, the stop counted as the last."""
    if partial:
        want, got = answer + "$", completion + "$" * stopped
        return len(os.path.commonprefix([want, got])) / len(want)
    number = r"[-+]?\d[\d,]*(?:\.\d+)?"
    if not re.fullmatch(number, answer.strip()):
        return float(completion.strip() == answer.strip())
    found = re.search(number, completion)
    value = lambda text: Decimal(text.replace(",", ""))
    return float(found is not None and value(found[0]) == value(answer))


def read_data(path):
    """Rows of a JSONL file, each {"prompt": text, "answer": text}; ValueError names the first bad line."""
    rows = []
    for n, line in enumerate(Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        row, good = None, False
        try:
            row = {k: json.loads(line)[k] for k in ("prompt", "answer")} if line.strip() else None
            good = row is None or all(isinstance(x, str) and x.strip() and x.encode() for x in row.values())
        except (ValueError, KeyError, TypeError, RecursionError):  # also half of a surrogate pair
            pass
        if row and good:
            rows.append(row)
        elif not good:
            shown = line[:40].decode(errors="replace")
            raise ValueError(f'--data {path} line {n}: {shown!r} must be {{"prompt": text, "answer": text}}, '
                             "in UTF-8, neither of them empty")  # fmt: skip
    if not rows:
        raise ValueError(f"--data {path}: holds no rows")
    return rows


def load_data(cfg, tokenizer, model=None):
    """(training rows, held-out rows); a row holds prompt, answer and the prompt's token ids. ValueError: a
    prompt that `model` cannot read: no token, one beyond its vocabulary, or more than its context has room for."""
    if cfg.data:
        rows, held = read_data(cfg.data), None
    else:  # every sum below a limit, in a fixed order; the tiny model writes the units digit first
        limit, held = (20, 64) if cfg.model else (100, 500)
        text, step = ("What is {} + {}? The answer is", 1) if cfg.model else ("{}+{}=", -1)
        order = torch.randperm(limit**2, generator=torch.Generator().manual_seed(0)).tolist()
        pairs = [divmod(i, limit) for i in order]
        rows = [dict(prompt=text.format(a, b), answer=str(a + b)[::step]) for a, b in pairs]
    vocab = room = float("inf")
    if model is not None:
        vocab = model.get_input_embeddings().weight.shape[0]
        room = (getattr(model.config.get_text_config(), "max_position_embeddings", None) or room) - cfg.max_new_tokens
    for row in rows:
        what = (f"--data {cfg.data}: " if cfg.data else "") + f"the prompt {row['prompt'][:40]!r}"
        if len(row["prompt"]) > 100 * max(room, 1):  # no token is that long, and a tokenizer would take minutes
            raise ValueError(f"{what} has {len(row['prompt'])} characters; at most {room} tokens fit the model's context")
        row["ids"] = tokenizer(row["prompt"])["input_ids"]
        if not cfg.model and 12 in row["ids"]:
            raise ValueError(f"{what} holds more than the tiny model's 0-9 + =; give a model of your own")
        if not row["ids"] or max(row["ids"]) >= vocab:
            raise ValueError(f"{what} has the token ids {row['ids'][:9]}; it needs at least one, and each below {vocab}, "
                             "the size of the model's vocabulary")  # fmt: skip
        if len(row["ids"]) > room:
            raise ValueError(f"{what} has {len(row['ids'])} tokens, and --max-new-tokens is {cfg.max_new_tokens}; together "
                             f"at most {room + cfg.max_new_tokens} fit the model's context")  # fmt: skip
    held = min(100, max(1, len(rows) // 10)) if held is None else held
    if len(rows) - held < cfg.prompts:
        raise ValueError(f"--prompts {cfg.prompts}: there are only {len(rows) - held} to train on, and {held} held out")
    return rows[held:], rows[:held]


def tiny_base(steps=350, width=64, layers=3):
    """Folder of a tiny Qwen3 that gets some sums right, made once: `steps` supervised batches."""
    folder = Path(f"runs/base-{layers}x{width}-{steps}")
    if folder.exists():
        return folder
    ids = {c: i for i, c in enumerate([*"0123456789+=", "<pad>", "<eos>"])}
    raw = Tokenizer(models.WordLevel(ids, "<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=14, hidden_size=width, intermediate_size=5 * width // 2, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, head_dim=32, bos_token_id=None,
        eos_token_id=13, pad_token_id=12, max_position_embeddings=64, tie_word_embeddings=True))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    rows, _ = load_data(Config(prompts=1), tokenizer)
    g = torch.Generator().manual_seed(0)
    for _ in tqdm(range(steps), desc=f"training the tiny base, once: {folder}"):
        batch = [rows[i] for i in torch.randint(len(rows), (128,), generator=g)]
        p = [[12] * (6 - len(r["ids"])) + r["ids"] for r in batch]
        a = [tokenizer(r["answer"])["input_ids"] + [13] for r in batch]
        mask = torch.arange(4) < torch.tensor([[len(x)] for x in a])
        tokens = torch.tensor([x + y + [12] * (4 - len(y)) for x, y in zip(p, a)])
        shown = Rollout(tokens, torch.tensor([len(r["ids"]) for r in batch]), mask, *[None] * 6)
        attention, position = positions(shown.prompt_len, 6, 9)  # one pass: prompts seldom repeat here
        hidden = model.model(tokens[:, :-1], attention_mask=attention, position_ids=position, use_cache=False).last_hidden_state
        (-token_logps(model, shown, hidden=hidden[:, 5:][mask])[mask].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.parent.mkdir(exist_ok=True)
    try:
        write(folder, lambda new: save_model(model, tokenizer, new))
    except OSError:  # another process was faster, with the same weights
        if not folder.exists():
            raise
    return folder


def save_model(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch(path, option="--model"):
    """The folder of a model: `path` itself, or what the hub holds under that name, or else the hub's cache; of
    the hub only what is data: no pickle and no code. ValueError, within seconds, if neither has it."""
    if Path(path).exists():
        return path
    if Path(path).is_absolute():
        raise ValueError(f"{option} {path}: no such folder; give the folder of a model")
    data = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        huggingface_hub.HfApi().model_info(str(path), timeout=4)
        return huggingface_hub.snapshot_download(str(path), allow_patterns=data, ignore_patterns=["*/*", "consolidated*"])
    except Exception as e:  # no network, no such name: many kinds
        try:
            cached = huggingface_hub.snapshot_download(str(path), local_files_only=True)
            return print(f"{option} {path}: the hub does not answer ({type(e).__name__}); this is the copy in its cache") or cached
        except Exception:
            raise ValueError(f"{option} {path}: no such folder, not in the hub's cache, and the hub does not give it "
                             f"({type(e).__name__}: {str(e)[:150]}); give the folder of a model") from None  # fmt: skip


def load_model(path, dtype, device, option="--model"):
    """(model, tokenizer) of a Hugging Face causal LM, dropout off. ValueError, naming `option`, if it cannot be
    had whole: a weight missing or not finite, pickled weights, code of its own, no tokenizer, no stop token."""
    try:
        folder = fetch(path, option)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
            output_loading_info=True)  # fmt: skip
    except Exception as e:  # many kinds, from as many libraries
        told = str(e) if str(e).startswith(option) else f"{option} {path}: no causal LM can be loaded from there ({str(e)[:300]})"
        raise ValueError(told) from None
    bad = [f"{n} is missing" for n in sorted(found["missing_keys"])]
    bad += [f"{n} holds inf or NaN" for n, p in model.named_parameters() if not p.isfinite().all()]
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes up an empty one
        bad += ["no tokenizer: add tokenizer.json and tokenizer_config.json"]
    if model.generation_config.eos_token_id is None and model.config.get_text_config().eos_token_id is None:
        bad += ["no stop token: name its eos_token_id in generation_config.json"]
    if bad:
        raise ValueError(f"{option} {path}: {bad[0]}; give a folder with a whole causal LM")
    return model.to(device).eval(), tokenizer


def model_fingerprint(model):
    """What a recipe holds for: the architecture, its sizes, and a checksum of its norms' weights."""
    text = model.config.get_text_config()
    norms = sum(float(p.detach().double().sum()) for p in model.parameters() if p.dim() == 1)
    return [text.model_type, text.num_hidden_layers, text.hidden_size, text.vocab_size, round(norms, 3)]


def keep_list(keep, model):
    """The modules of --keep-bf16: names after commas, or @FILE, a recipe made by opd.py --sensitivity."""
    if not keep.startswith("@"):
        return [k.strip() for k in keep.split(",") if k.strip()]
    try:
        recipe = json.loads(Path(keep[1:]).read_text())
        if not isinstance(recipe["keep_bf16"], list) or not all(isinstance(k, str) for k in recipe["keep_bf16"]):
            raise ValueError("its keep_bf16 is no list of names")
        recipe["model"] = recipe["model"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"--keep-bf16 {keep}: no recipe ({e}); make one with python opd.py --sensitivity") from None
    if model is not None and recipe["model"] != model_fingerprint(model):
        raise ValueError(f"--keep-bf16 {keep}: made for {recipe['model']}, this is {model_fingerprint(model)}")
    return recipe["keep_bf16"]


def grade(rollout, rows, stop_ids, tokenizer, cfg):
    """(reward, completion, whether it reached a stop) of each response, as three lists."""
    T = rollout.mask.shape[1]
    stopped = (torch.isin(rollout.tokens[:, -T:], stop_ids) & rollout.mask).any(1).tolist()
    texts = [tokenizer.decode(y[: n - s]) for y, n, s in
             zip(rollout.tokens[:, -T:].tolist(), rollout.mask.sum(1).tolist(), stopped)]  # fmt: skip
    partial = not (cfg.model or cfg.data)
    return [reward(t, r["answer"], s, partial) for t, r, s in zip(texts, rows, stopped)], texts, stopped


def accuracy(sampler, rows, tokenizer, cfg):
    """Share of `rows` whose greedy completion earns the full reward."""
    scores = []
    for i in range(0, len(rows), 250):
        drawn = sampler.sample([r["ids"] for r in rows[i : i + 250]], cfg.max_new_tokens, greedy=True)
        scores += grade(drawn, rows[i : i + 250], sampler.stop_ids, tokenizer, cfg)[0]
    return sum(s >= 1 for s in scores) / max(1, len(scores))


# --------------------------------------------------------------------------------------------------
# A run: what is trained, what samples, and the folder that both can be resumed from. Files are
# written under another name and renamed, so that nobody ever reads half of one.


def write(path, save):
    """`save(temporary path)`, then rename; a folder that is there already is moved aside first. OSError if not."""
    new, gone = (path.with_name(f"{path.name}.{os.getpid()}{x}.tmp") for x in ("", ".gone"))
    try:
        save(new)
        if path.is_dir():
            os.replace(path, gone)
        os.replace(new, path)
    except Exception as e:  # of torch, safetensors or matplotlib
        raise OSError(f"{path} cannot be written ({e}); is the disk full, or the folder read-only?") from e
    finally:  # on an error nothing is left over
        for left in (new, gone):
            shutil.rmtree(left, ignore_errors=True)
            left.unlink(missing_ok=True)


class Stop(KeyboardInterrupt):
    """SIGINT or SIGTERM, its number the first argument, wants the command to end."""


def guard(main):
    """Make `main(argv)` end, whatever ends it early, in one line on standard error and an exit status: 2 for bad
    input, a full disk or too little memory, 130 for SIGINT, 143 for SIGTERM. The first signal lets the step finish
    and save (Run.end_step); a second one, or one outside a run's steps, ends at once."""

    @functools.wraps(main)
    def guarded(argv=None):
        def ask(number, _):
            if Run.live is None or Run.live.stop:
                raise Stop(number)
            Run.live.stop = number

        Run.live, at_first = None, {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handler
            at_first = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return main(argv)
        except (ValueError, OSError, torch.OutOfMemoryError) as e:
            status, told = 2, f"error: {' '.join(str(e).split())}"
            told += "; make --micro-batch smaller" if isinstance(e, torch.OutOfMemoryError) else ""
            full = getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            told += "; the disk is full, make room" if full else ""
        except KeyboardInterrupt as e:
            status = 128 + (e.args or (signal.SIGINT,))[0]
            told = f"stopped by {signal.Signals(status - 128).name}"
        finally:
            for number, handler in at_first.items():
                signal.signal(number, handler)
        if run := Run.live:
            told += f"; go on from its last saved step with --resume {run.folder}" if (run.folder / "state.pt").exists() else (
                f"; no step of {run.folder} was saved")  # fmt: skip
            print(file=sys.stderr)  # below the progress bar
        Run.live = None
        print(f"{Path(inspect.getfile(main)).name}: {told}", file=sys.stderr)
        return status

    return guarded


class Run:
    """Model, float32 master weights, optimizer, sampler, data and folder of a run."""

    live = None  # the run that `guard` lets finish its step; its `stop`: the signal that asks for the end

    def __init__(self, cfg, path, kind, also=None):
        """also(model, tokenizer): what else must be there before a folder is made; kept as self.also."""
        self.cfg, self.rows, self.before, self.stop = cfg, [], {}, None  # before: the accuracies of before training
        option = "--student" if hasattr(cfg, "student") else "--model"
        self.model, self.tokenizer = load_model(path, cfg.dtype, cfg.device, option)
        self.data, self.held_out = load_data(cfg, self.tokenizer, self.model)
        self.also = also and also(self.model, self.tokenizer)
        self.params = list(self.model.parameters())
        float32 = cfg.dtype == "float32"
        self.master = self.params if float32 else [p.detach().float() for p in self.params]
        optimizer = dict(adam=torch.optim.Adam, sgd=torch.optim.SGD)[cfg.optimizer]
        self.optimizer = optimizer(self.master, lr=cfg.lr, fused=True)
        kind_of = dict(torch=TorchSampler, vllm=VLLMSampler)[cfg.sampler]
        keep = keep_list(cfg.keep_bf16, self.model)
        probe = [(r["ids"] * 32)[:32] for r in self.data[:4]]  # what the KV scales are calibrated on
        extra = dict(memory=cfg.sampler_memory) if cfg.sampler == "vllm" else {}
        options = dict(weights=cfg.weights, kv=cfg.kv, keep_bf16=keep, noise=cfg.noise, head_k=cfg.head_k,
                       probe=probe, seed=cfg.seed, rows=cfg.micro_batch, **extra)  # fmt: skip
        self.sampler = kind_of(self.model, **options)
        # What the next D+1 steps sample with: (version, its place among `models`, why). A place is written again
        # D+1 publications later, when no step to come samples with what it held.
        D = cfg.lag or cfg.max_lag or 0
        self.plan = deque([(0, 0, None)] * (D + 1), maxlen=D + 1)
        self.models = [copy.deepcopy(self.model) for _ in range(min(D, cfg.steps) + 1)] if D else [self.model]
        if cfg.resume:
            self.folder = Path(cfg.resume)
            self.restore()
        else:
            names = (Path(f"runs/{kind}-{i}") for i in itertools.count(1))
            self.folder = Path(cfg.out or next(f for f in names if not f.exists()))
            self.folder.mkdir(parents=True, exist_ok=bool(cfg.out))
            versions = dict(torch=torch.__version__, transformers=transformers.__version__)
            config = json.dumps(dataclasses.asdict(cfg) | dict(versions=versions), indent=1)
            write(self.folder / "config.json", lambda new: new.write_text(config))
        self.logs = [open(self.folder / f"{name}.jsonl", "a") for name in ("metrics", "samples")]
        Run.live = self

        self.worker = ProcessSampler(kind_of, self.models, self.model.device, options) if cfg.async_ else None
        for step, due in enumerate(self.plan, len(self.rows)):
            self.ask(step, due)

    def close(self):
        if self.worker:
            self.worker.close()

    def accuracies(self, suffix=""):
        """Greedy accuracy on held-out prompts, of the trainer's model and of the sampler as it is."""
        exact = TorchSampler(self.model, "none", "none")
        return {name + suffix: accuracy(sampler, self.held_out, self.tokenizer, self.cfg)
                for name, sampler in (("accuracy", exact), ("accuracy_sampler", self.sampler))}  # fmt: skip

    def accumulate(self):
        """A bfloat16 forward leaves bfloat16 gradients; they add up in float32."""
        for p, w in zip(self.params, self.master):
            if w is not p:
                w.grad, p.grad = p.grad.float() + (0 if w.grad is None else w.grad), None

    def step(self):
        """One optimizer step; the gradient's norm. A gradient that is not finite moves nothing."""
        norm = float(torch.nn.utils.get_total_norm([w.grad for w in self.master]))
        if norm < float("inf"):
            self.optimizer.step()
            if not torch.nn.utils.get_total_norm(self.master) < float("inf"):
                raise ValueError(f"--lr {self.cfg.lr}: a step took the weights to inf or NaN; make it smaller")
        self.optimizer.zero_grad()
        for p, w in zip(self.params, self.master):
            p.data.copy_(w.data) if w is not p else None
        return norm

    def request(self, step):
        """(data rows, the arguments of `sample`) of a step: a function of (--seed, step)."""
        cfg, seed = self.cfg, self.cfg.seed * 1_000_003 + step
        picked = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(seed))[: cfg.prompts]
        batch = [self.data[i] for i in picked for _ in range(cfg.group_size)]
        return batch, ([r["ids"] for r in batch], cfg.max_new_tokens, seed)

    def ask(self, step, due):
        """With --async: have the process sample a step to come, with the weights that are due then."""
        if self.worker and step < self.cfg.steps:
            self.worker.ask(*due[:2], *self.request(step)[1])

    def draw(self, step):
        """(data rows, rollout, dropped): a group of responses to each of the step's prompts, from q. A
        response with a log-prob of inf or NaN is masked out, and marked in `dropped` (B,)."""
        batch, how = self.request(step)
        rollout = self.worker.take() if self.worker else self.sampler.sample(*how)
        head = (rollout.head_logq + rollout.head_logp_stale).exp().sum(-1)  # -inf, a token ruled out, may stand there
        dropped = (~(rollout.logq + rollout.logp_stale + head).isfinite() & rollout.mask).any(1)
        rollout.mask = rollout.mask & ~dropped[:, None]
        return batch, rollout, dropped

    def resync(self, row):
        """After step t: publish the weights of now for step t+1+D, if a rule says so, and have the sampler go on
        with those that are due at step t+1. Adds to `row` whether they are others, and why. D: 0 but for
        --lag and --async."""
        cfg, version, (latest, place, _) = self.cfg, row["step"] + 1, self.plan[-1]
        share = row["ess" if cfg.ess_level == "sequence" else "ess_token"]
        due = cfg.sync_every and version - latest >= cfg.sync_every
        reason = f"every {cfg.sync_every}" if due else None
        if not due and share < (cfg.sync_ess or 0):
            reason = f"ess {share:.3f} < {cfg.sync_ess}"
        if cfg.lag is not None or cfg.async_ and cfg.sync_every is cfg.sync_ess is None:
            reason = f"lag {self.plan.maxlen - 1}"
        if reason:
            place = (place + 1) % len(self.models)
            self.models[place].load_state_dict(self.model.state_dict())  # itself, where D is 0
        self.plan.append((version, place, reason) if reason else self.plan[-1])
        due, place, reason = self.plan[0]
        row |= dict(synced=due != row["version"], sync_reason=reason if due != row["version"] else None)
        if row["synced"] and not self.worker:
            self.sampler.sync(self.models[place], due)
        self.ask(row["step"] + self.plan.maxlen, self.plan[-1])

    def end_step(self, row, times, batch, graded, dropped, line):
        """The end of a step, which dlc.py and opd.py share: sync by the rules, write the step's numbers
        and one of its samples at once, save every --save-every steps; the `line` to show, filled in.
        times: when the step began and when it had its rollouts; graded: what `grade` gave."""
        (rewards, texts, stopped), first = graded, batch[0]
        row |= dict(dropped=int(dropped.sum()), truncated=1 - sum(stopped) / len(batch),
                    kv_scales=list(map(list, (self.worker or self.sampler).kv_scales)))  # fmt: skip
        self.resync(row)
        shown = dict(step=row["step"], prompt=first["prompt"], answer=first["answer"], completion=texts[0], reward=rewards[0])
        start, drawn, end = *times, time.perf_counter()
        row |= dict(seconds_sample=drawn - start, seconds_train=end - drawn, tokens_per_second=row["tokens"] / (end - start))
        row |= dict(seconds_sample=self.worker.seconds, seconds_wait=drawn - start) if self.worker else {}
        row |= self.before if row["step"] == 0 else {}
        kept = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in row.items()}  # JSON has no NaN
        self.rows.append(kept)
        for file, x in zip(self.logs, (kept, shown)):
            print(json.dumps(x), file=file, flush=True)
        if (row["step"] + 1) % self.cfg.save_every == 0 or row["step"] + 1 == self.cfg.steps or self.stop:
            sampled = self.models if self.plan.maxlen > 1 else [self.sampler.stale]
            state = dict(step=row["step"], plan=list(self.plan), optimizer=self.optimizer.state_dict(),
                         master=[w.detach() for w in self.master], sampled=[m.state_dict() for m in sampled])  # fmt: skip
            write(self.folder / "state.pt", lambda new: torch.save(state, new))
        if self.stop:
            raise Stop(self.stop)
        line += " {syncs:6d} {tokens_per_second:9.0f}"
        return line.format(**row, syncs=sum(r["synced"] for r in self.rows))

    def restore(self):
        """Back to the last saved step. Nothing else is state: the random numbers of a step are a
        function of (seed, step). ValueError, with nothing written: files that are broken or another run's."""
        logs = [self.folder / f"{name}.jsonl" for name in ("metrics", "samples")]
        try:
            state = torch.load(self.folder / "state.pt", weights_only=True, map_location=self.model.device)
            for model, weights in zip(self.models, state["sampled"], strict=True):  # with D = 0, self.model for a moment
                model.load_state_dict(weights)
            self.plan.extend(state["plan"])
            version, place, _ = self.plan[0]
            self.sampler.sync(self.models[place], version)
            self.optimizer.load_state_dict(state["optimizer"])
            for p, w, saved in zip(self.params, self.master, state["master"], strict=True):
                p.data.copy_(w.data.copy_(saved))
            done = state["step"] + 1  # what was logged after the last save, the last line perhaps in part, goes
            kept = [log.read_text().splitlines(True)[:done] for log in logs]
            self.rows = [json.loads(line) for line in kept[0]]
            if [[json.loads(line)["step"] for line in lines] for lines in kept] != [list(range(done))] * 2:
                raise ValueError(f"its logs do not hold steps 0 to {done - 1}")
        except Exception as e:  # torch.load alone raises many kinds
            told = str(e) if isinstance(e, ValueError) else type(e).__name__  # torch's own advice is to trust the file
            raise ValueError(f"--resume {self.folder}: its saved state or its logs are broken ({told}); begin a new run") from None
        if done > self.cfg.steps:
            raise ValueError(f"--steps {self.cfg.steps}: {self.folder} has {done} steps already; give more")
        for left in self.folder.glob("*.tmp"):  # half a file of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
            left.unlink(missing_ok=True)
        for log, lines in zip(logs, kept):
            write(log, lambda new: new.write_text("".join(lines)))
        self.before = {k: v for k, v in self.rows[0].items() if "accuracy" in k}

    def finish(self, title):
        """Accuracies of the end, the model in Hugging Face form, and the figure. Every step is saved: a signal
        ends it at once."""
        self.stop = True
        self.sampler.sync(self.model, self.cfg.steps)
        self.rows[-1] |= self.before | self.accuracies()
        result = {k: v for k, v in self.rows[-1].items() if k.startswith("accuracy")}
        write(self.folder / "result.json", lambda new: new.write_text(json.dumps(result)))
        write(self.folder / "model", lambda new: save_model(self.model, self.tokenizer, new))
        write(self.folder / "curves.png", lambda new: figure(self.rows, new, title))
        Run.live = None


def measure(rollout, logp, head_logp, cap):
    """The two gaps, the ESS of the lag and more, on a batch; `logp`: π before the first update."""
    logp, head_logp = logp.clamp_min(-100), head_logp.clamp_min(-100)  # as in policy_loss
    mask, count = rollout.mask, int(rollout.mask.sum())
    n = max(1, count)
    numerics = mismatch(rollout.logp_stale, rollout.logq, mask, rollout.head_logp_stale, rollout.head_logq)
    lag = mismatch(logp, rollout.logp_stale, mask, head_logp, rollout.head_logp_stale)
    log_lag, rest = logp - rollout.logp_stale, tail(head_logp)
    entropy = -((head_logp.exp() * head_logp).sum(-1) + rest * rest.log())[mask].sum()
    row = dict(discrepancy=numerics["kl"], lag=lag["kl"], ess=ess(log_lag, mask), ess_token=ess(log_lag, mask, "token"))
    row |= dict(head_mass=numerics["head_mass"], entropy=float(entropy) / n, tokens=count, length=count / len(mask))
    row["cap_share"] = float((ratio(logp, rollout.logq) > cap)[mask].sum()) / n
    rest = ("k1", "k3", "mean_abs", "max_abs")
    return row | {f"discrepancy_{k}": numerics[k] for k in rest} | {f"lag_{k}": lag[k] for k in rest}


def figure(rows, path, title):
    """Reward, the two gaps and the ESS against the step; a dotted line at every sync."""
    fig, axes = plt.subplots(3, sharex=True, figsize=(7, 7), layout="constrained")
    get = lambda key: [max(r[key], 1e-7) for r in rows]
    mean = [sum(get("reward")[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(rows))]
    axes[0].plot(get("reward"), "0.8", label="reward under q")
    axes[0].plot(mean, "C0", label="its mean over 10 steps")
    axes[1].semilogy(get("discrepancy"), "C3", label="discrepancy, KL(q || π_stale)")
    axes[1].semilogy(get("lag"), "C0--", label="lag, KL(π_stale || π)")
    axes[2].plot(get("ess"), "C0", label="ESS of the lag, responses")
    axes[2].plot(get("ess_token"), "C0:", label="ESS of the lag, tokens")
    syncs = [r["step"] + 1 for r in rows if r["synced"]]
    for ax, unit in zip(axes, ("reward", "nats a token", "share of the batch")):
        ax.vlines(syncs if len(syncs) < len(rows) / 4 else [], 0, 1, "0.6", ":", lw=0.7,
                  transform=ax.get_xaxis_transform())  # fmt: skip
        ax.set_ylabel(unit)
        ax.legend(fontsize=8)
    axes[1].set_ylim(bottom=1e-5)
    axes[2].set(ylim=(0, 1.05), xlabel=f"step; {len(syncs)} syncs (dotted, if few)")
    axes[0].set_title(title, fontsize=10)
    fig.savefig(path, dpi=130, format="png")
    plt.close(fig)


# --------------------------------------------------------------------------------------------------
# The loop.


def check(cfg):
    """`cfg` with its defaults filled in. ValueError, in one line, for a value that cannot be used."""
    fill = dict(steps=500, prompts=32, lr=2e-4, max_new_tokens=4)
    if cfg.model:
        fill = dict(steps=20, prompts=8, lr=1e-5, max_new_tokens=12)
    fill["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    fill["sync_ess"] = 0.5 if cfg.sync_every is cfg.lag is None and not cfg.async_ else None
    fill["max_lag"] = 1 if cfg.async_ else None
    cfg = dataclasses.replace(cfg, **{k: v for k, v in fill.items() if getattr(cfg, k) is None})
    batch = cfg.prompts * cfg.group_size
    mini = batch // max(1, cfg.minibatches)
    cfg.micro_batch = mini if cfg.micro_batch is None else cfg.micro_batch
    known = dict(sampler=("torch", "vllm"), correction=CORRECTIONS, weights=FORMATS, kv=KV_FORMATS, optimizer=("adam", "sgd"),
                 ess_level=("sequence", "token"), dtype=("float32", "bfloat16"))  # fmt: skip
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder = Path(cfg.resume or cfg.out or "runs").absolute()
    folder = next(f for f in (folder, *folder.parents) if f.exists())  # where a folder would be made
    least = dict(steps=1, prompts=1, group_size=2, minibatches=1, micro_batch=1, head_k=1, cap=1, lr=1e-12,
                 save_every=1, max_new_tokens=1, sync_every=0, sync_ess=0, lag=0, noise=0, clip=0, sampler_memory=1e-3)  # fmt: skip
    rules = [(k, getattr(cfg, k) in v, "one of " + ", ".join(v)) for k, v in known.items()] + [
        (k, getattr(cfg, k) is None or v <= getattr(cfg, k) < float("inf"), f"a number from {v} up")
        for k, v in least.items()] + [
        ("seed", 0 <= cfg.seed < 2**40, "a number from 0 up to 2^40"),
        ("sync_ess", (cfg.sync_ess or 0) <= 1, "at most 1, a share of the batch"),
        ("lag", cfg.lag is None or cfg.sync_every is cfg.sync_ess is None and not cfg.async_,
         "alone: no --sync-every, --sync-ess or --async (which has --max-lag)"),
        ("max_lag", cfg.max_lag is None or cfg.async_, "left out without --async"),
        ("max_lag", cfg.max_lag is None or 1 <= cfg.max_lag < float("inf"), "at least 1: at 0 nothing overlaps (--lag 0)"),
        ("sampler", cfg.sampler == "torch" or not cfg.async_, "torch with --async"),
        ("minibatches", batch % max(1, cfg.minibatches) == 0, f"a divisor of the batch, {batch} responses"),
        ("micro_batch", mini % max(1, cfg.micro_batch) == 0, f"a divisor of a minibatch, {mini} responses"),
        ("device", re.fullmatch(r"cpu|cuda(:\d+)?", cfg.device), "cpu, cuda or cuda:N"),
        ("device", cfg.device == "cpu" or int("0" + re.sub(r"\D", "", cfg.device)) < gpus,
         f"cpu, or one of the {gpus} GPUs that torch sees"),
        ("group_size", batch <= 2**20, f"smaller: with --prompts {cfg.prompts} a batch has {batch} responses"),
        ("sampler_memory", cfg.sampler_memory is None or cfg.sampler == "vllm", "left out: only --sampler vllm has it"),
        ("data", cfg.data is None or Path(cfg.data).is_file(), "a file that exists"),
        ("out", cfg.resume or not cfg.out or not Path(cfg.out).exists() or
         Path(cfg.out).is_dir() and not any(Path(cfg.out).iterdir()), "a new or empty folder"),
        ("resume" if cfg.resume else "out", folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
         f"a folder that can be written; {folder} cannot"),
        ("resume", not cfg.resume or (Path(cfg.resume) / "state.pt").is_file(), "a run with a saved state.pt; begin a new one"),
    ]  # fmt: skip
    for name, good, need in rules:
        if not good:
            raise ValueError(f"{option(name)} {getattr(cfg, name)}: must be {need}")
    if cfg.data:
        read_data(cfg.data)  # before a model is made or loaded
    keep_list(cfg.keep_bf16, None)
    return cfg


def train(cfg):
    """Run `cfg`; one flat dict a step. The last one also holds the accuracies, before and after."""
    cfg = check(cfg)
    with contextlib.closing(Run(cfg, cfg.model or tiny_base(), f"dlc-{cfg.correction}")) as run:
        return loop(cfg, run)


def loop(cfg, run):
    model, sampler = run.model, run.sampler
    run.before = run.before or run.accuracies("_base")
    print(f"{run.folder}: {cfg.correction}; {cfg.sampler} sampler on {cfg.device}, weights {cfg.weights}, KV {cfg.kv}\n"
          " step version  reward  discrepancy      lag    ESS  clipped  syncs  tokens/s")  # fmt: skip

    bar = tqdm(range(len(run.rows), cfg.steps), initial=len(run.rows), total=cfg.steps)
    for step in bar:
        # 1. Sample a group of responses to each prompt from q.
        start = time.perf_counter()
        batch, rollout, dropped = run.draw(step)
        drawn = time.perf_counter()

        # 2. Reward, centred over the group of its prompt.
        graded = grade(rollout, batch, sampler.stop_ids, run.tokenizer, cfg)
        R = torch.tensor(graded[0], device=cfg.device).where(~dropped, float("nan"))
        R = R.view(cfg.prompts, cfg.group_size)
        A = R - R.nanmedian(1, keepdim=True).values  # first the median: exactly 0 where all are equal
        A = (A - A.nanmean(1, keepdim=True)).nan_to_num(0)
        A = (A / (A.std(1, keepdim=True) + 1e-6) if cfg.scale_advantage else A).flatten()

        # 3. Update: one optimizer step a minibatch, its gradient summed over micro-batches.
        fresh = None  # π before the first update; with one minibatch it is the update's own forward
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
                    cfg.correction, logp, part.logq, A[micro], part.mask, logp_stale=part.logp_stale,
                    logp_anchor=seen[-1][0] if fresh is None else fresh[0][micro], head_logp=head_logp,
                    head_logq=part.head_logq, head_logp_stale=part.head_logp_stale,
                    num_tokens=int(rollout.mask[mini].sum()), cap=cfg.cap, clip=cfg.clip)  # fmt: skip
                loss.backward()
                run.accumulate()
                stats.append(stat)
            norms.append(run.step())

        # 4. Measure both gaps and the ESS, on the batch as it was before its first update.
        row = dict(step=step, version=int(rollout.version[0, 0]), reward=float(R.nanmean().nan_to_num(0)))
        row |= measure(rollout, *(map(torch.cat, zip(*seen)) if fresh is None else fresh), cfg.cap)
        row |= dict(
            clip_share=sum(s["clipped"] for s in stats) / max(1, row["tokens"]), grad_norm=max(norms),
            weight_max=max(s["weight_max"] for s in stats), skipped=sum(not x < float("inf") for x in norms))  # fmt: skip

        # 5. Sync the sampler, if the rule says so; log at once, save, show.
        line = "{step:5d} {version:7d} {reward:7.3f} {discrepancy:12.5f} {lag:8.5f} {ess:6.3f} {clip_share:8.1%}"
        bar.write(run.end_step(row, (start, drawn), batch, graded, dropped, line))
    run.finish(f"{cfg.correction}: weights {cfg.weights}, KV {cfg.kv}")
    return run.rows


def option(field):
    """max_lag is --max-lag; async_, without the underscore a word of Python's, is --async."""
    return "--" + field.rstrip("_").replace("_", "-")


def parse(config, argv, description, skip=()):
    """The command line of a dataclass: a field is an option, the comment beside it is its help."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)  # fmt: skip

    def one_line(message):  # instead of argparse's whole usage
        raise ValueError(f"{message}; see --help")

    parser.error = one_line
    source = "".join(inspect.getsource(c) for c in reversed(config.__mro__[:-1]))  # the last wins
    kinds = {f.name: next(t for t in (bool, int, float, str) if t in (f.type, *typing.get_args(f.type)))
             for f in dataclasses.fields(config)}  # fmt: skip
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", source, re.M))
    for f in (f for f in dataclasses.fields(config) if f.name not in skip):
        kind = kinds[f.name]
        how = dict(action="store_true") if kind is bool else dict(type=kind, metavar=kind.__name__.upper())
        text = comments[f.name] + (f" (default: {f.default})" if kind is not bool and f.default not in (None, "") else "")
        parser.add_argument(option(f.name), dest=f.name, help=text, **how)
    given = vars(parser.parse_args(argv))
    if "resume" in given:
        if other := set(given) - {"resume", "steps"}:
            raise ValueError(f"--resume: all but --steps comes from that run; leave out {option(other.pop())}")
        try:
            stored = json.loads((Path(given["resume"]) / "config.json").read_text())
            del stored["versions"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"--resume {given['resume']}: must be a run's folder; its config.json is bad ({e})") from None
        if set(stored) != set(kinds):
            raise ValueError(f"--resume {given['resume']}: must be a run of this script; its options are others")
        for f in dataclasses.fields(config):
            allowed = (kinds[f.name], int) if kinds[f.name] is float else (kinds[f.name],)
            if type(stored[f.name]) not in allowed and (stored[f.name] is not None or f.type in kinds.values()):
                raise ValueError(f"--resume {given['resume']}: {f.name} {stored[f.name]!r} in its config.json must be "
                                 f"{allowed[0].__name__}; begin a new run")  # fmt: skip
        given = stored | given
    if not (given.get("model") or given.get("student") or "OMP_NUM_THREADS" in os.environ):
        torch.set_num_threads(1)  # two are little faster on the tiny model, and on a busy machine wait for each other
    made = config(**given)
    made.given = set(given)  # the options that were really given
    return made


@guard
def main(argv=None):
    cfg = parse(Config, argv, __doc__.splitlines()[0])
    if cfg.bias:
        return bias_tables()
    last = train(cfg)[-1]
    print(f"\n{'greedy accuracy, held out':28}  before   after")
    for who, key in (("trainer's model, π", "accuracy"), ("its narrow copy, which samples", "accuracy_sampler")):
        print(f"{who:30}{last[key + '_base']:7.3f} {last[key]:7.3f}")
    shown = {k: v for k, v in last.items() if k.startswith("accuracy")}
    print("RESULT " + json.dumps(dict(correction=cfg.correction, steps=last["step"] + 1) | shown))


if __name__ == "__main__":
    sys.exit(main())
