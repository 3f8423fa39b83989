"""The papers' claims, each an experiment: runs with seeds, kept row by row, and verdicts from them.

    python notebooks/experiments.py NAME --seeds 8   # compare gaps resync opd stable probes overlap
    python notebooks/experiments.py claims           # C1 ... C8 and O1 ... O9 from the logs
    python notebooks/experiments.py figures          # notebooks/figures/ from the same logs

Every finished run is one line of notebooks/data/NAME.jsonl, appended at once; a second call runs
only what is missing. A run takes one core; `compare` is an hour on two, `overlap` half an hour on
an idle machine. Regimes and criteria were written before the runs they judge. Earlier versions of
this file made tune, opd_tune (the learning rates), updates and drift.
"""

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import StatisticsError, fmean, median, stdev

import torch
from matplotlib import pyplot as plt
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dlc  # noqa: E402
import opd  # noqa: E402
from sampler import TorchSampler, mismatch  # noqa: E402

DATA, FIGURES = HERE / "data", HERE / "figures"
SEEDS = 8  # a claim from fewer is no claim

# The tiny task's stand-ins for the papers' regimes: int3 plays the part of FP8 in a large model.
REGIMES = {
    "control": dict(weights="bf16", kv="bf16", sync_every=1),
    "discrepancy": dict(weights="int3", kv="bf16", sync_every=1),
    "lag": dict(weights="bf16", kv="bf16", sync_every=16),
    "both": dict(weights="int3", kv="bf16", sync_every=16),
}
# Equal by identity with one update a batch: the cell on the left is the run on the right.
SYNCED = dict(ppo_anchor="reinforce", ppo_stale="reinforce", dlc="sc", dlc_tis="tis_sc")
DELAYED = dict(ppo_anchor="reinforce")
SAME = dict(control=SYNCED, discrepancy=SYNCED, lag=DELAYED, both=DELAYED)
PPO = ("ppo_anchor", "ppo_stale", "ppo_sampler")
RATE = 1e-4  # of all methods, chosen on the control over all of them together
RULES = {f"every {n}": dict(sync_every=n) for n in (1, 4, 16, 64)} | {
    "ESS < 1/2": dict(sync_ess=0.5)}
# Models by size, layers x width, trained until about a quarter of the sums are right; teachers.
SIZES = {"2x32": dict(steps=1075, width=32, layers=2), "3x64": {},
         "4x128": dict(steps=260, width=128, layers=4)}
TEACHERS = {"2x32": dict(steps=1200), "3x64": dict(steps=1200),
            "4x128": dict(steps=350, width=128, layers=4)}
LEVELS = (0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6)  # of noise; 0.05 and 0.1 came later
TOLERANCE, FP8 = 0.05, dict(weights="fp8", kv="fp8")
NEVER = dict(weights="bf16", kv="bf16", noise=0, sync_every=0)  # what a lag costs


# --------------------------------------------------------------------------------------------------
# Runs and their logs.


@functools.cache
def rows(name):
    """The runs logged so far."""
    path = DATA / f"{name}.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def runs(name, cell, least=SEEDS):
    """Those of a cell, one a seed. FileNotFoundError: too few of them are logged."""
    found = [r for r in rows(name) if r["cell"] == [*cell]]
    if len(found) < least:
        raise FileNotFoundError(f"{name}.jsonl: {len(found)} runs of {cell}")
    return found

def values(name, cell, key="accuracy"):
    return [r[key] for r in runs(name, cell)]


def append(name, row):
    with (DATA / f"{name}.jsonl").open("a") as log:
        print(json.dumps(row), file=log)
    rows.cache_clear()


def quietly(module, **config):
    """The steps of module.train, without a word, in a folder that is thrown away; the last one
    holds also `sampled` and `sampled_q`: the mean reward of two samples of each held-out prompt,
    drawn from the trainer's model and from its narrow copy."""
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          contextlib.redirect_stderr(io.StringIO())):
        how = dict(out=folder + "/run", save_every=10**9, device="cpu")
        steps = module.train(cfg := module.Config(**how | config))
        cfg = module.check(replace(cfg, out=None))
        model, tokenizer = dlc.load_model(folder + "/run/model", "float32", "cpu")
        data, held_out = dlc.load_data(cfg, tokenizer, model)
        probe = [(row["ids"] * 32)[:32] for row in data[:4]]  # as in dlc.Run
        narrow = TorchSampler(model, cfg.weights, cfg.kv, dlc.keep_list(cfg.keep_bf16, model),
                              cfg.noise, seed=cfg.seed, probe=probe)
        narrow.sync(model, cfg.steps)  # noise is a function of seed and version
        for key, q in dict(sampled=TorchSampler(model, "none", "none"), sampled_q=narrow).items():
            ids, scores = [row["ids"] for row in held_out], []
            for s in range(2):
                drawn = q.sample(ids, cfg.max_new_tokens, seed=s)
                graded = dlc.grade(drawn, held_out, q.stop_ids, tokenizer, cfg)
                scores += [x["reward"] for x in graded]
            steps[-1][key] = fmean(scores)
        return steps


def one_run(job):
    """What is logged of `job`. With a teacher it is opd.train, else dlc.train; `base` and `teacher`
    are arguments of tiny_base, `thin` the steps averaged into a point of a curve."""
    torch.set_num_threads(1)
    module, paths, thin = dlc, dict(base=str(dlc.tiny_base(**job.get("base", {})))), job["thin"]
    if "teacher" in job:
        module, paths["teacher"] = opd, str(dlc.tiny_base(**job["teacher"]))
    steps = quietly(module, **paths, **job["config"])
    bins = [steps[i : i + thin] for i in range(0, len(steps), thin)]
    keys = ("reward", "discrepancy", "lag", "ess", "ess_token", "clip_share", "cap_share",
            "teacher_kl")
    curves = {k: [round(fmean(r[k] for r in b), 5) for b in bins] for k in keys if k in steps[0]}
    if thin == 1:  # the ESS of the first t tokens too
        at = lambda t: [round(r["ess_at"][t], 5) for r in steps]
        curves |= {f"ess_{t}": at(t) for t in steps[0]["ess_at"]}
    last = {k: v for k, v in steps[-1].items() if k.startswith(("accuracy", "sampled"))}
    return job | last | dict(syncs=steps[-1]["syncs"], torch=torch.__version__, curves=curves)


