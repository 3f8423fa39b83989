"""Decode attention of the narrow copy against float64 by hand, full forwards, the library's own."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from test_sampler import MIXED, PROMPTS, at, close, full, tiny
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sampler import TorchSampler, grouped_attention

RATIOS = (1, 2, 3, 8)  # query heads to one K and V
TYPES = ["qwen3", "mistral", "gemma3"]  # full attention, a sliding window, one layer of each


def shaped(name, ratio, dtype=torch.float32):
    """A tiny model of 2 K and V heads, each for `ratio` query heads."""
    more = MIXED if name == "gemma3" else {}
    heads = dict(hidden_size=96, num_attention_heads=2 * ratio, num_key_value_heads=2, head_dim=16)
    return tiny(name, dtype, **more | heads)


def by_hand(query, key, value, visible, scale):
    """(B, 1, heads, size) in float64: softmax over what a row may see."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(ratio, 1) for x in (key, value))
    score = torch.einsum("bhqd,bhkd->bhqk", query.double(), key) * scale
    weight = score.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weight, value)


def inputs(ratio, dtype, length=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)
    visible = torch.arange(19) >= torch.tensor([0, 7, 18, 3])[:, None, None, None]
    return draw(4, 2 * ratio, length, 16), draw(4, 2, 19, 16), draw(4, 2, 19, 16), visible


def both(query, key, value, mask, **how):
    """What ours gives and what the library's does, from the same call."""
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1])
    call = lambda attend: attend(layer, query, key, value, mask, scaling=0.3, dropout=0.0, **how)[0]
    return call(grouped_attention), call(sdpa_attention_forward)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_query_a_row_is_softmax_attention(ratio, dtype):
    query, key, value, visible = inputs(ratio, dtype)
    everything = visible | True
    additive = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
    for mask, seen in ((visible, visible), (additive, visible), (None, everything)):
        want = by_hand(query, key, value, seen, 0.3)
        got, theirs = both(query, key, value, mask, sliding_window=4)
        assert got.shape == want.shape and got.dtype == dtype
        off, limit = ((x.double() - want).abs().max() for x in (got, theirs))
        assert off <= max(2 * limit, 1e-6)  # no less exact than the library's, in bfloat16 either


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_row_that_sees_nothing_gives_no_nan(dtype):
    query, key, value, visible = inputs(3, dtype)
    visible[1] = False
    got, theirs = both(query, key, value, visible)
    assert got.isfinite().all() and torch.equal(got[1], theirs[1])


def test_prefill_and_a_bias_for_each_head_are_left_to_the_library():
    for length, bias in ((5, {}), (1, dict(position_bias=torch.randn(4, 6, 1, 19)))):
        assert torch.equal(*both(*inputs(3, torch.float32, length), **bias))
    query, key, value, visible = inputs(3, torch.float32)
    visible = visible & (torch.arange(6)[:, None, None] < torch.arange(19))  # each head its own
    got, _ = both(query, key, value, visible)
    assert (got.double() - by_hand(query, key, value, visible, 0.3)).abs().max() < 1e-6


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", TYPES)
def test_decode_is_the_full_forward(name, ratio, monkeypatch):
    """Padded on the left, windows, a growing cache; the judge is each row alone, with neither."""
    model, seen, attend = shaped(name, ratio), set(), F.scaled_dot_product_attention
    s = TorchSampler(model, "none", "none", head_k=17, stop_ids=[])

    def watched(query, key, *args, **how):
        seen.add((query.shape[2], key.shape[1]))
        return attend(query, key, *args, **how)

    with monkeypatch.context() as m:
        m.setattr(F, "scaled_dot_product_attention", watched)
        r = s.sample(PROMPTS, 9, greedy=True)  # nothing but the engine runs
    assert seen == {(5, 2 * ratio), (ratio, 2)}  # prefill repeats K and V, decode does not
    table = full(model, r)
    close(r.head_logq, table.gather(-1, r.head_ids))
    close(r.logq, at(table, r))
    assert r.logq.std() > 0.1


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", TYPES)
def test_fp8_kv_is_read_as_prefill_reads_it(name, ratio):
    """The judge is the library on the whole row; in float64, where no code is on an edge."""
    s = TorchSampler(shaped(name, ratio, torch.float64), "none", "fp8", head_k=17, stop_ids=[])
    plain = copy.deepcopy(s.engine)
    plain.set_attn_implementation("sdpa")
    r = s.sample(PROMPTS, 9, seed=0)
    for b, n in enumerate(r.prompt_len.tolist()):
        row, cache = r.tokens[b : b + 1, 5 - n :], s._new_cache()
        z = plain(row, past_key_values=cache, use_cache=True).logits[0, n - 1 : -1]
        close(z.log_softmax(-1).gather(-1, r.head_ids[b]).float(), r.head_logq[b])
    assert (r.logq - r.logp_stale).abs().max() > 1e-3  # the rounding is there


@pytest.mark.parametrize("weights", ("none", "bf16", "fp8"))
def test_with_a_key_for_each_query_head_every_bit_is_the_librarys(weights):
    ours, plain = (TorchSampler(shaped("qwen3", 1), weights, "none", stop_ids=[]) for _ in range(2))
    plain.engine.set_attn_implementation("sdpa")
    a, b = (s.sample(PROMPTS, 9, seed=0) for s in (ours, plain))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.head_logq, b.head_logq)


def test_only_the_narrow_copy_uses_it_and_an_architectures_own_attention_stays():
    named = lambda model: model.config.get_text_config()._attn_implementation
    for weights in ("none", "fp8"):
        model = shaped("gemma3", 3)
        s = TorchSampler(model, weights, "fp8")
        s.sync(model, 1)
        assert [named(m) for m in (model, s.stale, s.engine)] == ["sdpa", "sdpa", "grouped"]
    eager = hf.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    assert named(TorchSampler(eager, "bf16", "bf16").engine) == "eager"
    config = hf.FalconConfig(
        vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True, eos_token_id=1, initializer_range=0.25)  # fmt: skip
    own = hf.FalconForCausalLM(config).eval()  # its modules do not look attention up by name
    s = TorchSampler(own, "none", "none", stop_ids=[])
    assert named(s.engine) == "sdpa"
    r = s.sample(PROMPTS, 9, seed=0)
    close(r.logq, at(full(own, r), r))
