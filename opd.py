"""OPD: on-policy distillation, and how much sampler-trainer mismatch it tolerates.

    python opd.py                # a tiny student learns from a tiny teacher on FP8 rollouts; a minute
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

import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import transformers
import tyro
from matplotlib import pyplot as plt
from tqdm import tqdm

import dlc
from dlc import autocast, load_model, measure, policy_loss, tiny_base, write
from sampler import (LinearLogps, NarrowKV, TorchSampler, head_product, mismatch, response_hidden,
                     token_logps)  # fmt: skip

LOSSES = ("full", "topk", "sampled", "forward", "jsd")


def divergence(loss, student_logits, teacher_logits, k=8):
    """The loss of the table at the top, a position: (..., V), (..., V) -> (...), nats, at least 0.

    The logarithms are constants to autograd: what they would add to the gradient is Σ_v ∇π(v) = 0,
    and so it is exactly 0, and not rounding that Adam would enlarge, where π = π_T."""
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
        rest = rest_s * (rest_s / rest_t).log().detach()
        return (s.exp() * (s - t).detach()).sum(-1) + rest
    raise ValueError(f"loss {loss!r}: choose one of {', '.join(LOSSES)}")


def distill_loss(loss, student_logits, teacher_logits, mask, tokens=None, *, k=8,
                 correction="reinforce", logq=None, **policies):  # fmt: skip
    """Mean over the tokens of `mask` of one of the losses; logits (B, T, V), tokens, logq (B, T).

    `sampled` needs tokens, and whatever `correction` looks at (policy_loss). ValueError: logits of
    unequal vocabularies, a loss that does not exist, no tokens for `sampled`."""
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher logits are {tuple(student_logits.shape)} and "
                         f"{tuple(teacher_logits.shape)}; cut both to the real vocabulary")
    logits = [x.where(mask[..., None], 0) for x in (student_logits, teacher_logits)]  # NaN padding
    if loss != "sampled":
        value = divergence(loss, *logits, k).where(mask, 0)
        return value.sum() / max(1, int(mask.sum()))
    if tokens is None:
        raise ValueError("the sampled loss needs tokens, which were not given")
    logp, logp_teacher = (x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in logits)
    A = (logp_teacher - logp).detach()
    logq = logp.detach() if logq is None else logq
    return policy_loss(correction, logp, logq, A, mask, **policies)[0]


class ChunkedDivergence(torch.autograd.Function):
    """Σ of `divergence` over positions, with the output heads inside and a chunk of positions at a
    time, so that no (N, V) tensor exists. A sum's gradient does not depend on what comes after it
    but for one factor, so each chunk makes its gradient at once and nothing is computed twice.

    hidden (N, D), head (V, D) of the student, hidden (N, D') and head (V, D') of the teacher -> ()"""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, loss, k):
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, LinearLogps.CHUNK // (3 * len(weight)))
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(hidden), rows):
            n = slice(i, i + rows)
            with torch.enable_grad():
                h, w = hidden[n].detach().requires_grad_(), weight.detach().requires_grad_()
                z, z_T = F.linear(h, w), F.linear(teacher_hidden[n], teacher_weight)
                value = divergence(loss, z.float(), z_T.float(), k).sum()
                d_hidden[n], d_w = torch.autograd.grad(value, (h, w))
            d_weight += d_w
            total = total + value.detach()
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, None, None, None, None


# --------------------------------------------------------------------------------------------------
# The options and the loop.


@dataclass
class Config(dlc.Config):  # the rest of the options is that of dlc.py
    student: str | None = None  # Hugging Face causal LM (default: the tiny base of dlc.py)
    teacher: str | None = None  # another with the same tokenizer (default: tiny, trained longer)
    loss: Literal[LOSSES] = "full"  # what pulls the student to the teacher
    loss_k: int = 8  # K of the topk loss
    correction: Literal[tuple(dlc.CORRECTIONS)] = "reinforce"  # of the sampled loss
    group_size: int = 4  # responses to each prompt
    steps: int | None = None  # batches (default: 300; 20 with --student)
    prompts: int | None = None  # prompts in a batch (default: 32; 8 with --student)
    lr: float | None = None  # learning rate (default: 0.001; 1e-05 with --student)
    max_new_tokens: int | None = None  # longest response (default: 4; 12 with --student)
    out: str | None = None  # the run's folder (default: runs/opd-LOSS-1, -2, ...)
    calibrate: bool = False  # measure the mismatch budget; resumable
    admit: bool = False  # check the rollout configuration, or a standard list, against the budget
    sensitivity: bool = False  # quantise one layer at a time, then find a recipe
    capacity: float | None = None  # print the tokens of KV cache that fit in so many GiB
    budget: str = "budget.json"  # where --calibrate writes and --admit reads
    tolerance: float = 0.05  # quality that the budget may cost, in accuracy
    levels: str = "0,0.05,0.1,0.2,0.4,0.8,1.6"  # noise levels that --calibrate trains at
    seeds: int = 3  # runs at each level
    target: float = 0.005  # mismatch that --sensitivity's recipe aims at, nats a token
    model: tyro.conf.Suppress[str | None] = None  # --student
    minibatches: tyro.conf.Suppress[int] = 1
    scale_advantage: tyro.conf.Suppress[bool] = False
    bias: tyro.conf.Suppress[bool] = False


def check(cfg):
    """`cfg` with its defaults filled in; ValueError, in one line, for a value that is not right."""
    cfg = dataclasses.replace(cfg, model=cfg.student)
    if cfg.student and not cfg.teacher:
        raise ValueError(f"--student {cfg.student}: needs a --teacher with the same tokenizer")
    if cfg.steps is None:
        cfg.steps = 20 if cfg.student else 300
    if cfg.lr is None:
        cfg.lr = 1e-5 if cfg.student else 1e-3
    return dlc.check(cfg)


def load_student(cfg):
    path = cfg.student or cfg.base or tiny_base()
    return load_model(path, "float32", cfg.device, "--student")


def load_teacher(cfg, student, tokenizer):
    """(teacher, size of the vocabulary that both share). ValueError: they read other ids."""
    path, name = cfg.teacher or tiny_base(steps=1200), f"--teacher {cfg.teacher}"
    teacher, other = load_model(path, cfg.dtype, cfg.device, "--teacher")
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    if mine != theirs:
        odd = sorted(set(mine.items()) ^ set(theirs.items()))[0]
        raise ValueError(f"{name}: its tokenizer is not the student's: {len(theirs)} tokens, not "
                         f"{len(mine)}, and {odd} is in one alone; choose a pair that shares one")
    stops = [TorchSampler(m).stop_ids.sort().values.tolist() for m in (student, teacher)]
    if stops[0] != stops[1]:
        raise ValueError(f"{name}: its stop tokens are {stops[1]}, not {stops[0]}; make them equal")
    vocab = min(len(m.get_output_embeddings().weight) for m in (student, teacher))
    if vocab < len(mine):
        raise ValueError(f"{name}: {vocab} logits are too few for {len(mine)} tokens")
    return teacher.requires_grad_(False), vocab  # beyond the real tokens a head is padding


def train(cfg):
    """Run `cfg`; one dict a step. The last one also holds accuracies: student, teacher, distilled."""
    cfg = check(cfg)
    model, tokenizer = load_student(cfg)
    teacher, vocab = load_teacher(cfg, model, tokenizer)
    with autocast(cfg), dlc.Run(cfg, model, tokenizer, f"opd-{cfg.loss}") as run:
        exact = TorchSampler(teacher, "none", "none")
        run.before["accuracy_teacher"] = dlc.accuracy(exact, run.held_out, tokenizer, cfg)
        print(f"{run.folder}: {cfg.loss}; {cfg.sampler} sampler on {cfg.device}, weights "
              f"{cfg.weights}, KV {cfg.kv}\n step version  KL to teacher  reward  discrepancy      "
              "lag    ESS  syncs  tokens/s")  # fmt: skip
        done = len(run.rows)
        for step in tqdm(range(done, cfg.steps), initial=done, total=cfg.steps, disable=None):
            # 1. The student samples from q.
            batch, rollout = run.batch(step), run.sampler.draw(step)
            padding = (rollout.tokens >= vocab).any(1)  # tokens of the student's padded head alone
            rollout.mask = rollout.mask & ~padding[:, None]
            rollout.tokens = rollout.tokens.where(~padding[:, None], 0)
            N = max(1, int(rollout.mask.sum()))

            # 2. The teacher scores what was drawn, and the loss pulls π to π_T.
            seen, total, gap_q = [], 0.0, 0.0
            for micro in torch.arange(len(batch)).split(cfg.micro_batch):
                part = rollout[micro]
                hidden = response_hidden(model, part)
                with torch.no_grad():
                    hidden_T = response_hidden(teacher, part)
                    logp_teacher = token_logps(teacher, part, hidden=hidden_T, vocab=vocab)
                with torch.set_grad_enabled(cfg.loss == "sampled"):
                    logp, head_logp = token_logps(model, part, head=True, hidden=hidden)
                seen.append((logp.detach(), head_logp.detach()))
                gap_q += float((part.logq - logp_teacher)[part.mask].sum())
                if cfg.loss == "sampled":
                    A = (logp_teacher - logp).detach()  # the trainer's π, not the sampler's q
                    loss, _ = policy_loss(
                        cfg.correction, logp, part.logq, A, part.mask, logp_stale=part.logp_stale,
                        logp_anchor=logp.detach(), head_logp=head_logp, head_logq=part.head_logq,
                        head_logp_stale=part.head_logp_stale, num_tokens=N, cap=cfg.cap,
                        clip=cfg.clip)  # fmt: skip
                    total -= float(A[part.mask].sum())
                else:
                    heads = (*head_product(model, hidden, vocab),
                             *head_product(teacher, hidden_T, vocab))  # fmt: skip
                    value = ChunkedDivergence.apply(*heads, cfg.loss, cfg.loss_k)
                    loss, total = value / N, total + float(value.detach())
                loss.backward()
            norm = run.update()

            # 3. Measure both gaps and the ESS, sync by the same rules as dlc.py, log.
            graded = dlc.grade(rollout, batch, run.stop_ids, tokenizer, cfg)
            row = dict(step=step, version=int(rollout.version[0, 0]), teacher_kl=total / N,
                       teacher_kl_by_q=gap_q / N, reward=sum(graded[0]) / len(batch))  # fmt: skip
            row |= measure(rollout, *map(torch.cat, zip(*seen)), cfg.cap)
            row |= dict(grad_norm=norm, skipped=int(not norm < float("inf")))
            run.end_step(row, rollout, batch, graded)
            if step % 10 == 0 or cfg.student:
                tqdm.write("{step:5d} {version:7d} {teacher_kl:14.4f} {reward:7.3f} "
                           "{discrepancy:12.5f} {lag:8.5f} {ess:6.3f} {syncs:6d} "
                           "{tokens_per_second:9.0f}".format(**row))  # fmt: skip
        return run.finish(f"{cfg.loss}: weights {cfg.weights}, KV {cfg.kv}")


# --------------------------------------------------------------------------------------------------
# One scale for every source, a budget on it, and what can be decided before training.

PROBE = 128  # prompts, each answered once by q, on which a configuration's mismatch is measured


def untrained(cfg):
    """(student before training, training prompts): what every probe is made with."""
    model, tokenizer = load_student(cfg)
    return model, dlc.load_data(cfg, tokenizer, model)[0]


def probe(cfg, model, data, **how):
    """KL(q || π_stale), nats a token, of a sampler built as `how` says, on fixed prompts."""
    how = dict(weights=cfg.weights, kv=cfg.kv, noise=cfg.noise) | how
    calibration = [(r["ids"] * 32)[:32] for r in data[:4]]
    with autocast(cfg):
        sampler = TorchSampler(model, **how, head_k=cfg.head_k, seed=1, probe=calibration)
        drawn = sampler.sample([r["ids"] for r in data[:PROBE]], cfg.max_new_tokens, seed=1)
    if not drawn.mask.any(1).all():
        raise ValueError(f"{how}: this sampler gives log-probs of inf or NaN; it cannot be admitted")
    return mismatch(drawn.logp_stale, drawn.logq, drawn.mask, drawn.head_logp_stale,
                    drawn.head_logq)["kl"]  # fmt: skip


def fingerprint(cfg):
    """What a budget holds for: the pair, the loss, and the run that gave it."""
    keys = ["student", "teacher", "loss", "loss_k", "data", "steps", "lr", "prompts", "group_size",
            "optimizer", "max_new_tokens", "dtype"]  # fmt: skip
    keys += ["correction", "clip", "cap"] * (cfg.loss == "sampled")
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
    """(budget, censored): the largest mismatch whose fitted quality is at most `tolerance` below
    the clean run's, and whether that is all. Sorts `curve` by mismatch, adds `fitted` to its rows."""
    curve.sort(key=lambda r: r["mismatch"])
    mean = [sum(r["quality"]) / len(r["quality"]) for r in curve]
    for row, fitted in zip(curve, falling_fit(mean)):
        row["fitted"] = fitted
    clean = next(m for m, r in zip(mean, curve) if r["noise"] == 0)
    good = [r["mismatch"] for r in curve if r["fitted"] >= clean - tolerance]
    good = good or [curve[0]["mismatch"]]
    return max(good), len(good) == len(curve)


