"""On-policy distillation: losses against sums, the direction of the KL, zero at the teacher, budgets and refusals."""

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
    want = dict(full=[hand_kl(a, b) for a, b in kept], forward=[hand_kl(b, a) for a, b in kept],
                jsd=[(hand_kl(a, m) + hand_kl(b, m)) / 2 for (a, b), m in zip(kept, mix)])  # fmt: skip
    for loss, values in want.items():
        assert abs(float(opd.distill_loss(loss, s, t, MASK)) - sum(values) / len(values)) < 1e-9


def test_topk_is_a_lower_bound_at_least_zero_and_full_at_the_whole_vocabulary():
    for seed in range(20):
        s, t = logits(seed), logits(seed + 100)
        full = opd.divergence("full", s, t)
        by_k = [opd.divergence("topk", s, t, k) for k in (1, 2, 3, 5, 6)]
        assert all((x >= -1e-12).all() and (x <= full + 1e-9).all() for x in by_k)
        assert torch.allclose(by_k[-1], full, atol=1e-5)


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
    """O6: E_{y~q} of the IS-weighted sampled gradient is the gradient of the full KL at that prefix, exactly."""
    V, s, t, q = 5, logits(3, 5)[0, 0], logits(4, 5)[0, 0], logits(5, 5)[0, 0].log_softmax(-1)
    live = s.clone().requires_grad_()
    full = torch.autograd.grad(opd.divergence("full", live, t), live)[0]
    mean = torch.zeros(V, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.bool)
    for y in range(V):
        live = s.clone().requires_grad_()
        value = opd.distill_loss("sampled", live.view(1, 1, V), t.view(1, 1, V), one, torch.tensor([[y]]),
                                 correction="is", logq=q[y].view(1, 1))  # fmt: skip
        mean += q[y].exp() * torch.autograd.grad(value, live)[0]
    assert (mean - full).abs().max() < 1e-12
    assert full.abs().max() > 1e-2


@pytest.mark.parametrize("loss", ["full", "topk", "forward", "jsd"])
def test_chunks_equal_the_whole(loss, monkeypatch):
    monkeypatch.setattr(S.LinearLogps, "CHUNK", 3 * 11 * 2)  # two positions at a time
    h, w, ht, wt = torch.randn(7, 8), torch.randn(11, 8), torch.randn(7, 4), torch.randn(13, 4)
    grads = []
    for chunked in (True, False):
        a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
        if chunked:
            value = opd.ChunkedDivergence.apply(a, b, ht, wt, loss, 3, 11)
        else:  # the teacher's rows 11 and 12 are padding of its embedding
            value = opd.divergence(loss, a @ b.T, (ht @ wt.T)[:, :11], 3).sum()
        (value / 5).backward()
        grads.append((value.detach(), a.grad, b.grad))
    for x, y in zip(*grads):
        assert torch.allclose(x, y, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="differ in shape"):
        opd.distill_loss("full", logits(0), logits(1, V=7), MASK)
    with pytest.raises(ValueError, match="needs tokens"):
        opd.distill_loss("sampled", logits(0), logits(1), MASK)
    with pytest.raises(ValueError, match="choose one of"):
        opd.distill_loss("reverse", logits(0), logits(1), MASK)
    for change in (dict(loss="kl"), dict(student="a"), dict(seeds=0), dict(tolerance=-1.0), dict(lag=1, sync_every=2)):
        with pytest.raises(ValueError):
            opd.check(opd.Config(**change))


