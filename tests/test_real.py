"""What real models, tokenizers and data bring that tiny clean ones do not. All is made here: random
models of a few thousand parameters, tokenizers of a few characters, files of a few lines."""

import copy
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import dlc
import opd
import sampler as S

reward = dlc.reward_of(str(Path(dlc.__file__).parent / "notebooks" / "number_reward.py"))
PROMPTS = [[5, 6, 7], [5, 6, 7], [9] * 11, [11, 12]]  # two equal, one longer than a window
SPECIAL = ["<pad>", "<s>", "</s>", "<end>", "<user>", "<tool>"]
CHARACTERS = " 0123456789+-=.,?#abcdefghijklmnopqrstuvwxyz\n"
VOCABULARY = {c: i for i, c in enumerate([*SPECIAL, *CHARACTERS])}
ROWS = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(5) for b in range(5)]
CHAT = ("<s>{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}")  # fmt: skip


def tokenizer(before=(), after=(), **how):
    """A token a character; `before` and `after` are what it puts around every text."""
    raw = Tokenizer(models.WordLevel(VOCABULARY, "<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    around = [(t, VOCABULARY[t]) for t in (*before, *after)]
    raw.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=around)  # fmt: skip
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[3:], **how)  # fmt: skip


SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LLAMA = SIZES | dict(num_key_value_heads=2, max_position_embeddings=128)
QWEN = LLAMA | dict(head_dim=8)
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
WINDOW = dict(sliding_window=8)
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
MLA |= MOE | dict(num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
                  first_k_dense_replace=1)  # fmt: skip
FALCON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
ARCHITECTURES = {
    "qwen3": (hf.Qwen3Config, QWEN),
    "qwen3-window": (hf.Qwen3Config,
                     QWEN | WINDOW | dict(use_sliding_window=True, max_window_layers=1)),
    "qwen3-moe": (hf.Qwen3MoeConfig, QWEN | MOE | dict(num_experts=4)),
    "llama": (hf.LlamaConfig, LLAMA),
    "mistral-window": (hf.MistralConfig, QWEN | WINDOW),
    "gpt2": (hf.GPT2Config, dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "phi": (hf.PhiConfig, LLAMA),
    "opt": (hf.OPTConfig,
            FALCON | dict(ffn_dim=64, max_position_embeddings=128, word_embed_proj_dim=16)),
    "gpt-neo": (hf.GPTNeoConfig,
                dict(hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=128,
                     attention_types=[[["global", "local"], 1]], window_size=8)),
    "bloom": (hf.BloomConfig, dict(hidden_size=32, n_layer=2, n_head=4)),
    "falcon": (hf.FalconConfig, FALCON),  # one KV head for all queries
    "falcon-alibi": (hf.FalconConfig, FALCON | dict(alibi=True)),
    "falcon-new": (hf.FalconConfig, FALCON | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "mpt": (hf.MptConfig, dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=128)),
    "gpt-j": (hf.GPTJConfig, dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=128)),
    "gemma3": (hf.Gemma3TextConfig, QWEN | WINDOW),
    "gemma4": (hf.Gemma4TextConfig,
               QWEN | WINDOW | dict(vocab_size_per_layer_input=96, hidden_size_per_layer_input=8,
                                    global_head_dim=16)),
    "gpt-oss": (hf.GptOssConfig, QWEN | MOE | WINDOW | dict(num_local_experts=4)),
    "olmo3": (hf.Olmo3Config, LLAMA | WINDOW),
    "lfm2": (hf.Lfm2Config, LLAMA | dict(layer_types=["full_attention"] * 2)),  # no convolutions
    "mla": (hf.DeepseekV3Config, LLAMA | MLA),
}  # fmt: skip
EXPERTS = {"qwen3-moe", "gpt-oss", "mla"}  # stacked matrices, which fp8 weights do not cover


