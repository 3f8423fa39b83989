"""The papers' claims, each an experiment: runs with seeds, kept row by row, and verdicts recomputed from them.

    python notebooks/experiments.py tune                # learning rate of each correction, on the control
    python notebooks/experiments.py compare --seeds 8   # regimes x corrections x seeds; about an hour on 2 cores
    python notebooks/experiments.py gaps --seeds 8      # discrepancy, lag and ESS against steps since the sync
    python notebooks/experiments.py updates --seeds 8   # PPO with four updates a batch; IS and SC under a short lag
    python notebooks/experiments.py drift --seeds 8     # score centering's own setting, by exact gradients
    python notebooks/experiments.py resync --seeds 8    # three model sizes: when the ESS falls; fixed intervals or the rule
    python notebooks/experiments.py opd_tune            # learning rate of the two distillation losses
    python notebooks/experiments.py probes              # mismatch of every configuration, before any training; no seeds
    python notebooks/experiments.py opd --seeds 8       # quality against mismatch, three pairs, admission, recipes
    python notebooks/experiments.py stable --seeds 8    # distillation in the regimes of `compare`
    python notebooks/experiments.py overlap --seeds 8   # wall-clock of --async; half an hour on a machine that does nothing else
    python notebooks/experiments.py claims              # C1 ... C8 and O1 ... O9 from the logs in notebooks/data/
    python notebooks/experiments.py figures             # notebooks/figures/ from the same logs

Every finished run is one line of notebooks/data/NAME.jsonl, appended at once; a second call runs only what is
missing. A run takes one core. The regimes and criteria below were written before the runs they judge.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dlc  # noqa: E402
import opd  # noqa: E402
from sampler import TorchSampler, mismatch  # noqa: E402

DATA, FIGURES = HERE / "data", HERE / "figures"

# The tiny task's stand-ins for the papers' regimes. int3 plays the part that FP8 plays in a large model.
REGIMES = {
    "control": dict(weights="bf16", kv="bf16", sync_every=1),
    "discrepancy": dict(weights="int3", kv="bf16", sync_every=1),
    "lag": dict(weights="bf16", kv="bf16", sync_every=16),
    "both": dict(weights="int3", kv="bf16", sync_every=16),
}
# Equal by identity when one update is made a batch: the cell on the left is the run on the right.
SAME = {
    "control": dict(ppo_anchor="reinforce", ppo_stale="reinforce", dlc="sc", dlc_tis="tis_sc"),
    "lag": dict(ppo_anchor="reinforce"),
}
SAME |= {"discrepancy": SAME["control"], "both": SAME["lag"]}
SEEDS = 8  # a claim from fewer is no claim
RATES = (1e-4, 2e-4, 4e-4)
CURVES = ("reward", "discrepancy", "lag", "ess", "ess_token", "clip_share", "cap_share", "teacher_kl",
          "ess_1", "ess_2", "ess_3", "ess_4")  # fmt: skip
# Models by size: layers x width, trained until about a quarter of the sums are right. With a teacher: the three pairs.
SIZES = {"2x32": dict(steps=1075, width=32, layers=2), "3x64": {}, "4x128": dict(steps=260, width=128, layers=4)}
TEACHERS = {"2x32": dict(steps=1200), "3x64": dict(steps=1200), "4x128": dict(steps=350, width=128, layers=4)}
LEVELS = (0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6)  # noise, in standard deviations of each matrix; 0.05 and 0.1 came later
OPD_RATES, OPD_STEPS, TOLERANCE = (6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3), {"2x32": 150, "3x64": 150, "4x128": 75}, 0.05
TINY, MEASURE = dlc.tiny_base, dlc.measure


@functools.cache
def parsed(path, changed):
    return [json.loads(line) for line in path.open()]


def rows(name):
    """The runs logged so far, read again only if the log has changed: a claim asks hundreds of times."""
    path = DATA / f"{name}.jsonl"
    return parsed(path, path.stat().st_mtime_ns) if path.exists() else []


def by_length(rollout, logp, head_logp, cap):
    """What dlc.measure gives, and the ESS of the responses' first t tokens, t = 1 ... 4."""
    row, T = MEASURE(rollout, logp, head_logp, cap), rollout.mask.shape[1]
    first = {f"ess_{t}": rollout.mask & (torch.arange(T) < t) for t in range(1, T + 1)}
    return row | {k: dlc.ess(logp - rollout.logp_stale, keep) for k, keep in first.items()}