def sweep(name, jobs, seeds):
    """Run what the log lacks of `jobs(seed)`, one a core; append each run as it ends."""
    parts = ("cell", "config", "base", "teacher")
    key = lambda job: json.dumps([job.get(k) for k in parts], sort_keys=True)
    done = {key(r) for r in rows(name)}
    todo = [job for seed in range(seeds) for job in jobs(seed) if key(job) not in done]
    for base in {json.dumps(j.get(k, {})) for j in todo for k in ("base", "teacher")}:
        dlc.tiny_base(**json.loads(base))  # made once, before the workers need it
    cores = len(os.sched_getaffinity(0))  # taskset -c 0: one
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        try:
            futures = [pool.submit(one_run, job) for job in todo]
            for future in tqdm(as_completed(futures), total=len(todo), desc=name):
                append(name, future.result())
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it would first run what is queued
            sys.exit(f"{name}: stopped; the same command goes on")


def rl(cell, correction, seed, steps=100, thin=5, base=None, **how):
    """A job of dlc.py. The seeds take turns on two bases."""
    base = (base or {}) | dict(seed=seed % 2)
    config = dict(correction=correction, lr=RATE, steps=steps, seed=seed) | how
    return dict(cell=cell, config=config, thin=thin, base=base)


def grid(seed, **more):
    """Every regime, every correction, at one rate; cells equal by identity are one run. And DLC
    with its own rule instead of the fixed interval."""
    for regime, how in REGIMES.items():
        for c in dlc.CORRECTIONS:
            if c not in SAME[regime]:
                yield rl([regime, c], c, seed, **how, **more)
    for regime, c in product(("lag", "both"), ("dlc", "dlc_tis")):
        yield rl([f"{regime}, ESS rule", c], c, seed,
                 **REGIMES[regime] | dict(sync_every=None, sync_ess=0.5), **more)


def doubled(seed):
    """The grid at twice the rate; 4 seeds."""
    return grid(seed, lr=2 * RATE)


def gaps(seed):
    """C1, C4: both gaps, step by step: sync at 1, 8 or never, with a clip (dlc) and without (tis),
    since the first runs, with dlc alone, showed that a clip holds the lag down."""
    for c, fmt, sync in product(("dlc", "tis"), ("fp8", "int3"), (1, 8, 0)):
        yield rl([fmt, sync] + [c] * (c != "dlc"), c, seed, 65, 1, lr=2e-4, weights=fmt, kv="bf16",
                 sync_every=sync)


def resync(seed):
    """C7: when the ESS falls without a sync; then quality and syncs of intervals and the rule."""
    how = dict(lr=LR["dlc"], weights="fp8", kv="bf16")
    for size, base in SIZES.items():
        for c in ("tis", "dlc"):
            yield rl([size, "never", c], c, seed, 40, 1, base, sync_every=0, **how)
        for rule, sync in RULES.items():
            yield rl([size, rule], "dlc", seed, 96, 10, base, **how, **sync)


def label(how):
    return " ".join(f"{k} {v}" for k, v in how.items())

def clean(noise=0):
    return dict(weights="bf16", kv="bf16", noise=noise)


def distil(pair, loss, seed, how, thin=15, **more):
    """A job of opd.py, with rollouts as `how` says; with no lag named, synchronous."""
    sync = {} if {"lag", "sync_every"} & set(how) else dict(sync_every=1)
    steps = dict(steps=75 if pair == "4x128" else 150)
    config = steps | dict(loss=loss, lr=LR[loss], seed=seed) | how | sync | more
    return dict(cell=[pair, loss, label(how)], config=config, thin=thin, base=SIZES[pair],
                teacher=TEACHERS[pair])


def others():
    """The configurations of the admission check, committed before any of them was run."""
    return json.loads((DATA / "admission.json").read_text())

def probed(pair, what):
    return runs("probes", (pair, what), 1)[0]

def recipe(pair):
    """That of opd.py: the fewest modules that bring uniform FP8 to half of its mismatch."""
    return FP8 | dict(keep_bf16=",".join(probed(pair, "recipe")["keep"]))


def opd_runs(seed):
    """O1-O3, O7, O8: noise levels, the admission configurations, recipes; over three pairs."""
    if seed == 0:
        yield distil("3x64", "sampled", 0, NEVER, 1, steps=33)
    noisy, few = [clean(n) for n in LEVELS], [clean(n) for n in (0, 0.4, 0.8, 1.2)]
    cells = [("3x64", "sampled", how) for how in noisy + others() + [recipe("3x64")]]
    cells += [("3x64", "full", how) for how in noisy + [others()[10], others()[14]]]
    cells += [(pair, "sampled", how) for pair in ("2x32", "4x128")
              for how in few + [recipe(pair), FP8]]
    for pair, loss, how in cells:
        yield distil(pair, loss, seed, how)


def stable(seed):
    """O5: the two losses in the regimes of `compare`: same student, data, batch and updates."""
    for regime, loss in product(("discrepancy", "lag", "both"), ("full", "sampled")):
        how = REGIMES[regime] | dict(noise=0)
        job = distil("3x64", loss, seed, how, steps=300, group_size=8)
        yield job | dict(cell=[regime, loss])


