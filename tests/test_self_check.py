"""check_engine.py: an honest sampler passes; each way of being broken is caught and named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import check_engine as C
import dlc
import sampler as S

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(made_base):
    return made_base(60, digits=3)


@pytest.fixture(scope="module")
def model(folder):
    return dlc.load_model(folder, "float32", "cpu")[0]


def wrong(model, kind=S.TorchSampler, *formats):
    return {what: bad for what, _, bad in C.self_check(model, kind, *formats) if bad}


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("none", "none"), ("int4", "fp8_e5m2")])
def test_an_honest_sampler_passes(model, formats):
    before = {n: p.clone() for n, p in model.named_parameters()}
    rows = list(C.self_check(model, S.TorchSampler, *formats))
    assert not [r for r in rows if r[2]], rows
    number = {what.split(":")[0].split(",")[0]: x for what, x, _ in rows}
    assert 0 <= number["floor"] < 1e-5 and number["engine unquantised"] < 1e-5
    assert abs(number["temperature"]) < 4 and 0.9 < number["head mass Q_H"] < 1.001
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    names = [what for what, *_ in rows]
    assert len(set(names)) == len(names)
    assert any(what.startswith("weights %s, KV %s:" % formats) for what in names)


class Deaf(S.TorchSampler):  # a sync that does nothing
    def sync(self, model, version):
        super().sync(model, version) if version == 0 else setattr(self, "version", version)


class Half(S.TorchSampler):  # a sync leaves the tied head behind, as vLLM's reload did on a CPU
    def _load(self):
        head = self.engine.get_output_embeddings()
        kept = head.weight.detach().clone()
        super()._load()
        head.weight = torch.nn.Parameter(kept if self.version else head.weight.detach().clone())


class Undated(S.TorchSampler):
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.version = r.version * 0
        return r


class Cold(S.TorchSampler):  # temperature 0.7: the last norm's gain multiplies the logits
    def _load(self):
        super()._load()
        self.engine.model.norm.weight.data /= 0.7


class ColdRaw(Cold):  # ... and log-probs from before the temperature: the ratio looks right
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.logq, r.head_logq = r.logp_stale.clone(), r.head_logp_stale.clone()
        return r


class Hot(ColdRaw):
    def _load(self):
        S.TorchSampler._load(self)
        self.engine.model.norm.weight.data *= 0.7


class Shifted(S.TorchSampler):
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.logq = r.logq.roll(1, 1)
        return r


class Late(S.TorchSampler):
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.logq = r.logq.roll(-1, 1)
        return r


class Lost(S.TorchSampler):
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.logq[3, 0] = float("nan")
        return r


class Zero(S.TorchSampler):  # the stop token comes with a made-up log-prob of 0
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        T = r.mask.shape[1]
        last = torch.arange(T) == r.mask.sum(1, keepdim=True) - 1
        r.logq = r.logq.where(~(last & torch.isin(r.tokens[:, -T:], self.stop_ids)), 0.0)
        return r


class Unstopped(S.TorchSampler):  # the stop token is cut off
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.mask = r.mask & ~torch.isin(r.tokens[:, -r.mask.shape[1] :], self.stop_ids)
        return r


class Endless(S.TorchSampler):  # goes on after a stop
    def sample(self, *args, **how):
        kept, self.stop_ids = self.stop_ids, self.stop_ids[:0]
        r = super().sample(*args, **how)
        self.stop_ids = kept
        return r


class Headless(S.TorchSampler):  # the head is not the likeliest tokens
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.head_ids = r.head_ids.roll(1, 1)
        return r


class Ignorant(S.TorchSampler):  # the option is accepted, and nothing is quantised
    def __init__(self, model, weights, kv, **how):
        super().__init__(model, "bf16" if weights == "fp8" else weights, kv, **how)


class Copied(S.TorchSampler):  # logp_stale is the engine's own log-prob
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.logp_stale = r.logq + 0.5
        return r


class Dropped(S.TorchSampler):  # a response whose log-probs were not finite arrives masked out
    def sample(self, *args, **how):
        r = super().sample(*args, **how)
        r.mask[3] = False
        return r


@pytest.mark.parametrize("kind, what, words", [
    (Deaf, "sync 1", "does not hold the weights"),
    (Half, "sync 1", "does not hold the weights"),
    (Undated, "sync 1", "version [0], not 1"),
    (Cold, "engine unquantised", "temperature 0.7"),
    (ColdRaw, "temperature", "a temperature below 1"),
    (Hot, "temperature", "above 1"),
    (Shifted, "engine unquantised", "token before it: shifted by one"),
    (Late, "engine unquantised", "token after it: shifted by one"),
    (Lost, "engine unquantised", "missing, inf or NaN"),
    (Dropped, "engine unquantised", "missing, inf or NaN"),
    (Unstopped, "responses that", "without its stop token"),
    (Zero, "responses that", "without its stop token"),
    (Endless, "responses that", "goes on after its stop"),
    (Headless, "head mass", "not the 14 likeliest"),
    (Ignorant, "weights fp8, KV bf16", "the engine ignores the format"),
    (Copied, "its unquantised copy", "logp_stale is not"),
])
def test_a_broken_sampler_is_caught(model, kind, what, words):
    rows = C.self_check(model, kind)
    number, bad = next((number, bad) for w, number, bad in rows if w.startswith(what))
    assert words in bad, (number, bad)


def test_formats_too_far_from_the_trainer_and_a_model_without_a_stop(model):
    found = wrong(model, S.TorchSampler, "int2", "bf16")
    assert list(found) == ["weights int2, KV bf16: KL(q || p), nats a token"]
    model.generation_config.eos_token_id, model.config.eos_token_id = None, None
    try:
        assert "name eos_token_id" in wrong(model)["stop tokens known"]
    finally:
        model.generation_config.eos_token_id, model.config.eos_token_id = 13, 13


def test_a_forward_that_depends_on_the_length_shows_at_that_length(folder):
    """LongRoPE turns every key by other angles once a sequence is longer than its switch: a sampler
    that keeps keys in its cache is right below the switch; above it, it refuses."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 4096
    config.rope_parameters = dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=40, factor=8.0,
        short_factor=[1.0] * 16, long_factor=[8.0] * 16)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    assert not [r for r in C.self_check(model, S.TorchSampler, "none", "none", 16) if r[2]]
    with pytest.raises(ValueError, match="at most 40 are read alike"):
        list(C.self_check(model, S.TorchSampler, "none", "none", 48))


