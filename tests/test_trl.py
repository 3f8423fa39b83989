"""notebooks/trl_dlc.py, our losses in TRL's GRPOTrainer: in one process, and in two on a CPU.

Those of two processes start this file: torchrun --nproc_per_node 2 tests/test_trl.py DIR CASE"""

import copy
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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
    """A trainer on 16 responses an update, in two accumulated parts, in any number of processes."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    given = dict(per_device_train_batch_size=8 // ranks, gradient_accumulation_steps=2,
                 num_generations=4, max_steps=3, max_completion_length=4, learning_rate=1e-3,
                 scale_rewards="none", max_grad_norm=0.0, save_strategy="no", report_to=[],
                 logging_strategy="no", disable_tqdm=True)  # fmt: skip
    out = str(Path(model).parent / "trained")
    args = trl_dlc.Config(model=str(model), output_dir=out, **given | options)
    rows = [dict(prompt=f"{a}+{b}=") for a in range(10, 26) for b in range(10, 14)]
    return trl_dlc.DLCTrainer(reward, args, Dataset.from_list(rows))


def theirs(trainer):
    """The same trainer with TRL's own loss."""
    loss = GRPOTrainer._compute_loss
    trainer._compute_loss = lambda model, inputs: loss(trainer, model, inputs)
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
    """Train; what the sampler was asked and drew, each call of `policy_loss`, each measured ESS."""
    seen, sample, measure = dict(asked=[], drawn=[], ess=[]), trainer.q.sample, trainer.batch_ess
    note = lambda name, value: (seen[name].append(value), value)[1]
    drawn = lambda *given: note("drawn", sample(*note("asked", given)))
    # An engine's own probe after a sync, with its seed by name, is no draw.
    trainer.q.sample = lambda *given, **how: sample(*given, **how) if how else drawn(*given)
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
    """The prompts of the first update of all ranks, and responses to them with both gaps."""
    prompts = watch(make(model, max_steps=1))["asked"][0][0]
    stale, _ = dlc.load_model(model, "float32", "cpu")
    g = torch.Generator().manual_seed(0)
    for p in stale.parameters():
        p.data += p.std() * torch.randn(p.shape, generator=g) if p.dim() > 1 else 0.0
    return prompts, TorchSampler(stale, "int3", "fp8", head_k=5).sample(prompts, 4, 0)


@pytest.fixture(scope="module")
def by_hand(model, whole):
    """The gradients of `policy_loss` on the whole batch at once, without TRL."""
    r = whole[1]
    policy, tokenizer = dlc.load_model(model, "float32", "cpu")
    y = r.tokens[:, -r.mask.shape[1] :]
    drawn = [a[m].tolist() for a, m in zip(y, r.mask)]
    reward = torch.tensor(digits(tokenizer.batch_decode(drawn, skip_special_tokens=True)))
    advantage = (reward.view(-1, 4) - reward.view(-1, 4).mean(1, keepdim=True)).flatten()
    gradients = {}
    for c in CORRECTIONS:
        logp, head_logp = token_logps(policy, r, head=True)
        loss, stats = dlc.policy_loss(
            c, logp, r.logq, advantage, r.mask, logp_stale=r.logp_stale, head_logp=head_logp,
            head_logq=r.head_logq, head_logp_stale=r.head_logp_stale)  # fmt: skip
        parts = torch.autograd.grad(loss, list(policy.parameters()))
        gradients[c] = torch.cat([g.flatten() for g in parts])
        assert c == "tis" or 0 < stats["clipped"] < stats["tokens"]
    return gradients


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradient_is_that_of_policy_loss(model, whole, by_hand, correction):
    gradient = first_gradient(replay(make(model, correction=correction, max_steps=1), *whole))
    assert [c for c in CORRECTIONS if near(gradient, by_hand[c])] == [correction]