def calibrate(cfg):
    """Train at every noise level and seed, and find the largest mismatch that still costs at most
    `tolerance`. A run that was made once is read from runs.jsonl.

    Returns and writes the budget: `for` (fingerprint), `curve` (a row a level: noise, mismatch of
    the untrained student, qualities over seeds, fitted quality), `lag` (lag in steps -> mismatch,
    from the clean run's weights), `budget` in nats a token, `censored` (quality never fell),
    `seconds` of one training run."""
    folder = Path(cfg.out or f"{Path(cfg.budget).with_suffix('')}-runs")
    cfg = check(dataclasses.replace(cfg, weights="bf16", kv="bf16", out=None, lag=None,
                                    sync_every=1, sync_ess=None, async_=False))  # fmt: skip
    levels = sorted(float(x) for x in cfg.levels.split(","))
    if levels[0] != 0:
        raise ValueError(f"--levels {cfg.levels}: 0, the clean run, must be the least of them")
    model, data = untrained(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "runs.jsonl"
    lines = log.read_text().splitlines(True) if log.exists() else []
    done = [json.loads(line) for line in lines if line.endswith("\n")]  # else half a line
    write(log, lambda new: new.write_text("".join(json.dumps(r) + "\n" for r in done)))

    def once(key, value, **how):  # train if runs.jsonl has no such run; the row that it has
        key = fingerprint(cfg) | key
        if not any(r["key"] == key for r in done):
            start, out = time.perf_counter(), str(folder / str(time.time_ns()))
            rows = train(dataclasses.replace(cfg, out=out, save_every=10**9, **how))
            done.append(dict(key=key, value=value(rows), seconds=time.perf_counter() - start))
            with log.open("a") as f:
                print(json.dumps(done[-1]), file=f, flush=True)
        return next(r for r in done if r["key"] == key)

    runs = {}
    order = [(n, s) for s in range(cfg.seeds) for n in levels]
    for n, s in tqdm(order, desc="calibrate", disable=None):
        last = lambda rows: rows[-1]["accuracy"]
        runs[n, s] = once(dict(noise=n, seed=s), last, noise=n, seed=s)
    # What a lag of D steps costs: the gap after D updates in a clean run that never syncs.
    steps = min(cfg.steps, 33)
    gaps = lambda rows: {str(r["step"]): r["lag"] for r in rows}
    lag = once(dict(lag=steps), gaps, noise=0.0, steps=steps, sync_every=0)["value"]
    curve = [dict(noise=n, mismatch=probe(cfg, model, data, noise=n),
                  quality=[runs[n, s]["value"] for s in range(cfg.seeds)]) for n in levels]
    budget, censored = within(curve, cfg.tolerance)
    seconds = sorted(r["seconds"] for r in runs.values())[len(runs) // 2]
    result = {"for": fingerprint(cfg), "tolerance": cfg.tolerance, "budget": budget,
              "censored": censored, "lag": lag, "curve": curve, "seconds": seconds}  # fmt: skip
    write(Path(cfg.budget), lambda new: new.write_text(json.dumps(result, indent=1)))
    return result


def admit(cfg, budget):
    """Is the rollout configuration of `cfg` within `budget` (of `calibrate`)? Nothing is trained.

    Returns `mismatch` (all sources together), `by_source` (each alone: weights, kv, noise, lag),
    `budget`, `admitted`, `seconds`. The lag's share is read from the budget's curve and added;
    above the tested range, of mismatch or lag, the answer is no. ValueError: another's budget."""
    cfg = check(cfg)
    for k, v in fingerprint(cfg).items():
        if budget["for"].get(k) != v:
            raise ValueError(f"--budget {cfg.budget}: was made for {k} {budget['for'].get(k)!r}, "
                             f"not {v!r}; repeat the options of --calibrate, or calibrate anew")
    model, data = untrained(cfg)
    start = time.perf_counter()
    keep = dlc.keep_list(cfg.keep_bf16, model)
    alone = dict(weights=dict(kv="bf16", noise=0.0), kv=dict(weights="bf16", noise=0.0),
                 noise=dict(weights="bf16", kv="bf16"))  # fmt: skip
    by_source = {k: probe(cfg, model, data, keep_bf16=keep, **how) for k, how in alone.items()}
    gaps = [budget["lag"].get(str(d), float("inf")) for d in range(1, cfg.lag + 1)]
    by_source["lag"] = max(gaps, default=0.0)  # the worst on the way: the first may be the largest
    total = probe(cfg, model, data, keep_bf16=keep) + by_source["lag"]
    return dict(mismatch=total, by_source=by_source, budget=budget["budget"],
                admitted=total <= budget["budget"], seconds=time.perf_counter() - start)  # fmt: skip


def sensitivity(cfg):
    """[(module, KL when it alone is quantised)], most sensitive first: layers in --weights, then
    their KV in --kv."""
    cfg = check(cfg)
    model, data = untrained(cfg)
    stem, n = TorchSampler(model).stem, model.config.get_text_config().num_hidden_layers
    layers, kvs = [f"{stem}.{i}" for i in range(n)], [f"{stem}.{i}.kv" for i in range(n)]
    alone = [(layers, name, dict(kv="bf16")) for name in layers]
    if cfg.kv not in ("none", "bf16"):
        alone += [(kvs, name, dict(weights="bf16")) for name in kvs]
    found = []
    for every, name, how in tqdm(alone, desc="layers and KV", disable=None):
        others = [x for x in every if x != name]
        found.append((name, probe(cfg, model, data, keep_bf16=others, **how)))
    return sorted(found, key=lambda row: -row[1])


def recipe(cfg, order):
    """Keep the most sensitive modules in BF16, one by one, until the mismatch is under `target`."""
    model, data = untrained(cfg)
    for n in range(len(order) + 1):
        keep = [name for name, _ in order[:n]]
        if (kl := probe(cfg, model, data, keep_bf16=keep)) <= cfg.target:
            break
    return dict(model=dlc.model_fingerprint(model), keep_bf16=keep, mismatch=kl,
                weights=cfg.weights, kv=cfg.kv)  # fmt: skip


def capacity(cfg):
    """[(what, bytes a token, tokens that fit, ratio to BF16)] of the KV cache in `capacity` GiB,
    from the bytes of real tensors: a layer's cache is filled with 256 tokens and weighed."""
    layers, heads, size = 28, 8, 128
    if cfg.student:
        text = transformers.AutoConfig.from_pretrained(cfg.student).get_text_config()
        layers, heads = text.num_hidden_layers, text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        heads = getattr(text, "num_key_value_heads", None) or heads
    kept = {k for k in dlc.keep_list(cfg.keep_bf16, None) if k.endswith(".kv")}
    if bad := [k for k in kept if k not in {f"model.layers.{i}.kv" for i in range(layers)}]:
        raise ValueError(f"--keep-bf16 {bad[0]}: no such layer's KV; there are {layers} layers, "
                         "from model.layers.0.kv")  # fmt: skip
    kept = len(kept) or 1

    def weigh(fmt):  # bytes of a layer's 256 tokens
        layer, x = NarrowKV(fmt), torch.zeros(1, heads, 256, size, dtype=torch.bfloat16)
        layer.update(x, x)
        return layer.keys.nbytes + layer.values.nbytes

    rows, wide, narrow = [], weigh("bf16"), weigh("fp8")
    for name, n in (("bf16", 0), ("fp8", layers), (f"fp8, {kept} layer's KV in bf16", layers - kept)):
        each = ((layers - n) * wide + n * narrow) / 256
        tokens = int((cfg.capacity * 2**30 - n * 8) // each)  # two float32 scales a narrow layer
        rows.append((name, each, tokens, tokens / rows[0][2] if rows else 1.0))
    return rows


# --------------------------------------------------------------------------------------------------
# What the tools print, and the command line.

STANDARD = (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("fp8_e5m2", "fp8_e5m2"),
            ("int8", "fp8"), ("nvfp4", "fp8"), ("int4", "fp8"), ("int3", "fp8"), ("int2", "fp8"))


def print_capacity(cfg):
    print(f"KV cache in {cfg.capacity} GiB{'':26}bytes/token      tokens   against bf16")
    for name, each, tokens, ratio in capacity(cfg):
        print(f"{name:44}{each:13,.1f}{tokens:12,d}{ratio:11.2f}x")
    print("FP8 halves every layer that it covers; a layer kept in BF16 keeps its two bytes a value, "
          "and scales take 8 bytes a layer.")  # fmt: skip


def print_calibration(cfg):
    b = calibrate(cfg)
    for r in b["curve"]:
        quality = r["quality"]
        print(f"noise {r['noise']:5.2f}  mismatch {r['mismatch']:9.5f}  quality "
              f"{sum(quality) / len(quality):.3f} ({min(quality):.3f}-{max(quality):.3f})  fitted "
              f"{r['fitted']:.3f}")  # fmt: skip
    print("RESULT " + json.dumps({k: b[k] for k in ("budget", "censored", "tolerance")}))


def print_sensitivity(cfg):
    order = sensitivity(cfg)
    for name, kl in order:
        print(f"{name:30}{kl:10.6f} {'#' * round(60 * kl / max(order[0][1], 1e-12))}")
    found, path = recipe(check(cfg), order), Path(cfg.out or "recipe.json")
    write(path, lambda new: new.write_text(json.dumps(found, indent=1)))
    print(f"{path}: keep {found['keep_bf16']} -> {found['mismatch']:.6f} nats a token, target "
          f"{cfg.target}\nRESULT {json.dumps(found)}")  # fmt: skip


def print_admission(cfg):
    """The verdict on the configuration that the options name, or on the standard ones if they name
    none; 3 for a REJECT of a single one."""
    try:
        budget = json.loads(Path(cfg.budget).read_text())
        wanted = [budget[k] for k in ("for", "budget", "censored", "lag", "curve", "seconds")]
        assert len(wanted) == 6 and budget["budget"] >= 0
    except (OSError, ValueError, TypeError, KeyError, AssertionError) as e:
        raise ValueError(f"--budget {cfg.budget}: no budget ({e}); run opd.py --calibrate") from None
    if budget["censored"]:
        print(f"{cfg.budget} is censored: quality never fell at {len(budget['curve'])} noise levels;"
              " it is the largest mismatch tried")  # fmt: skip
    names = ("weights", "kv", "keep_bf16", "noise", "lag", "async_")
    single = any(getattr(cfg, k) != getattr(Config(), k) for k in names)
    todo = [dataclasses.replace(cfg, weights=w, kv=k) for w, k in STANDARD]
    print("weights   kv         noise  lag   mismatch    budget  verdict   by source")
    for c in [cfg] if single else todo:
        out, lag = admit(c, budget), check(c).lag
        verdict = "ADMIT " if out["admitted"] else "REJECT"
        sources = ", ".join(f"{k} {v:.5f}" for k, v in out["by_source"].items())
        share = out["seconds"] / budget["seconds"]
        print(f"{c.weights:10}{c.kv:10}{c.noise:6.2f}{lag:5d}{out['mismatch']:11.5f}"
              f"{out['budget']:10.5f}  {verdict}   {sources}; {out['seconds']:.2f} s, "
              f"{share:.1%} of a training run")  # fmt: skip
    return 3 if single and not out["admitted"] else 0


def print_training(cfg):
    last = train(cfg)[-1]
    print(f"\n{'greedy accuracy, held out':32}")
    rows = (("student before", "_base"), ("teacher", "_teacher"), ("student after", ""),
            ("its narrow copy, which samples", "_sampler"))  # fmt: skip
    for who, key in rows:
        print(f"{who:32}{last[f'accuracy{key}']:7.3f}")
    shown = {k: v for k, v in last.items() if k.startswith("accuracy")}
    print("RESULT " + json.dumps(shown | dict(steps=last["step"] + 1)))


TOOLS = dict(calibrate=print_calibration, admit=print_admission, sensitivity=print_sensitivity,
             capacity=print_capacity)  # fmt: skip


@dlc.command
def main(argv=None):
    cfg = dlc.parse(Config, argv, __doc__.splitlines()[0])
    for name, tool in TOOLS.items():
        if getattr(cfg, name):
            return tool(cfg)
    return print_training(cfg)


if __name__ == "__main__":
    sys.exit(main())