def tiny(name="qwen3", seed=0, **how):
    config, shape = ARCHITECTURES[name]
    torch.manual_seed(seed)
    told = dict(vocab_size=96, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = hf.AutoModelForCausalLM.from_config(config(**told | shape | how)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8) if p.dim() > 1 else None  # far from uniform
    return model


def saved(folder, model, tok=None, generation=None, rows=ROWS):
    """The folder of a model with its tokenizer; data.jsonl lies in it."""
    model.save_pretrained(folder)
    (tok or tokenizer()).save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def config(folder, tmp_path, script=dlc, **how):
    """The options of a short run on the model and the data in `folder`."""
    told = dict(model=str(folder), data=str(folder / "data.jsonl"), steps=2, prompts=4,
                group_size=2, max_new_tokens=4, eval_rows=4, device="cpu",
                out=str(tmp_path / "run"))
    return script.Config(**told | how)


def distil(tmp_path, student, teacher, **how):
    """The options of a short distillation; student and teacher are saved as s and t."""
    folders = [str(saved(tmp_path / x, m)) for x, m in (("s", student), ("t", teacher))]
    told = dict(model=None, student=folders[0], teacher=folders[1])
    return config(tmp_path / "s", tmp_path, opd, **told | how)


def kl(r):
    return S.mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]


def alone(model, r):
    """log π of the drawn tokens by the model's own forward: a row alone, no padding, no cache."""
    T, out = r.mask.shape[1], torch.zeros_like(r.logq)
    for i, n in enumerate(r.prompt_len.tolist()):
        row = r.tokens[i : i + 1, r.tokens.shape[1] - T - n :]
        with torch.no_grad():
            logp = model(row, use_cache=False).logits.float().log_softmax(-1)[0, n - 1 : -1]
        out[i] = logp.gather(-1, row[0, n:, None])[:, 0]
    return out


# --------------------------------------------------------------------------------------------------
# Architectures


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_sampled_scored_and_quantised(name):
    """logq and token_logps are the model's own log-probs, and a narrow copy draws near it."""
    model = tiny(name)
    r = S.TorchSampler(model, "none", "none", head_k=8, stop_ids=[]).sample(PROMPTS, 12, seed=0)
    own = alone(model, r)
    assert (own - r.logq).abs().max() < 1e-5 and (own - S.token_logps(model, r)).abs().max() < 1e-5
    assert own.std() > 0.5  # else all this shows little
    if name in EXPERTS:
        with pytest.raises(ValueError, match=r"mlp.*: has a matrix in no linear layer.* use bf16"):
            S.TorchSampler(model, "fp8", "bf16")
    weights = "bf16" if name in EXPERTS else "fp8"
    narrow = S.TorchSampler(model, weights, "fp8", head_k=8, stop_ids=[])
    assert 1e-6 < kl(narrow.sample(PROMPTS, 12, seed=0)) < 0.3


# --------------------------------------------------------------------------------------------------
# What the end needs is tried at the start


def test_a_model_that_cannot_be_saved_is_refused_before_any_step(tmp_path):
    generation = dict(do_sample=False, temperature=0.6, eos_token_id=2)
    folder = saved(tmp_path / "m", tiny(), generation=generation)
    with pytest.raises((OSError, ValueError), match="temperature") as e:
        dlc.train(config(folder, tmp_path))
    assert "disk" not in str(e.value)  # the real cause alone
    log = tmp_path / "run" / "metrics.jsonl"
    assert not log.exists() or not log.read_text()  # no step was trained for nothing


def test_what_a_run_leaves_is_there_from_the_start_on(tmp_path, monkeypatch):
    """A crash in the first step leaves a model that loads, with its tokenizer."""
    def crash(*args, **kwargs):
        raise RuntimeError("crash")

    model, out = tiny(), tmp_path / "run"
    monkeypatch.setattr(dlc, "policy_loss", crash)
    with pytest.raises(RuntimeError, match="crash"):
        dlc.train(config(saved(tmp_path / "m", model), tmp_path))
    again, tok = dlc.load_model(str(out / "model"), "float32", "cpu")
    assert tok("1+2")["input_ids"] == tokenizer()("1+2")["input_ids"]
    ours = model.get_input_embeddings().weight[: len(VOCABULARY)]
    assert torch.equal(again.get_input_embeddings().weight[: len(VOCABULARY)], ours)


# --------------------------------------------------------------------------------------------------
# A forward that depends on the batch or the total length

DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16)
LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16,
            short_factor=[1.0] * 4, long_factor=[4.0] * 4)  # fmt: skip