def quietly(module, config):
    """The steps of module.train, without a word, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return module.train(module.Config(out=folder + "/run", save_every=10**9, device="cpu", **config))


def one_run(job):
    """Train `job["config"]` quietly in a folder that is thrown away; the summary that is logged. With a teacher
    it is opd.train, else dlc.train; `base` and `teacher` are arguments of tiny_base."""
    torch.set_num_threads(1)
    base, module = TINY(**job.get("base", {})), opd if "teacher" in job else dlc
    teacher = TINY(**job["teacher"]) if "teacher" in job else None
    dlc.tiny_base = opd.tiny_base = lambda steps=350: teacher if steps == 1200 else base
    dlc.measure = by_length
    steps = quietly(module, job["config"])
    thin = job.get("thin", 10)  # steps averaged into one point of a curve
    bins = [steps[i : i + thin] for i in range(0, len(steps), thin)]
    keys = [k for k in CURVES if k in steps[0] and (k[-2] != "_" or thin == 1)]
    curves = {k: [round(statistics.fmean(r[k] for r in b), 5) for b in bins] for k in keys}
    reward = [statistics.fmean(r["reward"] for r in steps[i : i + 20]) for i in range(0, len(steps) - 19, 5)]
    dip = max((max(reward[: i + 1]) - x for i, x in enumerate(reward)), default=0.0)
    last = {k: v for k, v in steps[-1].items() if k.startswith("accuracy")}
    return job | last | dict(syncs=sum(r["synced"] for r in steps), dip=round(dip, 4), ess_end=steps[-1]["ess"],
                             seconds=round(sum(r["seconds_sample"] + r["seconds_train"] for r in steps), 1),
                             torch=torch.__version__, curves=curves)  # fmt: skip


def run_all(name, jobs):
    """Run the jobs that notebooks/data/NAME.jsonl lacks, one a core; append each as it ends."""
    DATA.mkdir(exist_ok=True)
    key = lambda job: json.dumps([job["cell"], job["config"], job.get("base"), job.get("teacher")], sort_keys=True)
    done = {key(r) for r in rows(name)}
    todo = [j for j in jobs if key(j) not in done]
    for base in {json.dumps(j.get(k, {})) for j in todo for k in ("base", "teacher")}:
        TINY(**json.loads(base))  # made once, before the workers need it
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool, (DATA / f"{name}.jsonl").open("a") as log:
        try:
            for future in tqdm(as_completed([pool.submit(one_run, j) for j in todo]), total=len(todo), desc=name):
                print(json.dumps(future.result()), file=log, flush=True)
        except KeyboardInterrupt:
            for worker in pool._processes.values():  # else leaving the pool would first run all that is queued
                worker.kill()
            print(f"{name}: stopped; the same command goes on", file=sys.stderr)
            sys.exit(130)


def interval(values):
    """Mean and half-width of the 95 % interval (Student's t)."""
    n = len(values)
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(n, 2.0)
    return statistics.fmean(values), t * statistics.stdev(values) / n**0.5 if n > 1 else float("nan")


def tune(seeds):
    """Learning rate of each correction, alike for all: the best mean final accuracy on the control."""
    jobs = [dict(cell=[c, lr], config=dict(correction=c, lr=lr, steps=300, seed=100 + s, **REGIMES["control"]))
            for s in range(seeds) for c in dlc.CORRECTIONS if c not in SAME["control"] for lr in RATES]  # fmt: skip
    run_all("tune", jobs)
    for c in dlc.CORRECTIONS:
        print(f"{c:12} {best_rate(c)}")


def best_rate(correction):
    correction = SAME["control"].get(correction, correction)
    found = {lr: [r["accuracy"] for r in rows("tune") if r["cell"] == [correction, lr]] for lr in RATES}
    return max(found, key=lambda lr: statistics.fmean(found[lr] or [0]))


def compare(seeds):
    """The grid: every regime, every correction, every seed; one run for the cells that are equal by identity."""
    jobs = [dict(cell=[regime, c], config=dict(correction=c, lr=best_rate(c), steps=300, seed=s, **setting))
            for s in range(seeds) for regime, setting in REGIMES.items()
            for c in dlc.CORRECTIONS if c not in SAME[regime]]  # fmt: skip
    # DLC with its own rule instead of the fixed interval, and IS while the lag is short
    for s in range(seeds):
        for regime in ("lag", "both"):
            setting = REGIMES[regime] | dict(sync_every=None, sync_ess=0.5)
            jobs += [dict(cell=[regime + ", ESS rule", c], config=dict(correction=c, lr=best_rate(c), steps=300, seed=s, **setting))
                     for c in ("dlc", "dlc_tis")]  # fmt: skip
    run_all("compare", jobs)
    table("compare")
    figures(None)  # compare.png among them


def table(name):
    print(f"{'regime':20}{'correction':13}{'trainer':>15}{'its sampler':>17}{'worst dip':>11}{'syncs':>7}{'ESS at end':>11}   n")
    found = rows(name)
    for cell in sorted({tuple(r["cell"]) for r in found}, key=lambda c: list(map(str, c))):
        runs = [r for r in found if tuple(r["cell"]) == cell]
        (a, da), (b, db) = (interval([r[k] for r in runs]) for k in ("accuracy", "accuracy_sampler"))
        mean = lambda k: statistics.fmean(r[k] for r in runs)
        print(f"{str(cell[0]):20}{cell[1]:13}{a:8.3f} ± {da:.3f}{b:9.3f} ± {db:.3f}{mean('dip'):11.3f}{mean('syncs'):7.0f}"
              f"{mean('ess_end'):11.3f}{len(runs):4d}")  # fmt: skip


def gaps(seeds):
    """Discrepancy, lag, ESS and the share of ratios above the cap, step by step: sync at 1, 8 or never, with a clip
    (dlc) and without one (tis): the first runs, with dlc alone, showed that a clip holds the lag down."""
    jobs = [dict(cell=[fmt, sync] + ([c] if c != "dlc" else []), thin=1,
                 config=dict(correction=c, lr=2e-4, steps=65, seed=s, weights=fmt, kv="bf16", sync_every=sync))
            for c in ("dlc", "tis") for s in range(seeds) for fmt in ("fp8", "int3") for sync in (1, 8, 0)]  # fmt: skip
    run_all("gaps", jobs)


def updates(seeds):
    """C6: PPO's three references with four optimizer updates a batch, both gaps. C3: IS and SC under a short lag."""
    jobs = []
    for s in range(seeds):
        more = dict(lr=best_rate("ppo_stale"), steps=150, minibatches=4, seed=s, **REGIMES["both"])
        for title, how in (("both, 4 updates", more), ("both, 4 updates, rate / 4", more | dict(lr=more["lr"] / 4))):
            jobs += [dict(cell=[title, c], config=dict(correction=c, **how)) for c in ("ppo_anchor", "ppo_stale", "ppo_sampler")]
        short = REGIMES["lag"] | dict(sync_every=4)
        jobs += [dict(cell=["short lag", c], config=dict(correction=c, lr=best_rate(c), steps=300, seed=s, **short)) for c in ("is", "sc")]
    run_all("updates", jobs)
    table("updates")


def resync(seeds):
    """C7: steps until the ESS falls below one half without a sync; then quality and syncs of intervals and of the rule."""
    how = dict(lr=best_rate("dlc"), weights="fp8", kv="bf16")
    jobs = [dict(cell=[size, "never", c], base=base, thin=1, config=dict(correction=c, steps=40, sync_every=0, seed=s, **how))
            for s in range(seeds) for size, base in SIZES.items() for c in ("tis", "dlc")]  # fmt: skip
    rules = {f"every {n}": dict(sync_every=n) for n in (1, 4, 16, 64)} | {"ESS < 1/2": dict(sync_ess=0.5)}
    jobs += [dict(cell=[size, rule], base=base, config=dict(correction="dlc", steps=96, seed=s, **how, **sync))
             for s in range(seeds) for size, base in SIZES.items() for rule, sync in rules.items()]  # fmt: skip
    run_all("resync", jobs)


def drift(seeds):
    """Score centering's own setting, without sampling noise: a table of logits, V = 4, T = 3, rewards of -1 and +1
    with no baseline, a constant discrepancy, q = softmax(logits + offset), and thousands of synchronous steps on
    the expected gradient that `exact_bias` returns; plain SGD and Adam. A row is the expected reward under π."""
    name, total, V, T = "drift", 2000, 4, 3
    done = {json.dumps(r["cell"]) for r in rows(name)}
    DATA.mkdir(exist_ok=True)
    todo = [(s, o, c) for s in range(seeds) for o in ("sgd", "adam") for c in ("reinforce", "is", "sc", "tis_sc") if json.dumps([o, c, s]) not in done]
    torch.set_num_threads(1)
    for s, optimizer, c in tqdm(todo, desc=name):
        g = torch.Generator().manual_seed(s)
        table = lambda scale: [scale * torch.randn((V,) * (t + 1), generator=g).double() for t in range(T)]
        p, offset = table(0.5), table(0.7)
        R = (torch.rand((V,) * T, generator=g) < 0.3).double() * 2 - 1
        flat = torch.cat([x.flatten() for x in p]).requires_grad_()
        step = torch.optim.SGD([flat], lr=0.5) if optimizer == "sgd" else torch.optim.Adam([flat], lr=0.02)
        sizes, curve = [x.numel() for x in p], []
        for i in range(total + 1):
            p = [x.view((V,) * (t + 1)) for t, x in enumerate(flat.detach().split(sizes))]
            if i % 100 == 0:
                prob = sum(x.log_softmax(-1).view(x.shape + (1,) * (T - x.dim())) for x in p).exp()
                curve.append(round(float((prob * R).sum()), 5))
            flat.grad = -dlc.exact_bias(c, p, [a + b for a, b in zip(p, offset)], R)["estimate"]
            step.step()
        with (DATA / f"{name}.jsonl").open("a") as log:
            print(json.dumps(dict(cell=[optimizer, c, s], curve=curve)), file=log, flush=True)


# On-policy distillation. A cell is (pair, loss, label of the rollout configuration).


def label(how):
    return " ".join(f"{k} {v}" for k, v in how.items())


def distil(pair, loss, seed, how, steps=None, thin=15, **more):
    """A job: train the pair's student with rollouts as `how` says; with no lag named, synchronous."""
    sync = {} if {"lag", "sync_every"} & set(how) else dict(sync_every=1)
    config = dict(loss=loss, lr=more.pop("lr", None) or best_opd_rate(loss), steps=steps or OPD_STEPS[pair], seed=seed, **how, **sync)
    return dict(cell=[pair, loss, label(how)], base=SIZES[pair], teacher=TEACHERS[pair], thin=thin, config=config | more)


def clean(noise=0):
    return dict(weights="bf16", kv="bf16", noise=noise)


def opd_tune(seeds):
    """Learning rate of the two losses, alike: the best mean final accuracy of the clean run, 3 seeds."""
    run_all("opd_tune", [distil("3x64", loss, 100 + s, clean(), lr=lr) for s in range(3) for loss in ("full", "sampled") for lr in OPD_RATES])


def best_opd_rate(loss):
    found = {lr: [r["accuracy"] for r in rows("opd_tune") if r["cell"][1] == loss and r["config"]["lr"] == lr] for lr in OPD_RATES}
    return max(found, key=lambda lr: statistics.fmean(found[lr] or [0]))


def recipe_of(pair):
    """The modules that the recipe of opd.py keeps: the fewest that bring uniform FP8 to half of its mismatch."""
    return next((dict(weights="fp8", kv="fp8", keep_bf16=",".join(r["keep"])) for r in rows("probes") if r["cell"] == [pair, "recipe"]), None)


def probes(_):
    """Every configuration's mismatch with the untrained student, as the admission check measures it; each layer's
    sensitivity and the recipe; leaving out layers at random; and the sequence KL of noise, over 8 draws of it."""
    torch.set_num_threads(1)
    out = []
    for pair, base in SIZES.items():
        student = TINY(**base)
        opd.tiny_base = lambda steps=350: student
        cfg = opd.check(opd.Config(device="cpu"))
        model, _, data = opd.untrained(cfg)
        named = [clean(n) for n in LEVELS] + [{k: v for k, v in how.items() if k != "lag"} for how in json.loads((DATA / "admission.json").read_text())]
        for how in {json.dumps(h): h for h in named}.values():
            keep = dlc.keep_list(how.get("keep_bf16", ""), model)
            out.append(dict(cell=[pair, label(how)], kl=opd.probe(cfg, model, data, **how | dict(keep_bf16=keep))))
        order = opd.sensitivity(cfg)
        out.append(dict(cell=[pair, "sensitivity"], order=order))
        uniform = opd.probe(cfg, model, data)
        found = opd.recipe(dataclasses.replace(cfg, target=uniform / 2), order)
        out.append(dict(cell=[pair, "recipe"], keep=found["keep_bf16"], kl=found["mismatch"], uniform=uniform))
        g, names = torch.Generator().manual_seed(0), [n for n, _ in order]
        picks = [[names[i] for i in torch.randperm(len(names), generator=g)[: len(found["keep_bf16"])]] for _ in range(16)]
        out.append(dict(cell=[pair, "random"], kl=[opd.probe(cfg, model, data, keep_bf16=keep) for keep in picks]))
        for sigma in LEVELS:
            kls = []
            for s in range(8):
                q = TorchSampler(model, "bf16", "bf16", noise=sigma, seed=s)
                drawn = q.sample([r["ids"] for r in data[:256]], 4, seed=s)
                gap = mismatch(drawn.logp_stale, drawn.logq, drawn.mask, drawn.head_logp_stale, drawn.head_logq)
                kls.append(gap["kl"] * gap["tokens"] / len(drawn.mask))  # chain rule: Σ_t KL_t, a mean over responses
            out.append(dict(cell=[pair, "sequence KL"], sigma=sigma, kl=kls))
    dlc.write(DATA / "probes.jsonl", lambda new: new.write_text("".join(json.dumps(r) + "\n" for r in out)))


def opd_runs(seeds):
    """O1-O3, O7, O8: quality of noise levels, formats and lags; three pairs; the admission configurations; recipes."""
    configurations = json.loads((DATA / "admission.json").read_text())
    jobs = [distil("3x64", "sampled", 0, clean() | dict(sync_every=0), steps=33, thin=1)]  # lag -> mismatch
    for s in range(seeds):
        jobs += [distil("3x64", "sampled", s, how) for how in [clean(n) for n in LEVELS] + configurations]
        jobs += [distil("3x64", "full", s, how) for how in [clean(n) for n in LEVELS] + [configurations[i] for i in (10, 14)]]
    for s in range(seeds):
        for pair in SIZES:
            levels = () if pair == "3x64" else (0, 0.4, 0.8, 1.2)
            more = [recipe_of(pair)] + ([] if pair == "3x64" else [dict(weights="fp8", kv="fp8")])
            jobs += [distil(pair, "sampled", s, how) for how in [clean(n) for n in levels] + more]
    run_all("opd", jobs)


def stable(seeds):
    """O5: the two losses in the regimes of `compare`: same student, data, batch and number of updates."""
    jobs = [distil("3x64", loss, s, REGIMES[r] | dict(noise=0), steps=300, group_size=8) | dict(cell=[r, loss])
            for s in range(seeds) for r in ("discrepancy", "lag", "both") for loss in ("full", "sampled")]  # fmt: skip
    run_all("stable", jobs)


# O9: what runs by the clock: threads (with --async each process takes half of them) and options.
NARROW, WIDE = dict(weights="fp8", kv="fp8"), dict(weights="bf16", kv="bf16")
CLOCK = {"sync bf16, 1 thread": (1, WIDE | dict(sync_every=1)), "sync bf16, 2 threads": (2, WIDE | dict(sync_every=1)),
         "sync fp8, 1 thread": (1, NARROW | dict(sync_every=1)), "sync fp8, 2 threads": (2, NARROW | dict(sync_every=1)),
         "async fp8, lag 1": (2, NARROW | dict(async_=True, max_lag=1))}  # fmt: skip
CLOCK |= {f"async bf16, lag {D}": (2, WIDE | dict(async_=True, max_lag=D)) for D in (1, 2, 4, 8)}
TASKS = {"opd": list(CLOCK), "rl": [n for n in CLOCK if n[-1] not in "248"]}


def timed(job):
    """A run by the clock: seconds after step 0 (where processes start) of every tenth step, and the held-out accuracy there,
    measured when the run is over, on weights kept until then, so that the clock does not see it."""
    torch.set_num_threads(job["threads"])
    module, marks, end_step = opd if "loss" in job["config"] else dlc, [], dlc.Run.end_step

    def marked(run, row, *rest):
        line = end_step(run, row, *rest)
        marks.append((time.perf_counter(), run, copy.deepcopy(run.model.state_dict()) if row["step"] % 10 == 9 else None))
        return line

    dlc.Run.end_step = marked
    try:
        steps = quietly(module, job["config"])
    finally:
        dlc.Run.end_step = end_step
    points = []
    for i, (at, run, weights) in enumerate(marks):
        if weights:
            run.model.load_state_dict(weights)
            score = dlc.accuracy(TorchSampler(run.model, "none", "none"), run.held_out, run.tokenizer, run.cfg)
            points.append([i, round(at - marks[0][0], 4), score])
    middle = lambda key: statistics.median(r[key] for r in steps[1:-1])  # the last step also saves
    step = statistics.median(b[0] - a[0] for a, b in zip(marks[:-2], marks[1:-1]))
    return job | dict(step=step, sample=middle("seconds_sample"), train=middle("seconds_train"), points=points,
                      wait=middle("seconds_wait") if "async_" in job["config"] else None, lag=statistics.fmean(r["lag"] for r in steps),
                      accuracy=steps[-1]["accuracy"], accuracy_base=steps[-1]["accuracy_base"], torch=torch.__version__)  # fmt: skip


def overlap(seeds):
    """O9, one run at a time, the settings in turn for every seed."""
    tasks = {"opd": dict(loss="full", lr=best_opd_rate("full"), steps=150), "rl": dict(correction="dlc", lr=best_rate("dlc"), steps=150)}
    TINY(), TINY(steps=1200)
    done = [[r["cell"], r["config"]["seed"]] for r in rows("overlap")]
    todo = [(s, task, name) for s in range(seeds) for task in tasks for name in TASKS[task] if [[task, name], s] not in done]
    for s, task, name in tqdm(todo, desc="overlap"):
        threads, how = CLOCK[name]
        row = timed(dict(cell=[task, name], threads=threads, config=tasks[task] | how | dict(seed=s)))
        with (DATA / "overlap.jsonl").open("a") as log:
            print(json.dumps(row), file=log, flush=True)


def slope(values):
    """Least-squares slope of a list against its index."""
    x = torch.arange(len(values)).double()
    y = torch.tensor(values).double()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def cell(regime, correction, key="accuracy"):
    """The values of a cell of the grid over its seeds; for a cell equal by identity, its run's."""
    correction = SAME.get(regime, {}).get(correction, correction)
    return [r[key] for r in rows("compare") if r["cell"] == [regime, correction]]


def base():
    return rows("compare")[0]["accuracy_base"]


# Each returns (verdict, the measured numbers) from the logs, or None while a log is missing. What would make it
# "reproduced" is the condition in the code, and was written before the runs.


def c1():
    """Discrepancy about constant, lag grows: over 64 steps without a sync the lag's slope is above 0 (interval), and with a
    sync after every step, so that q is made anew, the discrepancy moves by less than a tenth of that; for both formats, with
    a clip and without one. (Without a sync q and π_stale stand still, so that their gap is constant by construction.)"""
    good, said = 0, []
    for name, more in (("dlc, clipped", []), ("tis", ["tis"])):
        for fmt in ("fp8", "int3"):
            runs, synced = ([r["curves"] for r in rows("gaps") if r["cell"] == [fmt, sync, *more]] for sync in (0, 1))
            if len(runs) < 2:
                return None
            (lag, dl), (disc, dd) = interval([slope(c["lag"]) for c in runs]), interval([slope(c["discrepancy"]) for c in synced])
            level = [statistics.fmean(statistics.fmean(c[k]) for c in x) for k, x in (("lag", runs), ("discrepancy", synced))]
            good += lag - dl > 0 and abs(disc) < lag / 10
            said.append(f"{name}, {fmt}: lag {lag:+.1e} ± {dl:.0e} nats a token a step about {level[0]:.3f}, discrepancy "
                        f"{disc:+.1e} ± {dd:.0e} about {level[1]:.3f}")  # fmt: skip
    return good, 4, "; ".join(said) + f"; n = {len(runs)}"


def learns(values):
    mean, half = interval(values)
    return mean - half > base()


def show(regime, names, key="accuracy"):
    return ", ".join("{} {:.2f} ± {:.2f}".format(c, *interval(cell(regime, c, key))) for c in names)


def c2():
    """Quantised and synchronous: SC and IS learn (interval above the base), each PPO ends below the base."""
    names = ("sc", "is", "tis", "ppo_sampler", "ppo_stale", "ppo_anchor")
    if any(len(cell("discrepancy", c)) < SEEDS for c in names):
        return None
    below = [statistics.fmean(cell("discrepancy", c)) < base() for c in names[3:]]
    return learns(cell("discrepancy", "sc")) + learns(cell("discrepancy", "is")) + any(below), 3, show("discrepancy", names)


def c3():
    """Under lag IS ends above SC, and PPO against the sampler's weights learns; while the lag is short (a sync every 4
    steps) IS learns, as it does under the discrepancy."""
    names = ("sc", "is", "tis", "ppo_stale", "reinforce")
    short = {c: [r["accuracy"] for r in rows("updates") if r["cell"] == ["short lag", c]] for c in ("is", "sc")}
    if any(len(cell("lag", c)) < SEEDS for c in names) or any(len(v) < SEEDS for v in short.values()):
        return None
    difference, half = interval([a - b for a, b in zip(cell("lag", "is"), cell("lag", "sc"))])
    said = show("lag", names) + f"; is - sc {difference:+.2f} ± {half:.2f}; short lag: "
    said += ", ".join("{} {:.2f} ± {:.2f}".format(c, *interval(v)) for c, v in short.items())
    good = (difference - half > 0) + learns(cell("lag", "ppo_stale")) + (learns(short["is"]) and learns(cell("discrepancy", "is")))
    return good, 3, said


def c4():
    """IS expires: without a clip and without a sync the ESS over responses falls below one half within 64 steps in most
    runs, and the share of ratios above the cap grows."""
    runs = [r["curves"] for r in rows("gaps") if r["cell"] == ["fp8", 0, "tis"]]
    if len(runs) < 2:
        return None
    first = [next((i for i, x in enumerate(c["ess"]) if x < 0.5), None) for c in runs]
    late, half = interval([statistics.fmean(c["cap_share"][-16:]) - statistics.fmean(c["cap_share"][1:9]) for c in runs])
    token = statistics.fmean(statistics.fmean(c["ess_token"][-8:]) for c in runs)
    said = f"ESS over responses below 1/2 at steps {first}; over tokens {token:.2f} at the end; share above the cap {late:+.3f} ± {half:.3f}"
    return (sum(x is not None for x in first) > len(runs) / 2) + (late - half > 0), 2, said


def random_gap(scale, seed=1):
    """(p, q, rewards) on V = 4, T = 3: logits from a normal, and q's `scale` normals away from them."""
    g = torch.Generator().manual_seed(seed)
    table = lambda s: [s * torch.randn((4,) * (t + 1), generator=g).double() for t in range(3)]
    p, offset = table(1.0), table(1.0)
    return p, [a + scale * b for a, b in zip(p, offset)], torch.rand(4, 4, 4, generator=g).double()


def c5():
    """Exactly: SC has no drift with the whole vocabulary and keeps `token` (equal to REINFORCE's); IS has neither. The
    drift that SC leaves grows as the head shrinks; it and `token` grow with the mismatch."""
    norms = lambda c, scale=0.1, **how: {k: float(v.norm()) for k, v in dlc.exact_bias(c, *random_gap(scale), **how).items()}
    norm = {c: norms(c) for c in ("reinforce", "sc", "is")}
    apart = dlc.exact_bias("sc", *random_gap(0.1))["token"] - dlc.exact_bias("reinforce", *random_gap(0.1))["token"]
    heads = [norms("sc", head_k=k)["drift"] for k in (4, 3, 2, 1)]
    wide = [norms("sc", scale)["token"] for scale in (0.1, 0.3, 1.0)]
    good = (norm["sc"]["drift"] < 1e-14) + (norm["sc"]["token"] > 1e-6 and float(apart.norm()) < 1e-14)
    good += (norm["is"]["token"] < 1e-14 and norm["is"]["drift"] < 1e-14) + (heads == sorted(heads) and wide == sorted(wide))
    size = lambda x: f"{x:.1e}" if x > 1e-14 else "0"
    said = "; ".join(f"{c}: token {size(n['token'])} drift {size(n['drift'])}" for c, n in norm.items())
    return good, 4, said + f"; sc, drift at K = 4, 3, 2, 1: {', '.join(map(size, heads))}; sc, token at a gap of 0.1, 0.3, 1: {', '.join(map(size, wide))}"


def drift_said():
    """The expected reward after 200 and 2,000 exact steps, with the drift (reinforce) and without it (sc)."""
    found = {(o, c): [r["curve"] for r in rows("drift") if r["cell"][:2] == [o, c]] for o in ("sgd", "adam") for c in ("reinforce", "is", "sc", "tis_sc")}
    if any(len(v) < SEEDS for v in found.values()):
        return ""
    return "; ".join(f"rewards ±1, no baseline, {o}, after {n} steps: " + ", ".join(
        "{} {:+.2f} ± {:.2f}".format(c, *interval([x[n // 100] for x in found[o, c]])) for c in ("reinforce", "is", "sc", "tis_sc"))
        for o in ("sgd", "adam") for n in (200, 2000))  # fmt: skip


def c6():
    """PPO's reference matters: with both gaps, the best and the worst reference differ by more than their intervals,
    with one update a batch (where the anchor is REINFORCE by identity) and with four."""
    names = ("ppo_anchor", "ppo_stale", "ppo_sampler")
    one = {c: cell("both", c) for c in names}
    four = {c: [r["accuracy"] for r in rows("updates") if r["cell"] == ["both, 4 updates", c]] for c in names}
    if any(len(v) < SEEDS for v in (*one.values(), *four.values())):
        return None
    good, said = 0, []
    quarter = {c: [r["accuracy"] for r in rows("updates") if r["cell"] == ["both, 4 updates, rate / 4", c]] for c in names}
    for title, found in (("1 update", one), ("4 updates", four), ("4 updates at a quarter of the rate", quarter)):
        if any(len(v) < SEEDS for v in found.values()):
            continue
        (low, a), (high, b) = min(map(interval, found.values())), max(map(interval, found.values()))
        good += high - b > low + a and found is not quarter  # added after seeing that at the full rate all three fall
        said.append(title + ": " + ", ".join("{} {:.2f} ± {:.2f}".format(c, *interval(v)) for c, v in found.items()))
    return good, 2, "; ".join(said)


def crossings(size, correction, key="ess"):
    """The first step at which the ESS is below one half, for each seed; 40 if it is not reached."""
    runs = [r["curves"][key] for r in rows("resync") if r["cell"] == [size, "never", correction]]
    return [next((i for i, x in enumerate(c) if x < 0.5), 40) for c in runs]


def c7():
    """The step at which the ESS over responses crosses one half (40: not reached) differs by model: the intervals of two
    sizes do not meet; longer responses cross sooner; and for some size each fixed interval is late (worse than the rule by
    more than the paired interval) or wasteful (no better, and more syncs)."""
    rules = ("every 1", "every 4", "every 16", "every 64", "ESS < 1/2")
    runs = {(size, rule): [r for r in rows("resync") if r["cell"] == [size, rule]] for size in SIZES for rule in rules}
    if any(len(v) < SEEDS for v in runs.values()) or any(len(crossings(size, "tis")) < SEEDS for size in SIZES):
        return None
    cross = {size: interval(crossings(size, "tis")) for size in SIZES}
    (low, a), (high, b) = min(cross.values()), max(cross.values())
    lengths = {size: [interval(crossings(size, "tis", f"ess_{t}"))[0] for t in (1, 2, 3, 4)] for size in SIZES}
    good, said, beaten = (high - b > low + a) + all(x[0] > x[3] for x in lengths.values()), [], False
    for size in SIZES:
        tokens = interval(crossings(size, "tis", "ess_token"))
        clipped = interval(crossings(size, "dlc"))
        said.append(f"{size}: ESS below 1/2 at step {cross[size][0]:.1f} ± {cross[size][1]:.1f}; by the first 1, 2, 3, 4 tokens "
                    f"{', '.join(f'{x:.1f}' for x in lengths[size])}; over tokens {tokens[0]:.1f} ± {tokens[1]:.1f}, dlc's clip on {clipped[0]:.1f}")  # fmt: skip
        rule, verdicts = runs[size, rules[-1]], []
        for name in rules[:-1]:
            less, half = interval([x["accuracy"] - y["accuracy"] for x, y in zip(rule, runs[size, name])])
            more = runs[size, name][0]["syncs"] > statistics.fmean(r["syncs"] for r in rule)
            verdicts.append("late" if less - half > 0 else "better" if less + half < 0 else "wasteful" if more else "")
        beaten |= set(verdicts) <= {"late", "wasteful"}
        said.append(f"{size}: " + ", ".join("{} {:.2f} ± {:.2f} ({:.0f} syncs{})".format(
            name, *interval([r["accuracy"] for r in runs[size, name]]), statistics.fmean(r["syncs"] for r in runs[size, name]), f", {v}" * bool(v))
            for name, v in zip(rules, [*verdicts, ""])))  # fmt: skip
    return good + beaten, 3, "; ".join(said)


def c8():
    """DLC holds in both regimes: it learns (interval above the base) under discrepancy, under lag, and under both, its
    own rule deciding the syncs."""
    cells = [("discrepancy", "dlc"), ("lag, ESS rule", "dlc"), ("both, ESS rule", "dlc")]
    if any(len(cell(*c)) < SEEDS for c in cells):
        return None
    extra = "; dlc_tis " + ", ".join("{:.2f} ± {:.2f}".format(*interval(cell(r, "dlc_tis"))) for r, _ in cells)
    return sum(learns(cell(*c)) for c in cells), 3, "; ".join(r + ": " + show(r, ["dlc"]) for r, _ in cells) + extra


def quality(pair, loss, how, key="accuracy"):
    return [r[key] for r in rows("opd") if r["cell"] == [pair, loss, label(how)]]


def kl_of(pair, how):
    """Mismatch before training: the probe of formats and noise, and the lag's share from the clean run's curve."""
    numerics = {k: v for k, v in how.items() if k != "lag"}
    lag = next((r["curves"]["lag"] for r in rows("opd") if "sync_every 0" in r["cell"][2]), None)
    found = [r["kl"] for r in rows("probes") if r["cell"] == [pair, label(numerics)]]
    return found[0] + max(lag[: how.get("lag", 0) + 1]) if found and lag else None


def noise_curve(pair, loss, levels=LEVELS):
    return [dict(noise=n, mismatch=kl_of(pair, clean(n)), quality=quality(pair, loss, clean(n))) for n in levels]


def others():
    return json.loads((DATA / "admission.json").read_text())


def missing_opd():
    need = [("3x64", loss, clean(n)) for loss in ("full", "sampled") for n in LEVELS] + [("3x64", "sampled", how) for how in others()]
    return kl_of("3x64", clean(0)) is None or any(len(quality(*x)) < SEEDS for x in need)


def ranks(x):
    return torch.tensor(x).argsort().argsort().double()


def o1():
    """One scale: over the formats, KV formats, lags and mixtures, the mismatch before training orders the quality after it
    (Spearman below -0.7, `sampled`), and the curve of the noise levels predicts that quality at least twice as well
    (mean absolute error) as their own mean does."""
    if missing_opd():
        return None
    x = [kl_of("3x64", how) for how in others()]
    y = [statistics.fmean(quality("3x64", "sampled", how)) for how in others()]
    rho = float(torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1])
    curve = noise_curve("3x64", "sampled")
    opd.within(curve, TOLERANCE)
    guess = [next((r["fitted"] for r in reversed(curve) if r["mismatch"] <= k), curve[0]["fitted"]) for k in x]
    error, spread = statistics.fmean(abs(a - b) for a, b in zip(guess, y)), statistics.fmean(abs(b - statistics.fmean(y)) for b in y)
    said = f"{len(x)} configurations of {min(x):.4f} to {max(x):.2f} nats; Spearman {rho:+.2f}; error of the noise curve {error:.3f}, of the mean {spread:.3f}"
    return (rho < -0.7) + (error < spread / 2), 2, said


def o2():
    """Flat, then falling: some noise costs nothing (its interval meets the clean run's) and the strongest costs more than
    both intervals; for each loss. The budget is the largest mismatch within 0.05 of the clean quality."""
    if missing_opd():
        return None
    good, said = 0, []
    for loss in ("sampled", "full"):
        curve = noise_curve("3x64", loss)
        budget, censored = opd.within(curve, TOLERANCE)
        found = [interval(r["quality"]) for r in curve]
        meets = lambda a, b: a[0] + a[1] >= b[0] - b[1]
        good += any(meets(x, found[0]) for x in found[1:]) and not meets(found[-1], found[0])
        said.append(f"{loss}: " + ", ".join("{:.3f} nats {:.2f} ± {:.2f}".format(r["mismatch"], *x) for r, x in zip(curve, found))
                    + f"; {loss}: budget {budget:.3f} nats" + ", censored: quality never fell" * censored)  # fmt: skip
    return good, 2, "; ".join(said)


def o3():
    """Over the three pairs, the mismatch of uniform FP8 differs by a factor of 1.5, and the share of the clean run's gain
    that is kept under noise of 1.2 differs by more than the intervals."""
    levels = (0, 0.4, 0.8, 1.2)
    if kl_of("3x64", clean(0)) is None or any(len(quality(p, "sampled", clean(n))) < SEEDS for p in SIZES for n in levels):
        return None
    fp8, kept, said = {}, {}, []
    for pair in SIZES:
        fp8[pair] = next(r["uniform"] for r in rows("probes") if r["cell"] == [pair, "recipe"])
        gain = statistics.fmean(quality(pair, "sampled", clean())) - quality(pair, "sampled", clean(), "accuracy_base")[0]
        kept[pair] = interval([(y - b) / gain for y, b in zip(quality(pair, "sampled", clean(1.2)), quality(pair, "sampled", clean(1.2), "accuracy_base"))])
        said.append(f"{pair}: FP8 {fp8[pair]:.4f} nats; " + ", ".join("{:.3f} nats {:.2f} ± {:.2f}".format(
            kl_of_noise(pair, n), *interval(quality(pair, "sampled", clean(n)))) for n in levels)
            + f"; of the gain kept at the last {kept[pair][0]:.2f} ± {kept[pair][1]:.2f}")  # fmt: skip
    (low, a), (high, b) = min(kept.values()), max(kept.values())
    return (max(fp8.values()) > 1.5 * min(fp8.values())) + (high - b > low + a), 2, "; ".join(said)


def kl_of_noise(pair, n):
    return next(r["kl"] for r in rows("probes") if r["cell"] == [pair, label(clean(n))])


def o4():
    """Some modules are sensitive: for each pair the most sensitive one's mismatch is at least twice the median's, and the
    recipe's is below that of as many modules left out at random (mean less interval)."""
    good, said = 0, []
    for pair in SIZES:
        get = lambda what: next((r for r in rows("probes") if r["cell"] == [pair, what]), None)
        if not get("random"):
            return None
        order, found, random = get("sensitivity")["order"], get("recipe"), get("random")["kl"]
        mean, half = interval(random)
        ratio = order[0][1] / statistics.median(kl for _, kl in order)
        good += (ratio >= 2) + (found["kl"] < mean - half)
        said.append(f"{pair}: {order[0][0]} {order[0][1]:.4f} nats, {ratio:.1f} times the median; recipe keeps {len(found['keep'])} of {len(order)} modules: "
                    f"{found['kl']:.4f} nats, uniform FP8 {found['uniform']:.4f}, as many at random {mean:.4f} ± {half:.4f}")  # fmt: skip
    return good, 6, "; ".join(said)


def destabilised(r):
    """The trainer's final accuracy is below the start's 95 % interval (500 held-out sums)."""
    start = r["accuracy_base"]
    return r["accuracy"] < start - 1.96 * (start * (1 - start) / 500) ** 0.5


def o5():
    """OPD stays stable where RL methods do not: in the three regimes no run of either loss is destabilised, and at least two
    RL methods are in half of their runs of some regime."""
    regimes, methods = ("discrepancy", "lag", "both"), ("reinforce", "tis", "sc", "ppo_stale", "dlc")
    rl = {(g, c): [destabilised(r) for r in rows("compare") if r["cell"] == [g, SAME[g].get(c, c)]] for g in regimes for c in methods}
    ours = {(g, c): [r for r in rows("stable") if r["cell"] == [g, c]] for g in regimes for c in ("full", "sampled")}
    if any(len(v) < SEEDS for v in (*rl.values(), *ours.values())):
        return None
    lost = {c: max(statistics.fmean(rl[g, c]) for g in regimes) for c in methods}
    bad = {c: sum(destabilised(r) for g in regimes for r in ours[g, c]) for c in ("full", "sampled")}
    said = [f"{g}: destabilised of {SEEDS}: " + ", ".join(f"{c} {sum(rl[g, c])}" for c in methods) + "; "
            + f"{g}: OPD " + ", ".join("{} {} ({:.2f} ± {:.2f})".format(c, sum(map(destabilised, ours[g, c])), *interval([r["accuracy"] for r in ours[g, c]]))
                                       for c in ("full", "sampled")) for g in regimes]  # fmt: skip
    return (bad["full"] == 0) + (bad["sampled"] == 0) + (sum(x >= 0.5 for x in lost.values()) >= 2), 3, "; ".join(said)


def prefix_errors(scale):
    """Exactly, V = 4, T = 3, target E_{h~d_π} ∇KL_h: the relative error, with prefixes from q, of `full`; of `sampled` with the
    untruncated weight, a truncated one, none; of `full` with prefix weights; and E_q[sampled with is] against E_q[full]."""
    p, q, _ = random_gap(scale, seed=2)
    T = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3 + t)).double() for t, x in enumerate(p)]
    leaves = [x.requires_grad_() for x in p]
    y = torch.cartesian_prod(*[torch.arange(4)] * 3)
    spread = lambda tables: torch.stack([x.log_softmax(-1).reshape(-1, 4).repeat_interleave(4 ** (3 - t), 0) for t, x in enumerate(tables)], 1)
    pick = lambda x: x.gather(-1, y[..., None])[..., 0]
    live, logq, teacher = spread(leaves), spread(q), spread(T)
    of_p, of_q = pick(live).detach().sum(1).exp(), pick(logq).sum(1).exp()
    before = (pick(live).detach() - pick(logq)).cumsum(1).roll(1, 1)  # log of the prefix weight, Π_{s<t} π/q
    before[:, 0] = 0
    grad = lambda x: torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)])
    kl = opd.divergence("full", live, teacher)
    true, full = grad((of_p[:, None] * kl).sum()), grad((of_q[:, None] * kl).sum())
    weighted = grad((of_q[:, None] * before.exp() * kl).sum())
    A = (pick(teacher) - pick(live)).detach()
    mask = torch.ones_like(y, dtype=torch.bool)
    sampled = {c: grad(dlc.policy_loss(c, pick(live), pick(logq), A * of_q[:, None], mask, num_tokens=1, cap=1.2)[0]) for c in ("is", "tis", "reinforce")}
    error = {k: float((g - true).norm() / true.norm()) for k, g in dict(full=full, prefix_weights=weighted, **sampled).items()}
    return error | dict(same=float((sampled["is"] - full).norm()))


