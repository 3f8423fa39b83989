"""The sampler against what it shares no code with: torch's casts, hand loops, plain forwards.

Models are tiny and random, their weights large enough for distributions far from uniform. `full` is
the yardstick: each row by itself, without padding or cache, through the model's own head."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import sampler as S
from sampler import NarrowKV, NarrowLinear, TorchSampler, mismatch, quantize, token_logps

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FP8 = {"fp8": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
PROMPTS = [[3, 4, 5, 6, 7], [8], [0, 9, 1], [3, 4, 5, 6, 7], [5, 5], [0]]  # two equal; 0 pads too
COMMON = dict(vocab_size=17, initializer_range=0.25, eos_token_id=1, bos_token_id=2)
LLAMA = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
LLAMA |= dict(num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False)
QWEN = LLAMA | dict(head_dim=32)
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
CONFIGS = {
    "qwen3": (hf.Qwen3Config, QWEN),
    "tied": (hf.Qwen3Config, QWEN | dict(tie_word_embeddings=True)),
    "mistral": (hf.MistralConfig, QWEN | dict(sliding_window=4)),  # shorter than the rows
    "gemma3": (hf.Gemma3TextConfig, QWEN | MIXED | dict(initializer_range=0.1)),
    "gpt2": (hf.GPT2Config, dict(n_embd=64, n_layer=2, n_head=2, n_positions=64)),  # Conv1D, biases
    "phi": (hf.PhiConfig, LLAMA),  # its output head has a bias
}


def tiny(name="qwen3", dtype=F32, seed=0, **options):
    config, shape = CONFIGS[name]
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config(**COMMON | shape | options)).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p) if p.dim() == 1 else 0  # norms not all 1, biases not 0
    return model.to(dtype)


def full(model, r):
    """(B, T, V) log-softmax, each row alone: no padding, no cache, the model's own forward."""
    P, out = r.tokens.shape[1] - r.mask.shape[1], []
    for row, n, t in zip(r.tokens, r.prompt_len.tolist(), r.mask.sum(1).tolist()):
        logps = model(row[None, P - n : P + t]).logits[0, n - 1 : n - 1 + t].log_softmax(-1)
        out.append(F.pad(logps, (0, 0, 0, r.mask.shape[1] - t)))
    return torch.stack(out)


def answer(r):
    return r.tokens[:, r.tokens.shape[1] - r.mask.shape[1] :]


def at(logps, r):
    return logps.gather(-1, answer(r)[..., None])[..., 0]


def close(a, b, tol=2e-5):
    assert a.shape == b.shape and (a - b).abs().max() < tol, f"off by {(a - b).abs().max():.3g}"


def state(model):
    return {n: x.clone() for n, x in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def scale_of(r):
    return mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)


@pytest.fixture(autouse=True)
def one_thread():  # matrices this small: more threads only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1), torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


# --- formats


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("fmt", FP8)
def test_fp8_is_torchs_own_cast(fmt, dtype):
    w, (kind, top) = (torch.randn(20, 33) * torch.logspace(-6, 6, 20)[:, None]).to(dtype), FP8[fmt]
    scale = w.float().abs().amax(1, keepdim=True) / top  # one for each row, not for the tensor
    assert torch.equal(quantize(w, fmt), ((w.float() / scale).to(kind).float() * scale).to(dtype))


def test_integers_lie_on_the_grid_and_next_to_the_weight():
    w = torch.randn(20, 33) * torch.logspace(-6, 6, 20)[:, None]
    for bits in (8, 4, 3):
        top, q = 2 ** (bits - 1) - 1, quantize(w, f"int{bits}")
        scale = w.abs().amax(1, keepdim=True) / top
        close(q / scale, (q / scale).round(), 1e-4)
        assert (q / scale).abs().max() < top + 0.1 and ((q - w).abs() <= scale * 0.50001).all()
    s = w.abs().mean(1, keepdim=True)
    close(quantize(w, "int2") / s, torch.sign(w) * (w.abs() > s / 2), 1e-5)  # ternary: -s, 0, s


