"""The papers' claims, each an experiment: runs with seeds, kept row by row, and verdicts from them.

    python notebooks/experiments.py NAME --seeds 8   # a sweep: NAME.jsonl; see SWEEPS, at the end
    python notebooks/experiments.py bases            # what the bases earn; a minute
    python notebooks/experiments.py probes           # mismatch before training; minutes
    python notebooks/experiments.py overlap          # by the clock: on an idle machine
    python notebooks/experiments.py claims           # C1 ... C8 and O1 ... O9 from the logs
    python notebooks/report.py                       # tables and figures from the logs

Every finished run is one line of notebooks/data/NAME.jsonl, appended at once; a second call runs
only what is missing. A run takes one core and most often less than half a minute. Logs under
data/sums/ are of the earlier default task, sums of four tokens, made by this file and dlc.py at
commit 3a3b4bc; a claim is read there until its sweep on the present task has ended, and says so.
"""

import argparse
import contextlib
import functools
import io
import json
import math
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
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dlc  # noqa: E402
import opd  # noqa: E402
from sampler import TorchSampler, mismatch  # noqa: E402

DATA = HERE / "data"
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
RULES = {"never": dict(sync_every=0)} | {f"every {n}": dict(sync_every=n) for n in (1, 4, 16, 64)}
RULES |= {"ESS < 1/2": dict(sync_ess=0.5), "both": dict(sync_every=16, sync_ess=0.5)}
# Models by size, layers x width, and one size by length of the answer: trained about as far.
SIZES = {"2x32": dict(steps=250, width=32, layers=2), "3x64": {},
         "4x128": dict(steps=60, width=128, layers=4)}
LENGTHS = {f"T = {n + 1}": dict(steps=s, digits=n)
           for n, s in {3: 24, 7: 46, 15: 90, 31: 178}.items()}
TEACHER = dict(steps=300)
# Where centring may pay: 300 steps; a pair of corrections, and what is not as in int3 with Adam.
# SGD's rate: of 0.01, 0.03, 0.1 and 1 the least under which the control learns in 80 steps.
CENTRED = {
    "int3": ("sc", "reinforce", {}), "int3, truncated weights": ("tis_sc", "tis", {}),
    "int3 and noise 0.3": ("sc", "reinforce", dict(noise=0.3)),
    "int3, SGD": ("sc", "reinforce", dict(optimizer="sgd", lr=0.01)),
    "int3, 8 tokens": ("sc", "reinforce", dict(digits=7)),
    "int3, 32 tokens": ("sc", "reinforce", dict(digits=31)),
    "int3, a sync every 16 steps": ("dlc", "ppo_stale", dict(sync_every=16)),
}
LOSSES = ("full", "sampled", "sampled tis", "sampled dlc")  # of O5
LEVELS = (0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6)  # of noise
MARGIN = 0.03  # of mean reward: C8's "as good as the best"
TOLERANCE, FP8 = 0.05, dict(weights="fp8", kv="fp8")
KEYS = ("sampled", "sampled_q", "accuracy", "accuracy_sampler")  # of a run: on π, on q; greedy
NEVER = dict(weights="bf16", kv="bf16", noise=0, sync_every=0)  # what a lag costs
SUMS = "sums/"  # where the logs of the earlier task lie

# ---- Runs and their logs. ------------------------------------------------------------------------

@functools.cache
def rows(name):
    """The runs logged so far."""
    path = DATA / f"{name}.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []

def runs(name, cell, least=SEEDS):
    """Those of a cell, by seed. FileNotFoundError: too few of them are logged."""
    found = [r for r in rows(name) if r["cell"] == [*cell]]
    if len(found) < least:
        raise FileNotFoundError(f"{name}.jsonl: {len(found)} runs of {cell}")
    return sorted(found, key=lambda r: r.get("config", {}).get("seed", 0))

def values(name, cell, key="sampled", least=SEEDS):
    """`key` of a cell's runs. On the sums only greedy accuracy was logged."""
    if name.startswith(SUMS):
        key = dict(sampled="accuracy", sampled_q="accuracy_sampler").get(key, key)
    return [r[key] for r in runs(name, cell, least)]

def append(name, row):
    with (DATA / f"{name}.jsonl").open("a") as log:
        print(json.dumps(row), file=log)
    rows.cache_clear()

def scored(cfg, model, tokenizer, draws):
    """`sampled` and `sampled_q`: the mean reward of `draws` samples of each held-out prompt, drawn
    from the trainer's model and from its narrow copy."""
    data, held_out = dlc.load_data(cfg, tokenizer, model)
    probe = [(row["ids"] * 32)[:32] for row in data[:4]]  # as in dlc.Run
    narrow = TorchSampler(model, cfg.weights, cfg.kv, dlc.keep_list(cfg.keep_bf16, model),
                          cfg.noise, seed=cfg.seed, probe=probe)
    narrow.sync(model, cfg.steps)  # noise is a function of seed and version
    ids, out = [row["ids"] for row in held_out], {}
    for key, q in dict(sampled=TorchSampler(model, "none", "none"), sampled_q=narrow).items():
        scores = []
        for s in range(draws):
            drawn = q.sample(ids, cfg.max_new_tokens, seed=s)
            graded = dlc.grade(drawn, held_out, q.stop_ids, tokenizer, cfg)
            scores += [x["reward"] for x in graded]
        out[key] = fmean(scores)
    return out

def quietly(module, **config):
    """The steps of module.train, without a word, in a folder that is thrown away; the last one
    holds what `scored` says of the trained model."""
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          contextlib.redirect_stderr(io.StringIO())):
        how = dict(out=folder + "/run", save_every=10**9, device="cpu")
        steps = module.train(cfg := module.Config(**how | config))
        cfg = module.check(replace(cfg, out=None))
        model, tokenizer = dlc.load_model(folder + "/run/model", "float32", "cpu")
        steps[-1] |= scored(cfg, model, tokenizer, 2)
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