def test_status_words_and_bad_input(folder, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    how = ["--model", str(folder)]
    assert C.main(how) == 0
    out, err = capsys.readouterr()
    assert out.endswith("engine and trainer agree\n") and err == "" and out.count("  ok\n") == 13
    monkeypatch.setattr(C, "TorchSampler", Deaf)
    assert C.main(how) == 3
    told = "of these are wrong: engine and trainer do not agree\n"
    assert capsys.readouterr().out.endswith(told)
    shutil.copytree(folder, "nan")
    weights = load_file("nan/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, "nan/model.safetensors", dict(format="pt"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    for argv, words in (
        (["--weights", "fp4"], "fp4 nvfp4"), (["--kv", "int8"], "int8 fp8_e5m2"),
        (["--stepz"], "--stepz"), (["--max-new-tokens", "many"], "--max-new-tokens many"),
        ([*how, "--max-new-tokens", "117"], "--max-new-tokens 117 at most 116"),
        ([*how, "--max-new-tokens", "3"], "--max-new-tokens 3"),
        (["--model", "none"], "--model none"), (["--model"], "--model"),
        (["--model", "nan"], "Qwen3ForCausalLM not finite"),
        ([*how, "--sampler", "vllm"], "pip install vllm"),
    ):
        assert C.main(argv) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, (out, err)
        assert err.startswith("check_engine.py: error:"), err
        assert all(w in err for w in words.split()), err


def test_as_a_process(folder, tmp_path):
    script = ROOT / "tests" / "check_engine.py"
    command = [sys.executable, script, "--model", folder, "--kv", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "weights fp8, KV none: KL" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir()) and json.loads((folder / "config.json").read_text())