KINDS = dict(sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=DYNAMIC)
ROPES = {
    "longrope": (hf.Phi3Config, LLAMA | dict(rope_parameters=LONG,
                                             original_max_position_embeddings=16)),
    "dynamic": (hf.LlamaConfig, LLAMA | dict(rope_parameters=DYNAMIC)),
    "of its own": (hf.LlamaConfig, LLAMA | dict(max_position_embeddings=16, rope_parameters=dict(
        rope_type="dynamic", factor=4.0, rope_theta=1e4))),
    "layers": (hf.Gemma3TextConfig, QWEN | WINDOW | dict(rope_parameters=KINDS)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_that_switches_by_length_is_kept_below_its_switch(name, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, name, ROPES[name])
    model = tiny(name)
    s = S.TorchSampler(model, "none", "none", head_k=8, stop_ids=[])
    r = s.sample(PROMPTS, 5, seed=0)  # 11 + 5, the switch is at 16
    assert (alone(model, r) - r.logq).abs().max() < 1e-5
    with pytest.raises(ValueError, match="12 .*16"):
        s.sample([[5, 6], [9] * 12], 5)
    folder = saved(tmp_path / "m", model)
    how = dict(weights="none", kv="none", steps=1)
    with pytest.raises(ValueError, match="4 tokens; 3 and --max-new-tokens fill the model's"):
        dlc.train(config(folder, tmp_path, max_new_tokens=13, **how))
    rows = dlc.train(config(folder, tmp_path, max_new_tokens=12, **how))
    assert rows[0]["discrepancy"] < 1e-6


# --------------------------------------------------------------------------------------------------
# Equal actions with different ids

STOPS = [VOCABULARY["</s>"], VOCABULARY["<end>"]]


def twins():
    """(student, teacher): each stops with probability 1/2 at a token, never with the other's id."""
    student = tiny("gpt2", vocab_size=len(VOCABULARY), tie_word_embeddings=False)
    student.generation_config.eos_token_id = STOPS
    with torch.no_grad():
        norm = student.transformer.ln_f
        norm.bias[0], norm.weight[0] = 1, 0  # a column that is always 1
        head = student.lm_head.weight.mul_(0.05)
        head[:, 0], head[STOPS[0], 0], head[STOPS[1], 0] = 0, math.log(len(VOCABULARY)), -9
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        teacher.lm_head.weight[STOPS] = student.lm_head.weight[STOPS[::-1]]
    return student, teacher


@pytest.mark.parametrize("loss", opd.LOSSES)
def test_all_stop_ids_are_one_action(loss):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 3, 9, generator=g).double()
    z_T, stops, mask = z.clone(), [4, 7], torch.ones(2, 3, dtype=torch.bool)
    z_T[..., stops] = z[..., stops[::-1]]  # the teacher stops as often, with the other
    tokens = torch.tensor([[4, 1, 7], [7, 4, 2]])
    how = dict(tokens=tokens, k=3)
    x = z.clone().requires_grad_()
    value = opd.distill_loss(loss, x, z_T, mask, stop_ids=stops, **how)
    value.backward()
    assert x.grad.abs().max() < 1e-12 and (loss == "sampled" or abs(float(value.detach())) < 1e-12)

    # The value: what the loss is on logits where the stops are one column.
    other = torch.randn(2, 3, 9, generator=g).double()
    rest = [i for i in range(9) if i not in stops]
    merge = lambda x: torch.cat([x[..., rest], x[..., stops].logsumexp(-1, keepdim=True)], -1)
    x, y = z.clone().requires_grad_(), z.clone().requires_grad_()
    new = torch.tensor([[7, 1, 7], [7, 7, 2]])  # the ids after the merge
    opd.distill_loss(loss, x, other, mask, stop_ids=stops, **how).backward()
    opd.distill_loss(loss, merge(y), merge(other), mask, **how | dict(tokens=new)).backward()
    if loss == "sampled":  # the gradient is that of the drawn id, the advantage that of the action
        s, t = (merge(v).log_softmax(-1).gather(-1, new[..., None])[..., 0] for v in (z, other))
        want = torch.nn.functional.one_hot(tokens, 9) - z.softmax(-1)
        torch.testing.assert_close(x.grad, -(t - s)[..., None] * want / 6)
    elif loss != "topk":  # whose bucket may hold one id of the action and not the other
        torch.testing.assert_close(x.grad, y.grad)

    # With one stop id, or none named, nothing changes, to the last bit.
    for kept in ([4], ()):
        x, y = z.clone().requires_grad_(), z.clone().requires_grad_()
        opd.distill_loss(loss, x, other, mask, stop_ids=kept, **how).backward()
        opd.distill_loss(loss, y, other, mask, **how).backward()
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("loss", opd.LOSSES)
def test_a_teacher_that_stops_with_another_id_does_not_unlearn_the_stop(loss, tmp_path):
    how = dict(loss=loss, weights="none", kv="none", max_new_tokens=6)
    rows = opd.train(distil(tmp_path, *twins(), steps=40, prompts=8, group_size=4, lr=1e-2, **how))
    at_first, at_last = (sum(r["truncated"] for r in part) / 10 for part in (rows[:10], rows[-10:]))
    assert at_first < 0.3 and abs(at_last - at_first) < 0.1
    assert loss == "sampled" or max(r["teacher_kl"] for r in rows) < 0.1


def test_gradient_checkpointing_which_drops_the_cache_is_refused():
    """Without its keys and values a response would be scored as if it had no prompt."""
    q = S.TorchSampler(model := tiny(), "none", "none")
    rollout = q.sample(PROMPTS, 4, seed=0)
    good = S.token_logps(model, rollout)
    torch.testing.assert_close(good, rollout.logq, atol=1e-5, rtol=0)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(S.token_logps(model.eval(), rollout), good)  # in training alone
    with pytest.raises(ValueError, match="gradient checkpointing"):
        S.token_logps(model.train(), rollout)


# --------------------------------------------------------------------------------------------------
# A run without a signal looks healthy

ANSWERS = """
18 | 18
 18. | 18
The answer is 18. | 18
$18 | 18
18 dollars | 18
18 dollars. What is 4 + 5? The answer is 9. | 18
She has 16 - 3 - 4 = 9 eggs. She makes 9 * 2 = $18 a day.\\n#### 18 | 18
#### 1,234 | 1234
1,234 | 1234
It is \\\\boxed{1,234} and not 7. | 1234
$70,000. | 70000
-5 | -5
2 - 7 is -5, so the answer is -5. | -5
It costs 10-7 dollars, that is 10-7=3. So 3. | 3
3/4 | 0.75
\\\\boxed{\\\\frac{3}{4}} | 3/4
0.50 | 0.5
Each costs $2.50. So 4 cost $10.00 | 10
He pays 50% of 8. That is 4 apples. | 4
There are 12 apples in 3 boxes. | 12
3 and 4 make 7, so the answer is 7 | 7
First 1, then 2. Last comes 3! | 3
"""
WRONG = """
1,2,3 | 123
3,4 | 34
10-7=3 pounds. | 7
#### 18 | 1
17 | 18
I don't know | 18
\\\\boxed{12} | 1
-5 | 5
1,23 | 123
"""


@pytest.mark.parametrize("line, right", [
    (x, right) for text, right in ((ANSWERS, 1.0), (WRONG, 0.0)) for x in text.strip().splitlines()
])  # fmt: skip
def test_the_number_that_a_response_answers_with(line, right):
    said, answer = line.replace("\\\\", "\\").rsplit(" | ", 1)
    said = said.replace("\\n", "\n")
    assert reward(said, dict(answer=answer), True) == right
    solution = f"Some steps, 1 + 1 = 2, then more.\n#### {answer}"  # as GSM8K writes it
    assert reward(said, dict(answer=solution), True) == right


def test_gsm8ks_own_rows_are_read_and_their_solutions_earn_1(tmp_path):
    solution = ("He buys 3 boxes of 4, which is 3*4=<<3*4=12>>12 pens.\nHe gives away 2, so "
                "12-2=10 stay.\n#### 10")  # fmt: skip
    rows = [dict(question=f"what is {i}?", answer=solution, level="easy") for i in range(20)]
    folder = saved(tmp_path / "m", tiny(), rows=rows)
    train, held = dlc.load_data(config(folder, tmp_path), tokenizer(), tiny())
    assert len(train) + len(held) == 20 and all(r["level"] == "easy" for r in train)
    assert held[0]["prompt"] == "what is 0?"
    assert held[0]["ids"] == tokenizer()("what is 0?")["input_ids"]
    assert all(reward(solution, r, True) == 1 for r in train)


def test_a_number_is_an_answer(tmp_path):
    rows = [dict(prompt=f"{i}=", answer=i) for i in range(8)] + [dict(prompt="1=", answer=2.5)] * 2
    folder = saved(tmp_path / "m", tiny(), rows=rows)
    train, _ = dlc.load_data(config(folder, tmp_path), tokenizer(), tiny())
    assert reward("2", train[0], True) == 1
    assert reward("2.50", train[-1], True) == 1


def test_a_special_token_that_is_no_stop_does_not_spoil_an_answer(tmp_path):
    ids = [VOCABULARY[c] for c in ("<tool>", "a", "b", "</s>")]
    mask = torch.ones(1, 4, dtype=torch.bool)
    r = S.Rollout(torch.tensor([[7, *ids]]), torch.tensor([1]), mask, *[None] * 6)
    cfg = config(tmp_path, tmp_path)
    rows, stops = [dict(prompt="", answer="ab")], torch.tensor([2])
    assert dlc.grade(r, rows, stops, tokenizer(), cfg)[0]["reward"] == 1.0


@pytest.mark.parametrize("answer, told, steps", [("abc", 1, 12), ("abc", 1, 2), ("a", 0, 12)])
def test_a_run_in_which_no_group_differs_says_so_once(
        answer, told, steps, tmp_path, capsys, monkeypatch):
    """With "a", some earn it: the reward is told to give 1 to every third response."""
    calls = itertools.count()
    third = lambda *_: float(answer == "a" and next(calls) % 3 == 0)
    monkeypatch.setattr(dlc, "reward_of", lambda _: third)
    rows = [dict(prompt=r["prompt"], answer=answer) for r in ROWS]
    folder = saved(tmp_path / "m", tiny(), rows=rows)
    dlc.train(config(folder, tmp_path, steps=steps, weights="none", kv="none"))
    out = "".join(capsys.readouterr())
    assert out.count("no group had two different rewards") == told
    if told:
        line = next(x for x in out.splitlines() if "no group had two" in x)
        assert "'abc'" in line and re.search(r"'\d\+\d='", line)  # a sample


# --------------------------------------------------------------------------------------------------
# Parameters outside the loss, and layers that are not a matrix


def multimodal():
    text = QWEN | WINDOW | dict(vocab_size=len(VOCABULARY), eos_token_id=2, bos_token_id=1)
    vision = SIZES | dict(image_size=28, patch_size=14)  # as many layers as the text has
    ids = {k: 5 for k in ("image_token_index", "boi_token_index", "eoi_token_index")}
    torch.manual_seed(0)
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(
        text_config=text | dict(pad_token_id=0), vision_config=vision, mm_tokens_per_image=4,
        eos_token_id=2, **ids)).eval()  # fmt: skip