def test_falling_fit_is_the_least_squares_non_increasing_sequence():
    assert opd.falling_fit([3, 1, 2, 0]) == [3, 1.5, 1.5, 0]
    assert opd.falling_fit([1, 2, 3]) == [2, 2, 2]
    assert opd.falling_fit([5, 4, 4, 1]) == [5, 4, 4, 1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A student of 60 supervised batches, and as its teacher a copy with every matrix moved a little."""
    root = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(root)
        student = root / dlc.tiny_base(60)
    model, tokenizer = dlc.load_model(student, "float32", "cpu")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * p.std() * torch.randn(p.shape, generator=g)) if p.dim() > 1 else None
    dlc.save_model(model, tokenizer, root / "teacher")
    return student, root / "teacher"


@pytest.fixture
def here(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opd, "tiny_base", lambda steps=0: pair[1] if steps else pair[0])
    return pair


def config(**kw):
    return opd.Config(**dict(prompts=8, group_size=2, device="cpu") | kw)


@pytest.mark.parametrize("how", [dict(loss="full"), dict(loss="sampled", correction="tis", lr=5e-4),
                                 dict(loss="topk", dtype="bfloat16")])
def test_training_comes_closer_to_the_teacher(here, how):
    how = dict(lr=2e-3, steps=40, prompts=16, weights="bf16", kv="bf16", sync_every=1) | how
    rows = opd.train(config(**how))
    first, last = (sum(r["teacher_kl"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last < 0.8 * first
    assert {"accuracy_base", "accuracy_teacher", "accuracy", "accuracy_sampler"} <= set(rows[-1])
    assert all(r["discrepancy"] < 0.01 and r["lag"] < 1e-9 for r in rows)


def test_resume_gives_the_same_numbers(here):
    quiet = ("seconds_sample", "seconds_train", "tokens_per_second")
    whole = opd.train(config(steps=4, out="a", save_every=2))
    opd.train(config(steps=2, out="b", save_every=2))
    again = opd.train(config(steps=4, resume="b", save_every=2))
    for x, y in zip(whole, again):
        assert {k: v for k, v in x.items() if k not in quiet} == {k: y[k] for k in x if k not in quiet}


def test_teacher_equal_to_student_does_not_move_the_weights(here, monkeypatch):
    monkeypatch.setattr(opd, "tiny_base", lambda steps=0: here[0])
    rows = opd.train(config(steps=1, optimizer="sgd", lr=1.0))
    assert abs(rows[0]["teacher_kl"]) < 1e-6 and rows[0]["grad_norm"] < 1e-5


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
    with pytest.raises(ValueError, match="stop tokens"):
        opd.load_teacher(dataclasses.replace(cfg, teacher=str(tmp_path / "stop")), student, tokenizer)
    other.generation_config.eos_token_id = 13
    other.resize_token_embeddings(16)  # a padded embedding is not a difference
    other.save_pretrained(tmp_path / "padded"), tokenizer.save_pretrained(tmp_path / "padded")
    assert opd.load_teacher(dataclasses.replace(cfg, teacher=str(tmp_path / "padded")), student, tokenizer)[1] == 14


def test_budget_admission_and_recipe(here, tmp_path, capsys):
    how = ["--prompts", "8", "--group-size", "2", "--steps", "3", "--device", "cpu"]
    assert opd.main(["--admit", *how]) == 2
    assert "run python opd.py --calibrate first" in capsys.readouterr().err
    assert opd.main(["--calibrate", "--levels", "0,2", "--seeds", "2", "--tolerance", "1", *how]) == 0
    budget = json.loads((tmp_path / "budget.json").read_text())
    assert budget["censored"] and budget["budget"] == max(r["mismatch"] for r in budget["curve"])
    assert (tmp_path / "budget.png").stat().st_size > 1000
    before = (tmp_path / "budget-runs" / "runs.jsonl").read_text()
    assert opd.main(["--calibrate", "--levels", "0,2", "--seeds", "2", "--tolerance", "1", *how]) == 0
    assert (tmp_path / "budget-runs" / "runs.jsonl").read_text() == before  # nothing ran twice
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
    found["model"][1] += 1
    (tmp_path / "recipe.json").write_text(json.dumps(found))
    assert opd.main(["--admit", "--weights", "int2", "--keep-bf16", "@recipe.json", *how]) == 2


def test_sensitivity_measures_one_module_at_a_time(here):
    found = opd.sensitivity(config(weights="int3", kv="fp8"))
    assert {n for n, _ in found} == {f"model.layers.{i}{k}" for i in range(3) for k in ("", ".kv")}
    assert [x for _, x in found] == sorted((x for _, x in found), reverse=True)
    cfg = opd.check(config(weights="int3", kv="bf16"))
    model, _, data = opd.untrained(cfg)
    alone = opd.probe(cfg, model, data, keep_bf16=["model.layers.0", "model.layers.2"])
    assert abs(dict(found)["model.layers.1"] - alone) < 1e-12


def test_capacity_is_1_93x_with_one_of_28_layers_kept(capsys, tmp_path):
    assert opd.main(["--capacity", "16"]) == 0
    assert "1.93x" in capsys.readouterr().out
    rows = opd.capacity(opd.Config(capacity=1.0))
    assert rows[0][1] == 28 * 2 * 8 * 128 * 2 and rows[0][2] == 2**30 // rows[0][1]
    assert abs(rows[2][3] - 2 * 28 / 29) < 1e-3 and 1.99 < rows[1][3] <= 2
    transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, head_dim=32).save_pretrained(tmp_path)
    rows = opd.capacity(opd.Config(capacity=0.001, student=str(tmp_path), keep_bf16="model.layers.0.kv"))
    assert abs(rows[2][3] - 2 * 3 / 4) < 1e-2


def test_readme_commands_parse():
    text = (Path(opd.__file__).parent / "README.md").read_text()
    commands = [line.split("#")[0].split()[2:] for line in text.splitlines() if line.startswith("python opd.py")]
    assert len(commands) >= 7
    for argv in commands:
        dlc.parse(opd.Config, argv, "", opd.UNUSED)


def test_every_option_has_its_help(capsys):
    with pytest.raises(SystemExit):
        opd.main(["--help"])
    shown = capsys.readouterr().out
    for f in dataclasses.fields(opd.Config):
        assert (f"--{f.name.replace('_', '-')} " in shown) == (f.name not in opd.UNUSED)
