"""OPD: on-policy distillation, and how much sampler-trainer mismatch it tolerates.

    python opd.py                    # a tiny student learns from a tiny teacher on FP8 rollouts; a minute
    python opd.py --calibrate        # noise levels x seeds -> mismatch against quality -> budget.json
    python opd.py --admit            # which rollout configurations fit the budget, before any training
    python opd.py --sensitivity      # one layer quantised at a time, and a recipe that keeps a few in BF16
    python opd.py --capacity 16      # tokens of KV cache in 16 GiB

The student samples from q, the teacher π_T scores what it drew, and the loss pulls π to π_T:

    full     Σ_v π (logπ - logπ_T)                        reverse KL(π || π_T), exact at every position
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

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from matplotlib import pyplot as plt
from tqdm import tqdm

import dlc
from dlc import Run, load_model, measure, parse, policy_loss, tiny_base, write
from sampler import (LinearLogps, NarrowKV, TorchSampler, mismatch, response_hidden,
                     token_logps)  # fmt: skip

LOSSES = ("full", "topk", "sampled", "forward", "jsd")


@dataclass
class Config(dlc.Config):
    student: str | None = None  # Hugging Face causal LM (default: the tiny base of dlc.py)
    teacher: str | None = None  # another with the same tokenizer (default: a tiny one, trained longer)
    loss: str = "full"  # full topk sampled forward jsd
    loss_k: int = 8  # K of the topk loss
    correction: str = "reinforce"  # of the sampled loss: one of the eleven in dlc.py
    group_size: int = 4  # responses to each prompt
    steps: int | None = None  # batches (default: 300; 20 with --student)
    prompts: int | None = None  # prompts in a batch (default: 32; 8 with --student)
    lr: float | None = None  # learning rate (default: 0.001; 1e-05 with --student)
    max_new_tokens: int | None = None  # longest response (default: 4; 12 with --student)
    out: str | None = None  # the run's folder (default: runs/opd-LOSS-1, -2, ...)
    calibrate: bool = False  # measure the mismatch budget; resumable
    admit: bool = False  # check the named rollout configuration, or a standard list, against the budget
    sensitivity: bool = False  # quantise one layer at a time, then find a recipe
    capacity: float | None = None  # print the tokens of KV cache that fit in so many GiB
    budget: str = "budget.json"  # where --calibrate writes and --admit reads
    tolerance: float = 0.05  # quality that the budget may cost, in accuracy
    levels: str = "0,0.05,0.1,0.2,0.4,0.8,1.6"  # noise levels that --calibrate trains at
    seeds: int = 3  # runs at each level
    target: float = 0.005  # mismatch that the recipe of --sensitivity aims at, nats a token


UNUSED = {"model", "bias", "scale_advantage", "minibatches"}  # of dlc.Config: no options here


def divergence(loss, student_logits, teacher_logits, k=8):
    """The per-position loss of the table at the top: (..., V), (..., V) -> (...), nats, each at least 0.

    The logarithms are constants to autograd: what they would add to the gradient is Σ_v ∇π(v) = 0, and so
    it is exactly 0, and not rounding that Adam would enlarge, where π = π_T (`full` and `topk`)."""
    s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
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
        rest_s, rest_t = ((1 - x.exp().sum(-1)).clamp_min(1e-6) for x in (s, t))
        return (s.exp() * (s - t).detach()).sum(-1) + rest_s * (rest_s / rest_t).log().detach()
    raise ValueError(f"loss {loss!r}: choose one of {', '.join(LOSSES)}")


def distill_loss(loss, student_logits, teacher_logits, mask, tokens=None, *, k=8, correction="reinforce",
                 logq=None, **policies):  # fmt: skip
    """Mean over the tokens of `mask` of one of the losses; logits (B, T, V), tokens and logq (B, T).

    `sampled` needs tokens, and whatever `correction` looks at (policy_loss). ValueError: logits of
    unequal vocabularies, a loss that does not exist, no tokens for `sampled`."""
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher logits differ in shape: {tuple(student_logits.shape)} and "
                         f"{tuple(teacher_logits.shape)}; cut both to the real vocabulary")  # fmt: skip
    student_logits, teacher_logits = (x.where(mask[..., None], 0) for x in (student_logits, teacher_logits))  # padding may hold NaN
    if loss != "sampled":
        return divergence(loss, student_logits, teacher_logits, k).where(mask, 0).sum() / max(1, int(mask.sum()))
    if tokens is None:
        raise ValueError("the sampled loss needs tokens, which were not given")
    logp, logp_teacher = (x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (student_logits, teacher_logits))
    A = (logp_teacher - logp).detach()
    return policy_loss(correction, logp, logp.detach() if logq is None else logq, A, mask, **policies)[0]


class ChunkedDivergence(torch.autograd.Function):
    """Σ of `divergence` over positions, with the output heads inside and a chunk of positions at a time, so
    that no (N, V) tensor exists. A sum's gradient does not depend on what comes after it but for
    one factor, so each chunk makes its gradient at once and nothing is computed twice.

    hidden (N, D), head (V, D) of the student, hidden (N, D') and head (V', D') of the teacher -> ()"""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, loss, k, vocab):
        total, rows = hidden.new_zeros((), dtype=torch.float32), max(1, LinearLogps.CHUNK // (3 * len(weight)))
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), rows):
            n = slice(i, i + rows)
            with torch.enable_grad():
                h, w = hidden[n].detach().requires_grad_(), weight.detach().requires_grad_()
                z, z_T = F.linear(h, w)[:, :vocab], F.linear(teacher_hidden[n], teacher_weight)[:, :vocab]
                value = divergence(loss, z.float(), z_T.float(), k).sum()
                d_hidden[n], d_w = torch.autograd.grad(value, (h, w))
            d_weight += d_w
            total = total + value.detach()
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, None, None, None, None, None