def probes(_):
    """Every configuration's mismatch with the untrained student, as the admission check measures
    it; each layer's sensitivity and the recipe; as many layers at random; the sequence KL of noise,
    by the chain rule Σ_t KL_t, a mean over responses."""
    torch.set_num_threads(1)
    out = []
    for pair, base in SIZES.items():
        cfg = opd.check(opd.Config(device="cpu", base=str(dlc.tiny_base(**base))))
        model, data = opd.untrained(cfg)
        kl = functools.partial(opd.probe, cfg, model, data)
        add = lambda what, pair=pair, **found: out.append(dict(cell=[pair, what], **found))
        for how in [clean(n) for n in LEVELS] + others():
            how = {k: v for k, v in how.items() if k != "lag"}
            keep = dlc.keep_list(how.get("keep_bf16", ""), model)
            if [pair, label(how)] not in [r["cell"] for r in out]:
                add(label(how), kl=kl(**how | dict(keep_bf16=keep)))
        order, uniform, g = opd.sensitivity(cfg), kl(), torch.Generator().manual_seed(0)
        cfg.target, names = uniform / 2, [name for name, _ in order]
        found = opd.recipe(cfg, order)
        picks = [torch.randperm(len(names), generator=g)[: len(found["keep_bf16"])]
                 for _ in range(16)]
        add("sensitivity", order=order)
        add("recipe", keep=found["keep_bf16"], kl=found["mismatch"], uniform=uniform)
        add("random", kl=[kl(keep_bf16=[names[i] for i in pick]) for pick in picks])
        for sigma in LEVELS:
            kls = []
            for s in range(8):
                q = TorchSampler(model, "bf16", "bf16", noise=sigma, seed=s)
                r = q.sample([row["ids"] for row in data[:256]], 4, seed=s)
                gap = mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)
                kls.append(gap["kl"] * gap["tokens"] / len(r.mask))
            add("sequence KL", sigma=sigma, kl=kls)
    text = "".join(json.dumps(r) + "\n" for r in out)
    dlc.write(DATA / "probes.jsonl", lambda new: new.write_text(text))


# O9: what runs by the clock: threads (with --async each process takes half of them) and options.
BF16, SYNC = dict(weights="bf16", kv="bf16"), dict(sync_every=1)
CLOCK = {"sync bf16, 1 thread": (1, BF16 | SYNC), "sync bf16, 2 threads": (2, BF16 | SYNC),
         "sync fp8, 1 thread": (1, FP8 | SYNC), "sync fp8, 2 threads": (2, FP8 | SYNC),
         "async fp8, lag 1": (2, FP8 | dict(async_=True, lag=1))}
CLOCK |= {f"async bf16, lag {D}": (2, BF16 | dict(async_=True, lag=D)) for D in (1, 2, 4, 8)}
TASKS = {"opd": list(CLOCK), "rl": [n for n in CLOCK if n[-1] not in "248"]}


def timed(task, name, config):
    """A run by the clock: seconds after step 0, where processes start, of every tenth step, and the
    accuracy there, from the same run again, whose numbers are the same bit for bit."""
    threads, how = CLOCK[name]
    torch.set_num_threads(threads)
    module, config = dict(opd=opd, rl=dlc)[task], config | how
    steps, scored = (quietly(module, **config, eval_every=n) for n in (0, 10))
    taken = [r["seconds_wait"] + r["seconds_train"] for r in steps]
    points = [[r["step"], round(sum(taken[1 : r["step"] + 1]), 4), r["accuracy"]]
              for r in scored if "accuracy" in r]
    middle = lambda key: median(r[key] for r in steps[1:-1])  # the last step also saves
    return dict(
        cell=[task, name], threads=threads, config=config, points=points, step=median(taken[1:-1]),
        sample=middle("seconds_sample"), train=middle("seconds_train"), wait=middle("seconds_wait"),
        lag=fmean(r["lag"] for r in steps), accuracy=steps[-1]["accuracy"],
        accuracy_base=steps[-1]["accuracy_base"], torch=torch.__version__)


def overlap(seeds):
    """O9, one run at a time, the settings in turn for every seed."""
    dlc.tiny_base(), dlc.tiny_base(steps=1200)
    of = dict(opd=dict(loss="full", lr=LR["full"]), rl=dict(correction="dlc", lr=LR["dlc"]))
    done = [[*r["cell"], r["config"]["seed"]] for r in rows("overlap")]
    cells = [(task, name) for task in TASKS for name in TASKS[task]]
    for seed, (task, name) in tqdm([*product(range(seeds), cells)], desc="overlap"):
        if [task, name, seed] not in done:
            append("overlap", timed(task, name, of[task] | dict(steps=150, seed=seed)))


# --------------------------------------------------------------------------------------------------
# The claims. Each returns how many of its criteria hold, how many there are, and lines of what was
# measured. The criteria are those of its docstring, written before the runs.


def interval(x):
    """Mean and half-width of the 95 % interval (Student's t)."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(x), 2.0)
    return fmean(x), t * stdev(x) / len(x) ** 0.5 if len(x) > 1 else float("nan")

def pm(x, digits=2, sign=""):
    mean, half = interval(x)
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"

def listed(found, sign=""):
    """`name mean ± half` of each, after commas."""
    return ", ".join(f"{name} {pm(x, sign=sign)}" for name, x in found.items())

def low(x):
    return interval(x)[0] - interval(x)[1]

def high(x):
    return interval(x)[0] + interval(x)[1]


def furthest_apart(samples):
    """Whether the highest and the lowest mean differ by more than both intervals."""
    samples = sorted(samples, key=fmean)
    return low(samples[-1]) > high(samples[0])


def slope(x):
    """Least-squares slope of a list against its index."""
    i, y = torch.arange(len(x)).double(), torch.tensor(x).double()
    i = i - i.mean()
    return float((i * (y - y.mean())).sum() / i.square().sum())


def cell(regime, correction, key="accuracy"):
    """A cell of the grid; for a cell equal by identity, its run's values."""
    return values("compare", (regime, SAME.get(regime, {}).get(correction, correction)), key)

def base():
    return rows("compare")[0]["accuracy_base"]

def learns(x):
    return low(x) > base()


def c1():
    """Discrepancy about constant, lag grows: over 64 steps without a sync the lag's slope is above
    0 (interval), and with a sync after every step, so that q is made anew, the discrepancy moves by
    less than a tenth of that; for both formats, with a clip and without one. (Without a sync q and
    π_stale stand still, so that their gap is constant by construction.)"""
    good, said = 0, []
    for (name, c), fmt in product((("dlc, clipped", []), ("tis", ["tis"])), ("fp8", "int3")):
        lags = [x["lag"] for x in values("gaps", [fmt, 0, *c], "curves")]
        numerics = [x["discrepancy"] for x in values("gaps", [fmt, 1, *c], "curves")]
        (lag, dl), (gap, dg) = (interval(list(map(slope, x))) for x in (lags, numerics))
        good += lag - dl > 0 and abs(gap) < lag / 10
        said.append(f"{name}, {fmt}: lag {lag:+.1e} ± {dl:.0e} nats a token a step about "
                    f"{fmean(map(fmean, lags)):.3f}, discrepancy {gap:+.1e} ± {dg:.0e} about "
                    f"{fmean(map(fmean, numerics)):.3f}")
    return good, 4, said + [f"n = {len(lags)}"]