def test_nvfp4_is_the_nearest_e2m1_in_blocks_of_16():
    e2m1, w = [0, 0.5, 1, 1.5, 2, 3, 4, 6], torch.randn(6, 37) * torch.logspace(-2, 2, 6)[:, None]
    w[0, 0], w[1, :16] = 6 * 448.0, 0  # the tensor's scale becomes 1; 37: the last block is short
    w[1, 16:25] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5, -0.75])  # ties, scale 1
    w[1, 25:32], w[2, :16], w[3, :16] = 0, 0.017, 1e-3  # scales that round down by a third; to 0
    want, whole = torch.zeros_like(w), float(w.abs().max()) / (6 * 448)
    for i in range(6):
        for j in range(0, 37, 16):
            block = w[i, j : j + 16]
            s = float((block.abs().max() / 6 / whole).to(torch.float8_e4m3fn)) * whole
            for k, x in enumerate(block.tolist()):  # nearest; a tie goes to the even mantissa
                near = min(range(8), key=lambda c: (abs(abs(x) - e2m1[c] * s), c % 2)) if s else 0
                want[i, j + k] = math.copysign(e2m1[near] * s, x)
    assert want[1, 16:25].tolist() == [6, 0, 1, 1, 2, 2, 4, -4, -1]  # the yardstick itself
    assert want[2, 0] == 6 / 512 and not want[3, :16].any()
    torch.testing.assert_close(quantize(w, "nvfp4"), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", S.FORMATS)
def test_quantize_has_a_defined_outcome_for_every_input(fmt):
    w = torch.randn(3, 5, 19)
    w[1] = 0  # 0/0 unless the scale has a floor
    for dtype in (F32, BF16):
        q = quantize(w.to(dtype), fmt)
        assert q.shape == w.shape and q.dtype == dtype and not q[1].any() and q[0].any()
    for size in (1e38, 1e-38, 1e-40, 1e-45):
        q = quantize(w.sign() * size, fmt)
        assert q.isfinite().all() and (size < 1 or q.abs().max() > 0.9 * size)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(ValueError):
            quantize(torch.tensor([[1.0, bad]]), fmt)
    if fmt != "int2":  # a rounded weight is its own rounding (the mean of a ternary row moves)
        close(quantize(quantize(w, fmt), fmt), quantize(w, fmt), 1e-6)
    before = w.clone()
    quantize(w, fmt).add_(1)
    assert torch.equal(w, before)  # never a view of the trainer's weight
    with pytest.raises(ValueError, match="int5"):
        quantize(w, "int5")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("fmt", FP8)
def test_kv_codes_are_torchs_own_and_one_byte(fmt, dtype):
    (kind, top), codes = FP8[fmt], torch.arange(256, dtype=torch.uint8)
    finite = codes.view(kind).float().isfinite()
    for scale in (1.0, 2.0**-9, 64.0, 0.3):
        layer, want = NarrowKV(fmt, scale, scale), codes.view(kind).to(dtype) * scale
        assert torch.equal(layer.load(codes, scale, dtype)[finite], want[finite])  # subnormals too
        x = torch.tensor([3.0, -3.0, 0.7, -1e-6]) * top * scale  # beyond the probe: saturates
        kept = (x / scale).clamp(-top, top).to(kind).to(dtype) * scale
        assert torch.equal(layer.load(layer.store(x, scale), scale, dtype), kept)
    x = torch.randn(1, 2, 3, 32, dtype=dtype)
    layer.update(x, x)
    assert layer.keys.dtype == torch.uint8 and layer.keys.shape == x.shape


def test_fp8_emulation_rounds_like_the_hardware_instruction(monkeypatch):
    w, x, bias = torch.randn(64, 48), torch.randn(20, 48).to(BF16), torch.randn(64).to(BF16)
    layer = NarrowLinear(bias, "fp8")
    layer.load(w, BF16)
    sw, sx = (a.float().abs().amax(1, keepdim=True) / 448 for a in (w, x))
    w8, x8 = (w / sw).to(FP8["fp8"][0]), (x.float() / sx).to(FP8["fp8"][0])
    want = torch._scaled_mm(x8, w8.t(), sx, sw.t().contiguous(), out_dtype=BF16).float()
    error = lambda y: float(((y - want).abs() / (x.float().abs() @ w.abs().t())).max())
    assert error(layer(x).float() - bias) < 0.006  # bfloat16's own rounding ...
    assert error(x.float() @ quantize(w, "fp8").t()) > 0.012  # ... unrounded activations exceed
    assert layer.codes.element_size() == 1
    monkeypatch.setattr(S, "hardware_fp8", lambda x: True)  # what a GPU would be given
    assert error(layer(x[None])[0].float() - bias) < 0.006
    layer.bias = None
    close(layer(x).float(), want, 1e-6)


# --- what is recorded is what was drawn from


@pytest.mark.parametrize("name", CONFIGS)
def test_format_none_records_the_models_own_distribution(name):
    model = tiny(name)
    r = TorchSampler(model, "none", "none", head_k=5, stop_ids=[]).sample(PROMPTS, 9, seed=0)
    table, (logp, head) = full(model, r), token_logps(model, r, head=True)
    close(r.logq, at(table, r))  # cached, left-padded decode = a plain forward of each row
    close(logp, at(table, r))
    close(head, table.gather(-1, r.head_ids))
    assert torch.equal(logp, r.logp_stale) and torch.equal(head, r.head_logp_stale)  # lag exactly 0
    assert abs(scale_of(r)["kl"]) < 1e-7
    assert r.logq.std() > 0.5 and r.mask.all()  # far from uniform, or all this shows nothing
    s, sizes = TorchSampler(model, "none", "none", rows=4), set()
    s.stale.base_model.register_forward_hook(lambda body, args, out: sizes.add(len(args[0])))
    r = s.sample(PROMPTS, 9, seed=0)  # scored in the trainer's micro-batches, to round alike
    assert torch.equal(token_logps(model, r, rows=4), r.logp_stale)
    assert sizes == {2, 3, 4}  # rows, or fewer prompts


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_runs_narrow_and_stays_near_the_model(name):
    model = tiny(name)
    s, plain = TorchSampler(model, "fp8", "fp8", stop_ids=[]), dict(model.named_modules())
    r = s.sample(PROMPTS * 3, 9, seed=0)
    assert 1e-5 < scale_of(r)["kl"] < 0.3  # nothing rounded; a matrix transposed or misplaced
    close(r.logp_stale, at(full(model, r), r))  # the stale copy keeps the trainer's numerics
    for n, m in s.engine.named_modules():
        linear = isinstance(plain[n], (torch.nn.Linear, Conv1D))
        assert isinstance(m, NarrowLinear) == (linear and m is not s.engine.lm_head), n
        if isinstance(m, NarrowLinear):  # the trainer's float32, a scale for each output channel
            w = plain[n].weight.t() if isinstance(plain[n], Conv1D) else plain[n].weight
            assert torch.equal(m.working, quantize(w, "fp8").to(BF16)), n


KV_OF = dict(qwen3="fp8", tied="bf16", mistral="fp8_e5m2", gemma3="fp8", gpt2="bf16", phi="fp8")


@pytest.mark.parametrize("name, kv", KV_OF.items())
def test_prefill_reads_the_same_rounding_as_decode(name, kv):
    s = TorchSampler(tiny(name, F64), "none", kv, head_k=17, stop_ids=[])
    r = s.sample(PROMPTS, 9, seed=0)
    for b, n in enumerate(r.prompt_len.tolist()):
        row, head = r.tokens[b : b + 1, 5 - n :], r.head_ids[b]
        forward = lambda x, cache: s.engine(x, past_key_values=cache, use_cache=True).logits[0]
        z = forward(row, s._new_cache())[n - 1 : -1]  # prompt and answer in one prefill
        close(z.log_softmax(-1).gather(-1, head).float(), r.head_logq[b])
        cache = s._new_cache()
        for part in row[:, :n].split(max(1, n - 1), 1):  # the prompt's last token decoded instead
            z = forward(part, cache)[-1:]
        close(z.log_softmax(-1).gather(-1, head[:1]).float(), r.head_logq[b, :1])
    assert (r.logq - r.logp_stale).abs().max() > 1e-3  # the rounding is there


def test_the_one_scale_orders_the_formats():
    model = tiny()
    draw = lambda *f: TorchSampler(model, *f, stop_ids=[]).sample([[3, 4]] * 64, 12, seed=0)
    kl = lambda *f: scale_of(draw(*f))["kl"]
    bf16, fp8 = kl("bf16", "bf16"), kl("fp8", "fp8")
    assert abs(kl("none", "none")) < 1e-7  # how float32 rounds log-probs
    assert bf16 > 1e-6  # a real discrepancy
    assert fp8 > 3 * bf16 and kl("int2", "bf16") > 10 * fp8
    assert kl("none", "fp8_e5m2") > kl("none", "fp8") > kl("none", "bf16") > 1e-7


def test_token_frequencies_match_the_recorded_distribution():
    model, n = tiny(vocab_size=11), 20_000
    r = TorchSampler(model, "none", "none", stop_ids=[]).sample([[3, 4, 5]] * n, 2, seed=0)
    rows = torch.tensor([[3, 4, 5, v] for v in range(11)])
    two = model(rows).logits[:, 2:].detach().log_softmax(-1)
    joint = (two[0, 0][:, None] + two[:, 1]).double().flatten()  # log p(y1, y2), a plain forward
    (a, b), seen = answer(r).T, (answer(r) @ torch.tensor([11, 1])).bincount(minlength=121)
    close(r.logq, torch.stack([two[0, 0][a], two[a, 1, b]], 1))

    def chi2(logp):  # of pairs: a uniform used for both tokens of a row would show as well
        expect = n * logp.exp()
        rare = expect < 5
        e, o = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (expect, seen.double()))
        return float((((o - e) ** 2 / e).sum() - len(e) + 1) / (2 * len(e) - 2) ** 0.5)  # ~ N(0, 1)

    assert chi2(joint) < 4 and (n * joint.exp() > 5).sum() > 30
    assert chi2((joint / 1.1).log_softmax(0)) > 8  # temperature 1.1 would be seen