def o6():
    """Noise shifts prefixes, exactly: `sampled` with the untruncated token weight has `full`'s expectation under q, so its error
    is `full`'s; a truncated weight changes it; prefix weights remove it. The sequence KL grows with every step of noise."""
    grown = [interval(r["kl"]) for r in rows("probes") if r["cell"] == ["3x64", "sequence KL"]]
    if not grown:
        return None
    e = prefix_errors(0.3)
    good = (e["same"] < 1e-14) + (e["full"] > 1e-3) + (abs(e["tis"] - e["full"]) > 1e-3) + (e["prefix_weights"] < 1e-14)
    kls = [r["kl"] for r in rows("probes") if r["cell"] == ["3x64", "sequence KL"]]
    rises = [interval([y - x for x, y in zip(a, b)]) for a, b in zip(kls, kls[1:])]  # each level has the same eight draws
    good += all(mean - half > 0 for mean, half in rises)
    show = ", ".join(f"{k} {e[k]:.3f}" for k in ("full", "is", "tis", "reinforce")) + f", full with prefix weights {e['prefix_weights']:.0e}"
    said = f"relative error of the gradient under q: {show}; sequence KL at noise " + ", ".join(
        f"{n}: {m:.3f} ± {h:.3f}" for n, (m, h) in zip(LEVELS, grown))  # fmt: skip
    wide = ", ".join(f"{scale} {prefix_errors(scale)['full']:.3f}" for scale in (0.1, 0.3, 1.0))
    return good, 5, said + f"; error of full at a gap of {wide}"