def c2():
    """Quantised and synchronous: SC and IS learn (interval above the base), a PPO ends below it."""
    names = ("sc", "is", "tis", "ppo_sampler", "ppo_stale", "ppo_anchor")
    found = {c: cell("discrepancy", c) for c in names}
    below = any(fmean(found[c]) < base() for c in PPO)
    return learns(found["sc"]) + learns(found["is"]) + below, 3, [listed(found)]


def c3():
    """Under lag IS ends above SC, and PPO against the sampler's weights learns; while the lag is
    short (a sync every 4 steps) IS learns, as it does under the discrepancy."""
    found = {c: cell("lag", c) for c in ("sc", "is", "tis", "ppo_stale", "reinforce")}
    short = {c: values("updates", ("short lag", c)) for c in ("is", "sc")}
    apart = [a - b for a, b in zip(found["is"], found["sc"])]
    good = (low(apart) > 0) + learns(found["ppo_stale"])
    good += learns(short["is"]) and learns(cell("discrepancy", "is"))
    said = [listed(found), f"is - sc {pm(apart, sign='+')}", f"short lag: {listed(short)}"]
    return good, 3, said


def c4():
    """IS expires: without a clip and without a sync the ESS over responses falls below one half
    within 64 steps in most runs, and the share of ratios above the cap grows."""
    curves = values("gaps", ("fp8", 0, "tis"), "curves")
    first = [next((i for i, x in enumerate(c["ess"]) if x < 0.5), None) for c in curves]
    grown = [fmean(c["cap_share"][-16:]) - fmean(c["cap_share"][1:9]) for c in curves]
    token = fmean(fmean(c["ess_token"][-8:]) for c in curves)
    good = (sum(x is not None for x in first) > len(curves) / 2) + (low(grown) > 0)
    return good, 2, [f"ESS over responses below 1/2 at steps {first}",
                     f"over tokens {token:.2f} at the end",
                     f"share above the cap {pm(grown, 3, '+')}"]


def random_gap(scale, seed=1):
    """(p, q, rewards) on V = 4, T = 3: logits from a normal, and q's `scale` normals away."""
    g = torch.Generator().manual_seed(seed)
    p, offset = ([torch.randn((4,) * (t + 1), generator=g).double() for t in range(3)]
                 for _ in range(2))
    return p, [a + scale * b for a, b in zip(p, offset)], torch.rand(4, 4, 4, generator=g).double()


