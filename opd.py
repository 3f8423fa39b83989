"""OPD: on-policy distillation, and how much sampler-trainer mismatch it tolerates.

    python opd.py                # a tiny student learns from a tiny teacher on FP8 rollouts
    python opd.py --calibrate    # noise levels x seeds -> mismatch against quality -> budget.json
    python opd.py --admit        # which rollout configurations fit the budget, before any training
    python opd.py --sensitivity  # one layer quantised at a time, and a recipe: a few kept in BF16
    python opd.py --capacity 16  # tokens of KV cache in 16 GiB

The student samples from q, the teacher π_T scores what it drew, and the loss pulls π to π_T:

    full     Σ_v π (logπ - logπ_T)                        reverse KL(π || π_T), exact at a position
    topk     the same on π's K likeliest tokens and one bucket for the rest; never below 0
    sampled  policy gradient, A_t = logπ_T(y_t) - logπ(y_t) held fixed, any correction of dlc.py
    forward  Σ_v π_T (logπ_T - logπ);   jsd  half of KL(π || m) + KL(π_T || m), m = (π + π_T) / 2

With `full` the sum over the token is exact, so mismatch enters through the prefixes alone, which no
correction of a token can mend; with `sampled` it enters through the drawn token as well.

Left out: temperature (student and teacher are read at 1), a mixture with the teacher's own text.
Letters as in dlc.py; the teacher is never called q.  logp_teacher: log π_T.

[1] Yu et al., How much mismatch can OPD tolerate?, arXiv 2611.11450; its abstract is all we had.
[2] Agarwal et al., On-policy distillation of language models, arXiv 2306.13649.
"""

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from tqdm import tqdm

import dlc
from dlc import autocast, load_model, measure, policy_loss, tiny_base, write
from sampler import (LinearLogps, NarrowKV, TorchSampler, checksum, head_product, mismatch,
                     response_hidden, stop_tokens, tail, token_logps)

LOSSES = ("full", "topk", "sampled", "forward", "jsd")
PROBE = 128  # prompts, each answered once by q, on which a configuration's mismatch is measured
STANDARD = [dict(weights=weights, kv=kv) for weights, kv in (  # what --admit tries if none is named
    ("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("fp8_e5m2", "fp8_e5m2"), ("int8", "fp8"),
    ("nvfp4", "fp8"), ("int4", "fp8"), ("int3", "fp8"), ("int2", "fp8"))]

def one_stop(logits, stop_ids):
    """To stop is one action, whatever the id: all stop ids get an even share of its mass, (..., V).
    No KL between two such policies can tell the ids apart."""
    if len(stop_ids) < 2:
        return logits
    stops = torch.as_tensor(stop_ids, device=logits.device)
    share = logits[..., stops].logsumexp(-1, keepdim=True) - math.log(len(stops))
    return logits.index_copy(-1, stops, share.expand(*share.shape[:-1], len(stops)))

def divergence(loss, student_logits, teacher_logits, k=8):
    """The loss of the table at the top, a position: (..., V), (..., V) -> (...), nats, at least 0.

    The logarithms are constants to autograd: what they would add to the gradient is Σ_v ∇π(v) = 0,
    and so it is exactly 0, and not rounding that Adam would enlarge, where π = π_T. A token that a
    policy rules out (-inf) counts as one of exp(-100), so that 0 log 0 is 0."""
    s, t = (x.log_softmax(-1).clamp_min(-100) for x in (student_logits, teacher_logits))
    if loss == "full":
        return (s.exp() * (s - t).detach()).sum(-1)
    if loss == "forward":
        return (t.exp() * (t - s)).sum(-1)
    if loss == "jsd":
        m = torch.logaddexp(s, t) - math.log(2)
        return (s.exp() * (s - m).detach() + t.exp() * (t - m).detach()).sum(-1) / 2
    if loss == "topk":
        head = s.topk(min(k, s.shape[-1])).indices
        s, t = s.gather(-1, head), t.gather(-1, head)
        rest = tail(s) * (tail(s) / tail(t)).log().detach()
        return (s.exp() * (s - t).detach()).sum(-1) + rest
    raise ValueError(f"loss {loss!r}: choose one of {', '.join(LOSSES)}")

def distill_loss(loss, student_logits, teacher_logits, mask, tokens=None, *, k=8,
                 correction="reinforce", logq=None, stop_ids=(), **policies):
    """Mean over the tokens of `mask` of one of the losses; logits (B, T, V), tokens, logq (B, T).
    `sampled` needs tokens, and whatever `correction` looks at (policy_loss). All of `stop_ids` are
    one action: in `sampled` the advantage is the action's, the gradient the drawn id's. ValueError:
    unequal vocabularies, no such loss, no tokens for `sampled`."""
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher logits are {tuple(student_logits.shape)} and "
                         f"{tuple(teacher_logits.shape)}; cut both to the real vocabulary")
    logits = [x.where(mask[..., None], 0) for x in (student_logits, teacher_logits)]  # NaN padding
    actions = [one_stop(x, stop_ids) for x in logits]
    if loss != "sampled":
        return divergence(loss, *actions, k).where(mask, 0).sum() / max(1, int(mask.sum()))
    if tokens is None:
        raise ValueError("the sampled loss needs tokens, which were not given")
    at = lambda x: x.log_softmax(-1).clamp_min(-100).gather(-1, tokens[..., None])[..., 0]
    logp, A = at(logits[0]), (at(actions[1]) - at(actions[0])).detach()
    logq = logp.detach() if logq is None else logq
    return policy_loss(correction, logp, logq, A, mask, **policies)[0]