@pytest.mark.parametrize("how", [
    dict(weights="fp8", kv="fp8"), dict(weights="none", kv="none"),
    dict(weights="none", kv="none", dtype="bfloat16"),
    dict(weights="fp8", kv="fp8", noise=0.1, keep_bf16="model.language_model.layers.1")])
def test_a_multimodal_model_is_trained_on_text_and_the_rest_left_alone(how, tmp_path, monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda *_: float(next(calls) % 2))
    model = multimodal()
    rows = dlc.train(config(saved(tmp_path / "m", model), tmp_path, lr=1e-3, **how))
    assert all(r["grad_norm"] > 0 and r["skipped"] == 0 for r in rows)
    after = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    same = lambda a, b: torch.equal(a.float(), b) or torch.equal(a, b.bfloat16())
    moved = {n for n, x in model.state_dict().items() if not same(after[n], x)}
    assert any("language_model" in n for n in moved)
    assert not any("vision" in n or "multi_modal" in n for n in moved)


def test_a_multimodal_models_text_layers_are_what_is_narrow():
    s = S.TorchSampler(multimodal(), "fp8", "fp8")
    assert s.stem == "model.language_model.layers"
    assert len(s.narrow) == 14 and all(s.stem in n for n in s.narrow)
    assert 1e-7 < kl(s.sample(PROMPTS, 6, seed=0)) < 0.1


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_float_table_that_is_no_parameter(weights):
    torch.manual_seed(0)
    model = hf.XGLMForCausalLM(hf.XGLMConfig(
        vocab_size=96, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4,
        max_position_embeddings=128, eos_token_id=2, init_std=0.3)).eval()  # fmt: skip
    narrow = S.TorchSampler(model, weights, "bf16", head_k=96)
    assert 1e-7 < kl(narrow.sample(PROMPTS, 8, seed=0)) < 0.1
    r = S.TorchSampler(model, "none", "none", stop_ids=[]).sample(PROMPTS, 8, seed=0)
    assert (alone(model, r) - r.logq).abs().max() < 1e-5


