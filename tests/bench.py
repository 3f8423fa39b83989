"""Ours against what a user would pick instead, in one run, alternating, as ratios of medians; no timed test.

    python tests/bench.py                            # the tiny model; what is not installed is said to be missing
    python tests/bench.py --model DIR                # and a real one (SmolLM2-135M-Instruct for the committed numbers)
    python tests/bench.py --model DIR --vllm PYTHON  # and vLLM, by the python of its own environment
    python tests/bench.py --scaling                  # how time and memory grow, fitted, with a figure

Peers: TRL (`pip install trl`) and vLLM (its CPU build: README). Beside each figure stands a physical limit: the least
time its multiplications or bytes take at the rates measured here at the start. Writes notebooks/data/bench.json."""

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
    """A row: how many times better ours is; with `most` ours / theirs, and the target an upper bound."""
    ratio = None if None in (ours, theirs) else (ours / theirs if most or unit == "tokens/s" else theirs / ours)
    met = None if None in (ratio, target) else bool(ratio <= target if most else ratio >= target)
    rows.append(dict(what=what, ours=ours, theirs=theirs, ratio=ratio, target=target, met=met, unit=unit, limit=limit) | more)
    show = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
    print(f"{what:66} ours {show(ours):>9} theirs {show(theirs):>9} {unit:9} ratio {show(ratio):>6} "
          f"target {'<=' if most else '>='}{show(target):>5} {'met' if met else 'NOT MET' if met is False else ''}  limit {show(limit)} "
          + " ".join(f"{k} {show(v)}" for k, v in more.items()), flush=True)  # fmt: skip


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(*calls, rounds=ROUNDS):
    """Median seconds of each, run in turn; one round of each before, unmeasured."""
    taken = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, kept in zip(calls, taken):
            x = call() if i else [call(), None][1]
            kept += [x] * (x is not None)
    return [statistics.median(x) for x in taken]


def profile(call):
    """Shares of the time of `call`: matrix products, attention, torch's other operators, Python between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        wall = seconds(call)
    out = dict.fromkeys(("products", "attention", "other operators"), 0.0)
    for op in p.key_averages():
        kind = "products" if op.key in ("aten::mm", "aten::addmm", "aten::bmm") else "attention" if "scaled_dot" in op.key else "other operators"
        out[kind] += op.self_cpu_time_total / 1e6 / wall
    return {k: round(v, 2) for k, v in out.items()} | dict(python=round(1 - sum(out.values()), 2))


def rates():
    """This machine's multiply-adds (FLOP/s, float32 and bfloat16) and memory traffic (bytes/s), best of 5."""
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


def our_step(correction, steps, logged=True, **how):
    """Median seconds of a training step of dlc.py. Not logged: both gaps unmeasured, and no stale scoring where the
    correction does not look at it."""
    measure, score = dlc.measure, sampler.token_logps
    if not logged:
        dlc.measure = lambda rollout, *_: dict.fromkeys(("discrepancy", "lag", "ess", "ess_token", "head_mass", "entropy"), 1.0) | dict(
            tokens=int(rollout.mask.sum()))  # fmt: skip
        if correction in ("reinforce", "sc"):
            sampler.token_logps = lambda model, r, *_: (r.logq, r.head_logq)
    with tempfile.TemporaryDirectory() as folder:
        cfg = dlc.Config(correction=correction, weights="bf16", kv="bf16", sync_every=1, steps=steps, device="cpu",
                         out=folder + "/run", save_every=10**9, **how)  # fmt: skip
        dlc.accuracy, accuracy = lambda *_: 0.0, dlc.accuracy
        try:
            run = quiet(dlc.train, cfg)
        finally:
            dlc.measure, sampler.token_logps, dlc.accuracy = measure, score, accuracy
    return statistics.median(r["seconds_sample"] + r["seconds_train"] for r in run[1:])