class ChunkedDivergence(torch.autograd.Function):
    """Σ of `divergence` over positions, output heads inside, a chunk at a time, so that no (N, V)
    tensor exists. hidden (N, D), head (V, D); of the teacher (N, D') and (V, D') -> ()

    What comes after a sum only scales its gradient, so each chunk makes its own at once."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, loss, k, stop_ids=()):
        rows = max(1, LinearLogps.CHUNK // (3 * len(weight)))
        total, d_hidden = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), rows):
            n = slice(i, i + rows)
            with torch.enable_grad():
                h, w = hidden[n].detach().requires_grad_(), weight.detach().requires_grad_()
                z, z_T = h @ w.t(), teacher_hidden[n] @ teacher_weight.t()
                z, z_T = (one_stop(x.float(), stop_ids) for x in (z, z_T))
                value = divergence(loss, z, z_T, k).sum()
                d_hidden[n], d_w = torch.autograd.grad(value, (h, w))
            d_weight += d_w
            total = total + value.detach()
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, *[None] * 5

@torch.no_grad()
def action_logps(model, rollout, stop_ids, hidden):
    """(log π of the drawn token, of the drawn action), (B, T): all stop ids are one action."""
    rollout = replace(rollout, head_ids=stop_ids.expand(*rollout.mask.shape, -1))
    logp, of_stops = token_logps(model, rollout, head=True, hidden=hidden)
    drawn = torch.isin(rollout.tokens[:, -rollout.mask.shape[1] :], stop_ids)
    return logp, of_stops.logsumexp(-1).where(drawn, logp)

@dataclass
class Config(dlc.Config):  # the rest of the options is that of dlc.py
    student: str | None = None  # Hugging Face causal LM (default: the tiny base of dlc.py)
    teacher: str | None = None  # another with the same tokenizer (default: tiny, trained longer)
    loss: Literal[LOSSES] = "full"  # what pulls the student to the teacher
    loss_k: int = 8  # K of the topk loss
    correction: Literal[tuple(dlc.CORRECTIONS)] = "reinforce"  # of the sampled loss
    group_size: int = 4  # responses to each prompt
    prompts: int | None = None  # prompts in a batch (default: 32; 8 with --student)
    out: str | None = None  # the run's folder (default: runs/opd-LOSS-1, -2, ...)
    calibrate: bool = False  # measure the mismatch budget; resumable
    admit: bool = False  # check the rollout configuration, or a standard list, against the budget
    sensitivity: bool = False  # quantise one layer at a time, then find a recipe
    capacity: float | None = None  # print the tokens of KV cache that fit in so many GiB
    budget: str = "budget.json"  # where --calibrate writes and --admit reads
    tolerance: float = 0.05  # quality that the budget may cost, in accuracy
    levels: str = "0,0.1,0.2,0.4,0.8,1.6"  # noise levels that --calibrate trains at
    seeds: int = 3  # runs at each level
    target: float = 0.002  # mismatch that --sensitivity's recipe aims at, nats a token
    model: tyro.conf.Suppress[str | None] = None  # --student
    minibatches: tyro.conf.Suppress[int] = 1
    scale_advantage: tyro.conf.Suppress[bool] = False
    bias: tyro.conf.Suppress[bool] = False

def check(cfg):
    """`cfg` with its defaults filled in; ValueError, in one line, for a value that is not right."""
    if cfg.student and not cfg.teacher:
        raise ValueError(f"--student {cfg.student}: needs a --teacher with the same tokenizer")
    if cfg.prompts is None and not cfg.student:
        cfg = replace(cfg, prompts=32)
    return dlc.check(replace(cfg, model=cfg.student))

def load_teacher(cfg, student, tokenizer):
    """The teacher, frozen. ValueError: it does not read and write the student's ids."""
    path = cfg.teacher or tiny_base(steps=300, digits=cfg.digits)
    name = f"--teacher {cfg.teacher}"
    teacher, other = load_model(path, cfg.dtype, cfg.device, "--teacher")
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    if odd := sorted(mine.items() ^ theirs.items()):
        raise ValueError(f"{name}: its tokenizer is not the student's: {odd[0]} is in one alone")
    stops = [sorted(stop_tokens(m)) for m in (student, teacher)]
    if stops[0] != stops[1]:
        raise ValueError(f"{name}: its stop tokens are {stops[1]}, not {stops[0]}; make them equal")
    vocab = min(len(m.get_output_embeddings().weight) for m in (student, teacher))
    if vocab < len(mine):
        raise ValueError(f"{name}: {vocab} logits are too few for {len(mine)} tokens")
    return teacher.requires_grad_(False)