def test_tables_of_positions_keep_their_precision():
    """Only what the library itself would narrow: rotary tables stay in float32."""
    for name in ("qwen3", "gpt-j", "gemma3"):
        s = S.TorchSampler(tiny(name), "bf16", "bf16")
        tables = {n: b.dtype for n, b in s.engine.named_buffers() if "scale" not in n}
        assert tables and set(tables.values()) == {torch.float32}


@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_is_refused_in_one_line(base, tmp_path):
    folder = saved(tmp_path / "m", tiny()) if base else tmp_path / "m"
    folder.mkdir(exist_ok=True)
    adapter = dict(peft_type="LORA", base_model_name_or_path="x/y")
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match="adapter.*merge") as e:
        dlc.load_model(str(folder), "float32", "cpu")
    assert "\n" not in str(e.value) and str(e.value).startswith("--model")


# --------------------------------------------------------------------------------------------------
# Special tokens that the tokenizer adds


def test_messages_go_through_the_chat_template(tmp_path):
    asked = [dict(role="user", content="1+2"), dict(role="user", content="?")]
    rows = [dict(prompt=asked, answer=3, kind="sum")] * 10
    tok = tokenizer(before=["<s>"])
    tok.chat_template = CHAT
    folder = saved(tmp_path / "m", tiny(), tok, rows=rows)
    train, _ = dlc.load_data(config(folder, tmp_path), tok, tiny())
    # One <s>, and the turn that is to be answered opened:
    want = [VOCABULARY[c] for c in ("<s>", "<user>", "1", "+", "2", "<user>", "?", "=")]
    assert train[0]["ids"] == want and train[0]["kind"] == "sum" and train[0]["prompt"] == asked
    dlc.train(config(folder, tmp_path, steps=1))
    with pytest.raises(ValueError, match="chat template"):
        dlc.load_data(config(folder, tmp_path), tokenizer(), tiny())