# ---- The sweeps: jobs of a seed. -----------------------------------------------------------------

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

def updates(seed):
    """C3 with a short lag; C6 with four updates a batch, where the anchor is not REINFORCE."""
    for c in ("is", "sc"):
        yield rl(["short lag", c], c, seed, **REGIMES["lag"] | dict(sync_every=4))
    for c in PPO:
        yield rl(["both, 4 updates", c], c, seed, **REGIMES["both"], minibatches=4)

def gaps(seed):
    """C1, C4: both gaps, step by step, with a clip (dlc) and without one (tis)."""
    for c, fmt, sync in product(("dlc", "tis"), ("fp8", "int3"), (1, 16, 0)):
        yield rl([fmt, sync] + [c] * (c != "dlc"), c, seed, 65, 1, weights=fmt, kv="bf16",
                 sync_every=sync)

def rules_of(models, seed):
    """When the ESS falls without a clip and without a sync; quality and syncs of every rule."""
    for model, base in models.items():
        how = dict(weights="fp8", kv="bf16", digits=base.get("digits", 16))
        yield rl([model, "never", "tis"], "tis", seed, 40, 1, base, sync_every=0, **how)
        for rule, sync in RULES.items():
            thin = 1 if rule == "never" else 8
            yield rl([model, rule], "dlc", seed, 96, thin, base, **how, **sync)

def resync(seed):
    """C7 by size; the crossing at twice the rate too."""
    yield from rules_of(SIZES, seed)
    yield rl(["twice the rate", "never", "tis"], "tis", seed, 40, 1, lr=2 * RATE, weights="fp8",
             kv="bf16", sync_every=0)

def centring(seed):
    """Does centring pay?"""
    for name, (*pair, how) in CENTRED.items():
        base = LENGTHS[f"T = {how['digits'] + 1}"] if "digits" in how else {}
        for c in pair:
            yield rl([name, c], c, seed, 300, 15, base, **REGIMES["discrepancy"] | how)

def label(how):
    return " ".join(f"{k} {v}" for k, v in how.items())

def clean(noise=0):
    return dict(weights="bf16", kv="bf16", noise=noise)

def distil(pair, loss, seed, how, steps=100, thin=10, **more):
    """A job of opd.py, with rollouts as `how` says; with no lag named, synchronous."""
    sync = {} if {"lag", "sync_every"} & set(how) else dict(sync_every=1)
    config = dict(steps=steps, loss=loss, lr=RATE, seed=seed) | how | sync | more
    return dict(cell=[pair, loss, label(how)], config=config, thin=thin, base=SIZES[pair],
                teacher=TEACHER)

def others(of=""):
    """The configurations of the admission check, committed before any of them was run."""
    return json.loads((DATA / f"{of}admission.json").read_text())

def probed(of, pair, what):
    return runs(of + "probes", (pair, what), 1)[0]

def recipe(of, pair):
    """That of opd.py: the fewest modules that bring uniform FP8 to half of its mismatch."""
    return FP8 | dict(keep_bf16=",".join(probed(of, pair, "recipe")["keep"]))

def opd_runs(seed):
    """O1-O3, O7, O8: noise levels, the admission configurations, recipes; over three pairs."""
    if seed == 0:
        yield distil("3x64", "sampled", 0, NEVER, 33, 1)
    noisy, few = [clean(n) for n in LEVELS], [clean(n) for n in (0, 0.1, 0.2, 0.4, 0.8)]
    cells = [("3x64", "sampled", how) for how in noisy + others() + [recipe("", "3x64")]]
    cells += [("3x64", "full", how) for how in noisy + [others()[10], others()[15]]]
    cells += [(pair, "sampled", how) for pair in ("2x32", "4x128")
              for how in few + [recipe("", pair), FP8]]
    for pair, loss, how in cells:
        yield distil(pair, loss, seed, how)

def stable(seed):
    """O5: distillation in the regimes of the grid: its bases, data, batch and updates."""
    for regime, loss in product(("discrepancy", "lag", "both"), LOSSES):
        loss, correction = f"{loss} reinforce".split()[:2]
        job = distil("3x64", loss, seed, REGIMES[regime] | dict(noise=0), correction=correction,
                     prompts=16, group_size=8)
        name = loss if correction == "reinforce" else f"{loss} {correction}"
        yield job | dict(cell=[regime, name], base=dict(seed=seed % 2))

# ---- What is measured without training, and what runs by the clock. ------------------------------

def bases(_):
    """What the grid's two bases and the students earn before training, by themselves and by their
    copy in each format."""
    torch.set_num_threads(1)
    out, every = [], {0: dict(seed=0), 1: dict(seed=1)} | SIZES
    for (name, made), fmt in product(every.items(), ("bf16", "int3")):
        cfg = dlc.check(dlc.Config(weights=fmt, kv="bf16", device="cpu"))
        model, tokenizer = dlc.load_model(str(dlc.tiny_base(**made)), "float32", "cpu")
        out.append(dict(cell=[name, fmt]) | scored(cfg, model, tokenizer, 8))
    save_rows("bases", out)

def save_rows(name, out):
    text = "".join(json.dumps(r) + "\n" for r in out)
    dlc.write(DATA / f"{name}.jsonl", lambda new: new.write_text(text))
    rows.cache_clear()