def c5():
    """Exactly: SC has no drift with the whole vocabulary and keeps `token` (equal to REINFORCE's);
    IS has neither. The drift that SC leaves grows as the head shrinks; both grow with the gap."""
    term = lambda name, c, gap=0.1, **how: dlc.exact_bias(c, *random_gap(gap), **how)[name]
    size = lambda *args, **how: float(term(*args, **how).norm())
    token, drift = ({c: size(name, c) for c in ("reinforce", "sc", "is")}
                    for name in ("token", "drift"))
    apart = float((term("token", "sc") - term("token", "reinforce")).norm())
    heads = [size("drift", "sc", head_k=k) for k in (4, 3, 2, 1)]
    wide = [size("token", "sc", gap) for gap in (0.1, 0.3, 1.0)]
    good = (drift["sc"] < 1e-14) + (token["sc"] > 1e-6 and apart < 1e-14)
    good += token["is"] < 1e-14 and drift["is"] < 1e-14
    good += heads == sorted(heads) and wide == sorted(wide)
    show = lambda x: f"{x:.1e}" if x > 1e-14 else "0"
    said = [f"{c}: token {show(token[c])} drift {show(drift[c])}" for c in token]
    said += [f"sc, drift at K = 4, 3, 2, 1: {', '.join(map(show, heads))}",
             f"sc, token at a gap of 0.1, 0.3, 1: {', '.join(map(show, wide))}"]
    for o, n in product(("sgd", "adam"), (200, 2000)):  # steps on the expected gradient, V^T = 4^3
        ends = {c: [r["curve"][n // 100] for r in rows("drift") if r["cell"][:2] == [o, c]]
                for c in ("reinforce", "is", "sc", "tis_sc")}
        said.append(f"rewards ±1, no baseline, {o}, after {n} steps: {listed(ends, '+')}")
    return good, 4, said


def c6():
    """PPO's reference matters: with both gaps, the best and the worst reference differ by more than
    their intervals, with one update a batch (where the anchor is REINFORCE) and with four."""
    one = {c: cell("both", c) for c in PPO}
    four = {c: values("updates", ("both, 4 updates", c)) for c in PPO}
    good = furthest_apart(one.values()) + furthest_apart(four.values())
    return good, 2, [f"1 update: {listed(one)}", f"4 updates: {listed(four)}"]


def crossing(size, correction, key="ess"):
    """The first step at which the ESS is below one half, for each seed; 40 if it is not reached."""
    curves = [c[key] for c in values("resync", (size, "never", correction), "curves")]
    return [next((i for i, x in enumerate(c) if x < 0.5), 40) for c in curves]


def against_rule(size, rule):
    """A fixed interval is late (worse than the ESS rule by more than the paired interval), better,
    or wasteful (no better, and more syncs)."""
    at = lambda rule, key="accuracy": values("resync", (size, rule), key)
    less = [a - b for a, b in zip(at("ESS < 1/2"), at(rule))]
    if low(less) > 0:
        return "late"
    if high(less) < 0:
        return "better"
    return "wasteful" if at(rule, "syncs")[0] > fmean(at("ESS < 1/2", "syncs")) else ""


def c7():
    """The step at which the ESS over responses crosses one half (40: not reached) differs by model:
    the intervals of two sizes do not meet; longer responses cross sooner; and for some size each
    fixed interval is late or wasteful (`against_rule`)."""
    cross, said, shorter, beaten = {size: crossing(size, "tis") for size in SIZES}, [], [], []
    for size in SIZES:
        curves = values("resync", (size, "never", "tis"), "curves")[0]
        lengths = [k for k in curves if k[4:].isdigit()]
        by = [fmean(crossing(size, "tis", k)) for k in lengths]
        shorter.append(by[0] > by[-1])
        said += [f"{size}: ESS below 1/2 at step {pm(cross[size], 1)}",
                 f"by the first {', '.join(k[4:] for k in lengths)} tokens "
                 + ", ".join(f"{x:.1f}" for x in by),
                 f"over tokens {pm(crossing(size, 'tis', 'ess_token'), 1)}, dlc's clip on "
                 f"{fmean(crossing(size, 'dlc')):.1f}"]
        words = [against_rule(size, rule) for rule in [*RULES][:-1]]
        beaten.append({*words} <= {"late", "wasteful"})
        told = []
        for rule, word in zip(RULES, [*words, ""]):
            syncs = f"{fmean(values('resync', (size, rule), 'syncs')):.0f} syncs"
            told.append(f"{rule} {pm(values('resync', (size, rule)))} ({syncs}"
                        + f", {word}" * (word != "") + ")")
        said.append(f"{size}: {', '.join(told)}")
    return furthest_apart(cross.values()) + all(shorter) + any(beaten), 3, said


def c8():
    """DLC holds in both regimes: it learns (interval above the base) under discrepancy, under lag,
    and under both, its own rule deciding the syncs."""
    regimes = ("discrepancy", "lag, ESS rule", "both, ESS rule")
    ours, more = ([cell(r, c) for r in regimes] for c in ("dlc", "dlc_tis"))
    said = [f"{r}: dlc {pm(x)}" for r, x in zip(regimes, ours)]
    return sum(map(learns, ours)), 3, said + ["dlc_tis " + ", ".join(map(pm, more))]


def quality(pair, loss, how, key="accuracy"):
    return values("opd", (pair, loss, label(how)), key)


def kl_of(pair, how):
    """Mismatch before training: the probe of formats and noise, and the lag's share, the worst on
    the way, from the clean run's curve."""
    lag = runs("opd", ("3x64", "sampled", label(NEVER)), 1)[0]["curves"]["lag"]
    numerics = {k: v for k, v in how.items() if k != "lag"}
    return probed(pair, label(numerics))["kl"] + max(lag[: how.get("lag", 0) + 1])


def noise_curve(loss):
    """(rows of noise, mismatch, quality and fitted quality; budget; censored) of the pair 3x64."""
    curve = [dict(noise=n, mismatch=kl_of("3x64", clean(n)),
                  quality=quality("3x64", loss, clean(n))) for n in LEVELS]
    return curve, *opd.within(curve, TOLERANCE)


def o1():
    """One scale: over the formats, KV formats, lags and mixtures, the mismatch before training
    orders the quality after it (Spearman below -0.7, `sampled`), and the curve of the noise levels
    predicts that quality at least twice as well (mean absolute error) as their own mean does."""
    x = [kl_of("3x64", how) for how in others()]
    y = [fmean(quality("3x64", "sampled", how)) for how in others()]
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (x, y)]
    rho, curve = float(torch.corrcoef(torch.stack(ranks))[0, 1]), noise_curve("sampled")[0]
    fits = [[r["fitted"] for r in curve if r["mismatch"] <= k] or [curve[0]["fitted"]] for k in x]
    error = fmean(abs(fit[-1] - v) for fit, v in zip(fits, y))
    spread = fmean(abs(v - fmean(y)) for v in y)
    return (rho < -0.7) + (error < spread / 2), 2, [
        f"{len(x)} configurations of {min(x):.4f} to {max(x):.2f} nats", f"Spearman {rho:+.2f}",
        f"error of the noise curve {error:.3f}, of the mean {spread:.3f}"]


def o2():
    """Flat, then falling: some noise costs nothing (its interval meets the clean run's) and the
    strongest costs more than both intervals; for each loss. The budget is the largest mismatch
    within 0.05 of the clean quality."""
    good, said = 0, []
    for loss in ("sampled", "full"):
        curve, budget, censored = noise_curve(loss)
        least, *more = [r["quality"] for r in curve]
        good += any(high(x) >= low(least) for x in more) and high(more[-1]) < low(least)
        told = [f"{r['mismatch']:.3f} nats {pm(r['quality'])}" for r in curve]
        said += [f"{loss}: {', '.join(told)}", f"{loss}: budget {budget:.3f} nats"
                 + ", censored: quality never fell" * censored]
    return good, 2, said


def o3():
    """Over the three pairs, the mismatch of uniform FP8 differs by a factor of 1.5, and the share
    of the clean run's gain that is kept under noise of 1.2 differs by more than the intervals."""
    fp8, kept, said = {}, {}, []
    for pair in SIZES:
        at = lambda n, key="accuracy", pair=pair: quality(pair, "sampled", clean(n), key)
        start, fp8[pair] = at(0, "accuracy_base")[0], probed(pair, "recipe")["uniform"]
        kept[pair] = [(y - start) / (fmean(at(0)) - start) for y in at(1.2)]
        told = [f"{probed(pair, label(clean(n)))['kl']:.3f} nats {pm(at(n))}"
                for n in (0, 0.4, 0.8, 1.2)]
        said += [f"{pair}: FP8 {fp8[pair]:.4f} nats", ", ".join(told),
                 f"of the gain kept at the last {pm(kept[pair])}"]
    differ = max(fp8.values()) > 1.5 * min(fp8.values())
    return differ + furthest_apart(kept.values()), 2, said


def o4():
    """Some modules are sensitive: for each pair the most sensitive one's mismatch is at least twice
    the median's, and the recipe's is below the interval of as many modules left out at random."""
    good, said = 0, []
    for pair in SIZES:
        order, found = probed(pair, "sensitivity")["order"], probed(pair, "recipe")
        (name, most), random = order[0], probed(pair, "random")["kl"]
        times = most / median(kl for _, kl in order)
        good += (times >= 2) + (found["kl"] < low(random))
        said += [f"{pair}: {name} {most:.4f} nats, {times:.1f} times the median",
                 f"recipe keeps {len(found['keep'])} of {len(order)} modules: {found['kl']:.4f} "
                 f"nats, uniform FP8 {found['uniform']:.4f}, as many at random {pm(random, 4)}"]
    return good, 6, said


def destabilised(name, cell):
    """How many runs end below the start's 95 % interval (500 held-out sums)."""
    ends = zip(values(name, cell), values(name, cell, "accuracy_base"))
    return sum(end < start - 1.96 * (start * (1 - start) / 500) ** 0.5 for end, start in ends)


def o5():
    """OPD stays stable where RL methods do not: in the three regimes no run of either loss is
    destabilised, and at least two RL methods are in half of their runs of some regime."""
    regimes, losses = ("discrepancy", "lag", "both"), ("full", "sampled")
    methods, lost, said = ("reinforce", "tis", "sc", "ppo_stale", "dlc"), {}, []
    for g in regimes:
        lost |= {(g, c): destabilised("compare", (g, SAME[g].get(c, c))) for c in methods}
        lost |= {(g, x): destabilised("stable", (g, x)) for x in losses}
        ours = [f"{x} {lost[g, x]} ({pm(values('stable', (g, x)))})" for x in losses]
        theirs = [f"{c} {lost[g, c]}" for c in methods]
        said += [f"{g}: destabilised of {SEEDS}: {', '.join(theirs)}",
                 f"{g}: OPD {', '.join(ours)}"]
    worst = lambda c: max(lost[g, c] for g in regimes)
    fall = sum(worst(c) >= SEEDS / 2 for c in methods) >= 2
    return sum(worst(x) == 0 for x in losses) + fall, 3, said


def prefix_errors(scale):
    """Exactly, V = 4, T = 3, target E_{h~d_π} ∇KL_h: the relative error, with prefixes from q,
    of `full`; of `sampled` with the untruncated weight, a truncated one, none; of `full` with
    prefix weights; and E_q[sampled with is] against E_q[full]."""
    p, q, _ = random_gap(scale, seed=2)
    target = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3 + t)).double()
              for t, x in enumerate(p)]
    leaves, y = [x.requires_grad_() for x in p], torch.cartesian_prod(*[torch.arange(4)] * 3)

    def spread(tables):  # log-probs at each position's prefix, (N, T, V)
        logs = [x.log_softmax(-1).reshape(-1, 4) for x in tables]
        return torch.stack([x.repeat_interleave(4 ** (3 - t), 0) for t, x in enumerate(logs)], 1)

    def grad(x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)])

    tables = [spread(x) for x in (leaves, q, target)]
    kl = opd.divergence("full", tables[0], tables[2])
    live, logq, logp_teacher = (x.gather(-1, y[..., None])[..., 0] for x in tables)
    logp, mask = live.detach(), torch.ones_like(y, dtype=torch.bool)
    of_p, of_q = logp.sum(1).exp()[:, None], logq.sum(1).exp()[:, None]
    before = (logp - logq).cumsum(1) - (logp - logq)  # log of the prefix weight, Π_{s<t} π/q
    true, A = grad((of_p * kl).sum()), (logp_teacher - logp) * of_q
    found = {c: grad(dlc.policy_loss(c, live, logq, A, mask, num_tokens=1, cap=1.2)[0])
             for c in ("is", "tis", "reinforce")}
    found |= dict(full=grad((of_q * kl).sum()), weighted=grad((of_q * before.exp() * kl).sum()))
    error = {k: float((g - true).norm() / true.norm()) for k, g in found.items()}
    return error | dict(same=float((found["is"] - found["full"]).norm()))