@pytest.mark.parametrize("prompt", [
    "", [], [1], ["a"], [dict(role="user")], [dict(content="a")], 7, None, {}])  # fmt: skip
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(prompt, tmp_path):
    folder = saved(tmp_path / "m", tiny(), rows=[*ROWS, dict(prompt=prompt, answer="1")])
    with pytest.raises(ValueError, match=f"line {len(ROWS) + 1}"):
        dlc.read_data(str(folder / "data.jsonl"))


def test_a_prompt_that_ends_in_a_stop_is_refused(tmp_path):
    tok = tokenizer(before=["<s>"], after=["</s>"])
    model = tiny()
    folder = saved(tmp_path / "m", model, tok)
    with pytest.raises(ValueError, match="ends in a stop token"):
        dlc.load_data(config(folder, tmp_path), tok, model)
    train, _ = dlc.load_data(config(folder, tmp_path), tokenizer(before=["<s>"]), model)
    assert train[0]["ids"][0] == 1 and len(train[0]["ids"]) == 5


def test_a_doubled_bos_is_said_once(tmp_path, capsys):
    rows = [dict(prompt="<s><user>" + r["prompt"], answer=r["answer"]) for r in ROWS]
    folder = saved(tmp_path / "m", tiny(), rows=rows)
    for tok, told in ((tokenizer(before=["<s>"]), 1), (tokenizer(), 0)):
        train, _ = dlc.load_data(config(folder, tmp_path), tok, tiny())
        out = "".join(capsys.readouterr())
        assert out.count("'<s>' twice") == told and train[0]["ids"][: 1 + told] == [1] * (1 + told)