def o7():
    """Admission against the truth, `sampled`, on the committed configurations: good is a mean quality within 0.05 of the clean
    run's. No false admit, and at least half of the good ones admitted."""
    if missing_opd():
        return None
    budget, _ = opd.within(noise_curve("3x64", "sampled"), TOLERANCE)
    clear = statistics.fmean(quality("3x64", "sampled", clean()))
    counts = {(a, g): 0 for a in (True, False) for g in (True, False)}
    for how in others():
        counts[kl_of("3x64", how) <= budget, statistics.fmean(quality("3x64", "sampled", how)) >= clear - TOLERANCE] += 1
    said = (f"budget {budget:.3f} nats, clean quality {clear:.2f}; admitted and good {counts[True, True]}, admitted and bad {counts[True, False]}, "
            f"rejected and good {counts[False, True]}, rejected and bad {counts[False, False]}")  # fmt: skip
    return (counts[True, False] == 0) + (counts[True, True] >= counts[False, True]), 2, said


def o8():
    """A recipe a pair: FP8 with its modules kept in BF16 ends within 0.05 of the BF16 rollouts; 1.93 times the tokens of KV
    cache with one of 28 layers' KV kept."""
    if any(recipe_of(p) is None or min(len(quality(p, "sampled", h)) for h in (clean(), recipe_of(p), dict(weights="fp8", kv="fp8"))) < SEEDS for p in SIZES):
        return None
    good, said = 0, []
    for pair in SIZES:
        found = {name: interval(quality(pair, "sampled", how)) for name, how in
                 (("bf16", clean()), ("FP8", dict(weights="fp8", kv="fp8")), ("recipe", recipe_of(pair)))}  # fmt: skip
        good += found["recipe"][0] >= found["bf16"][0] - TOLERANCE
        said.append(f"{pair}: " + ", ".join("{} {:.2f} ± {:.2f}".format(k, *v) for k, v in found.items()) + f", keeping {recipe_of(pair)['keep_bf16']}")
    ratio = opd.capacity(opd.Config(capacity=16))[-1][-1]
    return good + (ratio >= 1.93), 4, "; ".join(said) + f"; tokens of KV cache, one of 28 layers' KV in BF16: {ratio:.2f}x"


