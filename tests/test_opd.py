"""On-policy distillation: losses against sums, the direction of the KL, zero at the teacher,
budgets and refusals."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import transformers

import dlc
import opd
import sampler as S

torch.manual_seed(0)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()


def logits(seed, V=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(2, 3, V, generator=g)).to(dtype)


def hand_kl(a, b):
    a, b = a.softmax(-1).tolist(), b.softmax(-1).tolist()
    return sum(x * math.log(x / y) for x, y in zip(a, b))


def test_reverse_kl_runs_from_student_to_teacher_on_two_tokens():
    student, teacher = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    reverse = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert abs(float(opd.divergence("full", student, teacher)) - reverse) < 1e-6
    assert abs(float(opd.divergence("forward", student, teacher)) - forward) < 1e-6
    assert abs(reverse - forward) > 0.1  # or the test could not tell them apart


def test_full_forward_and_jsd_against_a_hand_sum():
    s, t = logits(0), logits(1)
    kept = [(s[i, j], t[i, j]) for i, j in MASK.nonzero().tolist()]
    mix = [(a.softmax(-1) + b.softmax(-1)).div(2).log() for a, b in kept]
    want = dict(full=[hand_kl(a, b) for a, b in kept], forward=[hand_kl(b, a) for a, b in kept])
    want["jsd"] = [(hand_kl(a, m) + hand_kl(b, m)) / 2 for (a, b), m in zip(kept, mix)]
    for loss, values in want.items():
        assert abs(float(opd.distill_loss(loss, s, t, MASK)) - sum(values) / len(values)) < 1e-9


def test_topk_is_a_lower_bound_at_least_zero_and_full_at_the_whole_vocabulary():
    for seed in range(20):
        s, t = logits(seed), logits(seed + 100)
        full = opd.divergence("full", s, t)
        by_k = [opd.divergence("topk", s, t, k) for k in (1, 2, 3, 5, 6)]
        assert all((x >= -1e-12).all() and (x <= full + 1e-9).all() for x in by_k)
        assert torch.allclose(by_k[-1], full, atol=1e-5)


def test_topk_head_is_the_students():
    student, teacher = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.7])
    want = 0.7 * math.log(0.7 / 0.1) + 0.3 * math.log(0.3 / 0.9)  # token 0 and one bucket
    assert abs(float(opd.divergence("topk", student.log(), teacher.log(), 1)) - want) < 1e-6


@pytest.mark.parametrize("loss", opd.LOSSES)
def test_teacher_equal_to_student_gives_no_loss_and_no_gradient_and_another_gives_another(loss):
    tokens = torch.tensor([[0, 1, 2], [3, 4, 5]])
    grads = []
    for teacher in (logits(0), logits(1), logits(2)):
        s = logits(0).requires_grad_()
        value = opd.distill_loss(loss, s, teacher, MASK, tokens, k=3)
        grads.append(torch.autograd.grad(value, s)[0])
    assert abs(float(opd.distill_loss(loss, logits(0), logits(0), MASK, tokens, k=3))) < 1e-12
    assert grads[0].abs().max() < 1e-12
    assert (grads[1] - grads[2]).abs().max() > 1e-3  # the signal is not detached away
    assert grads[1][1, 1:].abs().max() == 0  # masked positions


def test_sampled_with_is_has_the_expectation_of_full_under_q():
    """O6: E_{y~q} of the IS-weighted sampled gradient is the gradient of the full KL there."""
    V, s, t, q = 5, logits(3, 5)[0, 0], logits(4, 5)[0, 0], logits(5, 5)[0, 0].log_softmax(-1)
    live = s.clone().requires_grad_()
    full = torch.autograd.grad(opd.divergence("full", live, t), live)[0]
    mean = torch.zeros(V, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.bool)
    for y in range(V):
        live = s.clone().requires_grad_()
        drawn, correction = torch.tensor([[y]]), dict(correction="is", logq=q[y].view(1, 1))
        value = opd.distill_loss(
            "sampled", live.view(1, 1, V), t.view(1, 1, V), one, drawn, **correction)
        mean += q[y].exp() * torch.autograd.grad(value, live)[0]
    assert (mean - full).abs().max() < 1e-12
    assert full.abs().max() > 1e-2


@pytest.mark.parametrize("loss", ["full", "topk", "forward", "jsd"])
def test_chunks_equal_the_whole(loss, monkeypatch):
    monkeypatch.setattr(S.LinearLogps, "CHUNK", 3 * 11 * 2)  # two positions at a time
    h, w, ht, wt = torch.randn(7, 8), torch.randn(12, 8), torch.randn(7, 4), torch.randn(13, 4)
    grads = []
    for chunked in (True, False):
        a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
        if chunked:
            value = opd.ChunkedDivergence.apply(a, b[:11], ht, wt[:11], loss, 3)
        else:  # rows 11 and up are padding of the embeddings
            value = opd.divergence(loss, (a @ b.T)[:, :11], (ht @ wt.T)[:, :11], 3).sum()
        (value / 5).backward()
        grads.append((value.detach(), a.grad, b.grad))
    for x, y in zip(*grads):
        assert torch.allclose(x, y, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="cut both to the real vocabulary"):
        opd.distill_loss("full", logits(0), logits(1, V=7), MASK)
    with pytest.raises(ValueError, match="needs tokens"):
        opd.distill_loss("sampled", logits(0), logits(1), MASK)
    with pytest.raises(ValueError, match="choose one of"):
        opd.distill_loss("reverse", logits(0), logits(1), MASK)
    for change in (dict(student="a"), dict(seeds=0), dict(loss_k=0)):
        with pytest.raises(ValueError, match="--" + next(iter(change)).replace("_", "-")):
            opd.check(opd.Config(**change))


def test_falling_fit_is_the_least_squares_non_increasing_sequence():
    assert opd.falling_fit([3, 1, 2, 0]) == [3, 1.5, 1.5, 0]
    assert opd.falling_fit([1, 2, 3]) == [2, 2, 2]
    assert opd.falling_fit([5, 4, 4, 1]) == [5, 4, 4, 1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A student of 40 supervised batches, and its teacher: a copy, every matrix moved a little."""
    root = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(root)
        student = root / dlc.tiny_base(40, digits=3)
    model, tokenizer = dlc.load_model(student, "float32", "cpu")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.6 * p.std() * torch.randn(p.shape, generator=g)) if p.dim() > 1 else None
    dlc.write(Path(root / "teacher"), model.save_pretrained, tokenizer.save_pretrained)
    return student, root / "teacher"