@pytest.mark.parametrize("correction", ["reinforce", "sc", *CORRECTIONS])
@pytest.mark.parametrize("steps", [2, 4])  # a batch for one update, for two
def test_without_a_gap_the_gradient_is_trls_own(model, correction, steps):
    """With a sampler of the trainer's own numerics and weights it is GRPO's at ratio 1."""
    how = dict(correction=correction, steps_per_generation=steps, **NO_GAP)
    assert near(first_gradient(make(model, **how)), first_gradient(theirs(make(model, **how))))


def test_in_bfloat16_the_stale_policy_has_the_trainers_numerics(model):
    """Just after a sync there is no lag."""
    (call, *_) = watch(make(model, bf16=True, use_cpu=True, **NO_GAP))["calls"]
    log_lag = call.args[1].detach() - call.kwargs["logp_stale"]
    assert float(log_lag.abs().max()) < 1e-5


def test_gradient_checkpointing_is_refused(model):
    """The gradient would be another, without a word."""
    with pytest.raises(AssertionError, match="KV cache"):
        make(model, gradient_checkpointing=True)


def test_it_syncs_when_the_ess_says_so(model):
    t = make(model, learning_rate=1e-9)
    t.train()
    assert t.q.version == 0 and t.q.weights == "fp8"
    t = make(model, learning_rate=0.1)  # the lag explodes
    t.train()
    assert t.q.version > 0