# --------------------------------------------------------------------------------------------------
# The loop.


def check(cfg):
    """`cfg` with its defaults filled in; ValueError, in one line, for a value that cannot be used."""
    cfg = dataclasses.replace(cfg, model=cfg.student)
    if (cfg.student is None) != (cfg.teacher is None):
        raise ValueError("--student and --teacher: give both or neither")
    if cfg.loss not in LOSSES:
        raise ValueError(f"--loss {cfg.loss}: must be one of {', '.join(LOSSES)}")
    for name, value, least in (("loss-k", cfg.loss_k, 1), ("seeds", cfg.seeds, 1), ("tolerance", cfg.tolerance, 0),
                               ("target", cfg.target, 0)):  # fmt: skip
        if not least <= value < float("inf"):
            raise ValueError(f"--{name} {value}: must be a number from {least} up")
    if cfg.steps is None:
        cfg.steps = 20 if cfg.student else 300
    if cfg.lr is None:
        cfg.lr = 1e-5 if cfg.student else 1e-3
    return dlc.check(cfg)


def load_teacher(cfg, student, tokenizer):
    """(teacher, size of the vocabulary that both share). ValueError if they do not read the same ids."""
    teacher, other = load_model(cfg.teacher or tiny_base(steps=1200), cfg.dtype, cfg.device, "--teacher")
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    if mine != theirs:
        odd = sorted(set(mine.items()) ^ set(theirs.items()))[0]
        raise ValueError(f"--teacher {cfg.teacher}: its tokenizer is not the student's ({len(theirs)} tokens against "
                         f"{len(mine)}; {odd} is in one alone); choose a pair that shares one")  # fmt: skip
    stops = [m.generation_config.eos_token_id for m in (student, teacher)]
    stops = [sorted({x} if isinstance(x, int) else set(x or ())) for x in stops]
    if stops[0] != stops[1]:
        raise ValueError(f"--teacher {cfg.teacher}: its stop tokens are {stops[1]}, the student's {stops[0]}; make them equal")
    sizes = [len(m.get_output_embeddings().weight) for m in (student, teacher)]
    if min(sizes) < len(mine):
        raise ValueError(f"--teacher {cfg.teacher}: {min(sizes)} logits are too few for {len(mine)} tokens")
    if cfg.loss != "sampled" and any(m.get_output_embeddings().bias is not None for m in (student, teacher)):
        raise ValueError(f"--loss {cfg.loss}: an output head with a bias is not covered; use --loss sampled")
    return teacher.requires_grad_(False), min(sizes)  # beyond the real tokens a head is padding


def train(cfg):
    """Run `cfg`; one flat dict a step. The last one also holds accuracies: student, teacher, distilled."""
    cfg = check(cfg)
    build = lambda *student: load_teacher(cfg, *student)
    with contextlib.closing(Run(cfg, cfg.student or tiny_base(), f"opd-{cfg.loss}", build)) as run:
        return loop(cfg, run)