@pytest.fixture
def here(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opd, "tiny_base", lambda steps=0, **_: pair[1] if steps else pair[0])
    return pair


def spoil(monkeypatch, *where):
    """A log-prob of what was drawn is NaN, before the sampler has looked for it."""
    finish = S.TorchSampler._finish

    def spoilt(self, rollout):
        rollout.logq[where] = float("nan")
        return finish(self, rollout)

    monkeypatch.setattr(S.TorchSampler, "_finish", spoilt)


def config(**kw):
    return opd.Config(**dict(digits=3, eval_rows=40, prompts=8, group_size=2, device="cpu") | kw)


@pytest.mark.parametrize("how", [dict(loss="full"), dict(loss="sampled", correction="tis"),
                                 dict(loss="topk", dtype="bfloat16")])
def test_training_comes_closer_to_the_teacher(here, how):
    how = dict(steps=40, prompts=16, group_size=4, weights="bf16", kv="bf16", sync_every=1) | how
    rows = opd.train(config(lr=2e-4, **how))
    first, last = (sum(r["teacher_kl"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last < 0.8 * first
    assert {"accuracy_base", "accuracy_teacher", "accuracy", "accuracy_sampler"} <= set(rows[-1])
    assert all(r["discrepancy"] < 0.01 and r["lag"] < 1e-9 for r in rows)


@pytest.mark.parametrize("how", [dict(loss="full"), dict(loss="topk", loss_k=3),
                                 dict(loss="sampled"),
                                 dict(loss="sampled", correction="tis", cap=1.05),
                                 dict(loss="sampled", correction="dlc_tis", cap=1.05, clip=0.01)])
def test_a_step_is_the_gradient_of_distill_loss_over_the_whole_batch(here, how, monkeypatch):
    """With both gaps, in micro-batches, one response broken: distill_loss on whole logits."""
    seen, draw = [], S.DelayedSampler.draw

    def spy(self, step):
        run, rollout = self.request.__self__, draw(self, step)
        seen.append((copy.deepcopy(run.model), rollout))
        return rollout

    spoil(monkeypatch, 1, 0)
    monkeypatch.setattr(S.DelayedSampler, "draw", spy)
    lr = 0.2
    rows = opd.train(config(steps=2, weights="int3", kv="bf16", head_k=4, micro_batch=2,
                            sync_every=0, optimizer="sgd", lr=lr, out="run", **how))  # fmt: skip
    before, r = seen[1]
    assert r.mask.any(1).tolist() == [True, False] + [True] * 14 and rows[1]["dropped"] == 1
    P, T = r.tokens.shape[1] - r.mask.shape[1], r.mask.shape[1]
    attention, position = S.positions(r.prompt_len, P, P + T)
    after, teacher = (dlc.load_model(x, "float32", "cpu")[0] for x in ("run/model", here[1]))
    z, z_T = (m(r.tokens, attention_mask=attention, position_ids=position).logits[:, P - 1 : -1]
              for m in (before, teacher))  # fmt: skip
    more = dict(correction="reinforce", loss_k=8) | how
    more = dict(k=more.pop("loss_k")) | more | dict(
        logq=r.logq, logp_stale=r.logp_stale, head_logp=z.log_softmax(-1).gather(-1, r.head_ids),
        head_logq=r.head_logq, head_logp_stale=r.head_logp_stale)  # fmt: skip
    loss = opd.distill_loss(more.pop("loss"), z, z_T, r.mask, r.tokens[:, P:], **more)
    flat = lambda xs: torch.cat([x.detach().flatten() for x in xs])
    moved = (flat(before.parameters()) - flat(after.parameters())) / lr
    want = flat(torch.autograd.grad(loss, list(before.parameters())))
    assert want.norm() > 1e-2 and (moved - want).norm() < 1e-3 * want.norm()
    logp, logp_T = (x.detach().log_softmax(-1).gather(-1, r.tokens[:, P:, None])[..., 0]
                    for x in (z, z_T))  # fmt: skip
    assert abs(rows[1]["teacher_kl_by_q"] - float((r.logq - logp_T)[r.mask].mean())) < 1e-4
    value = (logp - logp_T)[r.mask].mean() if how["loss"] == "sampled" else loss.detach()
    assert abs(rows[1]["teacher_kl"] - float(value)) < 1e-4


def test_resume_gives_the_same_numbers(here):
    quiet = ("seconds_sample", "seconds_wait", "seconds_train", "tokens_per_second", "memory")
    whole = opd.train(config(steps=4, out="a", save_every=2))
    opd.train(config(steps=2, out="b", save_every=2))
    again = opd.train(config(steps=4, resume="b", save_every=2))
    for x, y in zip(whole, again):
        kept = set(x) - set(quiet)
        assert {k: x[k] for k in kept} == {k: y[k] for k in kept}


def test_teacher_equal_to_student_does_not_move_the_weights(here, monkeypatch):
    monkeypatch.setattr(opd, "tiny_base", lambda steps=0, **_: here[0])
    rows = opd.train(config(steps=1, optimizer="sgd", lr=1.0))
    assert abs(rows[0]["teacher_kl"]) < 1e-6 and rows[0]["grad_norm"] < 1e-5
    for loss in ("full", "topk"):  # not even by rounding, of which Adam would make a whole step
        assert opd.train(config(steps=1, loss=loss))[0]["grad_norm"] == 0


def test_the_teachers_accuracy_is_the_teachers(here, monkeypatch):
    seen = []
    head = dlc.load_model(here[1], "float32", "cpu")[0].lm_head.weight
    same = lambda s, *_: (seen.append(torch.equal(s.stale.lm_head.weight, head)) or len(seen), [])
    monkeypatch.setattr(dlc, "accuracy", same)
    last = opd.train(config(steps=1))[-1]
    assert seen.index(True) == last["accuracy_teacher"] - 1 and sum(seen) == 1


def test_another_tokenizer_or_stop_token_is_refused(here, tmp_path):
    student, tokenizer = dlc.load_model(here[0], "float32", "cpu")
    other, odd = dlc.load_model(here[1], "float32", "cpu")
    odd.add_tokens(["x"])
    other.save_pretrained(tmp_path / "odd"), odd.save_pretrained(tmp_path / "odd")
    cfg = config(student=str(here[0]), teacher=str(tmp_path / "odd"))
    with pytest.raises(ValueError, match="tokenizer is not the student's"):
        opd.load_teacher(cfg, student, tokenizer)
    other.generation_config.eos_token_id = 11
    other.save_pretrained(tmp_path / "stop"), tokenizer.save_pretrained(tmp_path / "stop")
    cfg = dataclasses.replace(cfg, teacher=str(tmp_path / "stop"))
    with pytest.raises(ValueError, match="stop tokens"):
        opd.load_teacher(cfg, student, tokenizer)
    other.generation_config.eos_token_id = 13
    other.resize_token_embeddings(16)  # a padded embedding is not a difference
    other.save_pretrained(tmp_path / "padded"), tokenizer.save_pretrained(tmp_path / "padded")
    cfg = dataclasses.replace(cfg, teacher=str(tmp_path / "padded"))
    teacher = opd.load_teacher(cfg, student, tokenizer)
    assert len(teacher.lm_head.weight) == 14
    assert not any(p.requires_grad for p in teacher.parameters())
    other.config.pad_token_id = None
    other.resize_token_embeddings(12)
    other.save_pretrained(tmp_path / "short"), tokenizer.save_pretrained(tmp_path / "short")
    cfg = dataclasses.replace(cfg, teacher=str(tmp_path / "short"))
    with pytest.raises(ValueError, match="12 logits are too few for 14 tokens"):
        opd.load_teacher(cfg, student, tokenizer)


def test_budget_admission_and_recipe(here, tmp_path, capsys):
    how = "--digits 3 --eval-rows 40 --prompts 8 --group-size 2 --steps 3 --device cpu".split()
    assert opd.main(["--admit", *how]) == 2
    assert "run python opd.py --calibrate first" in capsys.readouterr().err
    calibrate = ["--calibrate", "--levels", "0,2", "--seeds", "2", "--tolerance", "1", *how]
    assert opd.main(calibrate) == 0
    budget = json.loads((tmp_path / "budget.json").read_text())
    assert budget["censored"] and budget["budget"] == max(r["mismatch"] for r in budget["curve"])
    runs = sorted(x.name for x in (tmp_path / "budget-runs").iterdir())
    assert opd.main(calibrate) == 0 and len(runs) == 2 * 2 + 1
    assert runs == sorted(x.name for x in (tmp_path / "budget-runs").iterdir())  # none ran twice
    assert json.loads((tmp_path / "budget.json").read_text()) == budget
    capsys.readouterr()

    assert opd.main(["--admit", *how]) == 0  # a list exits 0 once printed
    shown = capsys.readouterr().out
    assert shown.count("ADMIT") + shown.count("REJECT") == len(opd.STANDARD)
    assert opd.main(["--admit", "--weights", "bf16", "--kv", "bf16", *how]) == 0
    assert opd.main(["--admit", "--noise", "30", *how]) == 3  # above the tested range
    assert opd.main(["--admit", "--lag", "500", *how]) == 3  # a lag that was never measured
    assert opd.main(["--admit", "--loss", "topk", *how]) == 2
    assert "was made for loss 'full', not 'topk'" in capsys.readouterr().err

    assert opd.main(["--sensitivity", "--weights", "int2", "--target", "0.05", *how]) == 0
    found = json.loads((tmp_path / "recipe.json").read_text())
    assert found["keep_bf16"] and found["mismatch"] <= 0.05
    assert opd.main(["--admit", "--weights", "int2", "--keep-bf16", "@recipe.json", *how]) in (0, 3)
    found["model"] += 1
    (tmp_path / "recipe.json").write_text(json.dumps(found))
    assert opd.main(["--admit", "--weights", "int2", "--keep-bf16", "@recipe.json", *how]) == 2


QUALITY = {0.0: (0.8, 0.82), 0.4: (0.6, 0.8), 0.8: (0.84, 0.88), 1.6: (0.1, 0.2)}  # noise: by seed


@pytest.fixture
def calibrated(here, monkeypatch):
    """A budget whose runs are a table: the fit pools 0.4 with 0.8, a lag of D costs D / 100."""

    def fake(cfg):
        assert (cfg.weights, cfg.kv, cfg.sync_ess) == ("bf16", "bf16", None)
        if cfg.sync_every == 0:
            assert cfg.noise == 0
            return [dict(step=i, lag=i / 100) for i in range(3)]
        assert cfg.sync_every == 1
        clock = dict(seconds_wait=1.0, seconds_train=2.0)
        return [dict(accuracy=QUALITY[cfg.noise][cfg.seed]) | clock]

    monkeypatch.setattr(opd, "train", fake)
    cfg = config(levels="0,0.4,0.8,1.6", seeds=2, tolerance=0.04, weights="fp8")
    opd.calibrate(cfg)
    return cfg, json.loads(Path("budget.json").read_text())


def test_budget_ends_where_the_fitted_quality_leaves_the_tolerance(calibrated):
    cfg, budget = calibrated
    curve = budget["curve"]
    assert [r["noise"] for r in curve] == [0, 0.4, 0.8, 1.6] and not budget["censored"]
    assert [tuple(r["quality"]) for r in curve] == list(QUALITY.values())
    assert [r["fitted"] for r in curve] == pytest.approx([0.81, 0.78, 0.78, 0.15])
    assert budget["budget"] == curve[2]["mismatch"]
    assert budget["lag"] == {"0": 0, "1": 0.01, "2": 0.02}
    opd.calibrate(dataclasses.replace(cfg, tolerance=0.02))
    assert json.loads(Path("budget.json").read_text())["budget"] == curve[0]["mismatch"]
    opd.calibrate(dataclasses.replace(cfg, levels="1.6"))  # the clean run is always among them
    assert [r["noise"] for r in json.loads(Path("budget.json").read_text())["curve"]] == [0, 1.6]
    with pytest.raises(ValueError, match="'x'"):
        opd.calibrate(dataclasses.replace(cfg, levels="0,x"))


def test_admission_adds_the_lag_reads_keep_and_measures_each_source_alone(calibrated):
    cfg, budget = calibrated
    cfg = dataclasses.replace(cfg, weights="int3", kv="fp8_e5m2", noise=0.1)
    model, data = opd.untrained(opd.check(cfg))
    bf16 = dict(weights="bf16", kv="bf16", noise=0.0)
    alone = lambda **kw: opd.probe(opd.check(cfg), model, data, **bf16 | kw)
    parts = dict(weights=alone(weights="int3"), kv=alone(kv="fp8_e5m2"), noise=alone(noise=0.1))
    out, late = (opd.admit(dataclasses.replace(cfg, lag=lag), budget) for lag in (None, 2))
    assert out["by_source"] == parts | dict(lag=0.0) and late["by_source"]["lag"] == 0.02
    assert len({*parts.values(), alone()}) == 4
    assert out["mismatch"] == opd.probe(opd.check(cfg), model, data)
    assert abs(late["mismatch"] - out["mismatch"] - 0.02) < 1e-9
    limit = budget | dict(budget=out["mismatch"] + 0.01)
    fits = lambda lag: opd.admit(dataclasses.replace(cfg, lag=lag), limit)["admitted"]
    assert [fits(lag) for lag in (None, 0, 2, 3)] == [True, True, False, False]  # 3: never measured
    falls = opd.admit(dataclasses.replace(cfg, lag=2), budget | dict(lag={"1": 0.3, "2": 0.1}))
    assert falls["by_source"]["lag"] == 0.3  # the worst on the way: else a longer lag is cheaper
    keep = "model.layers.0,model.layers.1,model.layers.2"
    kept = opd.admit(dataclasses.replace(cfg, noise=0.0, keep_bf16=keep), budget)
    assert kept["by_source"]["weights"] == alone() and kept["mismatch"] == parts["kv"]
    for other in (dict(student="a", teacher="b"), dict(loss_k=3), dict(steps=7)):
        with pytest.raises(ValueError, match=f"was made for {next(iter(other))} "):
            opd.admit(dataclasses.replace(cfg, **other), budget)
    of = lambda **kw: opd.fingerprint(opd.Config(**kw))
    assert of() == of(correction="is") and of(loss="sampled") != of(loss="sampled", correction="is")


def test_a_list_exits_0_and_one_rejected_configuration_3(calibrated, capsys, monkeypatch):
    monkeypatch.setattr(opd, "STANDARD", opd.STANDARD[-2:])
    Path("budget.json").write_text(json.dumps(calibrated[1] | dict(budget=0.0)))
    how = "--digits 3 --eval-rows 40 --prompts 8 --group-size 2 --device cpu --admit".split()
    assert opd.main(how) == 0 and capsys.readouterr().out.count("REJECT") == 2
    assert opd.main([*how, "--weights", "int2"]) == 3
    assert opd.main([*how, "--kv", "fp8"]) == 3  # the default, but named
    for text in ("{}", "not json"):
        Path("budget.json").write_text(text)
        assert opd.main(how) == 2 and "not a budget" in capsys.readouterr().err


def test_a_sampler_with_log_probs_that_are_not_finite_is_refused(calibrated, monkeypatch):
    spoil(monkeypatch, 0, 0)
    with pytest.raises(ValueError, match="cannot be admitted"):
        opd.admit(*calibrated)


def test_probe_is_the_mean_kl_of_q_from_the_trainer(here, monkeypatch):
    seen, sample = [], S.TorchSampler.sample
    spy = lambda self, *args, **kw: seen.append(sample(self, *args, **kw)) or seen[-1]
    monkeypatch.setattr(S.TorchSampler, "sample", spy)
    cfg = opd.check(config(weights="int2"))
    model, data = opd.untrained(cfg)
    kl, r = opd.probe(cfg, model, data), seen[0]
    logp = S.token_logps(model, r, head=True)[1]  # the head is the whole vocabulary of 14
    want = (r.head_logq.exp() * (r.head_logq - logp)).sum(-1)[r.mask].mean()
    assert len(r.tokens) == opd.PROBE and kl > 0.01 and abs(kl - float(want.detach())) < 1e-4


def test_recipe_keeps_the_fewest_of_the_order_that_meet_the_target(here):
    cfg = opd.check(config(weights="int2", kv="bf16"))
    model, data = opd.untrained(cfg)
    order = [(f"model.layers.{i}", 0.0) for i in (2, 0, 1)]
    names = [name for name, _ in order]
    by_n = [opd.probe(cfg, model, data, keep_bf16=names[:n]) for n in range(4)]
    for target in (*by_n, 0.9 * by_n[0]):
        n = [kl <= target for kl in by_n].index(True)
        found = opd.recipe(dataclasses.replace(cfg, target=target), order)
        assert found["keep_bf16"] == names[:n] and found["mismatch"] == by_n[n]


def test_sensitivity_measures_one_module_at_a_time(here):
    found = opd.sensitivity(config(weights="int3", kv="fp8"))
    assert {n for n, _ in found} == {f"model.layers.{i}{k}" for i in range(3) for k in ("", ".kv")}
    assert [x for _, x in found] == sorted((x for _, x in found), reverse=True)
    cfg = opd.check(config(weights="int3", kv="bf16"))
    model, data = opd.untrained(cfg)
    alone = opd.probe(cfg, model, data, keep_bf16=["model.layers.0", "model.layers.2"])
    assert abs(dict(found)["model.layers.1"] - alone) < 1e-12
    cfg = dataclasses.replace(cfg, weights="bf16", kv="fp8")
    alone = opd.probe(cfg, model, data, keep_bf16=["model.layers.0.kv", "model.layers.2.kv"])
    assert abs(dict(found)["model.layers.1.kv"] - alone) < 1e-12


def test_capacity_is_1_93x_with_one_of_28_layers_kept(pair, capsys, tmp_path):
    assert opd.main(["--capacity", "16"]) == 0
    assert "1.93x" in capsys.readouterr().out
    rows = opd.capacity(opd.Config(capacity=1.0))
    assert rows[0][1] == 28 * 2 * 8 * 128 * 2 and rows[0][2] == 2**30 // rows[0][1]
    assert abs(rows[2][3] - 2 * 28 / 29) < 1e-3 and 1.99 < rows[1][3] <= 2
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=14, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, eos_token_id=13))
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair[0])
    dlc.write(Path(tmp_path), llama.save_pretrained, tokenizer.save_pretrained)
    byte = 3 * 2 * 2 * 32  # a token in FP8; room for 1000, less the scales
    cfg = opd.Config(capacity=1000 * byte / 2**30, student=str(tmp_path))
    cfg = dataclasses.replace(cfg, keep_bf16="model.layers.0.kv")
    assert [r[2] for r in opd.capacity(cfg)] == [500, 999, 749]
    keep = "model.layers.0.kv, model.layers.2.kv,model.layers.1"
    rows = opd.capacity(dataclasses.replace(cfg, keep_bf16=keep))
    assert rows[2][1] == byte * 5 / 3
    with pytest.raises(ValueError, match="there are 3 layers"):
        opd.capacity(dataclasses.replace(cfg, keep_bf16="model.layers.3.kv"))
    for gib in ("0", "-1", "inf"):
        assert opd.main(["--capacity", gib]) == 2