def train(cfg):
    """Run `cfg`; one dict a step. The last one also holds the accuracies, before and after."""
    cfg = check(cfg)
    path = cfg.student or cfg.base or tiny_base(digits=cfg.digits)
    model, tokenizer = load_model(path, "float32", cfg.device, "--student")
    teacher = load_teacher(cfg, model, tokenizer)
    with autocast(cfg), dlc.Run(cfg, model, tokenizer, f"opd-{cfg.loss}", teacher) as run:
        exact = TorchSampler(teacher, "none", "none")
        run.before["accuracy_teacher"], _ = dlc.accuracy(exact, run.held_out, tokenizer, cfg)
        print(f"{run.folder}: {cfg.loss}, {cfg.sampler} sampler, {cfg.weights}, KV {cfg.kv}")
        print(" step version  KL to teacher  reward  discrepancy      lag    ESS  syncs  tokens/s")
        done = len(run.rows)
        for step in tqdm(range(done, cfg.steps), initial=done, total=cfg.steps, disable=None):
            # 1. The student samples from q.
            batch, rollout = run.batch(step), run.sampler.draw(step)
            N = max(1, int(rollout.mask.sum()))

            # 2. The teacher scores what was drawn, and the loss pulls π to π_T.
            seen, total, gap_q = [], 0.0, 0.0
            for micro in torch.arange(len(batch)).split(cfg.micro_batch):
                part = rollout[micro]
                hidden, hidden_T = response_hidden(model, part), response_hidden(teacher, part)
                logp, head_logp = token_logps(model, part, head=True, hidden=hidden)
                logp_T, action_T = action_logps(teacher, part, run.stop_ids, hidden_T)
                seen.append((logp.detach(), head_logp.detach()))
                gap_q += float((part.logq - logp_T)[part.mask].sum())
                if cfg.loss == "sampled":
                    A = action_T - action_logps(model, part, run.stop_ids, hidden)[1]  # not of q
                    loss, _ = policy_loss(
                        cfg.correction, logp, part.logq, A, part.mask, logp_stale=part.logp_stale,
                        logp_anchor=logp.detach(), head_logp=head_logp, head_logq=part.head_logq,
                        head_logp_stale=part.head_logp_stale, num_tokens=N, cap=cfg.cap,
                        clip=cfg.clip)
                    total -= float(A[part.mask].sum())
                else:
                    heads = head_product(model, hidden) + head_product(teacher, hidden_T)
                    value = ChunkedDivergence.apply(*heads, cfg.loss, cfg.loss_k, run.stop_ids)
                    loss, total = value / N, total + float(value.detach())
                loss.backward()
            norm = dlc.update(model, run.optimizer)

            # 3. Measure both gaps and the ESS, sync by the same rules as dlc.py, log.
            graded = dlc.grade(rollout, batch, run.stop_ids, tokenizer, cfg)
            kept = [x["reward"] for x, whole in zip(graded, rollout.mask.any(1)) if whole]
            row = dict(step=step, version=int(rollout.version[0, 0]), teacher_kl=total / N,
                       teacher_kl_by_q=gap_q / N, reward=sum(kept) / max(1, len(kept)))
            row |= measure(rollout, *map(torch.cat, zip(*seen)), cfg.cap)
            row |= dict(grad_norm=norm, skipped=int(not norm < float("inf")))
            run.end_step(row, rollout, graded)
            if step % 10 == 0 or cfg.student:
                tqdm.write("{step:5d} {version:7d} {teacher_kl:14.4f} {reward:7.3f} "
                           "{discrepancy:12.5f} {lag:8.5f} {ess:6.3f} {syncs:6d} "
                           "{tokens_per_second:9.0f}".format(**row))
        return run.finish()