def loop(cfg, run):
    model, sampler, (teacher, vocab) = run.model, run.sampler, run.also
    if not run.before:
        exact = TorchSampler(teacher, "none", "none")
        run.before = run.accuracies("_base") | dict(accuracy_teacher=dlc.accuracy(exact, run.held_out, run.tokenizer, cfg))
    print(f"{run.folder}: {cfg.loss}; {cfg.sampler} sampler on {cfg.device}, weights {cfg.weights}, KV {cfg.kv}\n"
          " step version  KL to teacher  reward  discrepancy      lag    ESS  syncs  tokens/s")  # fmt: skip

    bar = tqdm(range(len(run.rows), cfg.steps), initial=len(run.rows), total=cfg.steps)
    for step in bar:
        # 1. The student samples from q.
        start = time.perf_counter()
        batch, rollout, dropped = run.draw(step)
        padding = (rollout.tokens >= vocab).any(1)  # a token that only the student's padded head has
        dropped, rollout.mask = dropped | padding, rollout.mask & ~padding[:, None]
        rollout.tokens = rollout.tokens.where(~padding[:, None], 0)
        drawn, N = time.perf_counter(), max(1, int(rollout.mask.sum()))

        # 2. The teacher scores what was drawn, and the loss pulls π to π_T.
        seen, total, gap_q = [], 0.0, 0.0
        for micro in torch.arange(len(batch)).split(cfg.micro_batch):
            part = rollout[micro]
            hidden = response_hidden(model, part)
            with torch.no_grad():
                hidden_teacher = response_hidden(teacher, part)
                logp_teacher = token_logps(teacher, part, hidden=hidden_teacher, vocab=vocab).clamp_min(-100)
            with torch.set_grad_enabled(cfg.loss == "sampled"):
                logp, head_logp = token_logps(model, part, head=True, hidden=hidden)
            seen.append((logp.detach(), head_logp.detach()))
            gap_q += float((part.logq - logp_teacher)[part.mask].sum())
            if cfg.loss == "sampled":
                A = (logp_teacher - logp.clamp_min(-100)).detach()  # the trainer's π, not the sampler's q
                loss, _ = policy_loss(
                    cfg.correction, logp, part.logq, A, part.mask, logp_stale=part.logp_stale, logp_anchor=logp.detach(),
                    head_logp=head_logp, head_logq=part.head_logq, head_logp_stale=part.head_logp_stale,
                    num_tokens=N, cap=cfg.cap, clip=cfg.clip)  # fmt: skip
                total -= float(A[part.mask].sum())
            else:
                heads = model.get_output_embeddings().weight, teacher.get_output_embeddings().weight
                value = ChunkedDivergence.apply(hidden, heads[0], hidden_teacher, heads[1], cfg.loss, cfg.loss_k, vocab)
                loss, total = value / N, total + float(value.detach())
            loss.backward()
            run.accumulate()
        norm = run.step()

        # 3. Measure both gaps and the ESS, sync by the same rules as dlc.py, log.
        graded = dlc.grade(rollout, batch, sampler.stop_ids, run.tokenizer, cfg)
        row = dict(step=step, version=int(rollout.version[0, 0]), teacher_kl=total / N, teacher_kl_by_q=gap_q / N)
        row["reward"] = sum(graded[0]) / len(batch)
        row |= measure(rollout, *map(torch.cat, zip(*seen)), cfg.cap)
        row |= dict(grad_norm=norm, skipped=int(not norm < float("inf")))
        line = "{step:5d} {version:7d} {teacher_kl:14.4f} {reward:7.3f} {discrepancy:12.5f} {lag:8.5f} {ess:6.3f}"
        bar.write(run.end_step(row, (start, drawn), batch, graded, dropped, line))
    run.finish(f"{cfg.loss}: weights {cfg.weights}, KV {cfg.kv}")
    return run.rows


# --------------------------------------------------------------------------------------------------
# One scale for every source, a budget on it, and what can be decided before training.

PROBE = 128  # prompts, each answered once by q, on which a configuration's mismatch is measured


