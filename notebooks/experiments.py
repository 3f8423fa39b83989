"""The papers' claims, each an experiment: runs with seeds, kept row by row, and verdicts recomputed from them.

    python notebooks/experiments.py tune                # learning rate of each correction, on the control
    python notebooks/experiments.py compare --seeds 8   # regimes x corrections x seeds; about an hour on 2 cores
    python notebooks/experiments.py gaps --seeds 8      # discrepancy, lag and ESS against steps since the sync
    python notebooks/experiments.py claims              # C1 ... C8 from the logs in notebooks/data/

Every finished run is one line of notebooks/data/NAME.jsonl, appended at once; a second call runs only what is
missing. A run takes one core. The regimes and criteria below were written before the runs they judge.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import dlc  # noqa: E402

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
RATES = (1e-4, 2e-4, 4e-4)
CURVES = ("reward", "discrepancy", "lag", "ess", "ess_token", "clip_share", "cap_share")


def rows(name):
    path = DATA / f"{name}.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def one_run(job):
    """Train `job["config"]` quietly in a folder that is thrown away; the summary that is logged."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    base = dlc.tiny_base(**job.get("base", {}))
    dlc.tiny_base = lambda: base
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cfg = dlc.Config(out=folder + "/run", save_every=10**9, device="cpu", **job["config"])
        steps = dlc.train(cfg)
    shutil.rmtree(folder)
    thin = job.get("thin", 10)  # steps averaged into one point of a curve
    bins = [steps[i : i + thin] for i in range(0, len(steps), thin)]
    curves = {k: [round(statistics.fmean(r[k] for r in b), 5) for b in bins] for k in CURVES}
    reward = [statistics.fmean(r["reward"] for r in steps[i : i + 20]) for i in range(0, len(steps) - 19, 5)]
    dip = max((max(reward[: i + 1]) - x for i, x in enumerate(reward)), default=0.0)
    last = {k: v for k, v in steps[-1].items() if k.startswith("accuracy")}
    return job | last | dict(syncs=sum(r["synced"] for r in steps), dip=round(dip, 4), ess_end=steps[-1]["ess"],
                             seconds=round(sum(r["seconds_sample"] + r["seconds_train"] for r in steps), 1),
                             torch=torch.__version__, curves=curves)  # fmt: skip


def run_all(name, jobs):
    """Run the jobs that notebooks/data/NAME.jsonl lacks, one a core; append each as it ends."""
    DATA.mkdir(exist_ok=True)
    key = lambda job: json.dumps([job["cell"], job["config"], job.get("base")], sort_keys=True)
    done = {key(r) for r in rows(name)}
    todo = [j for j in jobs if key(j) not in done]
    for base in {json.dumps(j.get("base", {})) for j in todo}:
        dlc.tiny_base(**json.loads(base))  # made once, before the workers need it
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool, (DATA / f"{name}.jsonl").open("a") as log:
        for future in tqdm(as_completed([pool.submit(one_run, j) for j in todo]), total=len(todo), desc=name):
            print(json.dumps(future.result()), file=log, flush=True)


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
    """Discrepancy, lag, ESS and the share of ratios above the cap, step by step: sync at 1, 8 or never."""
    jobs = [dict(cell=[fmt, sync], thin=1, config=dict(correction="dlc", lr=2e-4, steps=65, seed=s, weights=fmt,
                                                        kv="bf16", sync_every=sync))
            for s in range(seeds) for fmt in ("fp8", "int3") for sync in (1, 8, 0)]  # fmt: skip
    run_all("gaps", jobs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "compare", "gaps", "table"))
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    os.chdir(HERE.parent)  # the tiny bases are cached under runs/
    dict(tune=tune, compare=compare, gaps=gaps, table=lambda _: table("compare"))[args.what](args.seeds)


if __name__ == "__main__":
    main()
