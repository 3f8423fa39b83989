"""Ours against what a user would pick instead, in one run, alternating, as ratios of medians.

    python tests/bench.py                            # the tiny model; what is missing is named
    python tests/bench.py --model DIR                # and a real one (SmolLM2-135M-Instruct)
    python tests/bench.py --model DIR --vllm PYTHON  # and vLLM, by the python of its environment
    python tests/bench.py --scaling                  # how time and memory grow, with a figure

Peers: TRL (`pip install trl`) and vLLM (its CPU build: README). Beside each figure stands a
physical limit: the least time its multiplications or bytes take at the rates measured here at the
start. Writes notebooks/data/bench.json. No test of the suite is timed.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import dlc  # noqa: E402
import opd  # noqa: E402
import sampler  # noqa: E402
from sampler import LinearLogps, TorchSampler  # noqa: E402

ROUNDS = 5
rows = []


def add(what, ours, theirs, unit, target=None, limit=None, most=False, **more):
    """A row: how many times better ours is; with `most` ours / theirs, and the target an upper
    bound."""
    ratio = met = None
    if None not in (ours, theirs):
        ratio = ours / theirs if most or unit == "tokens/s" else theirs / ours
    if None not in (ratio, target):
        met = bool(ratio <= target if most else ratio >= target)
    rows.append(dict(what=what, ours=ours, theirs=theirs, ratio=ratio, target=target, met=met,
                     unit=unit, limit=limit) | more)
    show = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
    word, sign = {True: "met", False: "NOT MET", None: ""}[met], "<=" if most else ">="
    print(f"{what:66} ours {show(ours):>9} theirs {show(theirs):>9} {unit:9} "
          f"ratio {show(ratio):>6} target {sign}{show(target):>5} {word}  limit {show(limit)} "
          + " ".join(f"{k} {show(v)}" for k, v in more.items()), flush=True)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(*calls, rounds=ROUNDS):
    """Median seconds of each, run in turn; one round of each before, unmeasured."""
    taken = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, kept in zip(calls, taken):
            took = call()
            kept += [took] if i else []
    return [statistics.median(x) for x in taken]


def profile(call):
    """Shares of the time of `call`: matrix products, attention, torch's other operators, Python
    between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        wall = seconds(call)
    out = dict.fromkeys(("products", "attention", "other operators"), 0.0)
    for op in p.key_averages():
        kind = "other operators"
        if op.key in ("aten::mm", "aten::addmm", "aten::bmm"):
            kind = "products"
        elif "scaled_dot" in op.key:
            kind = "attention"
        out[kind] += op.self_cpu_time_total / 1e6 / wall
    return {k: round(v, 2) for k, v in out.items()} | dict(python=round(1 - sum(out.values()), 2))


def rates():
    """This machine's multiply-adds (FLOP/s, float32 and bfloat16) and memory traffic (bytes/s),
    best of 5."""
    out = {}
    for kind in (torch.float32, torch.bfloat16):
        a = torch.randn(1024, 1024).to(kind)
        out[str(kind)[6:]] = 2 * 1024**3 / min(seconds(lambda: a @ a) for _ in range(5))
    x, y = torch.ones(2**26), torch.empty(2**26)
    out["bytes"] = 2 * x.nbytes / min(seconds(lambda: y.copy_(x)) for _ in range(5))
    return out


def quiet(call, *args):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call(*args)


# --------------------------------------------------------------------------------------------------
# A training step, against TRL's.


def unmeasured(rollout, *_):
    """In place of dlc.measure: no gap is measured."""
    names = ("discrepancy", "lag", "ess", "ess_token", "head_mass", "entropy")
    return dict.fromkeys(names, 1.0) | dict(tokens=int(rollout.mask.sum()))


def our_step(correction, steps, logged=True, **how):
    """Median seconds of a training step of dlc.py. Not logged: both gaps unmeasured, and no stale
    scoring where the correction does not look at it."""
    measure, score, accuracy = dlc.measure, sampler.token_logps, dlc.accuracy
    dlc.accuracy = lambda *_: 0.0
    if not logged:
        dlc.measure = unmeasured
        if correction in ("reinforce", "sc"):
            sampler.token_logps = lambda model, r, *_: (r.logq, r.head_logq)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = quiet(dlc.train, dlc.Config(
                correction=correction, weights="bf16", kv="bf16", sync_every=1, steps=steps,
                device="cpu", out=folder + "/run", save_every=10**9, **how))
    finally:
        dlc.measure, sampler.token_logps, dlc.accuracy = measure, score, accuracy
    return statistics.median(r["seconds_wait"] + r["seconds_train"] for r in run[1:])