def probe(cfg, model, data, **how):
    """KL(q || π_stale) in nats a token of a sampler built as `how` says, on fixed prompts with `model`."""
    how = dict(weights=cfg.weights, kv=cfg.kv, noise=cfg.noise) | how
    sampler = TorchSampler(model, **how, head_k=cfg.head_k, seed=1, probe=[(r["ids"] * 32)[:32] for r in data[:4]])
    drawn = sampler.sample([r["ids"] for r in data[:PROBE]], cfg.max_new_tokens, seed=1)
    if not drawn.logq[drawn.mask].isfinite().all():
        raise ValueError(f"{how}: this sampler gives log-probs that are inf or NaN; it cannot be admitted")
    return mismatch(drawn.logp_stale, drawn.logq, drawn.mask, drawn.head_logp_stale, drawn.head_logq)["kl"]


def untrained(cfg):
    """(student before training, its tokenizer, training prompts): what every probe is made with."""
    model, tokenizer = load_model(cfg.student or tiny_base(), cfg.dtype, cfg.device, "--student")
    return model, tokenizer, dlc.load_data(cfg, tokenizer, model)[0]


def fingerprint(cfg):
    """What a budget holds for: the pair, the loss, and the run that gave it."""
    keys = ["student", "teacher", "loss", "loss_k", "data", "steps", "lr", "prompts", "group_size", "optimizer",
            "max_new_tokens", "dtype"] + ["correction", "clip", "cap"] * (cfg.loss == "sampled")  # fmt: skip
    return {k: getattr(cfg, k) for k in keys}