def test_head_is_the_top_k_of_the_whole_vocabulary():
    model = tiny()
    r = TorchSampler(model, "none", "none", head_k=2, stop_ids=[]).sample(PROMPTS * 4, 9, seed=0)
    (top, ids), table = full(model, r).topk(2), full(model, r)
    assert 0.05 < (r.head_ids != answer(r)[..., None]).all(-1).float().mean() < 0.95
    close(r.logq, at(table, r))  # also where the draw lies outside the head
    assert torch.equal(r.head_ids, ids)
    close(r.head_logq, top)  # over the vocabulary, not renormalised
    r = TorchSampler(model, "none", "none", head_k=64).sample(PROMPTS, 2)
    mass = r.head_logq.exp().sum(-1)[r.mask]
    assert r.head_ids.shape[-1] == 17 and (mass - 1).abs().max() < 1e-5


def test_a_stop_is_kept_and_ends_its_own_row_only():
    model, ends = tiny(), set()
    for stop, given in (({0, 3, 11}, [0, 3, 11]), ({1}, None)):  # 0 also pads; eos_token_id is 1
        r = TorchSampler(model, "none", "none", stop_ids=given).sample(PROMPTS * 6, 12, seed=0)
        for b, (p, y, mask) in enumerate(zip(PROMPTS * 6, answer(r).tolist(), r.mask.tolist())):
            n = next((t + 1 for t, v in enumerate(y) if v in stop and mask[t]), len(y))
            assert mask == [True] * n + [False] * (len(y) - n) and not any(y[n:])
            assert r.tokens[b, :5].tolist() == [0] * (5 - len(p)) + p and r.prompt_len[b] == len(p)
            ends.update([n, ("by", y[n - 1])])
        close(r.logq[r.mask], at(full(model, r), r)[r.mask])  # the stop has its log-prob, not 0
    assert len(ends) > 8 and {("by", 0), ("by", 1)} < ends