def probes(_):
    """Every configuration's mismatch with the untrained student, as the admission check measures
    it; each layer's sensitivity and the recipe, and as many layers at random, these scored on
    other prompts than chose the recipe; the sequence KL of noise, by the chain rule Σ_t KL_t, a
    mean over responses."""
    torch.set_num_threads(1)
    out = []
    for pair, base in SIZES.items():
        cfg = opd.check(opd.Config(device="cpu", base=str(dlc.tiny_base(**base))))
        model, data = opd.untrained(cfg)
        kl = functools.partial(opd.probe, cfg, model, data)
        elsewhere = functools.partial(opd.probe, cfg, model, data[opd.PROBE :])
        add = lambda what, pair=pair, **found: out.append(dict(cell=[pair, what], **found))
        for how in [clean(n) for n in LEVELS] + others():
            how = {k: v for k, v in how.items() if k != "lag"}
            keep = dlc.keep_list(how.get("keep_bf16", ""), model)
            if [pair, label(how)] not in [r["cell"] for r in out]:
                add(label(how), kl=kl(**how | dict(keep_bf16=keep)))
        order, uniform, g = opd.sensitivity(cfg), kl(), torch.Generator().manual_seed(0)
        cfg.target, names = uniform / 2, [name for name, _ in order]
        keep = opd.recipe(cfg, order)["keep_bf16"]
        picks = [torch.randperm(len(names), generator=g)[: len(keep)] for _ in range(16)]
        add("sensitivity", order=order)
        add("recipe", keep=keep, kl=elsewhere(keep_bf16=keep), uniform=elsewhere())
        add("random", kl=[elsewhere(keep_bf16=[names[i] for i in pick]) for pick in picks])
        for sigma in LEVELS if pair == "3x64" else ():
            kls = []
            for s in range(8):
                q = TorchSampler(model, "bf16", "bf16", noise=sigma, seed=s)
                r = q.sample([row["ids"] for row in data[:256]], cfg.max_new_tokens, seed=s)
                gap = mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)
                kls.append(gap["kl"] * gap["tokens"] / len(r.mask))
            add("sequence KL", sigma=sigma, kl=kls)
    save_rows("probes", out)

# O9: what runs by the clock: threads (with --async each process takes half of them) and options.
BF16, SYNC = dict(weights="bf16", kv="bf16"), dict(sync_every=1)
CLOCK = {"sync bf16, 1 thread": (1, BF16 | SYNC), "sync bf16, 2 threads": (2, BF16 | SYNC),
         "sync fp8, 1 thread": (1, FP8 | SYNC), "sync fp8, 2 threads": (2, FP8 | SYNC),
         "async fp8, lag 1": (2, FP8 | dict(async_=True, lag=1))}
CLOCK |= {f"async bf16, lag {D}": (2, BF16 | dict(async_=True, lag=D)) for D in (1, 2, 4, 8)}
BETTER = list(CLOCK)[:2]  # of these the better one
TASKS = {"opd": list(CLOCK), "rl": [n for n in CLOCK if n[-1] not in "248"]}

def timed(task, name, config):
    """A run by the clock: seconds after step 0, where processes start, of every tenth step, and the
    accuracy there, from the same run again, whose numbers are the same bit for bit."""
    threads, how = CLOCK[name]
    torch.set_num_threads(threads)
    module, config = dict(opd=opd, rl=dlc)[task], config | how
    steps, graded = (quietly(module, **config, eval_every=n) for n in (0, 10))
    taken = [r["seconds_wait"] + r["seconds_train"] for r in steps]
    points = [[r["step"], round(sum(taken[1 : r["step"] + 1]), 4), r["accuracy"]]
              for r in graded if "accuracy" in r]
    middle = lambda key: median(r[key] for r in steps[1:-1])  # the last step also saves
    return dict(
        cell=[task, name], threads=threads, config=config, points=points, step=median(taken[1:-1]),
        sample=middle("seconds_sample"), train=middle("seconds_train"), wait=middle("seconds_wait"),
        lag=fmean(r["lag"] for r in steps), accuracy=steps[-1]["accuracy"],
        accuracy_base=steps[-1]["accuracy_base"], torch=torch.__version__)

def overlap(seeds):
    """O9, one run at a time, the settings in turn for every seed."""
    dlc.tiny_base(), dlc.tiny_base(**TEACHER)
    of = dict(opd=dict(loss="full", lr=RATE), rl=dict(correction="dlc", lr=RATE))
    done = [[*r["cell"], r["config"]["seed"]] for r in rows("overlap")]
    cells = [(task, name) for task in TASKS for name in TASKS[task]]
    for seed, (task, name) in tqdm([*product(range(seeds), cells)], desc="overlap"):
        if [task, name, seed] not in done:
            append("overlap", timed(task, name, of[task] | dict(steps=100, seed=seed)))

# ---- Statistics: paired by seed, and so by base, wherever one is said to be above another. -------

def interval(x):
    """Mean and half-width of the 95 % interval (Student's t; above 16 values a little wide)."""
    t = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
         2.160, 2.145, 2.131)[min(len(x), 16) - 2]
    return fmean(x), t * stdev(x) / len(x) ** 0.5 if len(x) > 1 else float("nan")

def pm(x, digits=2, sign=""):
    mean, half = interval(x)
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"

def listed(found, digits=2, sign=""):
    """`name mean ± half` of each, after commas."""
    return ", ".join(f"{name} {pm(x, digits, sign)}" for name, x in found.items())

def low(x):
    return interval(x)[0] - interval(x)[1]

def high(x):
    return interval(x)[0] + interval(x)[1]

def less(a, b):
    """a - b, seed by seed."""
    return [x - y for x, y in zip(a, b)]

def shuffled(groups, paired):
    """How often the means of the groups lie as far apart as here when their labels are shuffled:
    within a seed if paired, else over all runs; 10,000 times."""
    g = torch.Generator().manual_seed(0)
    x = torch.tensor([list(group) for group in groups]).double()  # (groups, seeds)
    apart = lambda x: x.mean(-1).amax(-1) - x.mean(-1).amin(-1)
    if paired:
        order = torch.rand(10_000, *x.shape, generator=g).argsort(1)
        drawn = x.expand(10_000, -1, -1).gather(1, order)
    else:
        drawn = x.flatten()[torch.rand(10_000, x.numel(), generator=g).argsort(1)]
        drawn = drawn.view(-1, *x.shape)
    return (1 + int((apart(drawn) >= apart(x) - 1e-12).sum())) / 10_001