def test_readme_commands_parse():
    text = (Path(opd.__file__).parent / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("python opd.py")]
    commands = [line.split("#")[0].split()[2:] for line in lines]
    assert len(commands) >= 7
    for argv in commands:
        dlc.parse(opd.Config, argv, "")


def test_every_option_has_its_help(capsys):
    with pytest.raises(SystemExit):
        opd.main(["--help"])
    shown = capsys.readouterr().out
    hidden = {"model", "minibatches", "scale_advantage", "bias"}  # of dlc.py alone
    for f in dataclasses.fields(opd.Config):
        option = f"--{f.name.rstrip('_').replace('_', '-')} "
        assert (option in shown) == (f.name not in hidden), option


def padded(folder, to, size):
    """A copy of the model in `folder`, its embedding padded with zero rows, as vocabularies are."""
    model, tokenizer = dlc.load_model(folder, "float32", "cpu")
    model.resize_token_embeddings(size)
    with torch.no_grad():
        model.get_input_embeddings().weight[14:] = 0
    dlc.write(Path(to), model.save_pretrained, tokenizer.save_pretrained)
    return str(to)


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_padding_of_a_vocabulary_is_no_difference(here, tmp_path, loss):
    """Teacher = student but for padding of either head, which is cut off: no loss, none drawn."""
    how = dict(steps=1, loss=loss, data=None, weights="bf16", kv="bf16", optimizer="sgd",
               max_new_tokens=4, prompts=16)
    teacher = padded(here[0], tmp_path / "t", 16)
    rows = opd.train(config(student=str(here[0]), teacher=teacher, out="a", **how))
    assert abs(rows[0]["teacher_kl"]) < 1e-5 and rows[0]["grad_norm"] < 1e-4
    assert rows[0]["dropped"] == 0
    rows = opd.train(config(student=teacher, teacher=str(here[0]), out="b", **how))
    assert rows[0]["dropped"] == 0 and abs(rows[0]["teacher_kl"]) < 1e-5


def test_every_response_of_a_micro_batch_dropped(here, monkeypatch):
    spoil(monkeypatch, 3)
    rows = opd.train(config(steps=1, micro_batch=1))
    assert rows[0]["dropped"] == 1 and math.isfinite(rows[0]["grad_norm"])


def test_a_head_with_a_bias_is_the_whole_head(here):
    """The bias is one more column of what every distillation loss multiplies."""
    student, _ = dlc.load_model(here[0], "float32", "cpu")
    head, hidden = student.get_output_embeddings(), torch.randn(5, 64)
    head.bias = torch.nn.Parameter(torch.randn(14))
    x, weight = S.head_product(student, hidden)
    assert torch.allclose(x @ weight.t(), head(hidden), atol=1e-5)


def test_too_little_memory_is_refused(capsys):
    assert opd.main(["--capacity", "0.00001"]) == 2
    assert "--capacity 1e-05: has no room for one token" in capsys.readouterr().err