def o6():
    """Noise shifts prefixes, exactly: `sampled` with the untruncated token weight has `full`'s
    expectation under q, so its error is `full`'s; a truncated weight changes it; prefix weights
    remove it. The sequence KL grows with every step of noise."""
    e, kls = prefix_errors(0.3), values("probes", ("3x64", "sequence KL"), "kl")
    good = (e["same"] < 1e-14) + (e["full"] > 1e-3) + (abs(e["tis"] - e["full"]) > 1e-3)
    good += e["weighted"] < 1e-14
    good += all(low([y - x for x, y in zip(a, b)]) > 0 for a, b in zip(kls, kls[1:]))  # same draws
    errors = ", ".join(f"{k} {e[k]:.3f}" for k in ("full", "is", "tis", "reinforce"))
    grown = ", ".join(f"{n}: {pm(x, 3)}" for n, x in zip(LEVELS, kls))
    wide = ", ".join(f"{gap} {prefix_errors(gap)['full']:.3f}" for gap in (0.1, 0.3, 1.0))
    return good, 5, [f"relative error of the gradient under q: {errors}, full with prefix weights "
                     f"{e['weighted']:.0e}", f"sequence KL at noise {grown}",
                     f"error of full at a gap of {wide}"]


def o7():
    """Admission against the truth, `sampled`, on the committed configurations: good is a mean
    quality within 0.05 of the clean run's. No false admit, and half of the good ones admitted."""
    budget, clear = noise_curve("sampled")[1], fmean(quality("3x64", "sampled", clean()))
    found = [(kl_of("3x64", how) <= budget, fmean(quality("3x64", "sampled", how)) >=
              clear - TOLERANCE) for how in others()]
    count = {x: found.count(x) for x in product((True, False), repeat=2)}
    said = [f"budget {budget:.3f} nats, clean quality {clear:.2f}", ", ".join(
        f"{'admitted' if a else 'rejected'} and {'good' if g else 'bad'} {n}"
        for (a, g), n in count.items())]
    return (count[True, False] == 0) + (count[True, True] >= count[False, True]), 2, said


def o8():
    """A recipe a pair: FP8 with its modules kept in BF16 ends within 0.05 of the BF16 rollouts;
    1.93 times the tokens of KV cache with one of 28 layers' KV kept."""
    good, said, times = 0, [], opd.capacity(opd.Config(capacity=16))[-1][-1]
    for pair in SIZES:
        hows = dict(bf16=clean(), FP8=FP8, recipe=recipe(pair))
        found = {name: quality(pair, "sampled", how) for name, how in hows.items()}
        good += fmean(found["recipe"]) >= fmean(found["bf16"]) - TOLERANCE
        said.append(f"{pair}: {listed(found)}, keeping {recipe(pair)['keep_bf16']}")
    said.append(f"tokens of KV cache, one of 28 layers' KV in BF16: {times:.2f}x")
    return good + (times >= 1.93), 4, said


