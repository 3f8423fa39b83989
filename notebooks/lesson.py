"""What the six notebooks share: the repository's folder, one thread, the figures' style, and the
judges of the exercises; and three logs that are made once, into notebooks/data/:

    python notebooks/lesson.py gaps    # lesson_gaps.jsonl: both gaps, step by step
    python notebooks/lesson.py budget  # lesson_budget.json: how much mismatch distillation bears
    python notebooks/lesson.py DIR     # smollm2_formats.json: formats on a Hugging Face model
"""

import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
HERE = Path(__file__).resolve().parent
os.chdir(HERE.parent)  # the repository; what is made once is kept in its runs/
sys.path[:0] = [str(HERE.parent), str(HERE)]
warnings.filterwarnings("ignore", message="IProgress")  # a plain progress bar will do

import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

import dlc  # noqa: E402
import opd  # noqa: E402
import sampler  # noqa: E402

torch.set_num_threads(1)
Q, STALE, PI = "C3", "C4", "C0"  # q is red, π_stale purple, π blue
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False})  # fmt: skip


def check(name, answer, good):
    """Print TODO while there is no answer, else PASS or FAIL; never raises."""
    try:
        verdict = "TODO"
        if answer is not None:
            verdict = "PASS" if good(answer) else "FAIL"
    except Exception as e:
        verdict = f"FAIL ({type(e).__name__}: {e})"
    print(f"{name}: {verdict}")


def check_bug(name, test):
    """Print PASS or FAIL and what was seen; `test` returns (whether it is right, a few words)."""
    try:
        good, seen = test()
    except Exception as e:
        good, seen = False, f"{type(e).__name__}: {e}"
    print(f"{name}: {'PASS' if good else 'FAIL'}   {seen}")


def quiet(call, *args, **kwargs):
    """The result of a call, without its progress bars and lines."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call(*args, **kwargs)


def gap(model, rows, new_tokens, seed=1, **how):
    """The mismatch of a sampler against its own unquantised copy: no lag, only numerics."""
    probe = [(r["ids"] * 32)[:32] for r in rows[:4]]  # fixed ids that calibrate the KV scales
    q = sampler.TorchSampler(model, probe=probe, **how)
    r = q.sample([row["ids"] for row in rows], new_tokens, seed=seed)
    return sampler.mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)


def measure_formats(folder, prompts=32, new_tokens=48):
    """KL and largest difference of the formats on a real model, into notebooks/data/."""
    model, tokenizer = dlc.load_model(folder, "float32", "cpu")
    rows, _ = dlc.load_data(dlc.check(dlc.Config(model=folder)), tokenizer, model)
    found = {}
    for weights, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")):
        row = gap(model, rows[:prompts], new_tokens, weights=weights, kv=kv)
        found[f"{weights} {kv}"] = {k: row[k] for k in ("kl", "mean_abs", "max_abs", "tokens")}
        print(weights, kv, row, flush=True)
    text = model.config.get_text_config()
    about = dict(command="python notebooks/lesson.py DIR",
                 model=f"{text.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}",
                 vocab=text.vocab_size, first_prompt=rows[0]["prompt"], prompts=prompts,
                 new_tokens=new_tokens)  # fmt: skip
    path = HERE / "data" / "smollm2_formats.json"
    path.write_text(json.dumps(dict(about, formats=found), indent=1) + "\n")


GAPS = [(fmt, sync, correction) for fmt in ("fp8", "int3")  # weights; the KV cache is BF16
        for sync, correction in ((0, "tis"), (0, "dlc"), (1, "tis"))] + [("int3", 8, "tis")]


def log(name):
    """The rows of notebooks/data/NAME.jsonl; none, if that log is not made yet."""
    path = HERE / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def gaps(fmt, sync, correction, key):
    """(seeds, steps) of one curve of the log that `measure_gaps` makes."""
    found = [r["curves"][key] for r in log("lesson_gaps") if r["cell"] == [fmt, sync, correction]]
    return torch.tensor(found)


def measure_gaps(seeds=8, steps=65):
    """The default task and rate from two bases, 16 x 8 responses a step: both gaps, the ESS, and
    the ESS of the first 1, 2, 4 ... tokens at every step, eleven seconds a run on an idle core."""
    done = [[*r["cell"], r["seed"]] for r in log("lesson_gaps")]
    for seed, cell in itertools.product(range(seeds), GAPS):
        if [*cell, seed] in done:
            continue
        fmt, sync, correction = cell
        with tempfile.TemporaryDirectory() as folder:
            rows = quiet(dlc.train, dlc.Config(
                correction=correction, weights=fmt, kv="bf16", sync_every=sync, steps=steps,
                seed=seed, base=str(dlc.tiny_base(seed=seed % 2)), out=folder + "/run"))
        keys = ("discrepancy", "lag", "ess", "ess_token", "cap_share", "clip_share")
        curves = {k: [round(r[k], 5) for r in rows] for k in keys}
        curves |= {f"ess_{t}": [round(r["ess_at"][t], 4) for r in rows] for t in rows[0]["ess_at"]}
        with (HERE / "data" / "lesson_gaps.jsonl").open("a") as file:
            print(json.dumps(dict(cell=cell, seed=seed, curves=curves)), file=file)
        print(cell, seed, rows[-1]["ess"], flush=True)


def distilling(loss):
    """The run that notebook 5 calibrates: opd.py's own pair, half of its batch."""
    return opd.Config(loss=loss, lr=2.5e-4, steps=100, prompts=16, group_size=4, seeds=3,
                      levels="0,0.025,0.05,0.1,0.2,0.4,0.8,1.6")


def measure_budget():
    """opd.calibrate for two losses, 25 runs each; 14 seconds a run on an idle core."""
    out, folder = dict(command="python notebooks/lesson.py budget"), HERE.parent / "runs" / "lesson"
    for loss in ("full", "sampled"):
        how = dict(out=str(folder / loss), budget=str(folder / f"{loss}.json"))
        out[loss] = quiet(opd.calibrate, replace(distilling(loss), **how))
        print(loss, out[loss], flush=True)
    (HERE / "data" / "lesson_budget.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    made = dict(gaps=measure_gaps, budget=measure_budget)
    made[sys.argv[1]]() if sys.argv[1] in made else measure_formats(sys.argv[1])