def trl_step(path, prompts, group, new, lr, rows_of, steps):
    """A function that gives the median seconds of a step of TRL's GRPOTrainer on the same model,
    prompts and batch; None without TRL."""
    try:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):  # a step includes its rollouts
            self.taken.append(time.perf_counter() - self.start)

    def reward(completions, answer, **_):
        return [float(c.strip().startswith(a)) for c, a in zip(completions, answer)]

    def step():
        model, tokenizer = dlc.load_model(path, "float32", "cpu")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        with tempfile.TemporaryDirectory() as folder:
            args = GRPOConfig(
                folder, per_device_train_batch_size=prompts * group, num_generations=group,
                max_completion_length=new, max_steps=steps, learning_rate=lr, temperature=1.0,
                beta=0.0, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False)
            data = Dataset.from_list(rows_of[:512])
            trainer = GRPOTrainer(model, reward, args, data, processing_class=tokenizer)
            trainer.add_callback(clock := Clock())
            clock.taken = []
            trainer.train()
        return statistics.median(clock.taken[1:])

    return lambda: quiet(step)


def flops(model, tokens):
    """2 multiply-adds a parameter a token, once for a forward; the tied embedding counts as the
    head."""
    return 2 * sum(p.numel() for p in model.parameters()) * tokens


def steps_against_trl(name, path, speed, targets, steps, prompts, group, new, lr, **how):
    model, tokenizer = dlc.load_model(path, "float32", "cpu")
    data, _ = dlc.load_data(dlc.check(dlc.Config(device="cpu", prompts=prompts, **how)), tokenizer)
    shown = [dict(prompt=r["prompt"], answer=r["answer"]) for r in data]
    how |= dict(steps=steps, prompts=prompts, group_size=group, max_new_tokens=new, lr=lr)
    theirs = trl_step(path, prompts, group, new, lr, shown, steps)
    calls = [lambda: our_step("reinforce", **how), lambda: our_step("dlc", **how),
             lambda: our_step("sc", **how), lambda: our_step("reinforce", logged=False, **how)]
    *ours, bare, trl = alternate(*calls, theirs) if theirs else (*alternate(*calls), None)
    q = TorchSampler(model, "bf16", "bf16")
    ids = [r["ids"] for r in data[:prompts] for _ in range(group)]

    def step():  # what is left out: reward, logs, the optimizer
        drawn = q.sample(ids, new, seed=0)
        sampler.token_logps(model, drawn, head=True)[0].sum().backward()

    step()
    shares = profile(step)
    # Tokens read: each prompt once, each response but for its last token. Sampling reads them once,
    # π_stale once, forward and backward three times over.
    length = statistics.fmean(len(r["ids"]) for r in data)
    reads = flops(model, prompts * length + prompts * group * (new - 1))
    missing = " (TRL is missing)" if trl is None else ""
    for c, mine, passes in (("reinforce", ours[0], 4), ("dlc", ours[1], 4),
                            ("reinforce, gaps not measured (as TRL)", bare, 3)):
        least = reads * passes / speed["float32"] + reads / speed["bfloat16"]
        add(f"RL step, {name}, {prompts} x {group}: {c} against TRL" + missing, mine, trl, "s",
            targets.get(c), least, profile=shares)
    return ours, how


# --------------------------------------------------------------------------------------------------
# Rollouts, against transformers' generate and vLLM.

VLLM = """
import json, os, sys, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
                  VLLM_CPU_KVCACHE_SPACE="1")
import vllm
path, new, rounds, prompts = json.loads(sys.stdin.read())
engine = vllm.LLM(path, dtype="bfloat16", max_logprobs=64, skip_tokenizer_init=True,
                  logprobs_mode="processed_logprobs")
how = vllm.SamplingParams(temperature=1.0, max_tokens=new, min_tokens=0, ignore_eos=True,
                          logprobs=64, flat_logprobs=True, detokenize=False)
taken = []
for _ in range(rounds + 1):
    start = time.perf_counter()
    engine.generate([dict(prompt_token_ids=x) for x in prompts], how, use_tqdm=False)
    taken.append(time.perf_counter() - start)
print("SECONDS", sorted(taken[1:])[rounds // 2])
"""


