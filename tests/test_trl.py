"""notebooks/trl_dlc.py, our losses in TRL's GRPOTrainer: in one process, and in two on a CPU.

The tests of two processes start this file: torchrun --nproc_per_node 2 tests/test_trl.py FOLDER CASE"""

import copy
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import dlc  # noqa: E402
import trl_dlc  # noqa: E402
from sampler import TorchSampler, token_logps  # noqa: E402

CORRECTIONS = ("tis", "ppo_stale", "dlc")
NO_GAP = dict(weights="none", kv="none", max_steps=1)


def digits(completions, **_):
    """A reward in which the responses of one group differ."""
    return [sum(map(int, re.findall(r"\d", c))) / 9 for c in completions]


def make(model, reward=digits, **options):
    """A trainer on 16 responses an update, in two accumulated parts, whatever the number of processes."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    given = dict(per_device_train_batch_size=8 // ranks, gradient_accumulation_steps=2, num_generations=4, max_steps=3,
                 max_completion_length=4, learning_rate=1e-3, scale_rewards="none", report_to=[], save_strategy="no",
                 logging_strategy="no", disable_tqdm=True, max_grad_norm=0.0)  # fmt: skip
    args = trl_dlc.Config(model=str(model), output_dir=str(Path(model).parent / "trained"), **given | options)
    rows = [dict(prompt=f"{a}+{b}=") for a in range(10, 26) for b in range(10, 14)]
    return trl_dlc.DLCTrainer(reward, args, Dataset.from_list(rows))


def theirs(trainer):
    """The same trainer with TRL's own loss."""
    trainer._compute_loss = lambda model, inputs: GRPOTrainer._compute_loss(trainer, model, inputs)
    return trainer


def replay(trainer, prompts, rollout):
    """The same trainer, whose sampler draws this rank's part of a rollout that is given."""

    def sample(prompt_ids, max_new_tokens, seed):
        rank, n = trainer.accelerator.process_index, len(prompt_ids)
        rows = slice(rank * n, rank * n + n)
        assert prompts[rows] == prompt_ids
        return rollout[rows]

    trainer.q.sample = sample
    return trainer


def first_gradient(trainer):
    """That of the first update, as the optimizer gets it."""
    found = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))

    trainer.add_callback(Look())
    trainer.train()
    return found[0]


def watch(trainer):
    """Train; what was asked of the sampler and what it drew, each call of `policy_loss`, and each measured ESS."""
    seen, sample, measure = dict(asked=[], drawn=[], ess=[]), trainer.q.sample, trainer.batch_ess
    note = lambda name, value: (seen[name].append(value), value)[1]
    trainer.q.sample = lambda *given: note("drawn", sample(*note("asked", given)))
    trainer.batch_ess = lambda: note("ess", measure())
    with mock.patch.object(trl_dlc, "policy_loss", wraps=dlc.policy_loss) as loss:
        trainer.train()
    return seen | dict(calls=loss.call_args_list)


def near(a, b, rounding=1e-5):
    assert float(b.norm()) > 1e-3
    return float((a - b).norm()) < rounding * float(b.norm())


@pytest.fixture(scope="module")
def model(made_base):
    return made_base(5)


# --------------------------------------------------------------------------------------------------
# One process.


@pytest.fixture(scope="module")
def whole(model):
    """The prompts of the first update of all ranks, and responses to them with both gaps in their log-probs."""
    prompts = watch(make(model, max_steps=1))["asked"][0][0]
    stale, _ = dlc.load_model(model, "float32", "cpu")
    g = torch.Generator().manual_seed(0)
    for p in stale.parameters():
        p.data += 0.3 * p.std() * torch.randn(p.shape, generator=g) if p.dim() > 1 else 0.0
    return prompts, TorchSampler(stale, "int3", "fp8", head_k=5).sample(prompts, 4, 0)


