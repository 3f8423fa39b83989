"""The losses of dlc.py in TRL's GRPOTrainer, on one GPU or many. Copy it; change data and reward.

    python notebooks/trl_dlc.py --model DIR                        # pip install trl; run with 1.16
    torchrun --nproc_per_node 2 notebooks/trl_dlc.py --model DIR   # no GPU: ACCELERATE_USE_CPU=true

A rank draws its own B rows, seeded by (seed, step, rank): tokens (B, P+T); mask, logq, logp_stale,
version (B, T); head_* (B, T, K); log-probs in nats. Global, so equal on all ranks: the ESS of the
lag, syncs and their weights, version (in updates) and N, an update's tokens. All other options are
TRL's; of those on sampling and loss only --epsilon, the clip, has an effect."""

import sys
from dataclasses import dataclass
from pathlib import Path
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dlc import ess, policy_loss  # noqa: E402
from sampler import Rollout, TorchSampler, VLLMSampler, token_logps  # noqa: E402

@dataclass(kw_only=True)
class Config(GRPOConfig):
    model: str  # folder of a Hugging Face causal LM
    correction: str = "dlc"  # one of the eleven in CORRECTIONS
    weights: str = "fp8"  # sampler's weights
    kv: str = "fp8"  # sampler's KV cache
    sampler: str = "torch"  # torch or vllm
    sync_ess: float = 0.5  # sync when ESS/B < F (0: never)
    bf16: bool = False  # TRL's default is True
    gradient_checkpointing: bool = False  # TRL's default is True

class DLCTrainer(GRPOTrainer):
    def __init__(self, reward, args, data):
        assert not args.gradient_checkpointing, "it drops the KV cache that token_logps reads"
        super().__init__(args.model, reward, args, data)
        self.whole, model, forward = self.model, self.model, self.model.forward
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # training will cut `model` in shards
            self.whole = type(model).from_pretrained(args.model, dtype=model.dtype).to(args.device)
        kind = VLLMSampler if args.sampler == "vllm" else TorchSampler
        self.q, self.lag = kind(self.whole, args.weights, args.kv), []
        # Gradients are reduced only where the wrapper's own forward runs: score inside it.
        model.forward = lambda *given, rollout=None, **named: (
            token_logps(model, rollout, True) if rollout else forward(*given, **named))  # fmt: skip

    def batch_ess(self):  # over the rows of all ranks, each as it was first trained on
        seen = zip(*self.lag[: self.args.steps_per_generation])
        share = ess(*(self.accelerator.gather(torch.cat(x)).cpu()[:, None] for x in seen))
        self._metrics["train"]["ess"].append(share)
        return share

    def sync(self):
        if self.whole is not self.model:  # shards: put together on rank 0, then sent to all
            state = self.accelerator.get_state_dict(self.model_wrapped)
            for name, x in self.whole.state_dict().items():
                torch.distributed.broadcast(x.copy_(state[name]) if state else x, 0)
        self.q.sync(self.whole, self.state.global_step)

    def _generate_single_turn(self, prompt_ids, *_, **__):
        if not self.lag or self.batch_ess() < self.args.sync_ess:
            self.sync()
        self._metrics["train"]["version"].append(self.q.version)
        n, ranks = self.args.gradient_accumulation_steps, self.accelerator.num_processes
        step = self.state.global_step * n + self._step % n  # TRL may sample n times in an update
        seed = (self.args.seed * 1_000_003 + step) * ranks + self.accelerator.process_index
        with self.accelerator.autocast():  # the trainer's numerics, for logp_stale
            r = self.q.sample(prompt_ids, self.max_completion_length, seed)
        self.lag, self.rollout, y = [], r, r.tokens[:, -r.mask.shape[1] :]
        return [row[m].tolist() or self.eos_token_ids[:1] for row, m in zip(y, r.mask)], None

    def _generate_and_score_completions(self, inputs):  # TRL shuffles, splits, repeats all alike
        return super()._generate_and_score_completions(inputs) | vars(self.rollout)

    def _compute_loss(self, model, inputs):
        r = Rollout(*(inputs[name] for name in vars(self.rollout)))
        logp, head_logp = model(rollout=r)
        self.lag.append(((logp - r.logp_stale).detach().sum(1), r.mask.any(1)))
        updates = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        N = inputs["num_items_in_batch"] / updates / self.accelerator.num_processes  # DDP averages
        return policy_loss(
            self.args.correction, logp, r.logq, inputs["advantages"], r.mask, num_tokens=N,
            logp_stale=r.logp_stale, head_logp=head_logp, head_logq=r.head_logq,
            head_logp_stale=r.head_logp_stale, clip=self.epsilon_low)[0]  # fmt: skip

def right(completions, answer, **_):  # one reward a row: is the first word the answer?
    return [float(text.split()[:1] == [a]) for text, a in zip(completions, answer)]

if __name__ == "__main__":
    (args,) = TrlParser(Config).parse_args_and_config()
    sums = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(32) for b in range(32)]
    DLCTrainer(right, args, Dataset.from_list(sums)).train()