def test_equal_prompts_share_a_prefill_and_nothing_else():
    s = TorchSampler(tiny(), "none", "none", stop_ids=[])
    a, b, c, d = [3, 4, 5], [8, 9], [6, 7, 2], [2]
    r = s.sample([a, a, b, a], 8, seed=0)
    for prompts, rows in (([a, c, b, d], [0, 2]), ([c, a, b, d], [1, 2]), ([c, d, b, a], [2, 3])):
        alone = s.sample(prompts, 8, seed=0)
        assert torch.equal(r.tokens[rows], alone.tokens[rows])
        close(r.logq[rows], alone.logq[rows])
    assert not torch.equal(r.tokens[0], r.tokens[1])  # equal prompts, each its own draws


def test_draws_come_from_the_samplers_own_generator():
    model, before = tiny(), torch.get_rng_state()
    make = lambda: TorchSampler(model, "fp8", "fp8", noise=0.1, seed=5, stop_ids=[])
    s = make()
    a, b, c, d = (s.sample(PROMPTS, 6, seed) for seed in (None, None, 1, 1))
    assert torch.equal(torch.get_rng_state(), before)  # else sampling would move the trainer's
    assert torch.equal(c.tokens, d.tokens) and torch.equal(c.logq, d.logq)
    assert not torch.equal(a.tokens, b.tokens) and not torch.equal(a.tokens, c.tokens)
    assert torch.equal(a.tokens, make().sample(PROMPTS, 6).tokens)