def vllm_seconds(python, path, prompts, new):
    """Median seconds of a batch in vLLM, run by another environment's `python`; None: it failed."""
    asked = json.dumps([path, new, ROUNDS, prompts])
    done = subprocess.run([python, "-c", VLLM], input=asked, capture_output=True, text=True,
                          env=os.environ | dict(HF_HUB_OFFLINE="1"))
    found = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    return float(found[0].split()[1]) if found else None


def rollouts(name, model, prompts, new, target, speed, vllm=None, path=None):
    """New tokens a second with a top-64 head, against transformers' generate with scores and the
    same head."""
    q = TorchSampler(model, "bf16", "bf16")
    wide, k = model.to(torch.bfloat16), min(64, q.head_k)
    P = max(map(len, prompts))
    padded = torch.tensor([[0] * (P - len(p)) + list(p) for p in prompts])
    attention = (torch.arange(P) >= P - torch.tensor([[len(p)] for p in prompts])).long()

    def generate():
        out = wide.generate(
            padded, attention_mask=attention, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new, min_new_tokens=new, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0)
        for z in out.logits:
            z.float().log_softmax(-1).topk(k)

    def ours():
        stop, q.stop_ids = q.stop_ids, q.stop_ids[:0]  # both draw every token
        q.sample(prompts, new, seed=0)
        q.stop_ids = stop

    def bare():  # without log π_stale, which generate does not have either
        score, sampler.token_logps = sampler.token_logps, lambda m, r, *_: (r.logq, r.head_logq)
        ours()
        sampler.token_logps = score

    count = len(prompts) * new
    calls = [lambda call=call: seconds(call) for call in (bare, ours, generate)]
    with torch.no_grad():
        mine, whole, theirs = alternate(*calls)
    size = sum(p.nbytes for p in wide.parameters())
    least = max(new * size / speed["bytes"], flops(wide, count) / speed["bfloat16"])
    what = f"rollouts, {name}, {len(prompts)} x {new}: against "
    add(what + "generate", count / mine, count / theirs, "tokens/s", target, count / least,
        with_logp_stale=count / whole, profile=profile(bare))
    if not vllm:
        return add(f"rollouts, {name}: against vLLM (missing: give --vllm PYTHON)", count / mine,
                   None, "tokens/s")
    took = vllm_seconds(vllm, path, [list(p) for p in prompts], new)
    add(what + "vLLM on this CPU" + (" (it failed)" if took is None else ""), count / mine,
        None if took is None else count / took, "tokens/s", None, count / least)


# --------------------------------------------------------------------------------------------------
# Memory and time in a process of its own.

PEAK = """
work()  # once before: the libraries' own buffers
import ctypes, gc
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what that run freed goes back, or the next peak would hide in it
open("/proc/self/clear_refs", "w").write("5")

def read(key):
    return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith(key))

base, taken = read("VmRSS"), []
for _ in range(TIMES):
    start = time.perf_counter()
    work()
    taken.append(time.perf_counter() - start)
print(sorted(taken)[len(taken) // 2], max(1, read("VmHWM") - base))
"""


