"""Numbers that break runs: each has a defined outcome (dropped and counted, skipped and counted, or
the end with the reason), the log stays strict JSON, and no weight becomes NaN. And the same seed
gives the same numbers, bit for bit."""

import json
from pathlib import Path

import crash
import pytest
import torch
from safetensors.torch import load_file

import dlc
import opd

INF, NAN = float("inf"), float("nan")
ARGV = """--digits 3 --eval-rows 9 --prompts 3 --group-size 2 --steps 3 --save-every 1 --out run
    --lr 1e-3""".split()


@pytest.fixture(scope="module")
def bases(made_base):
    return made_base(2, digits=3), made_base(4, digits=3)


@pytest.fixture(params=["dlc", "opd"])
def script(request, bases, tmp_path, monkeypatch):
    """script(*argv, hook=None) -> (status, rows of metrics.jsonl, weights); hook(step, rollout)
    spoils a batch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dlc, "accuracy", lambda *_: (0.0, []))
    monkeypatch.setattr(dlc, "tiny_base", lambda **_: bases[0])
    monkeypatch.setattr(opd, "tiny_base", lambda steps=0, **_: bases[bool(steps)])
    finish, module = dlc.TorchSampler._finish, dict(dlc=dlc, opd=opd)[request.param]

    def run(*argv, hook=None):
        count = iter(range(99))

        def spoilt(self, r):
            hook(next(count), r) if hook else None
            return finish(self, r)

        monkeypatch.setattr(dlc.TorchSampler, "_finish", spoilt)
        status = module.main([*ARGV, *argv])
        folder = Path(argv[argv.index("--out") + 1] if "--out" in argv else "run")
        strict = dict(parse_constant=lambda x: pytest.fail(f"{x} in metrics.jsonl"))
        rows = [json.loads(line, **strict) for line in (folder / "metrics.jsonl").open()]
        weights = load_file(folder / "model/model.safetensors") if status == 0 else {}
        assert all(x.isfinite().all() for x in weights.values())
        return status, rows, weights

    run.name = request.param
    return run


@pytest.mark.parametrize("field, value, dropped", [
    ("logq", NAN, 1), ("logq", INF, 1), ("logq", -INF, 0),
    ("head_logq", NAN, 1), ("head_logq", INF, 1), ("head_logq", -INF, 0)])
def test_log_probs_that_are_not_finite(script, field, value, dropped):
    """A response with NaN or inf is dropped and counted; -inf is a token ruled out, exp(-100)."""
    def spoil(step, r):
        if step == 1:
            at = (2, 0, 3) if field.startswith("head") else (2, 0)  # one of its head, or a token
            getattr(r, field)[at] = value

    status, rows, _ = script(hook=spoil)
    assert status == 0 and [r["dropped"] for r in rows] == [0, dropped, 0]
    assert not any(r["skipped"] for r in rows)
    if field == "logq" and value == -INF:
        assert rows[1]["discrepancy_max_abs"] > 90


@pytest.mark.parametrize("value, dropped", [(NAN, 1), (INF, 1), (-INF, 0)])
@pytest.mark.parametrize("head", [False, True])
def test_a_stale_copy_that_is_not_finite(script, monkeypatch, value, dropped, head):
    import sampler

    score, count = sampler.token_logps, iter(range(99))

    def spoilt(*args, **how):
        logp, head_logp = score(*args, **how)
        if next(count) == 1:
            (head_logp[2, 0] if head else logp[2])[0] = value
        return logp, head_logp

    monkeypatch.setattr(sampler, "token_logps", spoilt)
    status, rows, _ = script()
    assert status == 0 and [r["dropped"] for r in rows] == [0, dropped, 0]


def test_every_response_dropped_moves_nothing(script):
    _, rows, weights = script("--steps", "1", hook=lambda step, r: r.logq.fill_(NAN))
    assert rows[0]["dropped"] == 6 and rows[0]["tokens"] == 0 and rows[0]["grad_norm"] == 0
    before = load_file(Path(dlc.tiny_base()) / "model.safetensors")
    assert all(torch.equal(before[k], weights[k]) for k in weights)


def test_a_token_that_the_trainer_rules_out(script, monkeypatch):
    """π of the drawn token is 0: it counts as exp(-100), in the loss and in the log."""
    score = dlc.token_logps

    def none(model, part, head=False, **how):
        logp, head_logp = score(model, part, head=True, **how)
        hole = torch.zeros_like(part.mask)
        hole[0, 0] = True  # -inf, which token_logps gives as -100
        logp, head_logp = logp.masked_fill(hole, -100), head_logp.masked_fill(hole[..., None], -100)
        return (logp, head_logp) if head else logp

    for module in (dlc, opd):
        tested = module.__name__ == script.name
        monkeypatch.setattr(module, "token_logps", none if tested else score)
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda text, *_: sum(map(ord, text)) % 7)
    extra = ["--correction", "dlc_tis"] + ["--loss", "sampled"] * (script.name == "opd")
    status, rows, _ = script("--steps", "2", *extra)
    assert status == 0 and rows[0]["lag_max_abs"] > 50 and not any(r["skipped"] for r in rows)


@pytest.mark.parametrize("correction", ["is", "tis", "ppo_sampler", "dlc", "dlc_tis"])
def test_exploding_ratios(script, correction):
    if script.name == "opd" and correction != "is":
        pytest.skip("the same policy_loss as in dlc.py")
    extra = ["--loss", "sampled"] * (script.name == "opd")
    spoil = lambda step, r: r.logq.sub_(5000.0)
    status, rows, _ = script("--correction", correction, *extra, hook=spoil)
    assert status == 0 and all(r["discrepancy_max_abs"] > 90 and r["dropped"] == 0 for r in rows)


def test_one_token_answers_and_nothing_ever_stops(script, monkeypatch):
    status, rows, _ = script("--max-new-tokens", "1")
    assert status == 0 and all(r["length"] == 1 for r in rows)
    made = dlc.TorchSampler.__init__

    def endless(self, *args, **how):
        made(self, *args, **how)
        self.stop_ids = self.stop_ids[:0]

    monkeypatch.setattr(dlc.TorchSampler, "__init__", endless)
    status, rows, _ = script("--out", "endless")
    assert status == 0 and all(r["truncated"] == 1 and r["length"] == 4 for r in rows)


def test_every_answer_is_empty(script, monkeypatch):
    """The stop comes first everywhere: one token, no text, equal rewards: dlc learns nothing."""
    made = dlc.TorchSampler.__init__

    def at_once(self, *args, **how):
        made(self, *args, **how)
        self.stop_ids = torch.arange(14)

    monkeypatch.setattr(dlc.TorchSampler, "__init__", at_once)
    status, rows, _ = script()
    assert status == 0
    assert all((r["length"], r["truncated"], r["reward"]) == (1, 0, 0) for r in rows)
    assert script.name == "opd" or all(r["grad_norm"] == 0 for r in rows)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(script, monkeypatch, value):
    update, count = dlc.update, iter(range(99))

    def spoil(model, optimizer):
        if next(count) == 1:
            next(model.parameters()).grad[0, 0] = value
        return update(model, optimizer)

    monkeypatch.setattr(dlc, "update", spoil)
    status, rows, _ = script()
    assert status == 0 and [r["skipped"] for r in rows] == [0, 1, 0]
    assert rows[1]["grad_norm"] is None  # null


def test_weights_that_explode_end_the_run_with_the_last_good_state(script, capsys, monkeypatch):
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda text, *_: sum(map(ord, text)) % 7)
    status, rows, _ = script("--optimizer", "sgd", "--lr", "1e38")
    err = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and "--lr" in err and "make it smaller" in err
    if (state := Path("run/state.pt")).exists():
        weights = torch.load(state, weights_only=True)["model"]
        assert all(w.isfinite().all() for w in weights.values())


def test_the_same_seed_gives_the_same_numbers_bit_for_bit(script, monkeypatch):
    """Whatever other random numbers were drawn in the process; and another seed gives others."""
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda text, *_: sum(map(ord, text)) % 7)
    seen = []
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        torch.manual_seed(len(seen)), torch.rand(len(seen) + 1)
        script("--out", out, "--seed", seed, "--noise", "0.05", "--sync-every", "1", "--kv", "fp8")
        seen.append(crash.contents(Path(out)))
    first, again, other = seen
    assert all(crash.same(first[k], again[k]) for k in first)
    assert first["rows"] != other["rows"]
    assert not crash.same(first["state"]["model"], other["state"]["model"])