# ---- One scale for every source, a budget on it, and what can be decided before training. --------

def untrained(cfg):
    """(student before training, training prompts): what every probe is made with."""
    path = cfg.student or cfg.base or tiny_base(digits=cfg.digits)
    model, tokenizer = load_model(path, "float32", cfg.device, "--student")
    return model, dlc.load_data(cfg, tokenizer, model)[0]

def probe(cfg, model, data, **how):
    """KL(q || π_stale), nats a token, on fixed prompts; the sampler is that of `cfg`, but `how`."""
    keep = dlc.keep_list(cfg.keep_bf16, model)
    how = dict(weights=cfg.weights, kv=cfg.kv, noise=cfg.noise, keep_bf16=keep) | how
    calibration = [(r["ids"] * 32)[:32] for r in data[:4]]
    with autocast(cfg):
        sampler = TorchSampler(model, **how, head_k=cfg.head_k, seed=1, probe=calibration)
        drawn = sampler.sample([r["ids"] for r in data[:PROBE]], cfg.max_new_tokens, seed=1)
    if not drawn.mask.any(1).all():
        raise ValueError(f"{how}: gives log-probs of inf or NaN; this sampler cannot be admitted")
    heads = drawn.head_logp_stale, drawn.head_logq
    return mismatch(drawn.logp_stale, drawn.logq, drawn.mask, *heads)["kl"]

def fingerprint(cfg):
    """What a budget holds for: the pair, the loss, and the run that gave it."""
    keys = "student teacher base digits data reward loss loss_k steps lr prompts group_size "
    keys += "optimizer max_new_tokens dtype" + " correction clip cap" * (cfg.loss == "sampled")
    return {k: getattr(cfg, k) for k in keys.split()}

def falling_fit(quality):
    """Least-squares non-increasing fit (pool adjacent violators) of values at rising mismatch."""
    blocks = []
    for value in quality:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return [mean for mean, n in blocks for _ in range(n)]

def within(curve, tolerance):
    """(budget, censored): the largest mismatch whose fitted quality is at most `tolerance` below
    the clean run's, and whether all are so. Sorts `curve` by mismatch; its rows gain `fitted`."""
    curve.sort(key=lambda r: r["mismatch"])
    mean = [sum(r["quality"]) / len(r["quality"]) for r in curve]
    for row, fitted in zip(curve, falling_fit(mean)):
        row["fitted"] = fitted
    clean = next(m for m, r in zip(mean, curve) if r["noise"] == 0)
    good = [r["mismatch"] for r in curve if r["fitted"] >= clean - tolerance]
    return max(good, default=curve[0]["mismatch"]), len(good) == len(curve)

def trained(cfg, folder, **how):
    """Rows of a training run by `cfg`, changed as `how` says: of one in `folder`, or made now."""
    wanted = fingerprint(cfg) | dict(weights="bf16", kv="bf16", sync_every=1) | how
    for log in folder.glob("*/metrics.jsonl"):
        made = json.loads(log.with_name("config.json").read_text())
        lines = log.read_text().splitlines()
        if len(lines) == made["steps"] and all(made.get(k) == v for k, v in wanted.items()):
            return [*map(json.loads, lines)]
    out = str(folder / str(time.time_ns()))
    return train(replace(cfg, out=out, save_every=cfg.steps, **how))