def peak(code, times=1):
    """(median seconds, peak bytes above the inputs over all `times`) of `work()` in a process of
    its own, the high-water mark cleared after set-up. Holes that one run leaves in the heap are in
    the peak of several."""
    head = (f"import sys, time, torch\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"torch.set_num_threads({torch.get_num_threads()})\nTIMES = {times}\n")
    done = subprocess.run([sys.executable, "-c", head + code + PEAK], capture_output=True,
                          text=True, check=True)
    return tuple(map(float, done.stdout.split()))


LOSS = """
from sampler import LinearLogps
h = torch.randn({N}, {D}, requires_grad=True)
w = (torch.randn({V}, {D}) / 16).requires_grad_()
ids = torch.randint({V}, ({N}, 1))

def work():
    {loss}.sum().backward()
    h.grad = w.grad = None
"""


def loss_memory(speed):
    """The loss at a real vocabulary: gather minus logsumexp in chunks, against log_softmax of the
    whole."""
    V, N, D = 151_936, 4096, 256
    codes = [LOSS.format(V=V, N=N, D=D, loss=loss) for loss in (
        "LinearLogps.apply(h, w, ids)", "(h @ w.t()).log_softmax(-1).gather(-1, ids)")]
    found = [[peak(code) for code in codes] for _ in range(3)]  # a process each, in turn
    middle = lambda i, j: statistics.median(r[i][j] for r in found)
    (t, m), (t2, m2) = ((middle(i, 0), middle(i, 1) / 2**20) for i in (0, 1))
    least = (V * D * 4 + LinearLogps.CHUNK * 4) / 2**20
    what = "loss, V = 151,936, 4,096 positions: "
    add(what + "peak memory against log_softmax", m, m2, "MiB", 1 / 8, least, most=True)
    least = 4 * 2 * N * V * D / speed["float32"]
    add(what + "time against log_softmax", t, t2, "s", 1.6, least, most=True)


def kv(model, prompts, name, speed):
    each = {n: b for n, b, _, _ in opd.capacity(opd.Config(capacity=16))}
    wide, thin = each["bf16"], each[next(n for n in each if n.startswith("fp8,"))]
    add("KV bytes a token, 28 layers of 8 x 128, one layer kept in bf16", thin, wide, "bytes", 1.93,
        wide / 2, uniform=wide / each["fp8"])
    q8, q16 = TorchSampler(model, "bf16", "fp8"), TorchSampler(model, "bf16", "bf16")
    q8.stop_ids = q16.stop_ids = q16.stop_ids[:0]  # both draw every token
    new = 64 if name != "tiny default" else 16
    calls = [lambda q=q: seconds(lambda: q.sample(prompts, new, seed=0)) for q in (q8, q16)]
    a, b = alternate(*calls)
    size = sum(p.nbytes for p in q16.engine.parameters())  # read once a token
    add(f"decode with FP8 KV against BF16 KV, {name}, {len(prompts)} x {new}", a, b, "s", 1.3,
        new * size / speed["bytes"], most=True)


def admission(speed):
    with tempfile.TemporaryDirectory() as folder:
        opd.tiny_base(steps=1200)  # the teacher, made once: not a part of a training run
        cfg = opd.Config(levels="0", seeds=1, device="cpu", budget=folder + "/budget.json",
                         out=folder + "/runs")
        budget = quiet(opd.calibrate, cfg)
        cfg = opd.Config(weights="fp8", kv="fp8", device="cpu", budget=cfg.budget)
        taken = statistics.median(opd.admit(cfg, budget)["seconds"] for _ in range(ROUNDS))
    model, *_ = opd.untrained(opd.check(cfg))
    # About 5 tokens of a prompt, 3 of a response; four samplers, each read and scored.
    least = 4 * flops(model, opd.PROBE * 8) * (1 / speed["bfloat16"] + 1 / speed["float32"])
    add("admission check against one training run (300 steps)", taken, budget["seconds"], "s", 0.02,
        least, most=True)


# --------------------------------------------------------------------------------------------------
# How time and memory grow, and what a run needs on one card.


def estimate(text, batch, length, weights="fp8", kv="fp8"):
    """Bytes of each part of a run of dlc.py on one card, by counting; `text`: a Hugging Face
    config.

    trainer: float32 weights (a bfloat16 forward casts them, one at a time), gradient, Adam's two
    moments; sampler: the unquantised copy and the narrow one (1 byte a weight in linear layers, 2
    elsewhere, 4 a row for scales); KV: batch * length * layers * 2 * heads * size * 1 or 2; logits:
    one chunk of LinearLogps, twice."""
    h, inner, L = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    size = getattr(text, "head_dim", None) or h // text.num_attention_heads
    q, k = text.num_attention_heads * size, text.num_key_value_heads * size
    shapes = [(q, h), (k, h), (k, h), (h, q), (inner, h), (inner, h), (h, inner)]
    linear, scales = L * sum(a * b for a, b in shapes), L * sum(a for a, _ in shapes)
    heads = 1 if text.tie_word_embeddings else 2
    rest = text.vocab_size * h * heads + L * (2 * h + 2 * size) + h
    n = linear + rest
    narrow = 2 * linear if weights in ("none", "bf16") else linear + 4 * scales
    return {"trainer: weights": 4 * n,
            "trainer: gradient": 4 * n,
            "trainer: Adam": 8 * n,
            "sampler: unquantised copy": 4 * n,
            "sampler: narrow copy": narrow + 2 * rest,
            "KV cache": batch * length * L * 2 * k * (2 if kv in ("none", "bf16") else 1),
            "logits": 2 * 4 * LinearLogps.CHUNK}


def real_bytes(run, batch, length):
    """The same of a run's own tensors."""
    size = lambda tensors: sum(t.nbytes for t in tensors)
    params = list(run.model.parameters())
    for w in params:
        w.grad = torch.zeros_like(w)
    run.optimizer.step()
    q, cache = run.sampler.sampler, run.sampler.sampler._new_cache()
    q.engine(torch.zeros(batch, length).long(), past_key_values=cache, use_cache=True)
    narrow = [q.engine.get_submodule(n) for n in q.narrow]
    moments = [t for s in run.optimizer.state.values() for k, t in s.items() if k != "step"]
    codes = [t for m in narrow for t in (m.codes, *m.scales)]
    return {"trainer: weights": size(params),
            "trainer: gradient": size(w.grad for w in params),
            "trainer: Adam": size(moments),
            "sampler: unquantised copy": size(q.stale.parameters()),
            "sampler: narrow copy": size(q.engine.parameters()) + size(codes),
            "KV cache": size(t for layer in cache.layers for t in (layer.keys, layer.values))}


def check_estimate():
    """The estimate against the bytes of real tensors, on two small models; ratio for each part."""
    for steps, width, layers in ((350, 64, 3), (2, 96, 2)):
        with tempfile.TemporaryDirectory() as folder:
            cfg = dlc.check(dlc.Config(device="cpu", steps=1, out=folder + "/run"))
            loaded = dlc.load_model(dlc.tiny_base(steps, width, layers), "float32", "cpu")
            with dlc.Run(cfg, *loaded, "bench") as run:
                guess, real = estimate(run.model.config, 4, 10), real_bytes(run, 4, 10)
        print(f"{layers}x{width}: estimate over real bytes "
              + ", ".join(f"{k} {guess[k] / v:.3f}" for k, v in real.items()))


def scaling_figure(out):
    from matplotlib import pyplot as plt

    names = dict(B="responses", T="length, tokens", V="vocabulary", D="width")
    fig, axes = plt.subplots(2, 4, figsize=(12, 5.5), layout="constrained")
    for row in out:
        line = ("seconds", "peak MiB").index(row["unit"])
        ax = axes[line, list(names).index(row["axis"])]
        style = "C3s--" if row["what"] == "rollout" else "C0o-"
        ax.loglog(row["values"], row["y"], style, label=row["what"])
        ax.annotate(f"{row['slopes'][-1]:.2f}", (row["values"][-1], row["y"][-1]), xytext=(5, -3),
                    textcoords="offset points", fontsize=8)
        ax.set(xlabel=names[row["axis"]], ylabel=row["unit"])
        ax.minorticks_off()
        ax.set_xticks(row["values"], row["values"])
        ax.margins(x=0.15)
    axes[0, 0].legend(fontsize=8)
    fig.suptitle("beside each line its last slope in log-log")
    (ROOT / "notebooks/figures").mkdir(exist_ok=True)
    path = ROOT / "notebooks/figures/scaling.png"
    dlc.write(path, lambda new: fig.savefig(new, dpi=100, format="png"))


BATCH = """
import transformers
from sampler import TorchSampler, token_logps

transformers.utils.logging.set_verbosity_error()
B, T, V, D = {B}, {T}, {V}, {D}
torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
    vocab_size=V, hidden_size=D, intermediate_size=3 * D, num_hidden_layers=4,
    num_attention_heads=max(1, D // 64), num_key_value_heads=max(1, D // 64), head_dim=64,
    tie_word_embeddings=True, eos_token_id=None)).eval()
q = TorchSampler(model, "bf16", "bf16", stop_ids=[])
drawn = q.sample([[1, 2, 3, 4]] * B, T, seed=0)

def work():
    if {sample}:
        q.sample([[1, 2, 3, 4]] * B, T, seed=0)
    else:
        token_logps(model, drawn, head=True)[0].sum().backward()
        model.zero_grad()
"""
BASE = dict(B=16, T=64, V=4096, D=128)
GROW = dict(B=(4, 8, 16, 32, 64), T=(16, 32, 64, 128, 256), V=(1024, 4096, 16384, 65536),
            D=(64, 128, 256, 512))
# What each should do, in seconds and bytes: sampling and training read each token once a step, so
# time is linear in batch and (while the attention's T^2 is small) in length; the head's 2 N V D is
# linear in V but memory is held by the chunk; D enters squared.
SHOULD = dict(B=(1, 1), T=(1, 1), V=(1, 1), D=(2, 1))


def scaling(speed):
    """Seconds and peak bytes of one scored and differentiated batch, and of one rollout, as one
    size grows; slopes in log-log."""
    out = []
    for axis, values in GROW.items():
        for sample, name in ((False, "score and differentiate"), (True, "rollout")):
            codes = [BATCH.format(**BASE | {axis: v}, sample=sample) for v in values]
            found = [peak(code, times=5) for code in codes]
            x = [math.log(v) for v in values]
            for i, unit in enumerate(("seconds", "peak MiB")):
                y = [f[i] if i == 0 else f[i] / 2**20 for f in found]
                z, most = [math.log(v) for v in y], SHOULD[axis][i]
                slopes = [(z[j + 1] - z[j]) / (x[j + 1] - x[j]) for j in range(len(y) - 1)]
                out.append(dict(axis=axis, values=list(values), what=name, unit=unit, y=y,
                                slopes=slopes, should=most))
                print(f"{axis} {values}: {name}, {unit} {[round(v, 4) for v in y]}; "
                      f"slopes {[round(s, 2) for s in slopes]}; at most {most}")
    path = ROOT / "notebooks/data/scaling.json"
    dlc.write(path, lambda new: new.write_text(json.dumps(out)))
    scaling_figure(out)
    check_estimate()
    import transformers

    qwen = transformers.Qwen3Config(  # Qwen3-1.7B
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
    parts = estimate(qwen, 64, 1024)
    print("Qwen3-1.7B, 64 responses of 1,024 tokens: "
          + ", ".join(f"{k} {v / 2**30:.2f} GiB" for k, v in parts.items())
          + f"; together {sum(parts.values()) / 2**30:.1f} GiB, "
          "activations of the micro-batch apart")


# --------------------------------------------------------------------------------------------------


def steps_over_reinforce(ours, how):
    """What the corrections cost over the plainest one, as logged and without measuring gaps."""
    limits = [r["limit"] for r in rows]
    (plain, full, centred), what = ours, "step, tiny default, as logged: "
    add(what + "dlc over reinforce", full, plain, "s", 1.35, limits[0], most=True)
    add(what + "sc over reinforce", centred, plain, "s", 1.05, limits[0], most=True)
    calls = [lambda c=c: our_step(c, logged=False, **how) for c in ("reinforce", "dlc", "sc")]
    plain, full, centred = alternate(*calls)
    what = "step, tiny default, gaps not logged: "
    add(what + "dlc over reinforce", full, plain, "s", None, limits[0], most=True)
    add(what + "sc over reinforce", centred, plain, "s", None, limits[2], most=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a real causal LM")
    parser.add_argument("--vllm", help="a python that can import vllm")
    parser.add_argument("--scaling", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    speed = rates()
    giga = {k: v / 1e9 for k, v in speed.items()}
    print(f"{torch.get_num_threads()} threads: float32 {giga['float32']:.0f} and "
          f"bfloat16 {giga['bfloat16']:.0f} GFLOP/s, memory {giga['bytes']:.1f} GB/s; "
          f"medians of {ROUNDS} alternating rounds")
    if args.scaling:
        return scaling(speed)
    tiny, targets = str(dlc.tiny_base()), dict(reinforce=3, dlc=2.5)
    ours, how = steps_against_trl("tiny default", tiny, speed, targets, 21, 32, 8, 4, 2e-4)
    steps_over_reinforce(ours, how)
    model, tokenizer = dlc.load_model(tiny, "float32", "cpu")
    data, _ = dlc.load_data(dlc.check(dlc.Config(device="cpu")), tokenizer)
    prompts = [r["ids"] for r in data[:32]]
    rollouts("tiny default", model, [p for p in prompts for _ in range(8)], 4, 1.8, speed)
    loss_memory(speed)
    admission(speed)
    if args.model:
        name, targets = Path(args.model).name, dict(reinforce=1.3, dlc=1.3)
        model, tokenizer = dlc.load_model(args.model, "float32", "cpu")
        data, _ = dlc.load_data(dlc.check(dlc.Config(device="cpu", model=args.model)), tokenizer)
        prompts = [r["ids"] for r in data[:32]]
        kv(model, prompts, name, speed)
        rollouts(name, model, prompts, 64, 1.5, speed, args.vllm, args.model)
        steps_against_trl(name, args.model, speed, targets, 2, 8, 8, 12, 1e-5, model=args.model)
    else:
        kv(dlc.load_model(tiny, "float32", "cpu")[0], prompts, "tiny default", speed)
        add("a real model (missing: give --model DIR)", None, None, "")
    machine = dict(threads=torch.get_num_threads(), torch=torch.__version__,
                   **{k: round(v, 1) for k, v in giga.items()})
    text = json.dumps([r | dict(machine=machine) for r in rows], indent=1)
    dlc.write(ROOT / "notebooks/data/bench.json", lambda new: new.write_text(text))


if __name__ == "__main__":
    main()