def clocked(task, name):
    return [r for r in rows("overlap") if r["cell"] == [task, name]]


def reached(run, target):
    """Seconds until the first measured accuracy of at least `target`; to the end, if there is none."""
    return next((seconds for _, seconds, score in run["points"] if score >= target), run["points"][-1][1])


def o9():
    """Distillation (`full`): asynchronous FP8 reaches the accuracy sooner than the better of the two synchronous BF16 settings (the
    paired interval of the ratio of times is above 1), 1.25 times sooner, ends within 0.05 of it, and BF16's speed-up over one
    thread is within 15 % of (Ts + Tt) / max(Ts, Tt). The accuracy: 90 % of the gain of the synchronous BF16 runs. RL beside it."""
    if any(len(clocked(task, name)) < SEEDS for task in TASKS for name in TASKS[task]):
        return None
    good, said = 0, []
    for task, names in TASKS.items():
        sync = [clocked(task, n) for n in ("sync bf16, 1 thread", "sync bf16, 2 threads")]
        start, end = sync[0][0]["accuracy_base"], statistics.fmean(r["accuracy"] for runs in sync for r in runs)
        target = start + 0.9 * (end - start)
        times = {n: [reached(r, target) for r in clocked(task, n)] for n in names}
        best = min((n for n in names if n.startswith("sync bf16")), key=lambda n: statistics.fmean(times[n]))
        ratio = {n: interval([a / b for a, b in zip(times[best], times[n])]) for n in names}
        speed, speed8 = (statistics.fmean(r["step"] for r in clocked(task, a)) / statistics.fmean(r["step"] for r in clocked(task, b))
                         for a, b in (("sync bf16, 1 thread", "async bf16, lag 1"), ("sync fp8, 1 thread", "async fp8, lag 1")))  # fmt: skip
        guess, guess8 = (statistics.fmean((r["sample"] + r["train"]) / max(r["sample"], r["train"]) for r in clocked(task, n))
                         for n in ("sync bf16, 1 thread", "sync fp8, 1 thread"))  # fmt: skip
        (final, _), (base_final, _) = (interval([r["accuracy"] for r in clocked(task, n)]) for n in ("async fp8, lag 1", best))
        mean, half = ratio["async fp8, lag 1"]
        if task == "opd":
            good += (mean - half > 1) + (mean >= 1.25) + (final >= base_final - TOLERANCE) + (abs(speed / guess - 1) < 0.15)
        lost = {n: sum(all(p[2] < target for p in r["points"]) for r in clocked(task, n)) for n in names}
        said.append(f"{task}, seconds to accuracy {target:.2f}: " + ", ".join(
            "{} {:.1f} ± {:.1f}".format(n, *interval(times[n])) + f" ({lost[n]} never)" * (lost[n] > 0)
            for n in TASKS["rl"]))  # fmt: skip
        said.append(f"{task}: over the better synchronous BF16, async FP8 {mean:.2f} ± {half:.2f}, async BF16 "
                    "{:.2f} ± {:.2f}, sync FP8 {:.2f} ± {:.2f}".format(*ratio["async bf16, lag 1"], *max(ratio["sync fp8, 1 thread"], ratio["sync fp8, 2 threads"])))  # fmt: skip
        said.append(f"{task}: steps a second over one thread's, BF16 {speed:.2f}, FP8 {speed8:.2f}; {task}: their stages' times predict {guess:.2f}, {guess8:.2f}")
        said.append(f"{task}, accuracy at the end: " + ", ".join("{} {:.2f} ± {:.2f}".format(n, *interval([r["accuracy"] for r in clocked(task, n)]))
                                                                for n in (best, "async bf16, lag 1", "async fp8, lag 1")))  # fmt: skip
    said.append("opd, BF16, --max-lag 1, 2, 4, 8: " + ", ".join("{:.1f} ms a step, lag {:.4f} nats, accuracy {:.2f} ± {:.2f}".format(
        1e3 * statistics.fmean(r["step"] for r in runs), statistics.fmean(r["lag"] for r in runs), *interval([r["accuracy"] for r in runs]))
        for runs in (clocked("opd", f"async bf16, lag {D}") for D in (1, 2, 4, 8))))  # fmt: skip
    return good, 4, "; ".join(said)


