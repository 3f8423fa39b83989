"""How time and memory grow with a batch's sizes, and what a run needs on one card.

    python tests/scaling.py         # notebooks/data/scaling.json and notebooks/figures/scaling.png
    python tests/scaling.py fits    # README's "Does it fit?"; nothing is allocated
"""

import contextlib
import json
import math
import os
import sys
import tempfile

import torch
import transformers
from bench import ROOT, dlc, peak
from torch._subclasses import FakeTensorMode

import sampler
from sampler import LinearLogps


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


def activations(config, rows, length, fake=True):
    """Bytes that the forward of one micro-batch keeps for its backward, `rows` sequences of
    `length` tokens under bfloat16 autocast, by collecting what autograd saves; with `fake`, tensors
    without data, so that a large model needs no memory. No prompt is shared: an upper bound."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with FakeTensorMode() if fake else contextlib.nullcontext():
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(rows, length, dtype=torch.long)
        with (torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
              torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)):
            hidden = model.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
            head = ids.reshape(-1, 1).expand(-1, 1 + 64)
            LinearLogps.apply(*sampler.head_product(model, hidden), head)
        for p in model.parameters():
            kept.pop(p.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())


def fits(config, card, length, responses=64):
    """(largest power of two of rows in a micro-batch that fits, GiB in all) on a card of so many
    GiB, or (0, GiB of one row) where none does; a tenth is left for what is not counted."""
    whole = lambda rows: (sum(estimate(config, responses, length).values())
                          + activations(config, rows, length)) / 2**30
    rows = 1
    while rows <= responses and whole(rows) <= 0.9 * card:
        rows *= 2
    return rows // 2, whole(max(1, rows // 2))


def qwen(width, inner):
    return transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=width, intermediate_size=inner, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)


def table():
    """README's "Does it fit?", counted."""
    for name, config in {"0.6B": qwen(1024, 3072), "1.7B": qwen(2048, 6144)}.items():
        for card in (24, 80):
            for length in (512, 2048):
                rows, gib = fits(config, card, length)
                print(f"{name}, {card} GiB, {length} tokens: --micro-batch {rows}, {gib:.1f} GiB")


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
    for steps, width, layers in ((90, 64, 3), (2, 96, 2)):
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


def scaling():
    """Seconds and peak bytes of one scored and differentiated batch, and of one rollout, as one
    size grows; slopes in log-log. The peak is that of one run in its process: what several leave
    behind in the heap would count."""
    out = []
    for axis, values in GROW.items():
        for sample, name in ((False, "score and differentiate"), (True, "rollout")):
            codes = [BATCH.format(**BASE | {axis: v}, sample=sample) for v in values]
            found = [(peak(code, times=5)[0], peak(code)[1]) for code in codes]
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
    table()


if __name__ == "__main__":
    os.chdir(ROOT)
    table() if sys.argv[1:] == ["fits"] else scaling()
