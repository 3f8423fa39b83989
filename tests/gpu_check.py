"""What a GPU does with these scripts, as a table: ten minutes at most, no downloads.

    python tests/gpu_check.py > FILE   # random weights in the shape of Qwen3-0.6B
    python tests/gpu_check.py --tiny   # the same on a CPU at a toy's size, to test this script

Three things are judged, and make the exit status 3 where they fail: formats that round on the card
as on a CPU, samplers near the trainer, an engine that agrees with it. Times and bytes are only
shown, beside the least that the card needs to read or multiply as much. A row that needs FP8
arithmetic (compute capability 8.9) or vLLM says so where there is none.
"""

import argparse
import contextlib
import copy
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from check_engine import self_check  # noqa: E402

import dlc  # noqa: E402
import sampler as S  # noqa: E402

BF16, MIB, GIB = torch.bfloat16, 2**20, 2**30
QWEN = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128)  # fmt: skip
TOY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
           num_attention_heads=4, num_key_value_heads=2, head_dim=32)  # fmt: skip


class Card:
    """Where it runs, and the sizes that go with it."""

    def __init__(self, tiny):
        self.tiny, self.device = tiny, torch.device("cpu" if tiny else "cuda")
        self.shape, self.rows, self.new = (TOY, 4, 6) if tiny else (QWEN, 32, 64)
        self.name = "CPU, toy sizes" if tiny else torch.cuda.get_device_name()
        self.copied, self.side, self.rounds = (2**22, 128, 1) if tiny else (2**31, 8192, 5)

    def wait(self):
        if not self.tiny:
            torch.cuda.synchronize()

    def seconds(self, call):
        """Median of some calls, after one unmeasured."""
        taken = []
        for i in range(self.rounds + 1):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken += [time.perf_counter() - start] if i else []
        return statistics.median(taken)

    def peak(self, call):
        """Bytes above what was held before, at most; 0 on a CPU, where torch does not count."""
        call()
        if self.tiny:
            return 0
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - held

    def model(self, **more):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            **self.shape | more, tie_word_embeddings=True, initializer_range=0.05,
            max_position_embeddings=4096, eos_token_id=1, bos_token_id=None)  # fmt: skip
        with self.device:
            return transformers.Qwen3ForCausalLM(config).eval()

    def prompts(self):
        return [[5 + i] * 16 for i in range(self.rows)]


def rates(card, _):
    """The card itself: a plain copy, and products in BF16 and FP8. Sets card.bandwidth."""
    a = torch.empty(card.copied, dtype=torch.uint8, device=card.device)
    b = torch.empty_like(a)
    card.bandwidth = 2 * len(a) / card.seconds(lambda: b.copy_(a))
    yield "memory, read and written", f"{card.bandwidth / 1e12:.2f} TB/s", "", ""
    n = card.side
    x = torch.randn(n, n, device=card.device, dtype=BF16)
    wide = card.seconds(lambda: x @ x.t())
    yield f"product of {n} x {n}, BF16", f"{2 * n**3 / wide / 1e12:.1f} TFLOP/s", "", ""
    if not S.hardware_fp8(x):
        return (yield "product, FP8", "-", "", "no FP8 arithmetic here")
    codes, (scale,) = S.pack(x, "fp8")
    product = lambda: torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=BF16)
    thin = card.seconds(product)
    yield (f"product of {n} x {n}, FP8", f"{2 * n**3 / thin / 1e12:.1f} TFLOP/s",
           f"{wide / thin:.2f} of BF16", "")  # fmt: skip


def formats(card, _):
    """The same codes as on a CPU, and a product within BF16's rounding of that of the codes."""
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(3072, 1024, generator=g), torch.randn(48, 1024, generator=g).to(BF16)
    other = 0
    for fmt in S.FORMATS[2:]:
        for given in (w, x):
            here, there = S.pack(given, fmt)[0], S.pack(given.to(card.device), fmt)[0]
            other += int((here.view(torch.uint8) != there.cpu().view(torch.uint8)).sum())
    yield "codes unlike a CPU's, all formats", f"{other}", "0", "WRONG" if other else "ok"
    exact = S.quantize(x, "fp8").double() @ S.quantize(w, "fp8").double().t()
    layer = S.NarrowLinear(None, "fp8")
    layer.load(w.to(card.device), BF16)
    off = float((layer(x.to(card.device)).cpu().double() - exact).abs().max() / exact.abs().max())
    which = "its FP8 product" if S.hardware_fp8(x.to(card.device)) else "emulated"
    yield (f"FP8 layer ({which}), largest error", f"{off:.4f}", "0.02",
           "ok" if off <= 0.02 else "WRONG")  # fmt: skip
    wrong = 0
    for fmt, kind in S.FP8.items():
        codes = torch.arange(256, dtype=torch.uint8)
        want = codes.view(kind).float() * 0.5
        got = S.NarrowKV(fmt).load(codes.to(card.device), 0.5, BF16).float().cpu()
        wrong += int((got != want)[want.isfinite()].sum())
    yield "KV codes that widen otherwise", f"{wrong}", "0", "WRONG" if wrong else "ok"


def weight_bytes(engine):
    """What a decode step reads of weights: codes where there are codes, and the head."""
    size = 0
    for m in engine.modules():
        if isinstance(m, S.NarrowLinear):
            size += m.codes.nbytes
        elif isinstance(m, torch.nn.Linear):
            size += m.weight.nbytes
    return size