# What each claim says, in a few words, and which of its printed lines the README's table shows.
CLAIMS = {
    "C1": (c1, "the discrepancy stays about constant, the lag grows", (2, 0)),
    "C2": (c2, "quantised and synchronous: SC or IS is enough, PPO collapses", (0,)),
    "C3": (c3, "under lag SC falls behind IS, and PPO against the sampler's weights works", (0, 1)),
    "C4": (c4, "IS expires: the ESS falls as the lag spreads", (0,)),
    "C5": (c5, "the exact bias: SC keeps `token`, IS cancels it", (1, 2)),
    "C6": (c6, "where PPO's reference sits matters", (0, 1, 2)),
    "C7": (c7, "when the ESS crosses one half depends on the model; a fixed interval is late or wasteful", (0, 4, 8)),
    "C8": (c8, "DLC holds in both regimes", (0, 1, 2)),
    "O1": (o1, "one scale for every source", (0, 1, 2)),
    "O2": (o2, "quality is flat, then falls: a budget", (1, 3)),
    "O3": (o3, "the cost and the mismatch of a format depend on the model", (0, 2, 3, 5, 6, 8)),
    "O4": (o4, "some layers are sensitive", (0, 1)),
    "O5": (o5, "OPD stays stable where RL methods do not", (2, 3, 4, 5)),
    "O6": (o6, "noise shifts prefixes, which no token weight mends", (0,)),
    "O7": (o7, "the admission check", (0, 1, 2)),
    "O8": (o8, "recipes keep the quality; 1.93 times the KV tokens", (0, 1, 2, 3)),
    "O9": (o9, "FP8 with asynchronous rollouts reaches the same quality 1.62 times sooner (here the gain is the overlap's alone)", (1, 2, 3, 4, 6)),
}


