"""The subclass of TRL's GRPOTrainer that the README points at, on a CPU."""

import re

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_dlc import DLCTrainer

import dlc

@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = dlc.load_model(dlc.tiny_base(5), "float32", "cpu")
    rows, _ = dlc.load_data(dlc.Config(prompts=1), tokenizer)
    data = Dataset.from_list([dict(prompt=r["prompt"], answer=r["answer"]) for r in rows[:64]])
    # rewards of one group must differ: the digits' sum of the completion
    reward = lambda completions, **_: [sum(map(int, re.findall(r"\d", c))) / 9 for c in completions]

    def make(**fields):
        args = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4,
                          max_completion_length=4, max_steps=3, learning_rate=1e-3, scale_rewards="none", use_cpu=True, bf16=False,
                          report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False)  # fmt: skip
        kind = type("Trainer", (DLCTrainer,), fields)
        return kind(model, reward, args, data, processing_class=tokenizer)

    return make


def test_it_trains(trainer):
    t = trainer()
    before = [p.detach().clone() for p in t.model.parameters()]
    t.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, t.model.parameters()))
    assert t.q.weights == "fp8" and len(t.seen) == 2  # two micro-batches, one batch's ESS
    assert t.rollout.version.unique().tolist() == [t.q.version]


@pytest.mark.parametrize("correction", ["reinforce", "sc", "dlc"])
def test_without_a_gap_the_gradient_is_trls_own(trainer, correction):
    """Sampler in the trainer's own numerics and weights: every correction is GRPO's gradient at ratio 1."""
    seen = []

    def both(self, model, inputs):
        ours, theirs = cls._compute_loss(self, model, inputs), GRPOTrainer._compute_loss(self, model, inputs)
        gradient = lambda x: torch.autograd.grad(x, [p for p in model.parameters()], retain_graph=True)
        seen.append([torch.cat([g.flatten() for g in gradient(x)]) for x in (ours, theirs)])
        return ours

    t = trainer(correction=correction, weights="none", kv="none")
    cls = type(t).__mro__[1]
    type(t)._compute_loss = both
    type(t)._generate_single_turn = lambda self, *a, **k: (setattr(self, "seen", ()), cls._generate_single_turn(self, *a, **k))[1]
    t.train()
    assert len(seen) == 6
    for ours, theirs in seen:
        assert float(theirs.norm()) > 1e-3 and float((ours - theirs).norm()) < 1e-4 * float(theirs.norm()), correction


def test_it_syncs_when_the_ess_says_so(trainer):
    t = trainer()
    t.args.learning_rate = 1e-9
    t.train()
    assert t.q.version == 0
    t = trainer()
    t.args.learning_rate = 0.1  # the lag explodes
    t.train()
    assert t.q.version > 0