def trl_step(path, prompts, group, new, lr, rows_of, steps):
    """A function that gives the median seconds of a step of TRL's GRPOTrainer on the same model, prompts and batch."""
    try:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.taken.append(time.perf_counter() - self.start)

    def reward(completions, answer, **_):
        return [float(c.strip().startswith(a)) for c, a in zip(completions, answer)]

    def step():
        model, tokenizer = dlc.load_model(path, "float32", "cpu")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        with tempfile.TemporaryDirectory() as folder:
            args = GRPOConfig(folder, per_device_train_batch_size=prompts * group, num_generations=group, max_completion_length=new,
                              max_steps=steps, learning_rate=lr, temperature=1.0, beta=0.0, use_cpu=True, bf16=False, report_to=[],
                              save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False)  # fmt: skip
            trainer = GRPOTrainer(model, reward, args, Dataset.from_list(rows_of[:512]), processing_class=tokenizer)
            trainer.add_callback(clock := Clock())
            clock.taken = []
            trainer.train()
        # a step includes its rollouts, which are made in the first half of on_step_begin .. on_step_end
        return statistics.median(clock.taken[1:])

    return lambda: quiet(step)


def flops(model, tokens):
    """2 multiply-adds a parameter a token, once for a forward; the tied embedding counts as the head."""
    return 2 * sum(p.numel() for p in model.parameters()) * tokens


def steps_against_trl(name, path, speed, targets, steps, prompts, group, new, lr, **how):
    model, tokenizer = dlc.load_model(path, "float32", "cpu")
    data, _ = dlc.load_data(dlc.check(dlc.Config(device="cpu", prompts=prompts, **how)), tokenizer)
    shown = [dict(prompt=r["prompt"], answer=r["answer"]) for r in data]
    how |= dict(steps=steps, prompts=prompts, group_size=group, max_new_tokens=new, lr=lr)
    theirs = trl_step(path, prompts, group, new, lr, shown, steps)
    calls = [lambda: our_step("reinforce", **how), lambda: our_step("dlc", **how), lambda: our_step("sc", **how),
             lambda: our_step("reinforce", logged=False, **how)]  # fmt: skip
    *ours, bare, trl = alternate(*calls, theirs) if theirs else (*alternate(*calls), None)
    q = TorchSampler(model, "bf16", "bf16")
    ids = [r["ids"] for r in data[:prompts] for _ in range(group)]

    def step():  # what is left out: reward, logs, the optimizer
        sampler.token_logps(model, q.sample(ids, new, seed=0), head=True)[0].sum().backward()

    step()
    shares = profile(step)
    # Tokens read: each prompt once, each response but for its last token. Sampling reads them once, π_stale once,
    # forward and backward three times over.
    reads = flops(model, prompts * statistics.fmean(len(r["ids"]) for r in data) + prompts * group * (new - 1))
    for c, mine, passes in (("reinforce", ours[0], 4), ("dlc", ours[1], 4), ("reinforce, gaps not measured (as TRL)", bare, 3)):
        add(f"RL step, {name}, {prompts} x {group}: {c} against TRL" + " (TRL is missing)" * (trl is None), mine, trl, "s",
            targets.get(c), reads * passes / speed["float32"] + reads / speed["bfloat16"], profile=shares)  # fmt: skip
    return ours, how