# --------------------------------------------------------------------------------------------------
# A resumed run's inputs are pinned


def resume(tmp_path, change, **how):
    folder = saved(tmp_path / "m", tiny())
    cfg = config(folder, tmp_path, save_every=1, **how)
    dlc.train(cfg)
    change(folder)
    return dlc.train(dataclasses.replace(cfg, resume=cfg.out, steps=3))


def test_a_run_resumes_with_the_inputs_that_it_began_with(tmp_path, capsys):
    assert len(resume(tmp_path, lambda folder: None)) == 3
    assert "numbers may differ" not in "".join(capsys.readouterr())


def test_edited_data_are_refused(tmp_path):
    def edit(folder):
        text = (folder / "data.jsonl").read_text()
        (folder / "data.jsonl").write_text(text.replace('"answer": "3"', '"answer": "4"'))

    with pytest.raises(ValueError, match="--resume .*the data are not those it began"):
        resume(tmp_path, edit)


def test_another_model_is_refused(tmp_path):
    def edit(folder):
        saved(folder, tiny(seed=1))

    with pytest.raises(ValueError, match="--resume .*the weights are not those it began"):
        resume(tmp_path, edit)


def test_the_way_to_override_works_and_other_versions_are_said(tmp_path, capsys):
    def edit(folder):
        saved(folder, tiny(seed=1))
        path = tmp_path / "run" / "config.json"
        stored = json.loads(path.read_text())
        del stored["versions"]["weights"]
        stored["versions"]["torch"] = "1.0"
        path.write_text(json.dumps(stored))

    assert len(resume(tmp_path, edit)) == 3
    out = "".join(capsys.readouterr())
    line = next(x for x in out.splitlines() if "numbers may differ" in x)
    assert "'1.0'" in line and torch.__version__ in line and "threads" in line


def test_another_teacher_is_refused(tmp_path):
    student, teacher = twins()
    cfg = distil(tmp_path, student, teacher, save_every=1)
    opd.train(cfg)
    saved(tmp_path / "t", student)
    with pytest.raises(ValueError, match="the weights are not those it began with"):
        opd.train(dataclasses.replace(cfg, resume=cfg.out, steps=3))


# --------------------------------------------------------------------------------------------------
# A token that is ruled out, and ids that do not exist


@pytest.mark.parametrize("loss", opd.LOSSES)
def test_a_token_that_a_policy_rules_out(loss):
    """-inf in student, teacher or both: 0 log 0 is 0, and nothing becomes NaN or infinite."""
    g = torch.Generator().manual_seed(0)
    z, z_T = (torch.randn(1, 4, 8, generator=g).double() for _ in range(2))
    z[0, 0, 1] = z[0, 1, 2] = z_T[0, 1, 2] = z_T[0, 2, 3] = -math.inf
    mask = torch.ones(1, 4, dtype=torch.bool)
    tokens = torch.tensor([[0, 1, 3, 4]])  # the third is one that the teacher rules out
    x = z.clone().requires_grad_()
    value = opd.distill_loss(loss, x, z_T, mask, tokens, k=8)
    value.backward()
    assert value.isfinite() and x.grad.isfinite().all()
    if loss in ("full", "forward", "jsd"):  # position 1: as if the vocabulary had seven tokens
        rest = [0, 1, 3, 4, 5, 6, 7]
        both = opd.divergence(loss, z[:, 1], z_T[:, 1])
        torch.testing.assert_close(both, opd.divergence(loss, z[:, 1, rest], z_T[:, 1, rest]))