@pytest.mark.parametrize("accumulation, steps, iterations", [(2, 4, 2), (4, 2, 1)])
def test_buffered_rows_keep_their_stale_policy(model, accumulation, steps, iterations):
    """Several updates on a batch, or several batches in an update: in each pass a row has the
    log-probs with which it was drawn, of the weights of its version, and TRL has its tokens."""
    passes = steps * iterations
    t = make(model, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
             steps_per_generation=steps, num_iterations=iterations, sync_ess=2.0,
             max_steps=2 * max(1, passes // accumulation))  # fmt: skip
    weights, ids, sync, loss, sample = {}, [], t.q.sync, t._compute_loss, t.q.sample

    def marked(*given):  # equal responses are told apart by a mark
        r = sample(*given)
        r.logq += torch.arange(len(r.logq))[:, None] / 1000
        return r

    def noted(model, version):
        weights[version] = copy.deepcopy(model)
        sync(model, version)

    def looked_at(model, inputs):
        ids.append(inputs["completion_ids"])
        return loss(model, inputs)

    t.q.sample, t.q.sync, t._compute_loss = marked, noted, looked_at
    seen = watch(t)
    assert len(ids) == passes * len(seen["drawn"]) and len(weights) == 2
    for n, batch in enumerate(seen["drawn"]):
        now = slice(n * passes, (n + 1) * passes)
        together = lambda get: torch.cat([get(c) for c in seen["calls"][now]])
        same = (together(lambda c: c.args[2])[:, None] == batch.logq).all(-1)  # (trained, drawn)
        assert (same.sum(0) == iterations).all() and (same.sum(1) == 1).all()
        row = same.float().argmax(1)
        for name in ("logp_stale", "head_logq", "head_logp_stale"):
            assert torch.equal(together(lambda c: c.kwargs[name]), getattr(batch, name)[row]), name
        y = batch.tokens[:, -batch.mask.shape[1] :].where(batch.mask, 12)  # 12: TRL's padding
        assert torch.equal(torch.cat(ids[now]), y[row])
        (version,) = batch.version.unique().tolist()
        assert torch.allclose(token_logps(weights[version], batch), batch.logp_stale, atol=1e-5)
    assert not torch.equal(*(w.state_dict()["lm_head.weight"] for w in weights.values()))


def run_the_command(model):
    """As a user gives it; it leaves the trained model in the current folder."""
    options = ("--max_steps 2 --max_completion_length 4 --num_generations 4 --output_dir trained "
               "--report_to none").split()  # fmt: skip
    with mock.patch.object(sys, "argv", ["trl_dlc.py", "--model", str(model), *options]):
        runpy.run_path(str(ROOT / "notebooks" / "trl_dlc.py"), run_name="__main__")
    return (Path("trained") / "checkpoint-2" / "model.safetensors").exists()


def test_the_command(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_the_command(model)


# --------------------------------------------------------------------------------------------------
# The sketch for verl, between stand-ins for what it imports.


def verl_stand_ins():
    """Of verl 0.9.1: the registry, the mean over all ranks' tokens, and what calls a loss."""
    registry = {}

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens):
        assert loss_agg_mode == "token-mean"
        return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size

    def ppo_loss(config, model_output, data, dp_group):
        mode, mask = "token-mean", data["response_mask"]
        loss = registry["dlc"](
            old_log_prob=data["old_log_probs"], log_prob=model_output["log_probs"],
            advantages=data["advantages"], response_mask=mask, loss_agg_mode=mode, config=config,
            rollout_is_weights=None)  # fmt: skip
        agg_loss(data["advantages"], mask, mode, **config.global_batch_info)  # its entropy, its KL
        return loss

    register = lambda name: lambda f: registry.setdefault(name, f)
    unpacked = lambda x, data: x.view(data["response_mask"].shape)
    made = {"trainer.ppo.core_algos": dict(agg_loss=agg_loss, register_policy_loss=register),
            "workers.utils.losses": dict(ppo_loss=ppo_loss),
            "workers.utils.padding": dict(no_padding_2_padding=unpacked)}  # fmt: skip
    return {f"verl.{name}": SimpleNamespace(**content) for name, content in made.items()}


@pytest.mark.parametrize("head_k", [4, 12])
def test_the_sketch_for_verl_is_policy_loss(head_k):
    """The same gradient in the logits: both gaps, clipped tokens, padding, half of a batch here."""
    with mock.patch.dict(sys.modules, verl_stand_ins()):
        sketch = runpy.run_path(str(ROOT / "notebooks" / "verl_dlc.py"))
    g = torch.Generator().manual_seed(0)
    B, T, V = 6, 5, 12
    random = lambda *shape: torch.randn(*shape, generator=g)
    logits = random(B, T, V).requires_grad_()
    stale = (logits.detach() + 0.3 * random(B, T, V)).log_softmax(-1)
    q = (stale + 0.3 * random(B, T, V)).log_softmax(-1)
    H = q.topk(head_k).indices
    y = torch.multinomial(q.exp().view(-1, V), 1, generator=g).view(B, T, 1)
    drawn, head = lambda x: x.gather(-1, y)[..., 0], lambda x: x.gather(-1, H)
    logp, advantage = logits.log_softmax(-1), random(B)
    mask = torch.arange(T) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]
    ours, stats = dlc.policy_loss(
        "dlc", drawn(logp), drawn(q), advantage, mask, logp_stale=drawn(stale),
        head_logp=head(logp), head_logq=head(q), head_logp_stale=head(stale), num_tokens=20)
    assert 0 < stats["clipped"] < stats["tokens"]

    packed = lambda x: SimpleNamespace(values=lambda: x.reshape(B * T, head_k))
    data = dict(rollout_topk_ids=packed(H.int()), rollout_topk_log_probs=packed(head(q)),
                stale_topk_log_probs=packed(head(stale)), old_log_probs=drawn(stale),
                response_mask=mask, advantages=advantage[:, None].expand(B, T))  # fmt: skip
    info = dict(dp_size=2, batch_num_tokens=40)
    call, config = sketch["dlc_ppo_loss"], SimpleNamespace(clip_ratio=0.2, global_batch_info=info)
    made = call(config, data=data, student_logits=logits.view(1, B * T, V), data_format="thd")
    loss, _ = call(config, model_output=made | dict(log_probs=drawn(logp)), data=data)
    gradient = lambda x: torch.autograd.grad(x, logits, retain_graph=True)[0]
    assert near(gradient(loss), gradient(ours))


# --------------------------------------------------------------------------------------------------
# Two processes: what each rank does, then the tests that compare.


def on_every_rank(model, prompts, rollout):
    out = dict(command=run_the_command(model))
    for c in CORRECTIONS:
        trainer = make(model, correction=c, max_steps=1)
        out["gap", c] = first_gradient(replay(trainer, prompts, rollout))
        out["no gap", c] = first_gradient(make(model, correction=c, **NO_GAP))
    out["no gap", "TRL's"] = first_gradient(theirs(make(model, **NO_GAP)))
    for name, seed in (("run", 1), ("again", 1), ("other seed", 2)):
        out[name] = three_steps(make(model, learning_rate=0.05, seed=seed))
    out["sharded"] = three_steps(make_sharded(model, learning_rate=0.05, seed=1))
    return out


def three_steps(trainer):
    """Of three updates: the weights, what was drawn, what the sampler is after each sync, and what
    the losses saw."""
    synced, sync, sample = [], trainer.q.sync, trainer.q.sample

    def probed(*given):
        sync(*given)
        synced.append(sample([[1, 10, 2, 11], [3, 11]], 4, 0))

    trainer.q.sync = probed
    seen = watch(trainer)
    trainer.sync()
    calls, weights = seen["calls"], trainer.accelerator.get_state_dict(trainer.model_wrapped)
    lag = [((c.args[1] - c.kwargs["logp_stale"]).detach(), c.args[4]) for c in calls]  # (B, T) both
    N = [float(c.kwargs["num_tokens"]) for c in calls]
    return dict(weights=weights, drawn=seen["drawn"], seeds=[a[2] for a in seen["asked"]],
                synced=synced, ess=seen["ess"], lag=lag, N=N)  # fmt: skip


def make_sharded(model, **options):
    """The trainer under FSDP2, which accelerate refuses on a CPU: tell it that these are GPUs."""
    os.environ |= dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
                       FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
                       FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen3DecoderLayer",
                       FSDP_CPU_RAM_EFFICIENT_LOADING="false")  # fmt: skip
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    trainer = make(model, **options)
    assert trainer.accelerator.is_fsdp2
    return trainer