# --- scoring


def test_order_padding_and_batch_size_change_nothing():
    model, order = tiny("mistral"), torch.randperm(12)
    s = TorchSampler(model, "none", "none", stop_ids=[0, 3, 11])
    r = s.sample(PROMPTS * 2, 10, seed=0)
    want, junk = token_logps(model, r), r.tokens.clone()
    close(token_logps(model, r[order]), want[order])
    close(token_logps(model, replace(r, tokens=F.pad(r.tokens, (3, 0), value=9))), want)
    for rows in (1, 5, 100):
        close(token_logps(model, r, rows=rows), want)
    junk[:, 5:][~r.mask] = 7
    close(token_logps(model, replace(r, tokens=junk)), want)
    assert not r.mask.all() and not want[~r.mask].any() and want[r.mask].max() < 0


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_is_that_of_log_softmax(name, head, monkeypatch):
    monkeypatch.setattr(S.LinearLogps, "CHUNK", 17 * 7)  # many chunks, the last one short
    model = tiny(name, F64)
    r = TorchSampler(model, "none", "none", head_k=4, stop_ids=[0, 3]).sample(PROMPTS, 9, seed=0)
    ids = torch.cat([answer(r)[..., None], r.head_ids], -1)[..., : 5 if head else 1]
    out = token_logps(model, r, head)
    out = torch.cat([out[0][..., None], out[1]], -1) if head else out[..., None]
    weight = torch.randn(ids.shape, dtype=F64) * r.mask[..., None]
    got, want = (torch.autograd.grad((weight * x).sum(), list(model.parameters()))
                 for x in (out, full(model, r).gather(-1, ids)))  # fmt: skip
    for (n, _), a, b in zip(model.named_parameters(), got, want):
        assert b.abs().max() > 1e-3 or n.endswith("k_proj.bias"), n  # softmax ignores a key's bias
        close(a, b, 1e-5 * max(1, float(b.abs().max())))


def test_a_prompt_is_read_once_for_all_its_responses():
    model, rows = tiny("mistral", F64), []
    prompts = [[3, 4, 5, 6, 7]] * 4 + [[8], [0, 8], [8]]  # 0 pads too: 8 is not 0 8
    r = TorchSampler(model, "none", "none", stop_ids=[]).sample(prompts, 6, seed=0)
    with torch.no_grad():
        close(token_logps(model, r), at(full(model, r), r), 1e-6)
        first = replace(r, tokens=r.tokens[:, :6], mask=r.mask[:, :1])  # a token each
        hook = model.get_input_embeddings().register_forward_hook(
            lambda _, ids, out: rows.append(tuple(ids[0].shape)))
        token_logps(model, r), token_logps(model, first)
        hook.remove()
    # Three prompts of 5, then 5 inputs a response; a lone token needs no second pass.
    assert rows == [(3, 5), (7, 5), (3, 5)]


