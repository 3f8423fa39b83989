"""What the logs of experiments.py show: tables, printed, and the figures of notebooks/figures/.

    python notebooks/report.py                          # the experiments
    python notebooks/report.py runs/dlc-dlc-1 RUN ...   # curves.png of runs of one's own

Cells whose runs are missing say "not run"; a figure is drawn from the present task's logs, else
from those of the sums. tests/fill_tables.py writes the tables into RESULTS.md.
"""

import json
import sys
from itertools import product
from pathlib import Path
from statistics import StatisticsError, fmean

import torch
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import dlc  # noqa: E402
from experiments import (  # noqa: E402
    CENTRED, KEYS, LEVELS, REGIMES, RULES, SIZES, SUMS, base, cell, clean, clocked, high, interval,
    kl_of, label, less, low, noise_curve, others, pm, probed, quality, random_gap, rows, start_of,
    values)

FIGURES = HERE / "figures"

# ---- Tables: (how a row begins, its cells). ------------------------------------------------------

def or_not(make):
    """What `make` says, or that its runs are missing."""
    try:
        return make()
    except (FileNotFoundError, StatisticsError):
        return "not run"

def grid_table():
    """Every correction, sampled and greedy, at both rates: π; q in each regime."""
    said = dict(sampled="sampled", accuracy="greedy")
    for (name, rate, least), key in product((("grid", "1e-4", 8), ("doubled", "2e-4", 4)), said):
        copy = key + ("_q" if key == "sampled" else "_sampler")
        for c in dlc.CORRECTIONS:
            yield f"`{c}`, {said[key]}, {rate}", [
                or_not(lambda g=g: "; ".join(pm(cell(g, c, k, name, least)) for k in (key, copy)))
                for g in REGIMES]

def centring_table():
    """Where centring pays: its mean discrepancy, both ends, and the paired difference on π and q
    with its word; then the share of `drift` in REINFORCE's bias by length, exactly."""
    for name, (centred, plain, _) in CENTRED.items():
        at = lambda c, key: values("centring", (name, c), key)

        def row(name=name, centred=centred, plain=plain, at=at):
            gap = fmean(fmean(x["discrepancy"]) for x in at(centred, "curves"))
            apart = {k: less(at(centred, k), at(plain, k)) for k in KEYS[:2]}
            pays = [(low(x) > 0) - (high(x) < 0) for x in apart.values()]
            words = [("no difference shown", "pays", "costs")[x] for x in pays]  # costs: -1
            return [f"{gap:.3f}", *(f"{c} {pm(at(c, 'sampled'))}" for c in (centred, plain)),
                    *(f"{pm(x, sign='+')}, {w}" for x, w in zip(apart.values(), words))]

        found = or_not(row)
        yield f"centring, {name}", [found] * 5 if isinstance(found, str) else found

def drift_shares():
    """At an equal gap a token, the share of `drift` in the bias of REINFORCE, rewards centred, as a
    signed projection on the bias, at T = 2 ... 7; the mean of 4 tables."""
    shares = []
    for T in range(2, 8):
        found = []
        for seed in range(4):
            p, q, rewards = random_gap(0.3, seed, T)
            prob = sum(x.log_softmax(-1).view(x.shape + (1,) * (T - x.dim())) for x in q).exp()
            out = dlc.exact_bias("reinforce", p, q, rewards - (prob * rewards).sum())
            bias = out["estimate"] - out["true"]
            found.append(float(out["drift"] @ bias / bias.square().sum()))
        shares.append(fmean(found))
    return shares

# ---- The figures: q is red, π blue. --------------------------------------------------------------

def save(fig, name):
    dlc.write(FIGURES / name, lambda new: fig.savefig(new, dpi=110, format="png"))
    plt.close(fig)

def band(ax, curves, style, name):
    """Mean over seeds and its 95 % interval, step by step."""
    mid = [interval(x) for x in zip(*curves)]
    ax.plot([m for m, _ in mid], style, label=name)
    ax.fill_between(range(len(mid)), [max(m - h, 1e-5) for m, h in mid],
                    [m + h for m, h in mid], color=style[:2], alpha=0.2, lw=0)

def compare_figure(of):
    if of:
        raise FileNotFoundError("the sums' grid had several rates")
    names, copies = list(dlc.CORRECTIONS), (
        ("sampled", "C0o", "trainer's model, π", 0.12),
        ("sampled_q", "C3x", "its quantised copy, q", -0.12))
    fig, axes = plt.subplots(1, 4, sharey=True, sharex=True, figsize=(12, 4), layout="constrained")
    for ax, (regime, how) in zip(axes, REGIMES.items()):
        for (key, style, name, up), (i, c) in product(copies, enumerate(names)):
            mean, half = interval(cell(regime, c, key))
            ax.errorbar(mean, i + up, xerr=half, fmt=style, ms=5, capsize=2,
                        label=name if i == 0 else None)
        ax.axvline(fmean(map(base, range(2))), color="0.5", ls=":", label="before training")
        ax.set(title=f"{regime}: {how['weights']}, sync every {how['sync_every']}",
               xlabel="mean reward, held out")
        ax.set_yticks(range(len(names)), names)
        ax.grid(axis="y", color="0.9")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    save(fig, "compare.png")