def clocked(task, name, key="points"):
    return values("overlap", (task, name), key)

def reached(points, target):
    """Seconds until the first accuracy of at least `target`; to the end, if there is none."""
    return next((s for _, s, score in points if score >= target), points[-1][1])


def speed_up(task, fmt):
    """(steps a second over one thread's, what the stages' times predict) of asynchronous runs."""
    one, both = f"sync {fmt}, 1 thread", f"async {fmt}, lag 1"
    stages = zip(clocked(task, one, "sample"), clocked(task, one, "train"))
    return (fmean(clocked(task, one, "step")) / fmean(clocked(task, both, "step")),
            fmean((a + b) / max(a, b) for a, b in stages))


def o9():
    """Distillation (`full`): asynchronous FP8 reaches the accuracy sooner than the better of the
    two synchronous BF16 settings (the paired interval of the ratio of times is above 1), 1.25 times
    sooner, ends within 0.05 of it, and BF16's speed-up over one thread is within 15 % of
    (Ts + Tt) / max(Ts, Tt). The accuracy: 90 % of the gain of the synchronous BF16 runs. RL too."""
    good, said = 0, []
    wide, narrow = (("sync bf16, 1 thread", "sync bf16, 2 threads"),
                    ("sync fp8, 1 thread", "sync fp8, 2 threads"))
    fp8, bf16 = "async fp8, lag 1", "async bf16, lag 1"
    for task, names in TASKS.items():
        start = clocked(task, wide[0], "accuracy_base")[0]
        end = fmean(x for n in wide for x in clocked(task, n, "accuracy"))
        target = start + 0.9 * (end - start)
        times = {n: [reached(points, target) for points in clocked(task, n)] for n in names}
        best = min(wide, key=lambda n: fmean(times[n]))
        sooner = {n: [a / b for a, b in zip(times[best], times[n])] for n in names}
        (faster, guess), (faster8, guess8) = speed_up(task, "bf16"), speed_up(task, "fp8")
        ends = {n: clocked(task, n, "accuracy") for n in (best, bf16, fp8)}
        if task == "opd":
            good += (low(sooner[fp8]) > 1) + (fmean(sooner[fp8]) >= 1.25)
            good += fmean(ends[fp8]) >= fmean(ends[best]) - TOLERANCE
            good += abs(faster / guess - 1) < 0.15
        told = []
        for n in TASKS["rl"]:
            lost = sum(all(score < target for *_, score in points) for points in clocked(task, n))
            told.append(f"{n} {pm(times[n], 1)}" + f" ({lost} never)" * (lost > 0))
        sync8 = pm(max([sooner[n] for n in narrow], key=interval))
        said += [f"{task}, seconds to accuracy {target:.2f}: {', '.join(told)}",
                 f"{task}: over the better synchronous BF16, async FP8 {pm(sooner[fp8])}, "
                 f"async BF16 {pm(sooner[bf16])}, sync FP8 {sync8}",
                 f"{task}: steps a second over one thread's, BF16 {faster:.2f}, FP8 {faster8:.2f}",
                 f"{task}: their stages' times predict {guess:.2f}, {guess8:.2f}",
                 f"{task}, accuracy at the end: {listed(ends)}"]
    told = []
    for n in (f"async bf16, lag {D}" for D in (1, 2, 4, 8)):
        step, lag = fmean(clocked("opd", n, "step")), fmean(clocked("opd", n, "lag"))
        told.append(f"{1e3 * step:.1f} ms a step, lag {lag:.4f} nats, accuracy "
                    f"{pm(clocked('opd', n, 'accuracy'))}")
    return good, 4, said + [f"opd, BF16, --max-lag 1, 2, 4, 8: {', '.join(told)}"]


def verdicts():
    """(name, verdict, lines of what was measured) of every claim."""
    for claim in (c1, c2, c3, c4, c5, c6, c7, c8, o1, o2, o3, o4, o5, o6, o7, o8, o9):
        try:
            good, of, lines = claim()
            word = f"partly ({good} of {of})" if good else "not reproduced"
            word = "reproduced" if good == of else word
        except (FileNotFoundError, StatisticsError):  # too few values
            word, lines = "not run", ["no log yet"]
        yield claim.__name__.upper(), word, lines


def claims(_):
    for name, word, lines in verdicts():
        print(f"{name} {word}\n   " + "\n   ".join(lines))


# --------------------------------------------------------------------------------------------------
# The figures: q is red, π blue.


def save(fig, name):
    dlc.write(FIGURES / name, lambda new: fig.savefig(new, dpi=110, format="png"))
    plt.close(fig)


def band(ax, curves, style, name):
    """Mean over seeds and its 95 % interval, step by step."""
    mid = [interval(x) for x in zip(*curves)]
    ax.plot([m for m, _ in mid], style, label=name)
    ax.fill_between(range(len(mid)), [max(m - h, 1e-5) for m, h in mid],
                    [m + h for m, h in mid], color=style[:2], alpha=0.2, lw=0)


def compare_figure():
    names, copies = list(dlc.CORRECTIONS), (
        ("accuracy", "C0o", "trainer's model, π", 0.12),
        ("accuracy_sampler", "C3x", "its quantised copy, q", -0.12))
    fig, axes = plt.subplots(1, 4, sharey=True, sharex=True, figsize=(12, 4), layout="constrained")
    for ax, (regime, how) in zip(axes, REGIMES.items()):
        for (key, style, name, up), (i, c) in product(copies, enumerate(names)):
            mean, half = interval(cell(regime, c, key))
            ax.errorbar(mean, i + up, xerr=half, fmt=style, ms=5, capsize=2,
                        label=name if i == 0 else None)
        ax.axvline(base(), color="0.5", ls=":", label="before training")
        ax.set(title=f"{regime}: {how['weights']}, sync every {how['sync_every']}",
               xlabel="accuracy, held out")
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="y", color="0.9")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    save(fig, "compare.png")


