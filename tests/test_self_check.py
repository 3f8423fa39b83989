"""sampler.py --check: an honest sampler passes; each way of being broken is caught, and named in words."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlc
import sampler as S

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(made_base):
    return made_base(60)


@pytest.fixture(scope="module")
def model(folder):
    return dlc.load_model(folder, "float32", "cpu")[0]


def wrong(model, kind=S.TorchSampler, *formats):
    return {what: bad for what, _, bad in S.self_check(model, kind, *formats) if bad}


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("none", "none"), ("int4", "fp8_e5m2")])
def test_an_honest_sampler_passes(model, formats):
    before = {n: p.clone() for n, p in model.named_parameters()}
    rows = list(S.self_check(model, S.TorchSampler, *formats))
    assert not [r for r in rows if r[2]], rows
    number = {what.split(":")[0].split(",")[0]: x for what, x, _ in rows}
    assert 0 <= number["floor"] < 1e-5 and number["engine unquantised"] < 1e-5
    assert abs(number["temperature"]) < 4 and 0.9 < number["head mass Q_H"] < 1.001
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert len({w for w, *_ in rows}) == len(rows) and any(w.startswith("weights %s, KV %s:" % formats) for w, *_ in rows)


class Deaf(S.TorchSampler):  # a sync that does nothing
    def sync(self, model, version):
        super().sync(model, version) if version == 0 else setattr(self, "version", version)


class Half(S.TorchSampler):  # a sync that leaves the output head, tied, behind, as vLLM's reload did on a CPU
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


class ColdRaw(Cold):  # ... and log-probs from before the temperature: the ratio looks right, the draws are not
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
        last = torch.arange(r.mask.shape[1]) == r.mask.sum(1, keepdim=True) - 1
        r.logq = r.logq.where(~(last & torch.isin(r.tokens[:, -r.mask.shape[1] :], self.stop_ids)), 0.0)
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


@pytest.mark.parametrize("kind, what, words", [
    (Deaf, "sync 1", "does not hold the weights"), (Half, "sync 1", "does not hold the weights"), (Undated, "sync 1", "version [0], not 1"),
    (Cold, "engine unquantised", "temperature 0.7"), (ColdRaw, "temperature", "a temperature below 1"), (Hot, "temperature", "above 1"),
    (Shifted, "engine unquantised", "token before it: shifted by one"), (Late, "engine unquantised", "token after it: shifted by one"),
    (Lost, "engine unquantised", "missing, inf or NaN"), (Unstopped, "responses that", "without its stop token"),
    (Zero, "responses that", "without its stop token"), (Endless, "responses that", "goes on after its stop"),
    (Headless, "head mass", "not the 14 likeliest"), (Ignorant, "weights fp8, KV bf16", "the engine ignores the format"),
    (Copied, "its unquantised copy", "logp_stale is not")])  # fmt: skip
def test_a_broken_sampler_is_caught(model, kind, what, words):
    number, bad = next((number, bad) for w, number, bad in S.self_check(model, kind) if w.startswith(what))
    assert words in bad, (number, bad)


def test_formats_too_far_from_the_trainer_and_a_model_without_a_stop(model):
    found = wrong(model, S.TorchSampler, "int2", "bf16")
    assert list(found) == ["weights int2, KV bf16: KL(q || p), nats a token"]
    model.generation_config.eos_token_id, model.config.eos_token_id = None, None
    try:
        assert "name eos_token_id" in next(bad for what, _, bad in S.self_check(model) if what == "stop tokens known")
    finally:
        model.generation_config.eos_token_id, model.config.eos_token_id = 13, 13


def test_status_words_and_bad_input(folder, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    how = ["--check", "--model", str(folder)]
    assert S.main(how) == 0
    out, err = capsys.readouterr()
    assert out.endswith("engine and trainer agree\n") and err == "" and out.count("  ok\n") == 13
    monkeypatch.setattr(S, "TorchSampler", Deaf)
    assert S.main(how) == 3 and capsys.readouterr().out.endswith("of these are wrong: engine and trainer do not agree\n")
    shutil.copytree(folder, "nan")
    weights = load_file("nan/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, "nan/model.safetensors", dict(format="pt"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    for argv, words in (([], "--check"), (["--check", "--weights", "fp4"], "fp4 nvfp4"), (["--check", "--kv", "int8"], "int8 fp8_e5m2"),
                        (["--check", "--stepz"], "--stepz"), (["--check", "--model", "none"], "--model none"), (["--check", "--model"], "--model"),
                        (["--check", "--model", "nan"], "model.norm.weight"), ([*how, "--sampler", "vllm"], "pip install vllm")):  # fmt: skip
        assert S.main(argv) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("sampler.py: error:") and all(w in err for w in words.split()), err


def test_as_a_process(folder, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "sampler.py", "--check", "--model", folder, "--kv", "none"],
                          cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and "weights fp8, KV none: KL" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir()) and json.loads((folder / "config.json").read_text())