def distance(r):
    """(KL(q || π), whether it is small and every number finite) of a rollout."""
    kl = S.mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]
    return kl, bool(r.mask.any(1).all()) and kl < 0.5


def rollouts(card, model):
    """Tokens a second, and how much of that time it takes to read the weights once a token."""
    base = None
    for weights, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("int4", "fp8")):
        q = S.TorchSampler(model, weights, kv, stop_ids=[])
        kl, near = distance(q.sample(card.prompts(), card.new, seed=0))
        took = card.seconds(lambda: q.sample(card.prompts(), card.new, seed=0, greedy=True))
        base, least = base or took, card.new * weight_bytes(q.engine) / card.bandwidth
        what = f"rollouts {card.rows} x {card.new}, weights {weights}, KV {kv}"
        beside = f"{base / took:.2f} of BF16; weights read: {least / took:.1%} of it; KL {kl:.5f}"
        rate = f"{card.rows * card.new / took:.0f} tokens/s"
        yield what, rate, beside, "ok" if near else "WRONG"


def step(card, model):
    """One dlc update; no (B, T, V) float32 tensor may exist."""
    q = S.TorchSampler(model, "fp8", "fp8", stop_ids=[])
    r = q.sample(card.prompts(), card.new, seed=0)
    A = torch.randn(card.rows, device=card.device)

    def update():
        logp, head = S.token_logps(model, r, head=True)
        loss, _ = dlc.policy_loss(
            "dlc", logp, r.logq, A, r.mask, logp_stale=r.logp_stale, head_logp=head,
            head_logq=r.head_logq, head_logp_stale=r.head_logp_stale)  # fmt: skip
        loss.backward()
        model.zero_grad()

    for dtype in (torch.float32, BF16):
        on = dtype == BF16
        with torch.autocast(card.device.type, BF16, enabled=on, cache_enabled=False):
            took, peak = card.seconds(update), card.peak(update)
        whole = r.mask.numel() * card.shape["vocab_size"] * 4
        yield (f"forward and backward of {r.mask.numel()} tokens, {str(dtype)[6:]}",
               f"{took:.3f} s", f"peak {peak / GIB:.2f} GiB, all logits are {whole / GIB:.2f}", "")


def loss(card, model):
    """Peak memory and time of the scored tokens alone, against log_softmax of all logits."""
    head = model.get_output_embeddings().weight.detach().to(BF16)
    n = 64 * card.rows * 2
    hidden = torch.randn(n, head.shape[1], device=card.device, dtype=BF16, requires_grad=True)
    ids = torch.randint(len(head), (n, 1), device=card.device)
    ours = lambda: S.LinearLogps.apply(hidden, head, ids).sum().backward()
    plain = lambda: F.linear(hidden, head).float().log_softmax(-1).gather(-1, ids).sum().backward()
    (t, m), (t2, m2) = ((card.seconds(f), card.peak(f)) for f in (ours, plain))
    bad = "ok" if m <= m2 / 8 else "WRONG"
    yield (f"loss of {n} positions", f"{m / MIB:.0f} MiB, {t:.3f} s",
           f"log_softmax {m2 / MIB:.0f} MiB, {t2:.3f} s", bad)  # fmt: skip


def engine(card, _):
    """tests/check_engine.py on two layers, in float32."""
    for what, number, bad in self_check(card.model(num_hidden_layers=2)):
        yield f"engine: {what}", f"{number:.3g}", "", f"WRONG: {bad}" if bad else "ok"


def against_vllm(card, model):
    """A real engine with FP8 weights and KV, before and after a sync."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        return (yield "vLLM", "-", "", "not installed")
    tokens = card.rows * card.new
    ours = S.TorchSampler(model, "fp8", "fp8", stop_ids=[])
    slow = card.seconds(lambda: ours.sample(card.prompts(), card.new, seed=0, greedy=True))
    ours = None
    gc.collect()
    torch.cuda.empty_cache()  # the engine takes its share of what is free
    with contextlib.redirect_stdout(sys.stderr):  # its words are not of the table
        q = S.VLLMSampler(model, "fp8", "fp8", stop_ids=[], memory=None if card.tiny else 0.5)
    took = card.seconds(lambda: q.sample(card.prompts(), card.new, seed=0, greedy=True))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1 * p.std() * torch.randn_like(p)
    for version, weights in enumerate((model, other)):
        q.sync(weights, version)
        kl, near = distance(q.sample(card.prompts(), card.new, seed=0))
        what = f"vLLM, FP8 weights and KV, the weights of sync {version}"
        yield (what, f"{tokens / took:.0f} tokens/s",
               f"{slow / took:.2f} of TorchSampler; KL {kl:.5f}", "ok" if near else "WRONG")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at a toy's size")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("gpu_check.py: error: no GPU that torch can use; --tiny runs it on a CPU",
              file=sys.stderr)
        return 2
    card, start, wrong = Card(args.tiny), time.perf_counter(), 0
    print(f"{card.name}; torch {torch.__version__}, transformers {transformers.__version__}\n\n"
          "| what | measured | beside it | |\n|---|---|---|---|")  # fmt: skip
    model = card.model()
    for part in (rates, formats, rollouts, step, loss, engine, against_vllm):
        for what, *found, judged in part(card, model):
            wrong += judged.startswith("WRONG")
            print("|", " | ".join([what.replace("|", "\\|"), *found, judged]), "|", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s; {wrong} of these are wrong")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