def cell(regime, correction, key="sampled", name="grid", least=SEEDS):
    """A cell of the grid; for a cell equal by identity, its run's values."""
    return values(name, (regime, SAME.get(regime, {}).get(correction, correction)), key, least)

def base(seed=0, key="sampled", fmt="bf16"):
    """What a base earns before training."""
    return values("bases", (seed, fmt), key, 1)[0]

def gained(regime, correction, name="grid"):
    """What each run's model of a cell earns more than its own base."""
    starts = [r["base"]["seed"] for r in runs(name, (regime, correction))]
    return less(cell(regime, correction, name=name), map(base, starts))

# ---- The claims. ---------------------------------------------------------------------------------
# Each returns how many of its criteria hold (None: not shown), how many there are, and lines of
# what was measured. The criteria are those of its docstring, written before the runs. `of`: where
# its logs lie, "" or SUMS. "Ends": the mean reward of sampled held-out answers of the trainer's
# model; on the sums, greedy accuracy. "Above" and "below": by paired 95 % intervals.

def c1(of):
    """Within a phase between syncs, by steps since the sync, the mean over phases: in the phase's
    last quarter the lag is above that in its first, and the discrepancy has moved by less than a
    tenth of that (by construction, but for the prompts); both formats, with a clip and without. And
    over a run without a clip that syncs every step, the discrepancy of the last quarter is between
    half and twice that of the first (interval); both formats."""
    name, good, said = of + "gaps", 0, []
    every = max((r["cell"][1] for r in rows(name)), default=0)
    quarter = lambda x: fmean(x[-len(x) // 4 :]) - fmean(x[: len(x) // 4])
    phase = lambda x: [fmean(x[p::every]) for p in range(every)]
    for (told, c), fmt in product((("dlc, clipped", []), ("tis", ["tis"])), ("fp8", "int3")):
        curves = values(name, [fmt, every, *c], "curves")
        lag, gap = ([quarter(phase(x[key])) for x in curves] for key in ("lag", "discrepancy"))
        still = max(abs(low(gap)), abs(high(gap))) < fmean(lag) / 10
        good += low(lag) > 0 and still
        said.append(f"{told}, {fmt}: within {every} steps the lag grows by {pm(lag, 4)} nats a "
                    f"token, the discrepancy by {pm(gap, 5, '+')}")
    for fmt in ("fp8", "int3"):
        curves = [x["discrepancy"] for x in values(name, (fmt, 1, "tis"), "curves")]
        ratio = [fmean(x[-len(x) // 4 :]) / fmean(x[: len(x) // 4]) for x in curves]
        good += low(ratio) > 0.5 and high(ratio) < 2
        said.append(f"{fmt}, a sync every step: discrepancy {fmean(map(fmean, curves)):.4f}, at "
                    f"the end {pm(ratio)} times that at the start")
    return good, 6, said

def c2(of):
    """Quantised and synchronous: `sc` ends above its base, `is` does, and PPO clipped against q,
    the one reference that is then not REINFORCE by identity, ends below its base."""
    found = {c: gained("discrepancy", c) for c in ("sc", "is", "ppo_sampler")}
    good = (low(found["sc"]) > 0) + (low(found["is"]) > 0) + (high(found["ppo_sampler"]) < 0)
    names = ("sc", "is", "tis", "reinforce", "ppo_sampler")
    ends, copy = ({c: cell("discrepancy", c, key) for c in names} for key in KEYS[:2])
    return good, 3, [f"over the base: {listed(found, sign='+')}", f"ends: {listed(ends)}",
                     f"its sampler: {listed(copy)}"]

def c3(of):
    """Under lag `is` ends above `sc`, and PPO clipped against the sampler's weights (`ppo_stale`)
    ends above its base and above `reinforce`."""
    names = ("sc", "is", "tis", "ppo_stale", "reinforce")
    found = {c: cell("lag", c) for c in names}
    apart = {"is - sc": less(found["is"], found["sc"]),
             "ppo_stale - reinforce": less(found["ppo_stale"], found["reinforce"])}
    good = (low(gained("lag", "ppo_stale")) > 0) + sum(low(x) > 0 for x in apart.values())
    return good, 3, [listed(found), listed(apart, sign="+")]

def c3_short(of):
    """IS learns in both regimes while the lag is short: `is` ends above its base with a sync every
    4 steps, and above `sc`; and under the discrepancy alone."""
    found = {c: values("updates", ("short lag", c)) for c in ("is", "sc")}
    apart = less(found["is"], found["sc"])
    alone = gained("short lag", "is", "updates"), apart, gained("discrepancy", "is")
    return sum(low(x) > 0 for x in alone), 3, [f"{listed(found)}; is - sc {pm(apart, sign='+')}"]

def crossing(name, cell, key="ess"):
    """The first step at which the ESS is below one half, for each seed; one past the last step if
    it is not reached."""
    curves = [c[key] for c in values(name, cell, "curves")]
    return [next((i for i, x in enumerate(c) if x < 0.5), len(c)) for c in curves]

def c4(of):
    """IS expires: with truncated importance weights and no sync for 65 steps (fp8) the ESS over
    responses falls below one half in most runs; then learning pays for it: `tis` ends below the
    same with a sync every step, and by more than `dlc`, clipped, does."""
    name, first = of + "gaps", crossing(of + "gaps", ("fp8", 0, "tis"))
    cost = {c: less(values(name, ["fp8", 0, *more]), values(name, ["fp8", 1, *more]))
            for c, more in dict(tis=["tis"], dlc=[]).items()}
    good = (sum(x < 65 for x in first) > len(first) / 2) + (high(cost["tis"]) < 0)
    good += high(less(cost["tis"], cost["dlc"])) < 0
    return good, 3, [f"ESS over responses below 1/2 at steps {first}",
                     f"no sync instead of one every step: {listed(cost, sign='+')}"]

def random_gap(scale, seed=1, T=3):
    """(p, q, rewards) on V = 4: logits from a normal, and q's `scale` normals away."""
    g = torch.Generator().manual_seed(seed)
    p, offset = ([torch.randn((4,) * (t + 1), generator=g).double() for t in range(T)]
                 for _ in range(2))
    return p, [a + scale * b for a, b in zip(p, offset)], torch.rand((4,) * T, generator=g).double()

def c5(of):
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
    good += max(token["is"], drift["is"]) < 1e-14
    good += heads == sorted(heads) and wide == sorted(wide)
    show = lambda x: f"{x:.1e}" if x > 1e-14 else "0"
    return good, 4, ["; ".join(f"{c}: token {show(token[c])} drift {show(drift[c])}"
                               for c in token),
                     f"sc, drift at K = 4, 3, 2, 1: {', '.join(map(show, heads))}",
                     f"sc, token at a gap of 0.1, 0.3, 1: {', '.join(map(show, wide))}"]

def c6(of):
    """PPO's reference matters: with both gaps, one update a batch (where the anchor is REINFORCE by
    identity), the three references end further apart than in 95 % of shufflings within seeds."""
    found, copy = ({c: cell("both", c, key) for c in PPO} for key in KEYS[:2])
    p = shuffled(found.values(), paired=True)
    return int(p < 0.05), 1, [f"{listed(found)}; p = {p:.4f}", f"its sampler: {listed(copy)}"]

def c6_updates(of):
    """The same with four updates a batch."""
    found = {c: values("updates", ("both, 4 updates", c)) for c in PPO}
    p = shuffled(found.values(), paired=True)
    return int(p < 0.05), 1, [f"{listed(found)}; p = {p:.4f}"]

def against_rule(at, rule):
    """A fixed interval is late (it ends below the ESS rule), better (above it), or wasteful
    (neither, with more syncs)."""
    apart = less(at("ESS < 1/2"), at(rule))
    if low(apart) > 0:
        return "late"
    if high(apart) < 0:
        return "better"
    return "wasteful" if fmean(at(rule, "syncs")) > fmean(at("ESS < 1/2", "syncs")) else "as good"

def c7(of):
    """The step at which the ESS over responses crosses one half without a clip differs by model
    (the sizes' means lie further apart than in 95 % of shufflings over all runs); in each size the
    first token alone crosses later than the whole response; and no fixed interval serves every
    size: each is late or wasteful (`against_rule`) in at least one and better in none."""
    name, later = of + "resync", 0
    cross, said, words = {s: crossing(name, (s, "never", "tis")) for s in SIZES}, [], {}
    for size in SIZES:
        curves = values(name, (size, "never", "tis"), "curves")[0]
        by = {k: crossing(name, (size, "never", "tis"), k) for k in curves if k[4:].isdigit()}
        later += low(less(by["ess_1"], cross[size])) > 0
        said += [f"{size}: ESS below 1/2 at step {pm(cross[size], 1)}",
                 f"by the first {', '.join(k[4:] for k in by)} tokens "
                 + ", ".join(f"{fmean(x):.1f}" for x in by.values())]
        said.append(rules_line(name, size, words))
    p = shuffled(cross.values(), paired=False)
    fixed = {rule: {w for (_, r), w in words.items() if r == rule} for _, rule in words}
    useless = all(w & {"late", "wasteful"} and "better" not in w for w in fixed.values())
    return (p < 0.05) + (later == len(SIZES)) + useless, 3, said + [f"over sizes p = {p:.4f}"]

def rules_line(name, model, words):
    """What each rule ends at, with its syncs; `words` gains those of fixed intervals."""
    at = lambda rule, key="sampled": values(name, (model, rule), key)
    logged, told = {r["cell"][1] for r in rows(name) if len(r["cell"]) == 2}, []
    for rule in [r for r in RULES if r in logged]:
        told.append(f"{rule} {pm(at(rule))} ({fmean(at(rule, 'syncs')):.0f} syncs")
        if rule.startswith("every"):
            words[model, rule] = against_rule(at, rule)
            told[-1] += f", {words[model, rule]}"
    return f"{model}: " + ", ".join(x + ")" for x in told)

def c7_length(of):
    """Longer answers cross sooner: without a clip the means of 4, 8, 16 and 32 tokens fall, and lie
    further apart than in 95 % of shufflings over all runs; and length moves the crossing (largest
    mean over smallest) more than size and rate do."""
    by = {T: crossing("lengths", (T, "never", "tis")) for T in LENGTHS}
    sizes = {s: crossing("resync", (s, "never", "tis")) for s in SIZES}
    rates = [sizes["3x64"], crossing("resync", ("twice the rate", "never", "tis"))]
    ratio = lambda groups: max(map(fmean, groups)) / max(1, min(map(fmean, groups)))
    p, means = shuffled(by.values(), paired=False), [fmean(x) for x in by.values()]
    moved = {k: ratio(v) for k, v in dict(length=by.values(), size=sizes.values(),
                                          rate=rates).items()}
    good = p < 0.05 and means == sorted(means, reverse=True)
    said = [f"{listed(by, 1)}; p = {p:.4f}", "largest over smallest mean: " + ", ".join(
        f"{k} {v:.1f}" for k, v in moved.items())]
    said += [rules_line("lengths", T, {}) for T in LENGTHS]
    return good + (max(moved, key=moved.get) == "length"), 2, said

def c8(of):
    """DLC holds: under discrepancy, under lag and under both, with a sync every 16 steps in the
    last two, and then by its own rule, `dlc` ends less than 0.03 below the regime's best correction
    (the one of the highest mean; paired interval)."""
    good, said = 0, []
    for regime in ("discrepancy", "lag", "both", "lag, ESS rule", "both, ESS rule"):
        found = {c: cell(regime.split(",")[0], c) for c in dlc.CORRECTIONS}
        best = max(found, key=lambda c: fmean(found[c]))
        ours = {c: less(cell(regime, c), found[best]) for c in ("dlc", "dlc_tis")}
        good += low(ours["dlc"]) > -MARGIN
        said.append(f"{regime}: {best} {pm(found[best])}; less: {listed(ours, 3, '+')}")
    return good, 5, said

def quality(of, pair, loss, how, key="sampled"):
    return values(of + "opd", (pair, loss, label(how)), key)

def kl_of(of, pair, how):
    """Mismatch before training: the probe of formats and noise, and the lag's share, the worst on
    the way, from the clean run's curve."""
    lag = runs(of + "opd", ("3x64", "sampled", label(NEVER)), 1)[0]["curves"]["lag"]
    numerics = {k: v for k, v in how.items() if k != "lag"}
    return probed(of, pair, label(numerics))["kl"] + max(lag[: how.get("lag", 0) + 1])

def noise_curve(of, loss):
    """(rows of noise, mismatch, quality and fitted quality; budget; censored) of the pair 3x64."""
    curve = [dict(noise=n, mismatch=kl_of(of, "3x64", clean(n)),
                  quality=quality(of, "3x64", loss, clean(n))) for n in LEVELS]
    return curve, *opd.within(curve, TOLERANCE)

def start_of(of, pair):
    """What a pair's student earns before training."""
    greedy = quality(of, pair, "sampled", clean(), "accuracy_base")[0]
    return greedy if of else base(pair)

def o1(of):
    """One scale: over the formats, KV formats, lags and mixtures, the mismatch before training
    orders the quality after it (Spearman below -0.7, `sampled`), and the curve of the noise levels
    predicts that quality at least twice as well (mean absolute error) as their own mean does."""
    x = [kl_of(of, "3x64", how) for how in others(of)]
    y = [fmean(quality(of, "3x64", "sampled", how)) for how in others(of)]
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (x, y)]
    rho, curve = float(torch.corrcoef(torch.stack(ranks))[0, 1]), noise_curve(of, "sampled")[0]
    fits = [[r["fitted"] for r in curve if r["mismatch"] <= k] or [curve[0]["fitted"]] for k in x]
    error = fmean(abs(fit[-1] - v) for fit, v in zip(fits, y))
    spread = fmean(abs(v - fmean(y)) for v in y)
    return (rho < -0.7) + (error < spread / 2), 2, [
        f"{len(x)} configurations of {min(x):.4f} to {max(x):.2f} nats", f"Spearman {rho:+.2f}",
        f"error of the noise curve {error:.3f}, of the mean {spread:.3f}"]

def o2(of):
    """Flat, then falling: at some level of noise quality is less than 0.05 below the clean runs'
    (paired interval), at the strongest it is below them; for each loss. The budget is the largest
    mismatch within 0.05 of the clean quality, by a falling fit."""
    good, said = 0, []
    for loss in ("sampled", "full"):
        curve, budget, censored = noise_curve(of, loss)
        apart = [less(r["quality"], curve[0]["quality"]) for r in curve[1:]]
        good += any(low(x) > -TOLERANCE for x in apart) and high(apart[-1]) < 0
        told = [f"{r['mismatch']:.3f} nats {pm(r['quality'])}" for r in curve]
        said += [f"{loss}: {', '.join(told)}", f"{loss}: budget {budget:.3f} nats"
                 + ", censored: quality never fell" * censored]
    return good, 2, said

def o3(of):
    """Over the three pairs, the mismatch of uniform FP8 differs by a factor of 1.5; and at an equal
    mismatch, the largest that noise reached in all three, the share of the clean run's gain that is
    kept (between two levels on a straight line) lies further apart than in 95 % of shufflings over
    all runs."""
    start, noise = {}, {}
    for pair in SIZES:
        logged = {r["cell"][2] for r in rows(of + "opd") if r["cell"][:2] == [pair, "sampled"]}
        noise[pair] = [(probed(of, pair, label(clean(n)))["kl"], n) for n in LEVELS
                       if label(clean(n)) in logged]
        start[pair] = start_of(of, pair)
    equal, kept, said = min(max(x)[0] for x in noise.values()), {}, []
    for pair, levels in noise.items():
        at = {n: quality(of, pair, "sampled", clean(n)) for _, n in levels}
        top = next(i for i, (kl, _) in enumerate(levels) if kl >= equal)
        (a, m), (b, n) = levels[max(0, top - 1)], levels[top]
        share = (equal - a) / (b - a) if b > a else 0
        there = [x + share * (y - x) for x, y in zip(at[m], at[n])]
        kept[pair] = [(x - start[pair]) / (fmean(at[0]) - start[pair]) for x in there]
        said.append(f"{pair}: FP8 {probed(of, pair, 'recipe')['uniform']:.4f} nats; of the gain "
                    f"kept at {equal:.3f} nats {pm(kept[pair])}")
    fp8, p = [probed(of, pair, "recipe")["uniform"] for pair in SIZES], shuffled(kept.values(), 0)
    return (max(fp8) > 1.5 * min(fp8)) + (p < 0.05), 2, said + [f"over pairs p = {p:.4f}"]

def o4(of):
    """Some modules are sensitive: for each pair the most sensitive one's mismatch is at least twice
    the median's, and the recipe's, scored on other prompts than chose it (on the sums: the same),
    is below the interval of the mean of 16 random choices of as many modules."""
    good, said = 0, []
    for pair in SIZES:
        order, found = probed(of, pair, "sensitivity")["order"], probed(of, pair, "recipe")
        (name, most), random = order[0], probed(of, pair, "random")["kl"]
        times = most / median(kl for _, kl in order)
        good += (times >= 2) + (found["kl"] < low(random))
        said += [f"{pair}: {name} {most:.4f} nats, {times:.1f} times the median",
                 f"recipe keeps {len(found['keep'])} of {len(order)} modules: {found['kl']:.4f} "
                 f"nats, uniform FP8 {found['uniform']:.4f}, as many at random {pm(random, 4)}"]
    return good, 6, said

def destabilised(name, cell):
    """How many runs end, in greedy accuracy, below the start's 95 % interval (500 prompts)."""
    ends = zip(values(name, cell, "accuracy"), values(name, cell, "accuracy_base"))
    return sum(end < start - 1.96 * (start * (1 - start) / 500) ** 0.5 for end, start in ends)

def o5(of):
    """OPD stays stable where RL methods do not: in the three regimes no run of any of its losses is
    destabilised (a criterion a loss), and at least two of the eleven RL methods, those equal by
    identity counted once, are in half of their runs of some regime."""
    regimes, name = ("discrepancy", "lag", "both"), of + "stable"
    losses = [x for x in LOSSES if any(r["cell"][1] == x for r in rows(name))] or LOSSES
    lost, ours, said = {}, dict.fromkeys(losses, 0), []
    for g in regimes:
        methods = [c for c in dlc.CORRECTIONS if c not in SAME[g]]
        rl = {c: destabilised(SUMS + "compare" if of else "grid", (g, c)) for c in methods}
        fallen = {x: destabilised(name, (g, x)) for x in losses}
        lost |= {c: max(n, lost.get(c, 0)) for c, n in rl.items()}
        ours = {x: ours[x] + fallen[x] for x in losses}
        ends = [f"{x} {fallen[x]} ({pm(values(name, (g, x)))})" for x in losses]
        said += [f"{g}: destabilised of {SEEDS}: {', '.join(f'{c} {n}' for c, n in rl.items())}",
                 f"{g}: OPD {', '.join(ends)}"]
    fall = sum(n >= SEEDS / 2 for n in lost.values()) >= 2
    return sum(n == 0 for n in ours.values()) + fall, len(losses) + 1, said

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

def o6(of):
    """Noise shifts prefixes, exactly: `sampled` with the untruncated token weight has `full`'s
    expectation under q, so its error is `full`'s; a truncated weight changes it; prefix weights
    remove it. The sequence KL grows with every step of noise (same draws)."""
    e, kls = prefix_errors(0.3), values(of + "probes", ("3x64", "sequence KL"), "kl")
    good = (e["same"] < 1e-14) + (e["full"] > 1e-3) + (abs(e["tis"] - e["full"]) > 1e-3)
    good += e["weighted"] < 1e-14
    good += all(low(less(b, a)) > 0 for a, b in zip(kls, kls[1:]))
    errors = ", ".join(f"{k} {e[k]:.3f}" for k in ("full", "is", "tis", "reinforce"))
    grown = ", ".join(f"{n}: {pm(x, 3)}" for n, x in zip(LEVELS, kls))
    return good, 5, [f"relative error of the gradient under q: {errors}, full with prefix weights "
                     f"{e['weighted']:.0e}", f"sequence KL at noise {grown}"]

def o7(of):
    """Admission against the truth, `sampled`, on the committed configurations: good is a mean
    quality within 0.05 of the clean runs'. No false admit, and half of the good ones admitted; not
    shown unless something is admitted and something is not."""
    budget, clear = noise_curve(of, "sampled")[1], fmean(quality(of, "3x64", "sampled", clean()))
    found = [(kl_of(of, "3x64", how) <= budget, fmean(quality(of, "3x64", "sampled", how)) >=
              clear - TOLERANCE) for how in others(of)]
    count = {x: found.count(x) for x in product((True, False), repeat=2)}
    said = [f"budget {budget:.3f} nats, clean quality {clear:.2f}", ", ".join(
        f"{'admitted' if a else 'rejected'} and {'good' if g else 'bad'} {n}"
        for (a, g), n in count.items())]
    good = (count[True, False] == 0) + (count[True, True] >= count[False, True])
    return good if len({a for a, _ in found}) == 2 else None, 2, said

def o8(of):
    """A recipe a pair: FP8 with its modules kept in BF16 ends less than 0.05 below the BF16
    rollouts (paired interval); a criterion a pair."""
    good, said = 0, []
    for pair in SIZES:
        hows = dict(bf16=clean(), FP8=FP8, recipe=recipe(of, pair))
        found = {name: quality(of, pair, "sampled", how) for name, how in hows.items()}
        apart = less(found["recipe"], found["bf16"])
        good += low(apart) > -TOLERANCE
        said.append(f"{pair}: {listed(found)}, recipe - bf16 {pm(apart, sign='+')}, keeping "
                    f"{recipe(of, pair)['keep_bf16']}")
    return good, 3, said

def o8_capacity(of):
    """1.93 times the tokens of KV cache, one of 28 layers' KV in BF16, by weighing a token's."""
    times = opd.capacity(opd.Config(capacity=16))[-1][-1]
    return int(times >= 1.93), 1, [f"{times:.2f}x"]

def clocked(of, task, name, key="points"):
    return values(of + "overlap", (task, name), key)

def reached(points, target):
    """Seconds until the first accuracy of at least `target`; to the end, if there is none."""
    return next((s for _, s, score in points if score >= target), points[-1][1])

def speed_up(of, task, fmt):
    """(steps a second over one thread's, what the stages' times predict) of asynchronous runs."""
    one, both = f"sync {fmt}, 1 thread", f"async {fmt}, lag 1"
    stages = zip(clocked(of, task, one, "sample"), clocked(of, task, one, "train"))
    return (fmean(clocked(of, task, one, "step")) / fmean(clocked(of, task, both, "step")),
            fmean((a + b) / max(a, b) for a, b in stages))

def sooner(of, task, name, than):
    """log of (seconds of `than` / seconds of `name`) to 90 % of the gain of the synchronous BF16
    runs, a seed each; and that accuracy."""
    start = clocked(of, task, BETTER[0], "accuracy_base")[0]
    end = fmean(x for n in BETTER for x in clocked(of, task, n, "accuracy"))
    target = start + 0.9 * (end - start)
    times = {n: [reached(x, target) for x in clocked(of, task, n)] for n in {name, *than}}
    best = min(than, key=lambda n: fmean(times[n]))
    return [math.log(a / b) for a, b in zip(times[best], times[name])], target

def times_sooner(logs):
    """Geometric mean with its interval, and the mean of the ratios."""
    mid, lo, hi = (math.exp(x) for x in (interval(logs)[0], low(logs), high(logs)))
    return f"{mid:.2f} ({lo:.2f} to {hi:.2f}; mean {fmean(map(math.exp, logs)):.2f})"

def o9(of):
    """Overlap, in distillation (`full`): asynchronous FP8 reaches the accuracy (90 % of the gain of
    the synchronous BF16 runs) sooner than the better of the two synchronous BF16 settings: the
    interval of the geometric mean of the ratio of times is above 1, the mean itself at least 1.25;
    it ends less than 0.05 below it (paired interval); and BF16's speed-up over one thread is within
    15 % of (Ts + Tt) / max(Ts, Tt)."""
    good, said = 0, []
    for task in TASKS:
        (gain, target), (wide, _) = (sooner(of, task, f"async {fmt}, lag 1", BETTER)
                                     for fmt in ("fp8", "bf16"))
        faster, guess = speed_up(of, task, "bf16")
        ends = {n: clocked(of, task, n, "accuracy") for n in (*BETTER, "async fp8, lag 1")}
        apart = less(ends["async fp8, lag 1"], max((ends[n] for n in BETTER), key=fmean))
        if task == "opd":
            good += (low(gain) > 0) + (fmean(gain) >= math.log(1.25))
            good += (low(apart) > -TOLERANCE) + (abs(faster / guess - 1) < 0.15)
        said += [f"{task}, to accuracy {target:.2f}: async FP8 {times_sooner(gain)} times sooner, "
                 f"async BF16 {times_sooner(wide)}",
                 f"{task}: steps a second over one thread's {faster:.2f}, predicted {guess:.2f}",
                 f"{task}, accuracy at the end: {listed(ends)}"]
    told = []
    for n in (f"async bf16, lag {D}" for D in (1, 2, 4, 8)):
        step, lag = fmean(clocked(of, "opd", n, "step")), fmean(clocked(of, "opd", n, "lag"))
        told.append(f"{1e3 * step:.1f} ms a step, lag {lag:.4f} nats, accuracy "
                    f"{pm(clocked(of, 'opd', n, 'accuracy'))}")
    return good, 4, said + [f"opd, BF16, --lag 1, 2, 4, 8: {', '.join(told)}"]

def o9_fp8(of):
    """FP8's own share: asynchronous FP8 is sooner than asynchronous BF16 (interval of the geometric
    mean of the ratio of times above 1); distillation, RL. FP8 is emulated on a CPU."""
    logs = {t: sooner(of, t, "async fp8, lag 1", ["async bf16, lag 1"])[0] for t in TASKS}
    return sum(low(x) > 0 for x in logs.values()), 2, [
        ", ".join(f"{t} {times_sooner(x)}" for t, x in logs.items())]

CLAIMS = (c1, c2, c3, c3_short, c4, c5, c6, c6_updates, c7, c7_length, c8,
          o1, o2, o3, o4, o5, o6, o7, o8, o8_capacity, o9, o9_fp8)
IDENTITIES = (c5, o6, o8_capacity)  # tests of the code, no reproductions

def verdict(claim):
    """(word, lines) by the present task's logs, else by those of the sums."""
    for of in ("", SUMS):
        try:
            good, total, lines = claim(of)
        except (FileNotFoundError, StatisticsError):  # too few values
            continue
        word = f"partly ({good} of {total})" if good else "not reproduced"
        word = {None: "not shown", total: "reproduced"}.get(good, word)
        if claim in IDENTITIES:
            word = "test passes" if good == total else f"test FAILS ({good} of {total})"
        return word + ", on the sums" * (of == SUMS and claim not in IDENTITIES), lines
    return "not run", ["no log yet"]

def verdicts():
    """(name, verdict, lines of what was measured) of every claim."""
    for claim in CLAIMS:
        name, _, part = claim.__name__.partition("_")
        yield (f"{name.upper()} {part}".strip(), *verdict(claim))

def claims(_):
    for name, word, lines in verdicts():
        print(f"{name}: {word}\n   " + "\n   ".join(lines))

SWEEPS = dict(  # in the order of what decides most
    grid=grid, resync=resync, opd=opd_runs, stable=stable, gaps=gaps, updates=updates,
    centring=centring, lengths=functools.partial(rules_of, LENGTHS),  # C7 by length
    doubled=functools.partial(grid, lr=2 * RATE))  # with 4 seeds
COMMANDS = dict(bases=bases, probes=probes, overlap=overlap, claims=claims)

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SWEEPS, *COMMANDS])
    parser.add_argument("--seeds", type=int, help="runs of a cell (8; of doubled 4)")
    args = parser.parse_args()
    os.chdir(HERE.parent)  # the tiny bases are cached under runs/
    seeds = args.seeds or (SEEDS // 2 if args.what == "doubled" else SEEDS)
    if args.what in SWEEPS:
        return sweep(args.what, SWEEPS[args.what], seeds)
    COMMANDS[args.what](seeds)

if __name__ == "__main__":
    main()
