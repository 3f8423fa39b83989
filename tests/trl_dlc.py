"""The losses of dlc.py inside TRL's GRPOTrainer, whole: rollouts from an FP8 copy on delayed weights, any correction, the
ESS rule. One process; copy it, and change `correction`, `weights` and `kv`. Run by test_trl.py with TRL 1.16."""

import torch
from trl import GRPOTrainer

from dlc import ess, policy_loss
from sampler import TorchSampler, token_logps


class DLCTrainer(GRPOTrainer):
    correction, weights, kv, seen = "dlc", "fp8", "fp8", ()

    def _generate_single_turn(self, prompt_ids, *_, **__):  # q draws; synced when the ESS of the lag says so
        if not self.seen:
            self.q = TorchSampler(self.model, self.weights, self.kv)
        elif ess(*map(torch.cat, zip(*self.seen))) < 0.5:  # over the whole batch, not its micro-batches
            self.q.sync(self.model, self.state.global_step)
        self.seen, self.rollout = [], self.q.sample(prompt_ids, self.max_completion_length)
        y = self.rollout.tokens[:, -self.rollout.mask.shape[1] :]
        return [a[m].tolist() for a, m in zip(y, self.rollout.mask)], None

    def _generate_and_score_completions(self, inputs):  # TRL shuffles its batch: note which rollout a row is
        return super()._generate_and_score_completions(inputs) | {"row": torch.arange(len(inputs))}

    def _compute_loss(self, model, inputs):
        part = self.rollout[inputs["row"].to(self.rollout.tokens.device)]
        logp, head_logp = token_logps(model, part, head=True)
        self.seen.append(((logp - part.logp_stale).detach(), part.mask))
        return policy_loss(self.correction, logp, part.logq, inputs["advantages"], part.mask, logp_stale=part.logp_stale,
                           head_logp=head_logp, head_logq=part.head_logq, head_logp_stale=part.head_logp_stale,
                           num_tokens=inputs["num_items_in_batch"])[0]