def rollouts(name, model, prompts, new, target, speed, vllm=None, path=None):
    """New tokens a second with a top-64 head, against transformers' generate with scores and the same head."""
    data = dict(ids=[p for p in prompts])
    q = TorchSampler(model, "bf16", "bf16")
    wide = model.to(torch.bfloat16)
    padded = torch.tensor([[0] * (max(map(len, data["ids"])) - len(p)) + list(p) for p in data["ids"]])
    attention = (torch.arange(padded.shape[1]) >= padded.shape[1] - torch.tensor([[len(p)] for p in data["ids"]])).long()
    k = min(64, q.head_k)

    def generate():
        out = wide.generate(padded, attention_mask=attention, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
                            min_new_tokens=new, output_logits=True, return_dict_in_generate=True, pad_token_id=0)  # fmt: skip
        for z in out.logits:
            z.float().log_softmax(-1).topk(k)

    def ours():
        stop, q.stop_ids = q.stop_ids, q.stop_ids[:0]  # both draw every token
        q.sample(data["ids"], new, seed=0)
        q.stop_ids = stop

    def bare():  # without log π_stale, which generate does not have either
        score, sampler.token_logps = sampler.token_logps, lambda m, r, *_: (r.logq, r.head_logq)
        ours()
        sampler.token_logps = score

    count = len(data["ids"]) * new
    with torch.no_grad():
        mine, whole, theirs = alternate(lambda: seconds(bare), lambda: seconds(ours), lambda: seconds(generate))
    size = sum(p.nbytes for p in wide.parameters())
    limit = count / max(new * size / speed["bytes"], flops(wide, count) / speed["bfloat16"])
    add(f"rollouts, {name}, {len(prompts)} x {new}: against generate", count / mine, count / theirs, "tokens/s", target, limit,
        with_logp_stale=count / whole, profile=profile(bare))  # fmt: skip
    if vllm:
        code = f"""import os, time, json; os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING='0', VLLM_LOGGING_LEVEL='ERROR', VLLM_CPU_KVCACHE_SPACE='1')
import vllm
e = vllm.LLM({path!r}, dtype='bfloat16', max_logprobs=64, skip_tokenizer_init=True, logprobs_mode='processed_logprobs')
how = vllm.SamplingParams(temperature=1.0, max_tokens={new}, min_tokens=0, ignore_eos=True, logprobs=64, flat_logprobs=True, detokenize=False)
p = [dict(prompt_token_ids=x) for x in {data['ids']!r}]
t = []
for _ in range({ROUNDS + 1}):
    s = time.perf_counter(); e.generate(p, how, use_tqdm=False); t.append(time.perf_counter() - s)
print('SECONDS', sorted(t[1:])[len(t[1:]) // 2])"""
        done = subprocess.run([vllm, "-c", code], capture_output=True, text=True, env=os.environ | dict(HF_HUB_OFFLINE="1"))
        found = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
        other = count / float(found[0].split()[1]) if found else None
        add(f"rollouts, {name}, {len(prompts)} x {new}: against vLLM on this CPU" + " (it failed)" * (not found), count / mine, other,
            "tokens/s", None, limit)  # fmt: skip
    else:
        add(f"rollouts, {name}: against vLLM (missing: give --vllm PYTHON)", count / mine, None, "tokens/s")
    return q