def test_a_frozen_head_gets_no_gradient_and_none_is_computed():
    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            seen.add(tuple(getattr(out, "shape", ())))
            return out

    for trained in (True, False):
        h, w = (torch.randn(shape, requires_grad=trained) for shape in ((6, 5), (9, 5)))
        loss = S.LinearLogps.apply(h.requires_grad_(), w, torch.arange(6)[:, None]).sum()
        seen = set()
        with Shapes():
            loss.backward()
        assert (6, 5) in seen and ((9, 5) in seen) == trained  # (V, D): a third more arithmetic
        assert h.grad.any() and (w.grad is not None) == trained
    h, w, every = h.detach().to(BF16), w.to(BF16), torch.arange(9).expand(6, 9)
    close(S.LinearLogps.apply(h, w, every), (h @ w.t()).float().log_softmax(-1), 1e-6)


CHILD = """
import re, sys, time, torch
from sampler import LinearLogps
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
torch.set_num_threads(1)
n = int(sys.argv[1])
h, w = torch.randn(n, 64, requires_grad=True), torch.randn(151936, 64, requires_grad=True)
ids = torch.randint(151936, (n, 1))
open("/proc/self/clear_refs", "w").write("5")  # else the peak of start-up hides ours
start, before = time.time(), status("VmRSS")
plain = lambda: (h @ w.t()).log_softmax(-1).gather(-1, ids)
(plain() if sys.argv[2] == "plain" else LinearLogps.apply(h, w, ids)).sum().backward()
print((status("VmHWM") - before), (time.time() - start) / n)
"""


def test_memory_at_a_real_vocabulary_is_at_most_an_eighth():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("peak memory is read from Linux's /proc, which is missing or closed here")

    def child(n, which):
        command = [sys.executable, "-c", CHILD, str(n), which]
        done = subprocess.run(command, cwd=Path(S.__file__).parent, check=True, capture_output=True)
        return map(float, done.stdout.split())

    ours, seconds = child(4096, "ours")
    plain, base = child(512, "plain")  # its peak, 7 GB, is proportional to positions
    print(f"peak {ours:.0f} against {8 * plain:.0f} MiB, time x{seconds / base:.2f}")
    assert 8 * plain > 5000 and ours <= 8 * plain / 8


def test_models_and_arguments_it_cannot_serve_are_refused():
    for name in CONFIGS:
        for dtype in (F32, BF16):
            S.check_head(tiny(name, dtype))
    capped = hf.Gemma2Config(**COMMON | QWEN | dict(final_logit_softcapping=2.0))
    with pytest.raises(ValueError, match="Gemma2"):
        S.check_head(hf.AutoModelForCausalLM.from_config(capped))
    layers = ["conv", "full_attention"]  # a convolution's state, which left padding would change
    conv = hf.Lfm2Config(**COMMON | LLAMA | dict(layer_types=layers))
    for kv in ("none", "bf16", "fp8"):
        with pytest.raises(ValueError, match="Lfm2ForCausalLM: layers without KV"):
            TorchSampler(hf.AutoModelForCausalLM.from_config(conv).eval(), "none", kv)
    for options in (dict(weights="fp4"), dict(kv="int4")):
        with pytest.raises(ValueError, match="choose one of"):
            TorchSampler(tiny(), **options)
    for prompts, n in (([], 3), ([[3]], 0)):
        with pytest.raises(ValueError):
            TorchSampler(tiny()).sample(prompts, n)


# --- sync


def test_the_samplers_weights_are_those_of_the_sync():
    model, history = tiny(), []
    s = TorchSampler(model, "none", "none")
    for step in range(6):
        history.append(state(model))
        if step == 3:
            s.sync(model, step)
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
    assert same(state(s.stale), history[3]) and same(state(s.engine), history[3])
    r, past = s.sample(PROMPTS, 6, seed=0), tiny()
    past.load_state_dict(history[3])
    assert (r.version == 3).all() and r.version.shape == r.mask.shape
    close(r.logp_stale, at(full(past, r), r) * r.mask)
    assert (token_logps(model, r) - r.logp_stale).abs().max() > 0.01  # the lag is there


