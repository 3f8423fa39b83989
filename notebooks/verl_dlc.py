"""A sketch, not run in verl: `dlc` for verl 0.9.1 in verl's own terms, without a line of dlc.py.

A registered loss is given old_log_prob, log_prob, advantages and response_mask, (B, T), no head.
So the centre is made where the engine hands out its logits, as verl's top-k distillation does it.
Missing in 0.9.1, to be added to its batch: old_log_probs must be log π_stale, and the nested
tensors rollout_topk_ids, rollout_topk_log_probs (log q) and stale_topk_log_probs (log π_stale),
each (tokens, K), must be there, row t beside the logits that predict token t. Then import this in
the actor's worker: set_loss_fn(partial(dlc_ppo_loss, config=config)), policy_loss.loss_mode=dlc,
distillation_use_topk=True in the batch."""

from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

def dlc_ppo_loss(config, model_output=None, data=None, dp_group=None, student_logits=None, **_):
    if student_logits is None:  # the second call: the loss
        centre = no_padding_2_padding(model_output["centre"], data)  # (B, T)
        config.global_batch_info["centre"] = centre
        return ppo_loss(config, model_output, data, dp_group)
    head = ("rollout_topk_ids", "rollout_topk_log_probs", "stale_topk_log_probs")
    ids, logq, logp_stale = (data[name].values() for name in head)  # (tokens, K)
    logp = student_logits[0].float().log_softmax(-1).gather(-1, ids.long())
    tail = lambda x: (1 - x.exp().sum(-1, keepdim=True)).clamp_min(1e-6)
    mass = logq.exp() * (logp - logp_stale).clamp(-20, 20).exp()
    weight = (mass - tail(logq) / tail(logp_stale) * logp.exp()).detach()
    return dict(centre=(weight * logp).sum(-1)[None])  # (1, tokens)

@register_policy_loss("dlc")
def dlc(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **_):
    centre = config.global_batch_info.pop("centre")
    lag = (log_prob - old_log_prob).detach().clamp(-20, 20).exp()
    clip = config.clip_ratio
    gated = (advantages > 0) & (lag > 1 + clip) | (advantages < 0) & (lag < 1 - clip)
    losses = -advantages * ~gated * (lag * log_prob - centre)
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