@pytest.fixture(scope="module")
def by_hand(model, whole):
    """The gradients of `policy_loss` on the whole batch at once, without TRL."""
    r = whole[1]
    policy, tokenizer = dlc.load_model(model, "float32", "cpu")
    y = r.tokens[:, -r.mask.shape[1] :]
    text = tokenizer.batch_decode([a[m].tolist() for a, m in zip(y, r.mask)], skip_special_tokens=True)
    reward = torch.tensor(digits(text)).view(-1, 4)
    advantage, gradients = (reward - reward.mean(1, keepdim=True)).flatten(), {}
    for c in CORRECTIONS:
        logp, head_logp = token_logps(policy, r, head=True)
        loss, _ = dlc.policy_loss(c, logp, r.logq, advantage, r.mask, logp_stale=r.logp_stale, head_logp=head_logp,
                                  head_logq=r.head_logq, head_logp_stale=r.head_logp_stale)  # fmt: skip
        gradients[c] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    return gradients


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradient_is_that_of_policy_loss(model, whole, by_hand, correction):
    gradient = first_gradient(replay(make(model, correction=correction, max_steps=1), *whole))
    assert [c for c in CORRECTIONS if near(gradient, by_hand[c])] == [correction]


@pytest.mark.parametrize("correction", ["reinforce", "sc", *CORRECTIONS])
def test_without_a_gap_the_gradient_is_trls_own(model, correction):
    """Sampler in the trainer's own numerics and weights: every correction is GRPO's gradient at ratio 1."""
    ours, trls = first_gradient(make(model, correction=correction, **NO_GAP)), first_gradient(theirs(make(model, **NO_GAP)))
    assert near(ours, trls)


def test_it_syncs_when_the_ess_says_so(model):
    t = make(model, learning_rate=1e-9)
    t.train()
    assert t.q.version == 0 and t.q.weights == "fp8"
    t = make(model, learning_rate=0.1)  # the lag explodes
    t.train()
    assert t.q.version > 0


