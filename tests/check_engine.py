"""Do the sampling engine and the trainer agree? About a minute, and in words what is wrong.

    python tests/check_engine.py                                    # the tiny base, plain PyTorch
    python tests/check_engine.py --model DIR --sampler vllm         # your model in a real engine
    python tests/check_engine.py --model DIR --max-new-tokens 2000  # drawn to the length in use

The judge is the model's own forward on prompts of equal length: no padding, no cache, not
token_logps, nothing that the sampler says of itself. Exit status 0: all agrees; 3: something is
wrong; 2: bad input.
"""

import argparse
import copy
import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dlc import load_model, tiny_base  # noqa: E402
from sampler import FORMATS, KV_FORMATS, TorchSampler, VLLMSampler, mismatch  # noqa: E402

P = 12  # tokens of every prompt
MISSING = "log-probs are missing, inf or NaN"


def judge(model, tokens):
    """log π of every token at every position of the response, (B, T, V)."""
    return model(tokens, use_cache=False).logits[:, P - 1 : -1].float().log_softmax(-1)


def drawn(full, r):
    """Of `full` (B, T, V), what belongs to the drawn tokens of rollout `r`: (B, T)."""
    return full.gather(-1, r.tokens[:, P:, None])[..., 0]


def off(a, b, mask):
    """Mean |a - b| in nats a token."""
    return float((a - b)[mask].abs().mean())


def explain(full, r, limit):
    """What log-probs that are not the trainer's look like, in words. full (B, T, V): log π."""
    at = lambda temperature: drawn((full / temperature).log_softmax(-1), r)
    if not off(r.logq, r.logq, r.mask) <= limit or not r.mask.any(1).all():
        return MISSING  # also where the sampler has masked them out
    both = r.mask[:, 1:] & r.mask[:, :-1]
    if off(at(1)[:, :-1], r.logq[:, 1:], both) <= limit:
        return "each log-prob is that of the token before it: shifted by one"
    if off(at(1)[:, 1:], r.logq[:, :-1], both) <= limit:
        return "each log-prob is that of the token after it: shifted by one"
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5):
        if off(at(temperature), r.logq, r.mask) <= limit:
            return f"they are log-probs at temperature {temperature}; it must be 1"
    return "they are not those of the drawn tokens under these weights"


def check_log_probs(full, r, floor, limit):
    yield "floor: the trainer against itself, another batch shape, mean |d log p|", floor, ""
    first, stale = off(drawn(full, r), r.logq, r.mask), off(drawn(full, r), r.logp_stale, r.mask)
    agrees = first <= limit and r.mask.any(1).all()
    bad = "" if agrees else explain(full, r, limit)
    yield "engine unquantised, mean |d log p|", first, bad
    bad = "" if stale <= limit else "logp_stale is not the trainer's log-prob"
    yield "its unquantised copy, logp_stale, likewise", stale, bad


def check_draws(full, r, limit):
    """Were the tokens drawn at temperature 1, and is the head that of the likeliest tokens?"""
    entropy = -(full.exp() * full).sum(-1)  # E[-log p]
    spread = (full.exp() * full**2).sum(-1) - entropy**2  # its variance
    z = float((-drawn(full, r) - entropy)[r.mask].sum() / spread[r.mask].sum().sqrt())
    bad = ""
    if not z > -4:
        bad = "drawn tokens are too likely: a temperature below 1, top-p, top-k or greedy"
    elif not z < 4:
        bad = "drawn tokens are too unlikely: a temperature above 1"
    yield "temperature: -log p of the drawn against the entropy, sigma", z, bad

    K = r.head_ids.shape[-1]
    q, p, best = r.head_logq.exp(), full.gather(-1, r.head_ids).exp(), full.topk(K).values.exp()
    odd = (q - p).abs().sum(-1) + (best - p).sum(-1).abs()  # wrong numbers, and wrong tokens
    odd = float(odd[r.mask].mean())
    bad = (f"the head is not the {K} likeliest tokens and their log-probs: "
           f"{odd:.2f} of the mass is elsewhere")
    bad = "" if odd < 0.02 + limit else bad
    yield "head mass Q_H", float(q.sum(-1)[r.mask].mean()), bad


def check_stops(model, sampler, r, prompts, limit):
    """Does a response end with its stop token, and with that token's log-prob?"""
    T, vocab = r.mask.shape[1], model.get_input_embeddings().weight.shape[0]
    stops = sampler.stop_ids
    known = len(stops) and int(stops.max()) < vocab
    bad = "none in the vocabulary: name eos_token_id in generation_config.json"
    yield "stop tokens known", len(stops), "" if known else bad

    frequent = torch.bincount(r.tokens[:, P:][r.mask]).topk(min(3, vocab)).indices
    sampler.stop_ids = frequent  # so that many responses stop
    s = sampler.sample(prompts, T, seed=1)
    sampler.stop_ids = stops
    is_stop, length = torch.isin(s.tokens[:, P:], frequent) & s.mask, s.mask.sum(1)
    is_last = torch.arange(s.mask.shape[1], device=s.mask.device) == length[:, None] - 1
    early, bad = length < T, ""
    if (is_stop & ~is_last).any() or not early.any():
        bad = "a response goes on after its stop token"
    ends = (is_stop & is_last).any(1)[early].all()
    if not ends or not off(drawn(judge(model, s.tokens), s), s.logq, s.mask) <= limit:
        bad = "a response ends without its stop token and that token's log-prob"
    yield "responses that a stop token ended", int(early.sum()), bad