@pytest.mark.parametrize("sizes", [(96, 96), (64, 96), (96, 64)])
def test_no_mass_lies_on_ids_that_the_tokenizer_does_not_have(sizes, tmp_path):
    """The same weights in heads of any length are the same model: no loss, no advantage, and
    nothing drawn from beyond."""
    n = len(VOCABULARY)
    assert n < 64
    real = tiny(vocab_size=n, tie_word_embeddings=False)
    models = []
    for size in sizes:
        model = copy.deepcopy(real)
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():  # a padded row that was never trained
            model.lm_head.weight[n:] = real.lm_head.weight[:1] + 0.1
        models.append(model)
    how = dict(weights="none", kv="none", steps=1, head_k=96)
    for loss in opd.LOSSES:
        row = opd.train(distil(tmp_path, *models, loss=loss, out=str(tmp_path / loss), **how))[0]
        assert abs(row["teacher_kl"]) < 1e-6 and row["head_mass"] > 1 - 1e-6 and row["dropped"] == 0
    model, _ = dlc.load_model(str(tmp_path / "s"), "float32", "cpu")
    sampler = S.TorchSampler(model, "none", "none", head_k=96, stop_ids=[])
    r = sampler.sample(PROMPTS * 9, 12, seed=0)
    assert r.tokens.max() < n and r.head_ids.max() < n
    torch.testing.assert_close(alone(real, r), r.logq, atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------------------------
# Spread over what was kept


def test_statistics_leave_dropped_responses_out(tmp_path, monkeypatch):
    """Of four responses with rewards 1 0 0 1 the last is dropped: all statistics are of three."""
    seen, finish = {}, S.TorchSampler._finish

    def broken(self, r):
        r.logq[3] = float("nan")
        return finish(self, r)

    def policy_loss(correction, logp, logq, advantage, mask, **how):
        seen.update(A=advantage, tokens=mask.sum(1))
        return loss(correction, logp, logq, advantage, mask, **how)

    def grade(rollout, rows, stop_ids, *rest):
        scores, stops = [1.0, 0.0, 0.0, 1.0], [True, True, False, False]
        return [dict(reward=r, stopped=s) for r, s in zip(scores, stops)]

    loss = dlc.policy_loss
    folder = saved(tmp_path / "m", tiny())
    monkeypatch.setattr(S.TorchSampler, "_finish", broken)
    monkeypatch.setattr(dlc, "policy_loss", policy_loss)
    monkeypatch.setattr(dlc, "grade", grade)
    monkeypatch.setattr(dlc.Run, "accuracies", lambda self, suffix="": {"accuracy" + suffix: 0.0})
    row = dlc.train(config(folder, tmp_path, prompts=1, group_size=4, steps=1,
                           scale_advantage=True, weights="none", kv="none"))[0]  # fmt: skip
    kept = torch.tensor([1.0, 0.0, 0.0])
    want = (kept - kept.mean()) / (kept.std() + 1e-6)
    torch.testing.assert_close(seen["A"], torch.cat([want, torch.zeros(1)]))
    assert row["dropped"] == 1 and row["reward"] == pytest.approx(1 / 3)
    assert row["truncated"] == pytest.approx(1 / 3)
    assert row["length"] == pytest.approx(float(seen["tokens"][:3].float().mean()))


def test_the_rewards_of_opd_leave_dropped_responses_out(tmp_path, monkeypatch):
    finish = S.TorchSampler._finish

    def broken(self, r):
        r.logq[1::2] = float("nan")
        return finish(self, r)

    monkeypatch.setattr(S.TorchSampler, "_finish", broken)
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda *_: 1.0)
    row = opd.train(distil(tmp_path, *twins(), steps=1))[0]
    assert row["dropped"] == 4 and row["reward"] == 1


@pytest.mark.parametrize("name, bf16", [
    ("falcon", 2 * (8 + 8) * 2),  # two layers, one KV head of 8 for K and for V, two bytes a value
    ("falcon-new", 2 * 4 * (8 + 8) * 2),
    ("mla", 2 * (16 + 4) * 2),  # the compressed vector, 16, and the shared rotary key, 4
    ("gemma4", 2 * 2 * 8 * 2 + 2 * 2 * 16 * 2),  # its full layer's heads are larger
    ("gpt2", 2 * 4 * (8 + 8) * 2), ("qwen3", 2 * 2 * (8 + 8) * 2)])  # fmt: skip
def test_capacity_is_that_of_a_real_cache(name, bf16, tmp_path):
    rows = opd.capacity(opd.Config(student=str(saved(tmp_path, tiny(name))), capacity=1.0))
    assert [r[1] for r in rows] == [bf16, bf16 / 2, rows[2][1]] and bf16 / 2 < rows[2][1] < bf16
