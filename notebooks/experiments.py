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
SEEDS = 8  # a claim from fewer is no claim
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
    """Discrepancy, lag, ESS and the share of ratios above the cap, step by step: sync at 1, 8 or never, with a clip
    (dlc) and without one (tis): the first runs, with dlc alone, showed that a clip holds the lag down."""
    jobs = [dict(cell=[fmt, sync] + ([c] if c != "dlc" else []), thin=1,
                 config=dict(correction=c, lr=2e-4, steps=65, seed=s, weights=fmt, kv="bf16", sync_every=sync))
            for c in ("dlc", "tis") for s in range(seeds) for fmt in ("fp8", "int3") for sync in (1, 8, 0)]  # fmt: skip
    run_all("gaps", jobs)


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
    """Discrepancy about constant, lag grows: over 64 steps without a sync the lag's slope is above 0 (interval), and
    the discrepancy moves by less than a tenth of what the lag does, for both formats; with a clip and without one."""
    good, said = 0, []
    for name, more in (("dlc, clipped", []), ("tis", ["tis"])):
        for fmt in ("fp8", "int3"):
            runs = [r["curves"] for r in rows("gaps") if r["cell"] == [fmt, 0, *more]]
            if len(runs) < 2:
                return None
            (lag, dl), (disc, dd) = interval([slope(c["lag"]) for c in runs]), interval([slope(c["discrepancy"]) for c in runs])
            level = [statistics.fmean(statistics.fmean(c[k]) for c in runs) for k in ("lag", "discrepancy")]
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
    """Under lag IS ends above SC, and PPO against the sampler's weights learns."""
    names = ("sc", "is", "tis", "ppo_stale", "reinforce")
    if any(len(cell("lag", c)) < SEEDS for c in names):
        return None
    difference, half = interval([a - b for a, b in zip(cell("lag", "is"), cell("lag", "sc"))])
    return (difference - half > 0) + learns(cell("lag", "ppo_stale")), 2, show("lag", names) + f"; is - sc {difference:+.2f} ± {half:.2f}"


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


def c5():
    """Exactly: SC has no drift with the whole vocabulary and keeps `token` (equal to REINFORCE's); IS has neither."""
    g = torch.Generator().manual_seed(1)
    table = lambda s: [s * torch.randn((4,) * (t + 1), generator=g).double() for t in range(3)]
    p = table(1.0)
    q, R = [a + b for a, b in zip(p, table(0.1))], torch.rand(4, 4, 4, generator=g).double()
    out = {c: dlc.exact_bias(c, p, q, R) for c in ("reinforce", "sc", "is")}
    norm = {c: {k: float(v.norm()) for k, v in o.items()} for c, o in out.items()}
    same = float((out["sc"]["token"] - out["reinforce"]["token"]).norm())
    good = (norm["sc"]["drift"] < 1e-14) + (norm["sc"]["token"] > 1e-6 and same < 1e-14)
    good += norm["is"]["token"] < 1e-14 and norm["is"]["drift"] < 1e-14
    size = lambda x: f"{x:.1e}" if x > 1e-14 else "0"
    return good, 3, "; ".join(f"{c}: token {size(n['token'])} drift {size(n['drift'])}" for c, n in norm.items())


def c6():
    """PPO's reference matters: with both gaps, the best and the worst reference differ by more than their intervals."""
    names = ("ppo_anchor", "ppo_stale", "ppo_sampler")
    found = [interval(cell("both", c)) if len(cell("both", c)) >= SEEDS else None for c in names]
    if None in found:
        return None
    (low, a), (high, b) = min(found), max(found)
    return int(high - b > low + a), 1, show("both", names)


def c8():
    """DLC holds in both regimes: it learns (interval above the base) under discrepancy, under lag, and under both, its
    own rule deciding the syncs."""
    cells = [("discrepancy", "dlc"), ("lag, ESS rule", "dlc"), ("both, ESS rule", "dlc")]
    if any(len(cell(*c)) < SEEDS for c in cells):
        return None
    extra = "; dlc_tis " + ", ".join("{:.2f} ± {:.2f}".format(*interval(cell(r, "dlc_tis"))) for r, _ in cells)
    return sum(learns(cell(*c)) for c in cells), 3, "; ".join(r + ": " + show(r, ["dlc"]) for r, _ in cells) + extra


def claims(_):
    for name, claim in dict(C1=c1, C2=c2, C3=c3, C4=c4, C5=c5, C6=c6, C8=c8).items():
        found = claim()
        good, of, said = found or (0, 1, "no log yet")
        word = "not run" if found is None else "reproduced" if good == of else "partly" if good else "not reproduced"
        print(f"{name} {word}\n   " + said.replace("; ", "\n   "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "compare", "gaps", "claims", "table"))
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    os.chdir(HERE.parent)  # the tiny bases are cached under runs/
    dict(tune=tune, compare=compare, gaps=gaps, claims=claims, table=lambda _: table("compare"))[args.what](args.seeds)


if __name__ == "__main__":
    main()