def calibrate(cfg):
    """Train at every noise level and seed, and find the largest mismatch that still costs at most
    `tolerance`. A run that was made once is not made again. Level 0, the clean run, is always one.

    Returns and writes the budget: `for` (fingerprint), `curve` (a row a level: noise, mismatch of
    the untrained student, quality of each seed, fitted), `lag` (steps -> mismatch), `budget` in
    nats a token, `censored` (quality never fell), `seconds` of one training run."""
    folder = Path(cfg.out or f"{Path(cfg.budget).with_suffix('')}-runs")
    cfg = check(replace(cfg, weights="bf16", kv="bf16", out=None, lag=None, sync_every=1,
                        sync_ess=None, async_=False))
    levels = sorted({0.0} | {float(x) for x in cfg.levels.split(",")})
    model, data = untrained(cfg)
    curve = [dict(noise=n, mismatch=probe(cfg, model, data, noise=n)) for n in levels]
    for row in tqdm(curve, desc="calibrate", disable=None):
        runs = [trained(cfg, folder, noise=row["noise"], seed=i) for i in range(cfg.seeds)]
        row["quality"] = [rows[-1]["accuracy"] for rows in runs]
    # What a lag of D steps costs: the gap after D updates in a clean run that never syncs.
    late = trained(cfg, folder, seed=cfg.seed, noise=0.0, steps=min(cfg.steps, 33), sync_every=0)
    budget, censored = within(curve, cfg.tolerance)
    result = {"for": fingerprint(cfg), "tolerance": cfg.tolerance, "budget": budget,
              "censored": censored, "curve": curve, "lag": {str(r["step"]): r["lag"] for r in late},
              "seconds": sum(r["seconds_wait"] + r["seconds_train"] for r in runs[0])}
    write(Path(cfg.budget), lambda new: new.write_text(json.dumps(result, indent=1)))
    return result

def admit(cfg, budget):
    """Is the rollout configuration of `cfg` within `budget` (of `calibrate`)? Nothing is trained.
    Returns `mismatch` (all sources), `by_source` (each alone: weights, kv, noise, lag), `budget`,
    `admitted`, `seconds`. The lag's share is read from the budget and added; above the tested
    range, of mismatch or lag, the answer is no. ValueError: a budget of another pair or run."""
    cfg = check(cfg)
    for k, v in fingerprint(cfg).items():
        if budget["for"].get(k) != v:
            raise ValueError(f"--budget {cfg.budget}: was made for {k} {budget['for'].get(k)!r}, "
                             f"not {v!r}; repeat the options of --calibrate, or calibrate anew")
    model, data = untrained(cfg)
    start = time.perf_counter()
    exact = dict(weights="bf16", kv="bf16", noise=0.0)
    by_source = {k: probe(cfg, model, data, **exact | {k: getattr(cfg, k)}) for k in exact}
    gaps = [budget["lag"].get(str(d), float("inf")) for d in range(1, cfg.lag + 1)]
    by_source["lag"] = max(gaps, default=0.0)  # the worst on the way: the first may be the largest
    total = probe(cfg, model, data) + by_source["lag"]
    return dict(mismatch=total, by_source=by_source, budget=budget["budget"],
                admitted=total <= budget["budget"], seconds=time.perf_counter() - start)

def sensitivity(cfg):
    """[(module, KL when it alone is quantised)], most sensitive first: layers in --weights, then
    their KV in --kv."""
    cfg = check(cfg)
    model, data = untrained(cfg)
    sampler, found = TorchSampler(model), []
    for end, exact in {"": dict(kv="bf16"), ".kv": dict(weights="bf16")}.items():
        names = [f"{sampler.stem}.{i}{end}" for i in range(sampler.layers)]
        for name in tqdm(names, desc="all but one kept", disable=None):
            others = [x for x in names if x != name]
            found.append((name, probe(cfg, model, data, keep_bf16=others, **exact)))
    return sorted(found, key=lambda row: -row[1])

def recipe(cfg, order):
    """Keep the most sensitive modules in BF16, one by one, until the mismatch is under `target`."""
    model, data = untrained(cfg)
    for n in range(len(order) + 1):
        keep = [name for name, _ in order[:n]]
        if (kl := probe(cfg, model, data, keep_bf16=keep)) <= cfg.target:
            break
    return dict(model=checksum(model), keep_bf16=keep, mismatch=kl,
                weights=cfg.weights, kv=cfg.kv)