@pytest.mark.parametrize("weights", ["fp8", "int4", "nvfp4"])
def test_the_same_weights_are_rounded_the_same_each_time(weights):
    model, ids = tiny(), torch.tensor([[3, 4, 5]])
    s = TorchSampler(model, weights, "fp8")
    logits, scales = s.engine(ids).logits, s.kv_scales
    s.sync(tiny(seed=1), 1)
    assert not torch.equal(s.engine(ids).logits, logits)
    s.sync(model, 2)  # rounding what was already rounded would show here
    assert torch.equal(s.engine(ids).logits, logits) and s.kv_scales == scales


def test_noise_is_relative_fresh_at_each_sync_and_reproducible():
    model, name = tiny(), "model.layers.0.mlp.up_proj"
    model.get_submodule(name).weight.data *= 10
    clean, make = state(model), lambda fmt, seed: TorchSampler(model, fmt, noise=0.1, seed=seed)
    s, twin, narrow = make("none", 1), make("none", 1), make("fp8", 1)
    first, other = state(s.engine), state(make("none", 2).engine)
    for x in (s, twin, narrow):
        x.sync(model, 3)
    noisy = state(s.engine)
    assert same(noisy, state(twin.engine)) and same(state(s.stale), clean)
    for n, w in clean.items():
        if "_proj" in n:  # else a norm, an embedding or the head, which stay clean
            assert 0.92 < (noisy[n] - w).std() / (0.1 * w.std()) < 1.08, n
            assert not torch.equal(noisy[n], first[n]) and not torch.equal(first[n], other[n])
        assert "_proj" in n or torch.equal(noisy[n], w), n
    rounded = quantize(noisy[name + ".weight"], "fp8").to(BF16)  # noise first, rounding after it
    assert torch.equal(narrow.engine.get_submodule(name).working, rounded)