def failing(completions, **_):
    """Fails on rank 1, in its second batch; rank 0 then waits for it."""
    failing.calls = getattr(failing, "calls", 0) + 1
    if os.environ["RANK"] == "1" and failing.calls == 2:
        raise ValueError("this reward fails on rank 1")
    return digits(completions)


def launch(case, folder, model, prompts, rollout):
    """This file on two CPU processes: (exit status, 124 if it hangs, and output)."""
    torch.save((str(model), prompts, rollout), folder / "given.pt")
    run = ["timeout", "600"]  # it ends torchrun by SIGTERM, and torchrun its processes
    run += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = dict(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([*run, __file__, folder, case], env=os.environ | environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return done.returncode, done.stdout


def what_ranks_did(case, folder, *given):
    status, output = launch(case, folder, *given)
    assert status == 0, output[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(model, whole, tmp_path_factory):
    return what_ranks_did("on_every_rank", tmp_path_factory.mktemp("ranks"), model, *whole)


def test_the_command_in_two_processes(ranks):
    assert all(rank["command"] for rank in ranks)


def test_two_ranks_have_the_gradient_of_the_whole_batch(ranks, by_hand):
    for rank in ranks:
        for c in CORRECTIONS:
            assert [x for x in CORRECTIONS if near(rank["gap", c], by_hand[x])] == [c]


def test_without_a_gap_two_ranks_have_trls_own_gradient(ranks):
    for rank in ranks:
        for c in CORRECTIONS:
            assert near(rank["no gap", c], rank["no gap", "TRL's"])


def stay_the_same(a, b):
    """Two ranks after three updates: the same weights, bit for bit, and after each sync the same
    sampler, in versions too; but other responses."""
    if b["weights"]:  # accelerate gathers shards on rank 0 alone
        assert all(torch.equal(x, b["weights"][name]) for name, x in a["weights"].items())
    assert len(a["synced"]) == len(b["synced"]) > 2
    for x, y in zip(a["synced"], b["synced"]):
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.version, y.version)
        assert torch.equal(x.logq[x.mask], y.logq[y.mask])
    versions = [[r.version.unique().tolist() for r in rank["drawn"]] for rank in (a, b)]
    assert versions[0] == versions[1]
    assert a["synced"][-1].version.unique().tolist() == [3]
    assert not any(torch.equal(x.tokens, y.tokens) for x, y in zip(a["drawn"], b["drawn"]))


@pytest.mark.parametrize("run", ["run", "sharded"])
def test_ranks_stay_the_same(ranks, run):
    stay_the_same(*(rank[run] for rank in ranks))


def test_vllm_on_each_rank(model, whole, tmp_path):
    """An engine in each process; the same as above."""
    pytest.importorskip("vllm")
    stay_the_same(*what_ranks_did("vllm", tmp_path, model, *whole))


def test_sharding_changes_no_number(ranks):
    for rank in ranks:
        a, b = rank["run"], rank["sharded"]
        for x, y in zip(a["drawn"], b["drawn"]):
            assert torch.equal(x.tokens, y.tokens)
            assert torch.allclose(x.logp_stale, y.logp_stale, atol=1e-4)
        assert a["ess"] == pytest.approx(b["ess"], rel=1e-4)


def test_the_ess_is_that_of_the_whole_batch(ranks):
    """And a gradient is divided by the tokens of both ranks, halved as gradients are averaged."""
    a, b = (rank["run"] for rank in ranks)
    batch = lambda rank, n: rank["run"]["lag"][2 * n : 2 * n + 2]  # its two parts, of update n
    both = lambda n: batch(ranks[0], n) + batch(ranks[1], n)

    def share(parts):
        rows = [(log_lag.sum(1), mask.any(1)) for log_lag, mask in parts]
        return dlc.ess(*(torch.cat(x)[:, None] for x in zip(*rows)))

    assert a["ess"] == b["ess"] == pytest.approx([share(both(0)), share(both(1))])
    assert a["ess"][0] == pytest.approx(1) and a["ess"][1] < 0.5
    mean = (share(batch(ranks[0], 1)) + share(batch(ranks[1], 1))) / 2
    assert abs(a["ess"][1] - mean) > 0.01, "a mean over ranks would pass"
    for n in range(3):
        tokens = sum(int(mask.sum()) for _, mask in both(n))
        assert a["N"][2 * n : 2 * n + 2] == b["N"][2 * n : 2 * n + 2] == [tokens / 2] * 2


def test_random_numbers_are_of_seed_step_and_rank(ranks):
    runs = [rank[run] for rank in ranks for run in ("run", "other seed")]
    assert len({seed for run in runs for seed in run["seeds"]}) == 2 * 2 * 3
    for rank in ranks:
        for x, y in zip(rank["run"]["drawn"], rank["again"]["drawn"]):
            assert torch.equal(x.tokens, y.tokens)


def test_a_rank_that_fails_ends_the_run(model, whole, tmp_path):
    status, output = launch("failing", tmp_path, model, *whole)
    assert status not in (0, 124) and "ValueError: this reward fails on rank 1" in output


if __name__ == "__main__":
    folder, case = Path(sys.argv[1]), sys.argv[2]
    model, prompts, rollout = torch.load(folder / "given.pt", weights_only=False)
    os.chdir(folder)
    if case == "failing":
        make(model, failing).train()
    if case == "vllm":
        options = dict(sampler="vllm", kv="bf16", sync_ess=2.0, learning_rate=0.05)
        done = three_steps(make(model, **options))
    else:
        done = on_every_rank(model, prompts, rollout)
    torch.save(done, folder / f"{os.environ['RANK']}.pt")