def capacity(cfg):
    """[(what, bytes a token, tokens that fit, ratio to BF16)] of the KV cache in `capacity` GiB, by
    weighing the cache of one token: the student's, or that of 28 layers of 8 heads of 128."""
    token = [(torch.zeros(1, 8, 1, 128),) * 2] * 28  # K and V in each layer
    if cfg.student:
        model, _ = load_model(cfg.student, "bfloat16", "cpu", "--student")
        cache = model.base_model(torch.tensor([[0]]), use_cache=True).past_key_values
        token = [(x.keys, x.values) for x in cache.layers if hasattr(x, "keys")]
    layers = set(range(len(token)))
    names = [k for k in dlc.keep_list(cfg.keep_bf16, None) if k.endswith(".kv")]
    kept = {int(name.split(".")[-2]) for name in names} or {0}
    if not kept <= layers:
        raise ValueError(f"--keep-bf16 {cfg.keep_bf16}: there are {len(layers)} layers, from 0")
    rows, mixed = [], f"fp8, {len(kept)} layer's KV in bf16"
    for name, wide in (("bf16", layers), ("fp8", set()), (mixed, kept)):
        cache = [NarrowKV("bf16" if i in wide else "fp8") for i in layers]
        for layer, keys_values in zip(cache, token):
            layer.update(*keys_values)
        each = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache)
        room = cfg.capacity * 2**30 - 8 * len(layers - wide)  # less two scales a narrow layer
        if not room >= each:
            raise ValueError(f"--capacity {cfg.capacity}: has no room for one token; give more")
        rows.append((name, each, int(room // each), rows[0][1] / each if rows else 1.0))
    return rows

@dlc.command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cfg = dlc.parse(Config, argv, __doc__.splitlines()[0])
    if cfg.calibrate:
        budget = calibrate(cfg)
        for row in budget["curve"]:
            print("noise {noise:5.2f}  mismatch {mismatch:9.5f}  fitted {fitted:.3f}  quality "
                  "{quality}".format(**row))
        result = {k: budget[k] for k in ("budget", "censored", "tolerance")}
    elif cfg.admit:
        try:
            budget = json.loads(Path(cfg.budget).read_text())
            limit, censored, seconds = (budget[k] for k in ("budget", "censored", "seconds"))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"--budget {cfg.budget}: is not a budget ({e!r}); run python opd.py "
                             "--calibrate first") from None
        sources = ("--weights", "--kv", "--keep", "--noise", "--lag", "--async")
        single = any(word.startswith(sources) for word in argv)  # else: the standard ones
        print(f"budget {limit:.5f}" + ", the largest tried: quality never fell" * censored)
        print("weights   kv         noise  lag   mismatch  verdict   by source")
        for how in [{}] if single else STANDARD:
            one = check(replace(cfg, **how))
            out = admit(one, budget)
            verdict = "ADMIT " if out["admitted"] else "REJECT"
            shares = ", ".join(f"{k} {v:.5f}" for k, v in out["by_source"].items())
            cost = f"{out['seconds']:.2f} s, {out['seconds'] / seconds:.1%} of a training run"
            print(f"{one.weights:10}{one.kv:10}{one.noise:6.2f}{one.lag:5d}{out['mismatch']:11.5f}"
                  f"  {verdict}   {shares}; {cost}")
        return 3 if single and not out["admitted"] else 0
    elif cfg.sensitivity:
        order = sensitivity(cfg)
        for name, kl in order:
            print(f"{name:30}{kl:10.6f} {'#' * round(60 * kl / max(order[0][1], 1e-12))}")
        result = recipe(check(cfg), order)
        path = Path(cfg.out or "recipe.json")
        write(path, lambda new: new.write_text(json.dumps(result, indent=1)))
        print(f"{path}: keep {result['keep_bf16']} -> {result['mismatch']:.6f} nats a token")
    elif cfg.capacity is not None:
        result = capacity(cfg)
        print(f"KV cache in {cfg.capacity} GiB{'':26}bytes/token      tokens   against bf16")
        for name, each, tokens, ratio in result:
            print(f"{name:44}{each:13,.1f}{tokens:12,d}{ratio:11.2f}x")
    else:
        last = train(cfg)[-1]
        result = {k: v for k, v in last.items() if k.startswith("accuracy")}
        result["steps"] = last["step"] + 1
    print("RESULT " + json.dumps(result))

if __name__ == "__main__":
    sys.exit(main())
