"""README's "Does it fit?" is counted; what counts is held to the bytes of real tensors here."""

import pytest
import scaling
import torch
import transformers

import dlc


def small(layers=3, width=64, vocab=3000):
    return transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width, head_dim=32,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True)


@pytest.mark.parametrize("weights, kv", [("fp8", "fp8"), ("bf16", "bf16"), ("int4", "fp8")])
def test_the_estimate_is_what_a_run_holds(quick_base, tmp_path, weights, kv):
    cfg = dlc.check(dlc.Config(device="cpu", steps=1, out=str(tmp_path / "run"), weights=weights,
                               kv=kv, base=str(quick_base)))
    with dlc.Run(cfg, *dlc.load_model(quick_base, "float32", "cpu"), "fits") as run:
        real = scaling.real_bytes(run, 4, 10)
        guess = scaling.estimate(run.model.config, 4, 10, weights, kv)
    assert {k: guess[k] for k in real} == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("rows, length", [(1, 64), (4, 64), (2, 200)])
def test_activations_are_what_a_forward_keeps(rows, length):
    """Counted without data: what real tensors count, or a little more (the attention of tensors
    without data keeps a copy of K and V); and that is what the allocator did not get back."""
    config = small()
    real = scaling.activations(config, rows, length, fake=False)
    assert real <= scaling.activations(config, rows, length) <= 1.15 * real
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(3000, (rows, length))
    with torch.profiler.profile(profile_memory=True) as found:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            hidden = model.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
            heads = scaling.sampler.head_product(model, hidden)
            out = scaling.LinearLogps.apply(*heads, ids.reshape(-1, 1).expand(-1, 65))
    kept = sum(e.self_cpu_memory_usage for e in found.key_averages())
    assert out.requires_grad and real == pytest.approx(kept, rel=0.05)


def test_a_longer_batch_or_a_smaller_card_fits_less():
    config = small(vocab=20_000)
    at = lambda card, length: scaling.fits(config, card, length)[0]
    assert 64 == at(24, 128) > at(0.75, 1024) > at(0.75, 2048) > at(0.1, 128) == 0
    rows, gib = scaling.fits(config, 0.75, 1024)
    assert 1 <= rows and gib <= 0.9 * 0.75