def gaps_figure():
    fig, axes = plt.subplots(2, 3, sharex=True, sharey=True, figsize=(10, 5), layout="constrained")
    for ax, (fmt, sync) in zip(axes.flat, product(("fp8", "int3"), (1, 8, 0))):
        curves = values("gaps", (fmt, sync, "tis"), "curves")
        band(ax, [c["discrepancy"] for c in curves], "C3-", "discrepancy, KL(q || π_stale)")
        band(ax, [c["lag"] for c in curves], "C0--", "lag, KL(π_stale || π)")
        ax.set(title=f"{fmt}, sync {f'every {sync}' if sync else 'never'}", yscale="log",
               ylim=(1e-4, 2), xlabel="step" * (fmt == "int3"), ylabel="nats a token" * (sync == 1))
    axes[0, 0].legend(fontsize=8)
    save(fig, "gaps.png")


def resync_figure():
    fig, axes = plt.subplots(2, 3, sharey="row", sharex="row", figsize=(10, 6),
                             layout="constrained")
    for (top, bottom), size in zip(axes.T, SIZES):
        never = values("resync", (size, "never", "tis"), "curves")
        band(top, [c["ess"] for c in never], "C0-", "over responses")
        band(top, [c["ess_token"] for c in never], "C2--", "over tokens")
        top.axhline(0.5, color="0.5", ls=":")
        top.set(title=f"{size}, no sync, no clip", xlabel="steps since the sync", ylim=(0, 1.02))
        for rule in RULES:
            (x, dx), (y, dy) = (interval(values("resync", (size, rule), key))
                                for key in ("syncs", "accuracy"))
            bottom.errorbar(x, y, dy, dx, fmt="C3D" if "ESS" in rule else "C0o", capsize=2)
            bottom.annotate(rule, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
        bottom.set(xscale="log", xlabel="syncs in 96 steps")
    axes[0, 0].set_ylabel("ESS / B")
    axes[1, 0].set_ylabel("accuracy, held out")
    axes[0, 0].legend(fontsize=8)
    save(fig, "resync.png")


def budget_figure():
    def style(how):
        if "lag" not in how:
            return ("C0o", "noise") if "noise" in how else ("C3s", "formats")
        mixed = how["weights"] != "bf16" or "noise" in how
        return ("C1D", "mixture") if mixed else ("C2^", "delayed weights")

    fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4), layout="constrained")
    for ax, loss in zip(axes, ("sampled", "full")):
        curve, budget, censored = noise_curve(loss)
        logged, named = {r["cell"][2] for r in rows("opd") if r["cell"][:2] == ["3x64", loss]}, []
        for how in [clean(n) for n in LEVELS] + others():
            if label(how) in logged:
                (mean, half), (form, group) = interval(quality("3x64", loss, how)), style(how)
                ax.errorbar(kl_of("3x64", how), mean, half, fmt=form, capsize=2, ms=5,
                            label=None if group in named else group)
                named.append(group)
        x, y = ([r[k] for r in curve] for k in ("mismatch", "fitted"))
        ax.step(x, y, "C0-", where="post", lw=1)
        ax.axvline(budget, color="0.3", ls="--",
                   label=f"budget {budget:.3f}" + " (censored)" * censored)
        start = quality("3x64", loss, clean(), "accuracy_base")[0]
        ax.axhline(start, color="0.5", ls=":", label="before training")
        ax.set_xscale("symlog", linthresh=1e-3)
        ax.set_xlim(left=0)
        ax.set(title=f"loss {loss}", xlabel="mismatch before training, nats a token",
               ylabel="accuracy after training")
        ax.legend(fontsize=8)
    save(fig, "budget.png")


def layers_figure():
    fig, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    for ax, pair in zip(axes, SIZES):
        order, found = probed(pair, "sensitivity")["order"], probed(pair, "recipe")
        names, kls = zip(*order)
        ax.barh([n.removeprefix("model.layers.") for n in names], kls,
                color=["C3" if n in found["keep"] else "0.7" for n in names])
        ax.invert_yaxis()
        ax.set(title=f"{pair}: uniform FP8 {found['uniform']:.4f}",
               xlabel="KL when it alone is FP8, nats a token")
    axes[0].set_ylabel("layer, or its KV (red: kept in BF16 by the recipe)")
    save(fig, "layers.png")


def overlap_figure():
    styles = {"sync bf16, 1 thread": "0.6", "sync bf16, 2 threads": "k--",
              "async bf16, lag 1": "C0-", "async fp8, lag 1": "C3-."}
    fig, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
    for ax, task, title in zip(axes, ("opd", "rl"), ("distillation, full", "RL, dlc")):
        for name, style in styles.items():
            _, x, y = torch.tensor(clocked(task, name)).mean(0).T
            ax.plot(x, y, style, label=name)
        ax.set(title=title, xlabel="seconds, start-up aside", ylabel="accuracy, held out")
        ax.legend(fontsize=8)
    lags = {D: f"async bf16, lag {D}" for D in (1, 2, 4, 8)}
    x, y = ([fmean(clocked("opd", n, key)) for n in lags.values()] for key in ("lag", "step"))
    axes[2].plot(x, [1 / t for t in y], "C0o-")
    for D, a, b in zip(lags, x, y):
        axes[2].annotate(D, (a, 1 / b), xytext=(0, 7), textcoords="offset points")
    axes[2].set(title="distillation, bf16, --max-lag 1, 2, 4, 8", xlabel="lag, nats a token",
                ylabel="steps a second", ylim=(0, 45))
    save(fig, "overlap.png")


def figures(_):
    for draw in (compare_figure, gaps_figure, resync_figure, budget_figure, layers_figure,
                 overlap_figure):
        draw()


SWEEPS = dict(grid=grid, doubled=doubled, gaps=gaps, resync=resync, opd=opd_runs, stable=stable)
COMMANDS = dict(probes=probes, overlap=overlap, claims=claims, figures=figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SWEEPS, *COMMANDS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    os.chdir(HERE.parent)  # the tiny bases are cached under runs/
    if args.what in SWEEPS:
        return sweep(args.what, SWEEPS[args.what], args.seeds)
    COMMANDS[args.what](args.seeds)


if __name__ == "__main__":
    main()