def gaps_figure(of):
    every = max((r["cell"][1] for r in rows(of + "gaps")), default=0)
    fig, axes = plt.subplots(2, 3, sharex=True, sharey=True, figsize=(10, 5), layout="constrained")
    for ax, (fmt, sync) in zip(axes.flat, product(("fp8", "int3"), (1, every, 0))):
        curves = values(of + "gaps", (fmt, sync, "tis"), "curves")
        band(ax, [c["discrepancy"] for c in curves], "C3-", "discrepancy, KL(q || π_stale)")
        band(ax, [c["lag"] for c in curves], "C0--", "lag, KL(π_stale || π)")
        ax.set(title=f"{fmt}, sync {f'every {sync}' if sync else 'never'}", yscale="log",
               ylim=(1e-4, 2), xlabel="step" * (fmt == "int3"), ylabel="nats a token" * (sync == 1))
    axes[0, 0].legend(fontsize=8)
    save(fig, "gaps.png")

def resync_figure(of):
    name = of + "resync"
    logged = {r["cell"][1] for r in rows(name) if len(r["cell"]) == 2}
    fig, axes = plt.subplots(2, 3, sharey="row", sharex="row", figsize=(10, 6),
                             layout="constrained")
    for (top, bottom), size in zip(axes.T, SIZES):
        never = values(name, (size, "never", "tis"), "curves")
        band(top, [c["ess"] for c in never], "C0-", "over responses")
        band(top, [c["ess_token"] for c in never], "C2--", "over tokens")
        top.axhline(0.5, color="0.5", ls=":")
        top.set(title=f"{size}, no sync, no clip", xlabel="steps since the sync", ylim=(0, 1.02))
        for rule in [r for r in RULES if r in logged]:
            (x, dx), (y, dy) = (interval(values(name, (size, rule), key))
                                for key in ("syncs", "sampled"))
            bottom.errorbar(x, y, dy, dx, capsize=2,
                            fmt="C0o" if rule.startswith(("every", "never")) else "C3D")
            bottom.annotate(rule, (x, y), xytext=(4, 6), textcoords="offset points", fontsize=8)
        bottom.set_xscale("symlog", linthresh=1)
        bottom.set_xlabel("syncs in 96 steps")
    axes[0, 0].set_ylabel("ESS / B")
    axes[1, 0].set_ylabel("accuracy, held out" if of else "mean reward, held out")
    axes[0, 0].legend(fontsize=8)
    save(fig, "resync.png")

def budget_figure(of):
    def style(how):
        if "lag" not in how:
            return ("C0o", "noise") if "noise" in how else ("C3s", "formats")
        mixed = how["weights"] != "bf16" or "noise" in how
        return ("C1D", "mixture") if mixed else ("C2^", "delayed weights")

    fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4), layout="constrained")
    for ax, loss in zip(axes, ("sampled", "full")):
        curve, budget, censored = noise_curve(of, loss)
        named = []
        logged = {r["cell"][2] for r in rows(of + "opd") if r["cell"][:2] == ["3x64", loss]}
        for how in [clean(n) for n in LEVELS] + others(of):
            if label(how) in logged:
                (mean, half), (form, group) = interval(quality(of, "3x64", loss, how)), style(how)
                ax.errorbar(kl_of(of, "3x64", how), mean, half, fmt=form, capsize=2, ms=5,
                            label=None if group in named else group)
                named.append(group)
        x, y = ([r[k] for r in curve] for k in ("mismatch", "fitted"))
        ax.step(x, y, "C0-", where="post", lw=1)
        ax.axvline(budget, color="0.3", ls="--",
                   label=f"budget {budget:.3f}" + " (censored)" * censored)
        ax.axhline(start_of(of, "3x64"), color="0.5", ls=":", label="before training")
        ax.set_xscale("symlog", linthresh=1e-3)
        ax.set_xlim(left=0)
        ax.set(title=f"loss {loss}", xlabel="mismatch before training, nats a token",
               ylabel="quality after training")
        ax.legend(fontsize=8)
    save(fig, "budget.png")