def peak(code, times=1):
    """(median seconds, peak bytes above the inputs over all `times`) of `work()` in a process of its own, the high-water
    mark cleared after set-up. Holes that one run leaves in the heap are in the peak of several."""
    head = f"import sys, time, torch; sys.path.insert(0, {str(ROOT)!r}); torch.set_num_threads({torch.get_num_threads()}); TIMES = {times}\n"
    tail = """
work()  # once before: the libraries' own buffers
import gc, ctypes; gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what that run freed goes back, or the next one's peak would hide in it
open('/proc/self/clear_refs', 'w').write('5')
read = lambda key: next(int(x.split()[1]) * 1024 for x in open('/proc/self/status') if x.startswith(key))
base, taken = read('VmRSS'), []
for _ in range(TIMES):
    start = time.perf_counter()
    work()
    taken.append(time.perf_counter() - start)
print(sorted(taken)[len(taken) // 2], max(1, read('VmHWM') - base))"""
    done = subprocess.run([sys.executable, "-c", head + code + tail], capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


def loss_memory(speed):
    """The loss at a real vocabulary: gather minus logsumexp in chunks, against log_softmax of the whole."""
    V, N, D = 151_936, 4096, 256
    inputs = f"h, w = torch.randn({N}, {D}, requires_grad=True), (torch.randn({V}, {D}) / 16).requires_grad_()\nids = torch.randint({V}, ({N}, 1))\n"
    ours = inputs + "from sampler import LinearLogps\ndef work():\n    LinearLogps.apply(h, w, None, ids).sum().backward(); h.grad = w.grad = None"
    theirs = inputs + "def work():\n    (h @ w.t()).log_softmax(-1).gather(-1, ids).sum().backward(); h.grad = w.grad = None"
    found = [[peak(code) for code in (ours, theirs)] for _ in range(3)]  # a process each, in turn
    (t, m), (t2, m2) = ([statistics.median(r[i][j] for r in found) for j in (0, 1)] for i in (0, 1))
    multiply = 2 * N * V * D / speed["float32"]
    add("loss, V = 151,936, 4,096 positions: peak memory against log_softmax", m / 2**20, m2 / 2**20, "MiB", 1 / 8,
        (V * D * 4 + LinearLogps.CHUNK * 4) / 2**20, most=True)  # fmt: skip
    add("loss, V = 151,936, 4,096 positions: time against log_softmax", t, t2, "s", 1.6, 4 * multiply, most=True)


def kv(model, prompts, name, speed):
    each = {n: b for n, b, _, _ in opd.capacity(opd.Config(capacity=16))}
    wide, thin = each["bf16"], each[next(n for n in each if n.startswith("fp8,"))]
    add("KV bytes a token, 28 layers of 8 x 128, one layer kept in bf16", thin, wide, "bytes", 1.93, wide / 2, uniform=wide / each["fp8"])
    q8, q16 = TorchSampler(model, "bf16", "fp8"), TorchSampler(model, "bf16", "bf16")
    new = 64 if name != "tiny default" else 16
    draw = lambda q: (setattr(q, "stop_ids", q.stop_ids[:0]), seconds(lambda: q.sample(prompts, new, seed=0)))[1]
    a, b = alternate(lambda: draw(q8), lambda: draw(q16))
    least = new * sum(p.nbytes for p in q16.engine.parameters()) / speed["bytes"]  # the weights, read once a token
    add(f"decode with FP8 KV against BF16 KV, {name}, {len(prompts)} x {new}", a, b, "s", 1.3, least, most=True)


def admission(speed):
    with tempfile.TemporaryDirectory() as folder:
        opd.tiny_base(steps=1200)  # the teacher, made once: not a part of a training run
        cfg = opd.Config(levels="0", seeds=1, device="cpu", budget=folder + "/budget.json", out=folder + "/runs")
        budget = quiet(opd.calibrate, cfg)
        cfg = opd.Config(weights="fp8", kv="fp8", device="cpu", budget=cfg.budget)
        taken = statistics.median(opd.admit(cfg, budget)["seconds"] for _ in range(ROUNDS))
    model, *_ = opd.untrained(opd.check(cfg))
    reads = flops(model, opd.PROBE * 8)  # about 5 tokens of a prompt, 3 of a response; four samplers, each read and scored
    least = 4 * reads * (1 / speed["bfloat16"] + 1 / speed["float32"])
    add("admission check against one training run (300 steps)", taken, budget["seconds"], "s", 0.02, least, most=True)


def estimate(text, batch, length, weights="fp8", kv="fp8", dtype="bfloat16"):
    """Bytes of each part of a run of dlc.py on one card, by counting; `text`: a Hugging Face config.

    trainer: forward weights and float32 master weights (one copy where the forward is float32), gradient, Adam's two
    moments; sampler: the unquantised copy and the narrow one (1 byte a weight in linear layers, 2 elsewhere, 4 a row for
    scales); KV: batch * length * layers * 2 * heads * size * 1 or 2; logits: one chunk of LinearLogps, twice."""
    h, V, size = text.hidden_size, text.vocab_size, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    q, k, L = text.num_attention_heads * size, text.num_key_value_heads * size, text.num_hidden_layers
    shapes = [(q, h), (k, h), (k, h), (h, q), (text.intermediate_size, h), (text.intermediate_size, h), (h, text.intermediate_size)]
    linear, scales = L * sum(a * b for a, b in shapes), L * sum(a for a, _ in shapes)
    rest = V * h * (1 if text.tie_word_embeddings else 2) + L * (2 * h + 2 * size) + h
    forward = 2 if dtype == "bfloat16" else 4
    wide = 2 if weights in ("none", "bf16") else 1
    out = {"trainer: weights": forward * (linear + rest) + (4 * (linear + rest) if forward == 2 else 0), "trainer: gradient": 4 * (linear + rest),
           "trainer: Adam": 8 * (linear + rest), "sampler: unquantised copy": forward * (linear + rest),
           "sampler: narrow copy": wide * linear + (4 * scales if wide == 1 else 0) + 2 * rest,
           "KV cache": batch * length * L * 2 * k * (2 if kv in ("none", "bf16") else 1), "logits": 2 * 4 * LinearLogps.CHUNK}  # fmt: skip
    return out


def check_estimate():
    """The estimate against the bytes of real tensors, on two small models, in both dtypes; ratio for each part."""
    for steps, width, layers in ((350, 64, 3), (2, 96, 2)):
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                cfg = dlc.check(dlc.Config(device="cpu", steps=1, dtype=dtype, out=folder + "/run"))
                run = dlc.Run(cfg, dlc.tiny_base(steps, width, layers), "bench")
                for w in run.master:
                    w.grad = torch.zeros_like(w)
                run.optimizer.step()
                cache = run.sampler._new_cache()
                x = torch.zeros(4, 10).long()
                run.sampler.engine(x, past_key_values=cache, use_cache=True)
                guess = estimate(run.model.config, 4, 10, dtype=dtype)
                size = lambda tensors: sum(t.nbytes for t in tensors)
                narrow = [run.sampler.engine.get_submodule(n) for n in run.sampler.narrow]
                real = {"trainer: weights": size(run.params) + (size(run.master) if dtype == "bfloat16" else 0),
                        "trainer: gradient": size(w.grad for w in run.master),
                        "trainer: Adam": size(t for s in run.optimizer.state.values() for k, t in s.items() if k != "step"),
                        "sampler: unquantised copy": size(run.sampler.stale.parameters()),
                        "sampler: narrow copy": size(run.sampler.engine.parameters()) + size(t for m in narrow for t in (m.codes, *m.scales)),
                        "KV cache": size(t for layer in cache.layers for t in (layer.keys, layer.values))}  # fmt: skip
                print(f"{layers}x{width} {dtype}: estimate over real bytes " + ", ".join(f"{k} {guess[k] / v:.3f}" for k, v in real.items()))


def scaling_figure(out):
    from matplotlib import pyplot as plt

    names = dict(B="responses", T="length, tokens", V="vocabulary", D="width")
    fig, axes = plt.subplots(2, 4, figsize=(12, 5.5), layout="constrained")
    for row, style in ((r, "C0o-" if r["what"] != "rollout" else "C3s--") for r in out):
        ax = axes[("seconds", "peak MiB").index(row["unit"]), list(names).index(row["axis"])]
        ax.loglog(row["values"], row["y"], style, label=row["what"])
        ax.annotate(f"{row['slopes'][-1]:.2f}", (row["values"][-1], row["y"][-1]), xytext=(5, -3), textcoords="offset points", fontsize=8)
        ax.set(xlabel=names[row["axis"]], ylabel=row["unit"])
        ax.minorticks_off()
        ax.set_xticks(row["values"], row["values"])
        ax.margins(x=0.15)
    axes[0, 0].legend(fontsize=8)
    fig.suptitle("beside each line its last slope in log-log")
    (ROOT / "notebooks/figures").mkdir(exist_ok=True)
    dlc.write(ROOT / "notebooks/figures/scaling.png", lambda new: fig.savefig(new, dpi=100, format="png"))


def scaling(speed):
    """Seconds and peak bytes of one scored and differentiated batch, and of one rollout, as one size grows; slopes in log-log."""
    base = dict(B=16, T=64, V=4096, D=128)
    code = """
import transformers, sampler
from sampler import TorchSampler, token_logps
transformers.utils.logging.set_verbosity_error()
B, T, V, D = {B}, {T}, {V}, {D}
torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=V, hidden_size=D, intermediate_size=3 * D, num_hidden_layers=4,
    num_attention_heads=max(1, D // 64), num_key_value_heads=max(1, D // 64), head_dim=64, tie_word_embeddings=True, eos_token_id=None)).eval()
q = TorchSampler(model, "bf16", "bf16", stop_ids=[])
drawn = q.sample([[1, 2, 3, 4]] * B, T, seed=0)
def work():
    if {sample}:
        q.sample([[1, 2, 3, 4]] * B, T, seed=0)
    else:
        token_logps(model, drawn, head=True)[0].sum().backward(); model.zero_grad()
"""
    # What each should do: sampling and training read each token once a step, so time is linear in batch and (while the
    # attention's T^2 is small) in length; the head's 2 N V D is linear in V but memory is held by the chunk; D enters squared.
    should = dict(B=(1, 1), T=(1, 1), V=(1, 1), D=(2, 1))
    axes_of = dict(B=(4, 8, 16, 32, 64), T=(16, 32, 64, 128, 256), V=(1024, 4096, 16384, 65536), D=(64, 128, 256, 512))
    out = []
    for axis, values in axes_of.items():
        for sample, name in ((False, "score and differentiate"), (True, "rollout")):
            found = [peak(code.format(**base | {axis: v}, sample=sample), times=5) for v in values]
            for i, unit in enumerate(("seconds", "peak MiB")):
                y = [f[i] / (1 if i == 0 else 2**20) for f in found]
                slope = [math.log(y[j + 1] / y[j]) / math.log(values[j + 1] / values[j]) for j in range(len(y) - 1)]
                out.append(dict(axis=axis, values=list(values), what=name, unit=unit, y=y, slopes=slope, should=should[axis][i]))
                print(f"{axis} {values}: {name}, {unit} {[round(v, 4) for v in y]}; slopes {[round(s, 2) for s in slope]}; at most {should[axis][i]}")
    dlc.write(ROOT / "notebooks/data/scaling.json", lambda new: new.write_text(json.dumps(out)))
    scaling_figure(out)
    check_estimate()
    import transformers

    qwen = transformers.Qwen3Config(vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                                    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)  # Qwen3-1.7B  # fmt: skip
    parts = estimate(qwen, 64, 1024)
    print("Qwen3-1.7B, 64 responses of 1,024 tokens: " + ", ".join(f"{k} {v / 2**30:.2f} GiB" for k, v in parts.items())
          + f"; together {sum(parts.values()) / 2**30:.1f} GiB, activations of the micro-batch apart")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a real causal LM")
    parser.add_argument("--vllm", help="a python that can import vllm")
    parser.add_argument("--scaling", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    speed = rates()
    print(f"{torch.get_num_threads()} threads: float32 {speed['float32'] / 1e9:.0f} and bfloat16 {speed['bfloat16'] / 1e9:.0f} GFLOP/s, "
          f"memory {speed['bytes'] / 1e9:.1f} GB/s; medians of {ROUNDS} alternating rounds")  # fmt: skip
    if args.scaling:
        return scaling(speed)
    tiny = str(dlc.tiny_base())
    (plain, full, centred), how = steps_against_trl("tiny default", tiny, speed, dict(reinforce=3, dlc=2.5), 21, 32, 8, 4, 2e-4)
    least = rows[0]["limit"]
    add("step, tiny default, as logged: dlc over reinforce", full, plain, "s", 1.35, least, most=True)
    add("step, tiny default, as logged: sc over reinforce", centred, plain, "s", 1.05, least, most=True)
    plain, full, centred = alternate(*(lambda c=c: our_step(c, logged=False, **how) for c in ("reinforce", "dlc", "sc")))
    add("step, tiny default, gaps not logged: dlc over reinforce", full, plain, "s", None, least, most=True)
    add("step, tiny default, gaps not logged: sc over reinforce", centred, plain, "s", None, rows[2]["limit"], most=True)
    model, tokenizer = dlc.load_model(tiny, "float32", "cpu")
    data, _ = dlc.load_data(dlc.check(dlc.Config(device="cpu")), tokenizer)
    rollouts("tiny default", model, [r["ids"] for r in data[:32] for _ in range(8)], 4, 1.8, speed)
    loss_memory(speed)
    admission(speed)
    model, _ = dlc.load_model(args.model or tiny, "float32", "cpu")
    name = Path(args.model).name if args.model else "tiny default"
    prompts = [r["ids"] for r in data[:32]]
    if args.model:
        real = dlc.check(dlc.Config(device="cpu", model=args.model))
        prompts = [r["ids"] for r in dlc.load_data(real, dlc.load_model(args.model, "float32", "cpu")[1])[0][:32]]
    kv(model, prompts, name, speed)
    if args.model:
        rollouts(name, model, prompts, 64, 1.5, speed, args.vllm, args.model)
        steps_against_trl(name, args.model, speed, dict(reinforce=1.3, dlc=1.3), 2, 8, 8, 12, 1e-5, model=args.model)
    else:
        add("a real model (missing: give --model DIR)", None, None, "")
    machine = dict(threads=torch.get_num_threads(), torch=torch.__version__, **{k: round(v / 1e9, 1) for k, v in speed.items()})
    text = json.dumps([r | dict(machine=machine) for r in rows], indent=1)
    dlc.write(ROOT / "notebooks/data/bench.json", lambda new: new.write_text(text))


if __name__ == "__main__":
    main()