@pytest.mark.parametrize("accumulation, steps, iterations", [(2, 4, 2), (4, 2, 1)])
def test_buffered_rows_keep_their_stale_policy(model, accumulation, steps, iterations):
    """Several updates on a batch, or several batches in an update: in each pass a row has the log-probs with which it
    was drawn, those of the weights of its version, beside TRL's copy of its own tokens."""
    passes = steps * iterations
    t = make(model, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation, steps_per_generation=steps,
             num_iterations=iterations, sync_ess=2.0, max_steps=2 * max(1, passes // accumulation))  # fmt: skip
    weights, ids, sync, loss, sample = {}, [], t.q.sync, t._compute_loss, t.q.sample

    def marked(*given):  # equal responses are told apart by a mark
        r = sample(*given)
        r.logq += torch.arange(len(r.logq))[:, None] / 1000
        return r

    t.q.sample = marked
    t.q.sync = lambda model, version: (weights.update({version: copy.deepcopy(model)}), sync(model, version))
    t._compute_loss = lambda model, inputs: (ids.append(inputs["completion_ids"]), loss(model, inputs))[1]
    seen = watch(t)
    assert len(ids) == passes * len(seen["drawn"]) and len(weights) == 2
    for n, batch in enumerate(seen["drawn"]):
        trained = seen["calls"][n * passes : (n + 1) * passes]
        together = lambda get: torch.cat([get(c) for c in trained])
        same = (together(lambda c: c.args[2])[:, None] == batch.logq).all(-1)  # each trained row, each drawn one
        assert (same.sum(0) == iterations).all() and (same.sum(1) == 1).all()
        row = same.float().argmax(1)
        assert torch.equal(together(lambda c: c.kwargs["logp_stale"]), batch.logp_stale[row])
        assert torch.equal(together(lambda c: c.kwargs["head_logp_stale"]), batch.head_logp_stale[row])
        y = batch.tokens[:, -batch.mask.shape[1] :].where(batch.mask, 12)  # 12: TRL's padding
        assert torch.equal(torch.cat(ids[n * passes : (n + 1) * passes]), y[row])
        (version,) = batch.version.unique().tolist()
        assert torch.allclose(token_logps(weights[version], batch), batch.logp_stale, atol=1e-5)
    assert not torch.equal(*(w.state_dict()["lm_head.weight"] for w in weights.values()))


def run_the_command(model):
    options = "--max_steps 2 --max_completion_length 4 --num_generations 4 --save_strategy no --report_to none"
    with mock.patch.object(sys, "argv", ["trl_dlc.py", "--model", str(model), *options.split()]):
        return runpy.run_path(str(ROOT / "notebooks" / "trl_dlc.py"), run_name="__main__")["trainer"]


def test_the_command(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_the_command(model).state.global_step == 2


# --------------------------------------------------------------------------------------------------
# Two processes: what each rank does, then the tests that compare.


def on_every_rank(model, prompts, rollout):
    out = dict(command=run_the_command(model).state.global_step)
    for c in CORRECTIONS:
        out["gap", c] = first_gradient(replay(make(model, correction=c, max_steps=1), prompts, rollout))
        out["no gap", c] = first_gradient(make(model, correction=c, **NO_GAP))
    out["no gap", "TRL's"] = first_gradient(theirs(make(model, **NO_GAP)))
    for name, seed in (("run", 1), ("again", 1), ("other seed", 2)):
        out[name] = three_steps(make(model, learning_rate=0.03, seed=seed))
    out["sharded"] = three_steps(make_sharded(model, learning_rate=0.03, seed=1))
    return out


def three_steps(trainer):
    """Of three updates: the weights, what the sampler drew and what it is after each sync, and what the losses saw."""
    synced, sync = [], trainer.q.sync
    probe = lambda: TorchSampler.sample(trainer.q, [[1, 10, 2, 11], [3, 11]], 4, 0)
    trainer.q.sync = lambda *given: (sync(*given), synced.append(probe()))
    seen = watch(trainer)
    trainer.sync()
    lag = [((c.args[1] - c.kwargs["logp_stale"]).detach(), c.args[4]) for c in seen["calls"]]  # (B, T) each
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return dict(weights=weights, drawn=seen["drawn"], seeds=[a[2] for a in seen["asked"]], synced=synced, ess=seen["ess"],
                lag=lag, N=[float(c.kwargs["num_tokens"]) for c in seen["calls"]])  # fmt: skip


def make_sharded(model, **options):
    """The trainer under FSDP2, which accelerate refuses on a CPU: tell it that these are GPUs."""
    fsdp = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
                FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen3DecoderLayer", FSDP_CPU_RAM_EFFICIENT_LOADING="false")  # fmt: skip
    os.environ |= fsdp
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    return make(model, **options)


def failing(completions, **_):
    """Fails on rank 1, in its second batch; rank 0 then waits for it."""
    failing.calls = getattr(failing, "calls", 0) + 1
    if os.environ["RANK"] == "1" and failing.calls == 2:
        raise ValueError("this reward fails on rank 1")
    return digits(completions)


def launch(*arguments):
    """This file on two CPU processes: (exit status, output, seconds)."""
    environment = os.environ | dict(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    start = time.monotonic()
    done = subprocess.run([*torchrun, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=300)  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - start


@pytest.fixture(scope="module")
def ranks(model, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save((str(model), *whole), folder / "given.pt")
    status, output, _ = launch(folder, "on_every_rank")
    assert status == 0, output[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_two_ranks_have_the_gradient_of_the_whole_batch(ranks, by_hand):
    for rank in ranks:
        for c in CORRECTIONS:
            assert [x for x in CORRECTIONS if near(rank["gap", c], by_hand[x])] == [c]


def test_without_a_gap_two_ranks_have_trls_own_gradient(ranks):
    for rank in ranks:
        for c in CORRECTIONS:
            assert near(rank["no gap", c], rank["no gap", "TRL's"])


@pytest.mark.parametrize("run", ["run", "sharded"])
def test_ranks_stay_the_same(ranks, run):
    """After three updates the same weights, bit for bit; after each sync the same sampler; no other responses."""
    a, b = (rank[run] for rank in ranks)
    whole = a["weights"] if run == "sharded" else b["weights"]  # accelerate gathers shards on rank 0 alone
    assert all(torch.equal(x, whole[name]) for name, x in a["weights"].items())
    assert not torch.equal(a["drawn"][0].logp_stale, a["drawn"][2].logp_stale)
    assert len(a["synced"]) == len(b["synced"]) > 2
    for x, y in zip(a["synced"], b["synced"]):
        assert torch.equal(x.logq, y.logq) and torch.equal(x.version, y.version)
    versions = [[r.version.unique().tolist() for r in x["drawn"]] for x in (a, b)]
    assert versions[0] == versions[1] and a["synced"][-1].version.unique().tolist() == [3]
    assert not any(torch.equal(x.tokens, y.tokens) for x, y in zip(a["drawn"], b["drawn"]) if x.tokens.shape == y.tokens.shape)


def test_sharding_changes_no_number(ranks):
    for rank in ranks:
        a, b = rank["run"], rank["sharded"]
        assert all(torch.equal(x.tokens, y.tokens) and torch.allclose(x.logp_stale, y.logp_stale, atol=1e-4) for x, y in zip(a["drawn"], b["drawn"]))
        assert a["ess"] == pytest.approx(b["ess"], rel=1e-4)


def test_the_ess_is_that_of_the_whole_batch(ranks):
    """And the tokens that a gradient is divided by are those of both ranks, halved as DDP averages."""
    a, b = (rank["run"] for rank in ranks)
    assert len(a["ess"]) == 2 and a["ess"] == b["ess"]
    sequences = lambda parts: ess_of([(log_lag.where(mask, 0).sum(1), mask.any(1)) for log_lag, mask in parts])
    ess_of = lambda rows: dlc.ess(*(torch.cat(x)[:, None] for x in zip(*rows)))
    for n, share in enumerate(a["ess"]):
        parts = [rank["run"]["lag"][2 * n : 2 * n + 2] for rank in ranks]  # two micro-batches of each rank
        assert share == pytest.approx(sequences(parts[0] + parts[1]), rel=1e-6)
        assert share != pytest.approx((sequences(parts[0]) + sequences(parts[1])) / 2, rel=1e-3) or share == 1.0
    for n in range(3):
        tokens = sum(int(mask.sum()) for rank in ranks for _, mask in rank["run"]["lag"][2 * n : 2 * n + 2])
        assert [rank["run"]["N"][2 * n + i] for rank in ranks for i in (0, 1)] == [tokens / 2] * 4


def test_random_numbers_are_of_seed_step_and_rank(ranks):
    runs = [rank[run] for rank in ranks for run in ("run", "other seed")]
    assert len({seed for run in runs for seed in run["seeds"]}) == 2 * 2 * 3
    for rank in ranks:
        for x, y in zip(rank["run"]["drawn"], rank["again"]["drawn"]):
            assert torch.equal(x.tokens, y.tokens)


def test_a_rank_that_fails_ends_the_run(model, whole, tmp_path):
    torch.save((str(model), *whole), tmp_path / "given.pt")
    status, output, seconds = launch(tmp_path, "failing")
    assert status != 0 and "ValueError: this reward fails on rank 1" in output and seconds < 100


if __name__ == "__main__":
    folder, case = Path(sys.argv[1]), sys.argv[2]
    model, prompts, rollout = torch.load(folder / "given.pt", weights_only=False)
    os.chdir(folder)
    if case == "failing":
        make(model, failing).train()
    else:
        torch.save(on_every_rank(model, prompts, rollout), folder / f"{os.environ['RANK']}.pt")