def verdicts():
    """(name, what it says, verdict, printed lines, those the README shows) of every claim."""
    for name, (claim, what, shown) in CLAIMS.items():
        found = claim()
        good, of, said = found or (0, 1, "no log yet")
        lines = said.split("; ")
        word = "not run" if found is None else "reproduced" if good == of else f"partly ({good} of {of})" if good else "not reproduced"
        yield name, what, word, lines + drift_said().split("; ") * (name == "C5" and drift_said() != ""), [lines[i] for i in shown if i < len(lines)]


def claims(_):
    for name, _, word, lines, _ in verdicts():
        print(f"{name} {word}\n   " + "\n   ".join(lines))


def readme(_):
    """The tables of the README that come from the logs; a test holds it to them."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        dlc.bias_tables()
    last = text.getvalue().split("\n\n")[-1].splitlines()[2:]
    bias = {line.split()[0]: line.split()[1] for line in last}
    formulas = """
        reinforce    1
        is           π/q
        tis          min(π/q, C)
        mis          π/q in [½, 5], else 0
        sc           1                   ; q                          ; ρ
        tis_sc       min(π/q, C)         ; min(π, C q)                ; min(1, C ρ)
        ppo_anchor   r = π/π_anchor      ;                            ;              ; clip r
        ppo_stale    r = π/π_stale       ;                            ;              ; clip r
        ppo_sampler  r = π/q             ;                            ;              ; clip r
        dlc          r = π/π_stale       ; q π/π_stale                ; ρ_s          ; clip r
        dlc_tis      r min(π_stale/q, C) ; (π/π_stale) min(π_stale, C q) ; min(1, C ρ_s) ; clip r = π/π_stale"""
    print("| name | w | m_v | α | gate | bias | int3 | lag | both | both, its sampler |\n|" + "---|" * 10)
    for (c, function), line in zip(dlc.CORRECTIONS.items(), formulas.split("\n")[1:]):
        formula = [x.strip() for x in line.split(maxsplit=1)[1].split(";")]
        cells = ["{:.2f} ± {:.2f}".format(*interval(v)) if len(v := cell(r, c, k)) > 1 else "" for r, k in
                 (("discrepancy", "accuracy"), ("lag", "accuracy"), ("both", "accuracy"), ("both", "accuracy_sampler"))]  # fmt: skip
        link = f"[`{c}`](dlc.py#L{inspect.getsourcelines(function)[1]})"
        print("| " + " | ".join([link, *formula, *[""] * (4 - len(formula)), bias[c], *cells]) + " |")
    print("\n| claim | what it says | here | measured |\n|---|---|---|---|")
    for name, what, word, _, shown in verdicts():
        print(f"| {name} | {what} | {word} | {'; '.join(shown)} |")
    print("\n| measured (`tests/bench.py`) | ratio | target | share of the limit |\n|---|---|---|---|")
    for words, *keys in (
        ("RL step, tiny default, 32 x 8, times faster than TRL's: `reinforce`; `dlc`; `reinforce` without measuring gaps", "RL step, tiny"),
        ("the same, SmolLM2-135M, 8 x 8 responses of 12 tokens", "RL step, smollm2"),
        ("a step of `dlc`; of `sc`, over one of `reinforce`; then both without measuring gaps", "step, tiny default"),
        ("rollouts, times faster than `generate` with the same head: tiny default; SmolLM2, 32 x 64; the latter over vLLM on this CPU",
         "rollouts, tiny default, 256", "rollouts, smollm2"),
        ("loss at V = 151,936, 4,096 positions, over `log_softmax`: peak memory; time", "loss"),
        ("FP8 KV, 28 layers of 8 x 128, one layer kept in BF16: times smaller a token; time of decoding over BF16 KV, SmolLM2", "KV bytes", "decode"),
        ("an admission check over one training run", "admission"),
    ):  # fmt: skip
        found = [r for r in json.loads((DATA / "bench.json").read_text()) if r["what"].startswith(tuple(keys)) and r["ratio"]]  # without: its peer was missing
        share = lambda r: r["ours"] / r["limit"] if r["unit"] == "tokens/s" else r["limit"] / r["ours"]
        target = lambda r: "-" if r["target"] is None else f"{r['target']:.3g} {'met' if r['met'] else '**not met**'}"
        print("| " + " | ".join([words, "; ".join(f"{r['ratio']:.3g}" for r in found), "; ".join(map(target, found)),
                                 "; ".join(f"{share(r):.1%}" for r in found)]) + " |")  # fmt: skip


def save(fig, name):
    FIGURES.mkdir(exist_ok=True)
    dlc.write(FIGURES / name, lambda new: fig.savefig(new, dpi=110, format="png"))
    plt.close(fig)


def band(ax, curves, style, name):
    """Mean over seeds and its 95 % interval, step by step."""
    mid = [interval(x) for x in zip(*curves)]
    ax.plot([m for m, _ in mid], style, label=name)
    ax.fill_between(range(len(mid)), [max(m - h, 1e-5) for m, h in mid], [m + h for m, h in mid], color=style[:2], alpha=0.2, lw=0)


def figures(_):
    """Everything in notebooks/figures/ that comes from the logs. q is red, π blue."""
    names = list(dlc.CORRECTIONS)
    fig, axes = plt.subplots(1, 4, sharey=True, sharex=True, figsize=(12, 4), layout="constrained")
    for ax, regime in zip(axes, REGIMES):
        for key, how, name, up in (("accuracy", "C0o", "trainer's model, π", 0.12), ("accuracy_sampler", "C3x", "its quantised copy, q", -0.12)):
            for i, c in enumerate(names):
                if len(values := cell(regime, c, key)) > 1:
                    mean, half = interval(values)
                    ax.errorbar(mean, i + up, xerr=half, fmt=how, ms=5, capsize=2, label=name if i == 0 else None)
        ax.axvline(base(), color="0.5", ls=":", label="before training")
        ax.set(title=f"{regime}: {REGIMES[regime]['weights']}, sync every {REGIMES[regime]['sync_every']}", xlabel="accuracy, held out")
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="y", color="0.9")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    save(fig, "compare.png")

    fig, axes = plt.subplots(2, 3, sharex=True, sharey=True, figsize=(10, 5), layout="constrained")
    for line, fmt in zip(axes, ("fp8", "int3")):
        for ax, sync in zip(line, (1, 8, 0)):
            runs = [r["curves"] for r in rows("gaps") if r["cell"] == [fmt, sync, "tis"]]
            band(ax, [c["discrepancy"] for c in runs], "C3-", "discrepancy, KL(q || π_stale)")
            band(ax, [c["lag"] for c in runs], "C0--", "lag, KL(π_stale || π)")
            ax.set(title=f"{fmt}, sync {f'every {sync}' if sync else 'never'}", yscale="log", ylim=(1e-4, 2))
    for ax in axes[1]:
        ax.set_xlabel("step")
    for ax in axes[:, 0]:
        ax.set_ylabel("nats a token")
    axes[0, 0].legend(fontsize=8)
    save(fig, "gaps.png")

    fig, axes = plt.subplots(2, 3, sharey="row", sharex="row", figsize=(10, 6), layout="constrained")
    for (top, low), size in zip(axes.T, SIZES):
        never = [r["curves"] for r in rows("resync") if r["cell"] == [size, "never", "tis"]]
        if never:
            band(top, [c["ess"] for c in never], "C0-", "over responses")
            band(top, [c["ess_token"] for c in never], "C2--", "over tokens")
        top.axhline(0.5, color="0.5", ls=":")
        top.set(title=f"{size}, no sync, no clip", xlabel="steps since the sync", ylim=(0, 1.02))
        for rule in ("every 1", "every 4", "every 16", "every 64", "ESS < 1/2"):
            if len(runs := [r for r in rows("resync") if r["cell"] == [size, rule]]) > 1:
                (x, dx), (y, dy) = interval([r["syncs"] for r in runs]), interval([r["accuracy"] for r in runs])
                low.errorbar(x, y, dy, dx, fmt="C3D" if "ESS" in rule else "C0o", capsize=2)
                low.annotate(rule, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
        low.set(xscale="log", xlabel="syncs in 96 steps")
    axes[0, 0].set_ylabel("ESS / B")
    axes[1, 0].set_ylabel("accuracy, held out")
    axes[0, 0].legend(fontsize=8)
    save(fig, "resync.png")

    fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4), layout="constrained")
    kind = lambda how: ("mixture" if how["weights"] != "bf16" or how.get("noise") else "delayed weights") if "lag" in how else "formats"
    for ax, loss in zip(axes, ("sampled", "full")):
        curve = noise_curve("3x64", loss)
        budget, censored = opd.within(curve, TOLERANCE)
        for group, style in (("noise", "C0o"), ("formats", "C3s"), ("delayed weights", "C2^"), ("mixture", "C1D")):
            hows = [clean(n) for n in LEVELS] if group == "noise" else [h for h in others() if kind(h) == group]
            for i, how in enumerate(h for h in hows if quality("3x64", loss, h)):
                mean, half = interval(quality("3x64", loss, how))
                ax.errorbar(kl_of("3x64", how), mean, half, fmt=style, capsize=2, ms=5, label=None if i else group)
        ax.step([r["mismatch"] for r in curve], [r["fitted"] for r in curve], "C0-", where="post", lw=1)
        ax.axvline(budget, color="0.3", ls="--", label=f"budget {budget:.3f}" + " (censored)" * censored)
        ax.axhline(quality("3x64", loss, clean(), "accuracy_base")[0], color="0.5", ls=":", label="before training")
        ax.set_xscale("symlog", linthresh=1e-3)
        ax.set_xlim(left=0)
        ax.set(title=f"loss {loss}", xlabel="mismatch before training, nats a token", ylabel="accuracy after training")
        ax.legend(fontsize=8)
    save(fig, "budget.png")

    fig, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    for ax, pair in zip(axes, SIZES):
        found = {r["cell"][1]: r for r in rows("probes") if r["cell"][0] == pair}
        order = found["sensitivity"]["order"]
        kept = found["recipe"]["keep"]
        ax.barh([n.removeprefix("model.layers.") for n, _ in order], [kl for _, kl in order],
                color=["C3" if n in kept else "0.7" for n, _ in order])  # fmt: skip
        ax.invert_yaxis()
        ax.set(title=f"{pair}: uniform FP8 {found['recipe']['uniform']:.4f}", xlabel="KL when it alone is FP8, nats a token")
    axes[0].set_ylabel("layer, or its KV (red: kept in BF16 by the recipe)")
    save(fig, "layers.png")

    fig, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
    for ax, task, title in zip(axes, ("opd", "rl"), ("distillation, full", "RL, dlc")):
        for name, style in (("sync bf16, 1 thread", "0.6"), ("sync bf16, 2 threads", "k--"), ("async bf16, lag 1", "C0-"), ("async fp8, lag 1", "C3-.")):
            if points := [r["points"] for r in clocked(task, name)]:
                x, y = (torch.tensor(points).mean(0)[:, i] for i in (1, 2))
                ax.plot(x, y, style, label=name)
        ax.set(title=title, xlabel="seconds, start-up aside", ylabel="accuracy, held out")
        ax.legend(fontsize=8)
    runs = [clocked("opd", f"async bf16, lag {D}") for D in (1, 2, 4, 8)]
    if all(runs):
        x, y = ([statistics.fmean(r[k] for r in some) for some in runs] for k in ("lag", "step"))
        axes[2].plot(x, [1 / t for t in y], "C0o-")
        for D, a, b in zip((1, 2, 4, 8), x, y):
            axes[2].annotate(D, (a, 1 / b), xytext=(0, 7), textcoords="offset points")
    axes[2].set(title="distillation, bf16, --max-lag 1, 2, 4, 8", xlabel="lag, nats a token", ylabel="steps a second", ylim=(0, 45))
    save(fig, "overlap.png")


def main():
    commands = dict(tune=tune, compare=compare, gaps=gaps, updates=updates, resync=resync, drift=drift, opd_tune=opd_tune,
                    probes=probes, opd=opd_runs, stable=stable, overlap=overlap, claims=claims, readme=readme, figures=figures, table=lambda _: table("compare"))  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    os.chdir(HERE.parent)  # the tiny bases are cached under runs/
    commands[args.what](args.seeds)


if __name__ == "__main__":
    main()