def test_tied_embeddings_stay_tied():
    model = tiny("tied")
    s = TorchSampler(model, "fp8", "fp8", noise=0.1)
    model.model.embed_tokens.weight.data += 1
    s.sync(model, 1)
    assert s.engine.lm_head.weight is s.engine.model.embed_tokens.weight
    assert torch.equal(s.engine.lm_head.weight, model.lm_head.weight.to(BF16))
    assert torch.equal(s.stale.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_weights_are_named_and_not_taken_over(bad):
    model, ids = tiny(), torch.tensor([[3, 4]])
    s = TorchSampler(model, "fp8", "fp8")
    stale, logits = state(s.stale), s.engine(ids).logits
    for p in model.parameters():
        p.data += 0.1
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        s.sync(model, 7)
    assert same(state(s.stale), stale) and s.version == 0
    assert torch.equal(s.engine(ids).logits, logits)


def test_keep_bf16_takes_whole_prefixes():
    keep = ["model.layers.1", "model.layers.3.mlp", "model.layers.4.kv"]
    s = TorchSampler(tiny(num_hidden_layers=11), "int4", "fp8", keep_bf16=keep)
    kept = {f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"} | {"lm_head"}
    kept |= {f"model.layers.{i}.mlp.{x}_proj" for i in (1, 3) for x in ("gate", "up", "down")}
    linear = {n for n, m in s.stale.named_modules() if isinstance(m, torch.nn.Linear)}
    narrow = {n for n, m in s.engine.named_modules() if isinstance(m, NarrowLinear)}
    assert narrow == linear - kept  # layer 10 is narrow although layer 1 is kept
    cache = s._new_cache()
    s.engine(torch.tensor([[3, 4]]), past_key_values=cache, use_cache=True)
    assert [i for i, x in enumerate(cache.layers) if x.keys.dtype != torch.uint8] == [4]
    for unknown in ("model.layers.11", "model.layers.11.kv", "layers.1", "model.layers.1.ml"):
        with pytest.raises(ValueError, match=unknown):
            TorchSampler(tiny(), "fp8", "fp8", keep_bf16=[unknown])


def test_kv_scales_come_from_the_probe_and_never_from_the_batch():
    model, probe = tiny(), torch.randint(17, (3, 10), generator=torch.Generator().manual_seed(0))
    s = TorchSampler(model, "none", "fp8", probe=probe, stop_ids=[])
    for cached, scales in zip(model(probe).past_key_values.layers, s.kv_scales):
        for x, scale in zip((cached.keys, cached.values), scales):  # absmax / 448, up to 2^n
            assert math.log2(scale).is_integer() and 224 < x.abs().max() / scale <= 448
    (k, v), before = s.kv_scales[0], list(s.kv_scales)
    alone, among = (s.sample(p, 6, greedy=True) for p in ([[3, 4]], [[8] * 9, [3, 4], [0]]))
    assert torch.equal(answer(alone)[0], answer(among)[1]) and s.kv_scales == before
    close(alone.logq[0], among.logq[1])
    model.model.layers[0].self_attn.v_proj.weight.data *= 64
    s.sync(model, 1)
    assert s.kv_scales[0] == (k, 64 * v)  # the scales follow the weights
    fixed = TorchSampler(model, "none", "fp8", kv_scale=1.0)
    assert fixed.kv_scales == [(1.0, 1.0)] * 2
    for x in (s, fixed):  # in use, not only listed
        assert [layer.scale for layer in x._new_cache().layers] == x.kv_scales


# --- the one scale


def test_mismatch_is_the_hand_sum():
    p, q = ((k * torch.randn(3, 4, 6, dtype=F64)).log_softmax(-1) for k in (2, 1))
    mask, y = torch.arange(4) < torch.tensor([[4], [2], [1]]), torch.randint(6, (3, 4, 1))
    a, b, ids, n = p.gather(-1, y)[..., 0], q.gather(-1, y)[..., 0], q.topk(3)[1], int(mask.sum())
    kl, bucket, gap = 0.0, 0.0, []
    for i, t in mask.nonzero().tolist():
        P, Q = ([math.exp(v) for v in x[i, t].tolist()] for x in (p, q))
        kl += sum(u * math.log(u / v) for u, v in zip(Q, P)) / n
        gap.append(math.log(P[y[i, t]] / Q[y[i, t]]))
        P, Q = ([x[j] for j in ids[i, t]] + [1 - sum(x[j] for j in ids[i, t])] for x in (P, Q))
        bucket += sum(u * math.log(u / v) for u, v in zip(Q, P)) / n  # head and one bucket
    want = dict(kl=kl, k1=-sum(gap) / n, k3=sum(math.exp(x) - 1 - x for x in gap) / n, tokens=n)
    want |= dict(mean_abs=sum(map(abs, gap)) / n, max_abs=max(map(abs, gap)), head_mass=1.0)
    assert mismatch(a, b, mask, p, q) == pytest.approx(want, abs=1e-9)
    part = mismatch(a, b, mask, p.gather(-1, ids), q.gather(-1, ids))
    assert part["kl"] == pytest.approx(bucket) and 0 < bucket < kl and 0.3 < part["head_mass"] < 1
    none = dict(kl=0, k1=0, k3=0, mean_abs=0, max_abs=0, head_mass=0, tokens=0)
    assert mismatch(a, b, mask & False, p, q) == pytest.approx(none)
    same = none | dict(head_mass=1, tokens=n)
    assert mismatch(b, b, mask, q, q) == pytest.approx(same, abs=1e-12)


@pytest.mark.parametrize("size, good", [(2.0**13, True), (2.0**24, False)])
def test_keys_beyond_what_fp8_can_be_scaled_to_are_refused(size, good):
    """A scale above 128 would make the bit trick of NarrowKV overflow: every response would go."""
    model = tiny()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight.fill_(size)
    if good:
        assert TorchSampler(model, "bf16", "fp8").sample([[1, 2, 3]], 4, seed=0).mask.any()
    else:
        with pytest.raises(ValueError, match="K or V is above"):
            TorchSampler(model, "bf16", "fp8")