def check_syncs(model, sampler, prompts, T, limit):
    """Does the engine take over other weights, and then those of before again?"""
    other, g = copy.deepcopy(model), torch.Generator(model.device).manual_seed(0)
    for p in other.parameters():
        if p.dim() > 1:
            p += 0.2 * p.std() * torch.randn(p.shape, generator=g, device=p.device)
    for version, target in ((1, other), (2, model)):
        far, bad = float("nan"), ""
        try:
            sampler.sync(target, version)
            r = sampler.sample(prompts, T, seed=1)
            far = off(drawn(judge(target, r.tokens), r), r.logq, r.mask)
            if not (r.version == version).all():
                marked = r.version.unique().tolist()
                bad = f"tokens are marked as of version {marked}, not {version}"
            if not far <= limit:
                bad = f"the engine does not hold the weights of the sync: {far:.3g} nats off"
        except ValueError as e:  # of the sampler's own probe
            bad = str(e)
        yield f"sync {version}, against the weights handed over, mean |d log p|", far, bad


def check_formats(model, kind, prompts, T, weights, kv):
    """Is each format applied, and does it stay near the trainer?"""
    base = None
    pairs = (("bf16", "bf16"), (weights, "bf16"), ("bf16", kv), (weights, kv))
    for pair in dict.fromkeys(pairs):
        gc.collect()  # the engine before
        r = kind(model, *pair).sample(prompts, T, seed=1)
        kl = mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]
        bad = ""
        if not kl < 0.3:
            bad = "too far from the trainer: a finer format, or python opd.py --sensitivity"
        base = r.logq if base is None else base  # of BF16 alone
        narrow = set(pair) - {"none", "bf16"}
        if narrow and r.logq.shape == base.shape and torch.equal(r.logq, base):
            bad = "nothing is quantised: the engine ignores the format"
        yield f"weights {pair[0]}, KV {pair[1]}: KL(q || p), nats a token", kl, bad


@torch.no_grad()
def self_check(model, kind=TorchSampler, weights="fp8", kv="fp8", max_new_tokens=16):
    """Yields (what, number, wrong) for one property after the other; wrong is "", or says in words
    what is. The longer the responses, the fewer: the judge keeps log π of a whole vocabulary."""
    T, vocab = max_new_tokens, model.get_input_embeddings().weight.shape[0]
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if T < 4:
        raise ValueError(f"--max-new-tokens {T}: must be at least 4")
    if room and P + T > room:
        raise ValueError(f"--max-new-tokens {T}: with prompts of {P} tokens at most {room - P} fit "
                         "the model's context")
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab, (16, P), generator=g)[: max(2, 256 // T)].tolist() * 2

    sampler = kind(model, "none", "none")
    stops, sampler.stop_ids = sampler.stop_ids, sampler.stop_ids[:0]  # all to the same length
    r = sampler.sample(prompts, T, seed=1)
    full = judge(model, r.tokens)
    alone = torch.cat([drawn(judge(model, r.tokens[i : i + 1]), r[i : i + 1]) for i in range(4)])
    floor = off(alone, drawn(full[:4], r[:4]), r.mask[:4])
    limit = max(0.01, 20 * floor)
    yield from check_log_probs(full, r, floor, limit)
    yield from check_draws(full, r, limit)
    sampler.stop_ids = stops
    yield from check_stops(model, sampler, r, prompts, limit)
    sampler.stop_ids = stops[:0]
    yield from check_syncs(model, sampler, prompts, T, limit)
    del sampler, full
    yield from check_formats(model, kind, prompts, T, weights, kv)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, instead of the whole usage
        raise ValueError(f"{message}; see --help")


def main(argv=None):
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="a causal LM, folder or name (default: the tiny base)")
    parser.add_argument("--sampler", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--weights", choices=FORMATS, default="fp8")
    parser.add_argument("--kv", choices=KV_FORMATS, default="fp8")
    parser.add_argument("--max-new-tokens", type=int, default=16, metavar="N",
                        help="length of the responses (default: 16)")
    wrong = 0
    try:
        cfg = parser.parse_args(argv)
        kind = VLLMSampler if cfg.sampler == "vllm" else TorchSampler
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, _ = load_model(cfg.model or tiny_base(), "float32", device)
        for what, number, bad in self_check(model, kind, cfg.weights, cfg.kv, cfg.max_new_tokens):
            wrong += bool(bad)
            print(f"{what:72}{number:12.3g}  {'WRONG: ' + bad if bad else 'ok'}", flush=True)
    except (ValueError, OSError) as e:
        print(f"check_engine.py: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("check_engine.py: stopped by SIGINT", file=sys.stderr)
        return 130
    if wrong:
        print(f"{wrong} of these are wrong: engine and trainer do not agree")
        return 3
    print("engine and trainer agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