def layers_figure(of):
    fig, axes = plt.subplots(1, 3, figsize=(10, 4), layout="constrained")
    for ax, pair in zip(axes, SIZES):
        order, found = probed(of, pair, "sensitivity")["order"], probed(of, pair, "recipe")
        names, kls = zip(*order)
        ax.barh([n.removeprefix("model.layers.") for n in names], kls,
                color=["C3" if n in found["keep"] else "0.7" for n in names])
        ax.invert_yaxis()
        ax.set(title=f"{pair}: uniform FP8 {found['uniform']:.4f}",
               xlabel="KL when it alone is FP8, nats a token")
    axes[0].set_ylabel("layer, or its KV (red: kept in BF16 by the recipe)")
    save(fig, "layers.png")

def overlap_figure(of):
    styles = {"sync bf16, 1 thread": "0.6", "sync bf16, 2 threads": "k--",
              "async bf16, lag 1": "C0-", "async fp8, lag 1": "C3-."}
    fig, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
    for ax, task, title in zip(axes, ("opd", "rl"), ("distillation, full", "RL, dlc")):
        for name, style in styles.items():
            _, x, y = torch.tensor(clocked(of, task, name)).mean(0).T
            ax.plot(x, y, style, label=name)
        ax.set(title=title, xlabel="seconds, start-up aside", ylabel="accuracy, held out")
        ax.legend(fontsize=8)
    lags = {D: f"async bf16, lag {D}" for D in (1, 2, 4, 8)}
    x, y = ([fmean(clocked(of, "opd", n, key)) for n in lags.values()] for key in ("lag", "step"))
    axes[2].plot(x, [1 / t for t in y], "C0o-")
    for D, a, b in zip(lags, x, y):
        axes[2].annotate(D, (a, 1 / b), xytext=(0, 7), textcoords="offset points")
    axes[2].set(title="distillation, bf16, --lag 1, 2, 4, 8", xlabel="lag, nats a token",
                ylabel="steps a second", ylim=(0, 45))
    save(fig, "overlap.png")

def smollm2_figure(of):
    """SmolLM2-135M on its sums, never synced: RESULTS.md has the command that logged it."""
    steps, styles = [r for r in rows("smollm2_gaps") if not of], dict(tis="C0-", dlc="C1--")
    fig, axes = plt.subplots(1, 3, sharex=True, figsize=(11, 3.5), layout="constrained")
    for (c, style), seed in product(styles.items(), (0, 1)):
        mine = [r for r in steps if (r["correction"], r["seed"]) == (c, seed)]
        for ax, key in zip(axes, ("discrepancy", "lag", "ess")):
            ax.plot([r[key] for r in mine], style, label=f"{c}, seed {seed}")
    for ax, told in zip(axes, ("discrepancy, nats a token", "lag, nats a token", "ESS / B")):
        ax.set(title=told, xlabel="step", ylim=(0, None))
    axes[0].legend(fontsize=8)
    save(fig, "smollm2.png")

def figures():
    """Each from the present task's logs, else from those of the sums."""
    for draw in (compare_figure, gaps_figure, resync_figure, budget_figure, layers_figure,
                 overlap_figure, smollm2_figure):
        for of in ("", SUMS):
            try:
                draw(of)
                print(draw.__name__, "on the sums" * (of == SUMS))
                break
            except (FileNotFoundError, StatisticsError):
                plt.close("all")

def curves(folders):
    """Runs of one's own beside each other: reward, with the held-out accuracies as stars; the
    discrepancy, dashed, and the lag, whose curve is broken at a sync, where it is 0; the ESS."""
    fig, axes = plt.subplots(3, figsize=(7, 7), sharex=True, layout="constrained")
    for i, folder in enumerate(folders):
        steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").open()]
        at = {key: [r[key] or float("nan") for r in steps]
              for key in ("reward", "discrepancy", "lag", "ess")}
        marks = {0: steps[0]["accuracy_base"]}
        marks |= {r["step"] + 1: r["accuracy"] for r in steps if "accuracy" in r}
        axes[0].plot(marks.keys(), marks.values(), f"C{i}*")
        axes[0].plot(at["reward"], f"C{i}", label=f"{folder}, {steps[-1]['syncs']} syncs")
        axes[1].plot(at["discrepancy"], f"C{i}--")
        axes[1].plot(at["lag"], f"C{i}")
        axes[2].plot(at["ess"], f"C{i}")
    axes[0].set(ylabel="reward; *: accuracy, held out")
    axes[1].set(ylabel="KL, nats a token; --: discrepancy", yscale="log")
    axes[2].set(ylabel="ESS / B", ylim=(0, 1.05), xlabel="step")
    axes[0].legend(fontsize=8)
    fig.savefig("curves.png", dpi=130)
    print("curves.png:", *folders)

@dlc.command
def main(argv=None):
    if folders := sys.argv[1:] if argv is None else argv:
        return curves(folders)
    for begins, cells in [*grid_table(), *centring_table()]:
        print(" | ".join([begins, *cells]))
    print("share of drift at T = 2 ... 7:", ", ".join(f"{x:.0%}" for x in drift_shares()))
    figures()

if __name__ == "__main__":
    sys.exit(main())