def falling_fit(quality):
    """Least-squares non-increasing fit (pool adjacent violators) of values at rising mismatch."""
    blocks = []
    for q in quality:
        blocks.append([q, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return [q for q, n in blocks for _ in range(n)]


def within(curve, tolerance):
    """(budget, censored): the largest mismatch whose fitted quality is at most `tolerance` below the clean
    run's, and whether that is all of them. Sorts `curve` by mismatch and adds `fitted` to its rows."""
    curve.sort(key=lambda r: r["mismatch"])
    mean = [sum(r["quality"]) / len(r["quality"]) for r in curve]
    for row, fitted in zip(curve, falling_fit(mean)):
        row["fitted"] = fitted
    clean = next(m for m, r in zip(mean, curve) if r["noise"] == 0)
    good = [r["mismatch"] for r in curve if r["fitted"] >= clean - tolerance] or [curve[0]["mismatch"]]
    return max(good), len(good) == len(curve)


def calibrate(cfg):
    """Train at every noise level and seed, and find the largest mismatch that still costs at most `tolerance`.

    Returns and writes the budget: `for` (fingerprint), `curve` (a row a level: noise, mismatch of the untrained
    student, qualities over seeds, fitted quality), `lag` (lag in steps -> mismatch, from the clean
    run's weights), `budget` in nats a token, `censored` (quality never fell), `seconds` of one training run."""
    folder = Path(cfg.out or f"{Path(cfg.budget).with_suffix('')}-runs")
    if Path(cfg.budget).is_dir() or not os.access(Path(cfg.budget).absolute().parent, os.W_OK):
        raise ValueError(f"--budget {cfg.budget}: must be a file in a folder that can be written")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: must be a folder, new or of an earlier calibration")
    cfg = check(dataclasses.replace(cfg, weights="bf16", kv="bf16", out=None, lag=None, sync_every=None, sync_ess=None,
                                    async_=False, max_lag=None))  # fmt: skip
    try:
        levels = sorted({float(x) for x in cfg.levels.split(",")})
        assert levels[0] == 0 and levels[-1] < float("inf")
    except (ValueError, AssertionError):
        raise ValueError(f"--levels {cfg.levels}: must be numbers after commas, 0 (the clean run) among them") from None
    model, _, data = untrained(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "runs.jsonl"
    lines = log.read_text().splitlines(True) if log.exists() else []
    if lines and not lines[-1].endswith("\n"):  # half a line, of a full disk
        write(log, lambda new: new.write_text("".join(lines[:-1])))
    try:
        done = [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as e:
        raise ValueError(f"{log}: is broken ({e}); remove its bad line, or the folder") from None

    def once(key, value, **how):  # train if runs.jsonl has no such run; the row that it has
        key = fingerprint(cfg) | key
        if not any(r["key"] == key for r in done):
            start, out = time.perf_counter(), str(folder / str(time.time_ns()))
            try:
                run = train(dataclasses.replace(cfg, sync_ess=None, out=out, save_every=10**9, **how))
            finally:
                Run.live = None  # what is resumed is the calibration, by the same command
            done.append(dict(key=key, value=value(run), seconds=time.perf_counter() - start))
            with log.open("a") as f:
                print(json.dumps(done[-1]), file=f, flush=True)
        return next(r for r in done if r["key"] == key)

    order = [(n, s) for s in range(cfg.seeds) for n in levels]
    runs = {(n, s): once(dict(noise=n, seed=s), lambda run: run[-1]["accuracy"], noise=n, seed=s, sync_every=1)
            for n, s in tqdm(order, desc="calibrate")}  # fmt: skip
    # What a lag of D steps costs: the gap after D updates in a clean run that never syncs, D = 0, 1, ...
    steps = min(cfg.steps, 33)
    lag = once(dict(lag=steps), lambda run: {str(r["step"]): r["lag"] for r in run}, noise=0.0, steps=steps, sync_every=0)["value"]
    curve = [dict(noise=n, mismatch=probe(cfg, model, data, noise=n), quality=[runs[n, s]["value"] for s in range(cfg.seeds)])
             for n in levels]  # fmt: skip
    budget, censored = within(curve, cfg.tolerance)
    seconds = sorted(r["seconds"] for r in runs.values())[len(runs) // 2]
    result = {"for": fingerprint(cfg), "tolerance": cfg.tolerance, "budget": budget, "censored": censored,
              "lag": lag, "curve": curve, "seconds": seconds}  # fmt: skip
    write(Path(cfg.budget), lambda new: new.write_text(json.dumps(result, indent=1)))
    write(Path(cfg.budget).with_suffix(".png"), lambda new: budget_figure(result, new))
    return result


def budget_figure(budget, path):
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    x = [r["mismatch"] for r in budget["curve"]]
    for r in budget["curve"]:
        ax.plot([r["mismatch"]] * len(r["quality"]), r["quality"], "o", color="0.6", ms=4)
    ax.plot(x, [r["fitted"] for r in budget["curve"]], "C0-", label="falling fit of the means")
    ax.axvline(budget["budget"], color="C3", ls="--", label=f"budget {budget['budget']:.3g} nats"
               + (" (censored)" if budget["censored"] else ""))  # fmt: skip
    ax.set(xlabel="mismatch KL(q || π), nats a token, untrained student", ylabel="accuracy after training")
    ax.set_xscale("symlog", linthresh=1e-3)
    ax.legend()
    fig.savefig(path, dpi=130, format="png")
    plt.close(fig)


def admit(cfg, budget):
    """Is the rollout configuration of `cfg` within `budget` (of `calibrate`)? Nothing is trained.

    Returns `mismatch` (all sources together), `by_source` (each alone: weights, kv, noise, lag),
    `budget`, `admitted`, `seconds`. The lag's share is read from the budget's curve and added; above
    the tested range, of mismatch or of lag, the answer is no. ValueError: another pair's budget."""
    cfg = check(cfg)
    if budget["for"] != fingerprint(cfg):
        odd = next(k for k, v in fingerprint(cfg).items() if budget["for"].get(k) != v)
        raise ValueError(f"--budget {cfg.budget}: was made for {odd} {budget['for'].get(odd)!r}, not {getattr(cfg, odd)!r}; "
                         "repeat the options given to --calibrate, or calibrate for these")  # fmt: skip
    model, _, data = untrained(cfg)
    start = time.perf_counter()
    keep = dlc.keep_list(cfg.keep_bf16, model)
    parts = dict(weights=dict(kv="bf16", noise=0.0), kv=dict(weights="bf16", noise=0.0), noise=dict(weights="bf16", kv="bf16"))
    by_source = {k: probe(cfg, model, data, keep_bf16=keep, **how) for k, how in parts.items()}
    D, late = cfg.lag or cfg.max_lag or 0, budget["lag"]
    seen = [late[str(d)] for d in range(1, D + 1) if str(d) in late]  # the worst on the way: a first step may be the largest
    by_source["lag"] = max(seen, default=0.0) if len(seen) == D else float("inf")
    total = probe(cfg, model, data, keep_bf16=keep) + by_source["lag"]
    return dict(mismatch=total, by_source=by_source, budget=budget["budget"], admitted=total <= budget["budget"],
                seconds=time.perf_counter() - start)  # fmt: skip


def sensitivity(cfg):
    """[(module, KL when it alone is quantised)], most sensitive first: layers in --weights, their KV in --kv."""
    cfg = check(cfg)
    model, _, data = untrained(cfg)
    stem, n = TorchSampler(model).stem, model.config.get_text_config().num_hidden_layers
    layers, kvs = [f"{stem}.{i}" for i in range(n)], [f"{stem}.{i}.kv" for i in range(n)]
    found = [(x, probe(cfg, model, data, kv="bf16", keep_bf16=[y for y in layers if y != x])) for x in tqdm(layers, desc="layers")]
    if cfg.kv not in ("none", "bf16"):
        found += [(x, probe(cfg, model, data, weights="bf16", keep_bf16=[y for y in kvs if y != x])) for x in tqdm(kvs, desc="KV")]
    return sorted(found, key=lambda row: -row[1])


def recipe(cfg, order):
    """Keep the most sensitive modules in BF16, one by one, until the mismatch is under `target`."""
    model, _, data = untrained(cfg)
    for n in range(len(order) + 1):
        keep = [name for name, _ in order[:n]]
        if (kl := probe(cfg, model, data, keep_bf16=keep)) <= cfg.target:
            break
    return dict(model=dlc.model_fingerprint(model), keep_bf16=keep, mismatch=kl, weights=cfg.weights, kv=cfg.kv)


def capacity(cfg):
    """[(what, bytes a token, tokens that fit, ratio to BF16)] of the KV cache in `capacity` GiB, from the
    bytes of real tensors: a layer's cache is filled with 256 tokens and weighed, scales included."""
    shape = dict(layers=28, heads=8, size=128)
    if cfg.student:
        try:
            folder = dlc.fetch(cfg.student, "--student")
            text = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            shape = dict(layers=text.num_hidden_layers, heads=heads, size=size)
        except Exception as e:  # of another library
            told = f"--student {cfg.student}: must be a causal LM whose KV heads its config.json gives ({e})"
            raise ValueError(str(e) if str(e).startswith("--student") else told) from None
    names = {k for k in dlc.keep_list(cfg.keep_bf16, None) if k.endswith(".kv")}
    if bad := [k for k in names if not re.search(r"\.(\d+)\.kv$", k) or int(k.split(".")[-2]) >= shape["layers"]]:
        raise ValueError(f"--keep-bf16 {bad[0]}: no such layer's KV; there are {shape['layers']} layers, from model.layers.0.kv")
    kept = names or ["one layer"]

    def weigh(fmt):  # bytes of one layer's 256 tokens, and of its two float32 scales
        layer, x = NarrowKV(fmt), torch.zeros(1, shape["heads"], 256, shape["size"], dtype=torch.bfloat16)
        layer.update(x, x)
        return layer.keys.nbytes + layer.values.nbytes, 8 if fmt in ("fp8", "fp8_e5m2") else 0

    rows, memory = [], cfg.capacity * 2**30
    for name, narrow in (("bf16", 0), ("fp8", shape["layers"]), (f"fp8, {len(kept)} layer's KV in bf16", shape["layers"] - len(kept))):
        (wide, _), (thin, scales) = weigh("bf16"), weigh("fp8")
        each = ((shape["layers"] - narrow) * wide + narrow * thin) / 256
        tokens = int((memory - narrow * scales) // each)
        if tokens < 1:
            raise ValueError(f"--capacity {cfg.capacity}: holds not one token of {each:.0f} bytes; give more")
        rows.append((name, each, tokens, tokens / rows[0][2] if rows else 1.0))
    return rows


STANDARD = [dict(weights=w, kv=k) for w, k in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("fp8_e5m2", "fp8_e5m2"),
            ("int8", "fp8"), ("nvfp4", "fp8"), ("int4", "fp8"), ("int3", "fp8"), ("int2", "fp8"))]  # fmt: skip


def tools(cfg, given):
    """What --calibrate, --admit, --sensitivity and --capacity print; the exit status. given: the options on
    the command line; ValueError for one that would be ignored."""
    rules = ("sync_every", "sync_ess", "sensitivity", "capacity")
    idle = {"calibrate": (*rules, "weights", "kv", "noise", "lag", "async_", "max_lag", "keep_bf16", "admit"), "admit": (*rules, "sampler"),
            "sensitivity": (*rules[:2], "capacity", "sampler", "lag", "async_", "max_lag", "keep_bf16"), "capacity": ("weights", "kv")}  # fmt: skip
    tool = next(t for t in idle if t in given)
    if bad := [x for x in idle[tool] if x in given]:
        raise ValueError(f"{dlc.option(bad[0])} {getattr(cfg, bad[0])}: --{tool} does not use it; leave it out")
    named = given & {"weights", "kv", "keep_bf16", "lag", "async_", "noise"}
    if cfg.capacity is not None:
        if not 0 < cfg.capacity < float("inf"):
            raise ValueError(f"--capacity {cfg.capacity}: must be a number of GiB above 0")
        rows = capacity(cfg)
        print(f"KV cache in {cfg.capacity} GiB{'':26}bytes/token      tokens   against bf16")
        for name, each, tokens, ratio in rows:
            print(f"{name:44}{each:13,.1f}{tokens:12,d}{ratio:11.2f}x")
        print("FP8 halves every layer that it covers; a layer kept in BF16 keeps its two bytes a value, and scales take 8 bytes a layer.")
    elif cfg.calibrate:
        b = calibrate(cfg)
        for r in b["curve"]:
            print(f"noise {r['noise']:5.2f}  mismatch {r['mismatch']:9.5f}  quality {sum(r['quality']) / len(r['quality']):.3f} "
                  f"({min(r['quality']):.3f}-{max(r['quality']):.3f})  fitted {r['fitted']:.3f}")  # fmt: skip
        print("RESULT " + json.dumps({k: b[k] for k in ("budget", "censored", "tolerance")}))
    elif cfg.sensitivity:
        order = sensitivity(cfg)
        for name, kl in order:
            print(f"{name:30}{kl:10.6f} {'#' * round(60 * kl / max(order[0][1], 1e-12))}")
        found = recipe(check(cfg), order)
        path = Path(cfg.out or "recipe.json")
        write(path, lambda new: new.write_text(json.dumps(found, indent=1)))
        print(f"{path}: keep {found['keep_bf16']} -> {found['mismatch']:.6f} nats a token, target {cfg.target}\nRESULT {json.dumps(found)}")
    else:
        if not Path(cfg.budget).is_file():
            raise ValueError(f"--budget {cfg.budget}: no such file; run python opd.py --calibrate first")
        try:
            budget = json.loads(Path(cfg.budget).read_text())
            assert all(x >= 0 for x in (budget["budget"], *budget["lag"].values())) and budget["seconds"] > 0
            budget["for"].keys()
        except (ValueError, AssertionError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"--budget {cfg.budget}: not a budget; run python opd.py --calibrate") from None
        if budget.get("censored"):
            print(f"{cfg.budget} is censored: quality never fell, at {len(budget['curve'])} noise levels; it is the largest mismatch tried")
        todo = [check(cfg)] if named else [dataclasses.replace(cfg, **how) for how in STANDARD]
        for c in todo:
            out = admit(copy.copy(c), budget)
            if c is todo[0]:
                print(f"{'weights':10}{'kv':10}{'noise':>6}{'lag':>5}{'mismatch':>11}{'budget':>10}  verdict   by source")
            print(f"{c.weights:10}{c.kv:10}{c.noise:6.2f}{c.lag or c.max_lag or 0:5d}{out['mismatch']:11.5f}{out['budget']:10.5f}  "
                  f"{'ADMIT ' if out['admitted'] else 'REJECT'}   " + ", ".join(f"{k} {v:.5f}" for k, v in out["by_source"].items())
                  + f"; {out['seconds']:.2f} s, {out['seconds'] / budget['seconds']:.1%} of a training run")  # fmt: skip
        return 3 if named and not out["admitted"] else 0
    return 0


@dlc.guard
def main(argv=None):
    cfg = parse(Config, argv, __doc__.splitlines()[0], UNUSED)
    if cfg.capacity is not None or cfg.calibrate or cfg.admit or cfg.sensitivity:
        return tools(cfg, cfg.given)
    last = train(cfg)[-1]
    print(f"\n{'greedy accuracy, held out':32}")
    for who, key in (("student before", "accuracy_base"), ("teacher", "accuracy_teacher"), ("student after", "accuracy"),
                     ("its narrow copy, which samples", "accuracy_sampler")):  # fmt: skip
        print(f"{who:32}{last[key]:7.3f}")
    print("RESULT " + json.dumps({k: v for k, v in last.items() if k.startswith("accuracy")} | dict(steps=last["step"] + 1)))


if __name__ == "__main__":
    sys.exit(main())
