"""The torch sampler with the hardware's FP8, on a model of Qwen3-0.6B's shape with random weights.
No downloads."""

import time

import pytest
import torch
import transformers

import dlc
import sampler as S

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use on this machine", allow_module_level=True)
DEVICE = torch.device("cuda")
HARDWARE = torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=4096, eos_token_id=1, bos_token_id=None, pad_token_id=0)
    with torch.device(DEVICE):
        return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def seconds(f, n=5):
    f()
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2]


def bandwidth():
    """Bytes a second of a plain copy: read and write of 4 GiB."""
    a = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * len(a) / seconds(lambda: b.copy_(a))


@pytest.mark.skipif(not HARDWARE, reason="this GPU has no FP8 arithmetic")
def test_the_hardware_rounds_as_the_emulation():
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(48, 1024, generator=g, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(3072, 1024, generator=g, device=DEVICE)
    bits = lambda x: S.pack(x, "fp8")[0].cpu().view(torch.uint8)
    assert torch.equal(bits(w), bits(w.cpu())) and torch.equal(bits(x), bits(x.cpu()))
    layer = S.NarrowLinear(None, "fp8")
    layer.load(w, torch.bfloat16)
    ours = layer(x).double()
    exact = S.quantize(x, "fp8").double() @ S.quantize(w, "fp8").double().T
    assert (ours - exact).abs().max() <= 0.02 * exact.abs().max()  # bfloat16 out and summed


def test_the_layer_uses_the_hardware_and_agrees_with_a_cpu():
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(256, 512, generator=g), torch.randn(3, 7, 512, generator=g).bfloat16()
    layer = S.NarrowLinear(None, "fp8")
    layer.load(w, torch.bfloat16)
    here = layer(x)
    layer.load(w.to(DEVICE), torch.bfloat16)
    assert layer.working is None  # only the codes stay on the card
    there = layer(x.to(DEVICE)).cpu()
    assert (here.float() - there.float()).abs().max() <= 0.02 * here.float().abs().max()


def test_kv_codes_widen_exactly_on_the_card():
    for fmt, kind in S.FP8.items():
        codes = torch.arange(256, dtype=torch.uint8)
        want = codes.view(kind).float()
        got = S.NarrowKV(fmt).load(codes.to(DEVICE), 0.5, torch.bfloat16).float().cpu()
        assert torch.equal(got[want.isfinite()], 0.5 * want[want.isfinite()])


def test_tokens_a_second_against_the_bandwidth(model):
    """A decode step reads every weight once; the rest is launch overhead of an eager model."""
    rate, new, prompts = bandwidth(), 32, [[5 + i] * 16 for i in range(32)]
    print(f"\n{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s")
    for weights, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")):
        sampler = S.TorchSampler(model, weights, kv, stop_ids=[])
        took = seconds(lambda: sampler.sample(prompts, new, seed=0, greedy=True), 3)
        linear = 0  # bytes
        for m in sampler.engine.modules():
            if isinstance(m, (S.NarrowLinear, torch.nn.Linear)):
                linear += m.codes.nbytes if isinstance(m, S.NarrowLinear) else m.weight.nbytes
        r = sampler.sample(prompts, new, seed=0)
        kl = S.mismatch(r.logp_stale, r.logq, r.mask, r.head_logp_stale, r.head_logq)["kl"]
        print(f"weights {weights:5} KV {kv:5}: {32 * new / took:8.0f} tokens/s, "
              f"{took / new * 1e3:.1f} ms a step against {linear / rate * 1e3:.2f} ms "
              f"to read {linear / 2**20:.0f} MiB of weights; discrepancy {kl:.5f} nats")
        assert torch.isfinite(r.logq).all() and kl < 0.5


def test_fp8_kv_takes_half_the_bytes():
    sizes = {}
    for fmt in ("bf16", "fp8"):
        layer, x = S.NarrowKV(fmt), torch.zeros(4, 8, 512, 128, dtype=torch.bfloat16, device=DEVICE)
        layer.update(x, x)
        sizes[fmt] = layer.keys.nbytes + layer.values.nbytes
    assert sizes["bf16"] == 2 * sizes["fp8"]


def test_a_step_its_time_and_peak_memory(model):
    """One dlc update of 32 x 64 tokens: no (B, T, V) float32 tensor, which would be 1.2 GiB."""
    sampler = S.TorchSampler(model, "fp8", "fp8", stop_ids=[])
    r = sampler.sample([[7 + i] * 16 for i in range(32)], 64, seed=0)
    A = torch.randn(32, device=DEVICE)

    def step():
        logp, head = S.token_logps(model, r, head=True)
        loss, _ = dlc.policy_loss(
            "dlc", logp, r.logq, A, r.mask, logp_stale=r.logp_stale, head_logp=head,
            head_logq=r.head_logq, head_logp_stale=r.head_logp_stale)
        loss.backward()
        model.zero_grad()

    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = seconds(step, 3)
    peak = torch.cuda.max_memory_allocated() - held
    print(f"\nforward and backward of 2048 tokens: {took:.3f} s, "
          f"peak {peak / 2**30:.2f} GiB above what was held")

    def scored(chunk):
        S.LinearLogps.CHUNK, kept = chunk, S.LinearLogps.CHUNK
        hidden = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.randint(151936, (4096, 1), device=DEVICE)
        head = model.get_output_embeddings().weight.detach()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        if chunk:
            S.LinearLogps.apply(hidden, head, None, ids).sum().backward()
        else:
            (hidden @ head.T).float().log_softmax(-1).gather(-1, ids).sum().backward()
        S.LinearLogps.CHUNK = kept
        return torch.cuda.max_memory_allocated() - held

    ours, plain = scored(S.LinearLogps.CHUNK), scored(0)
    print(f"loss at V = 151,936, 4,096 positions: {ours / 2**20:.0f} MiB "
          f"against {plain / 2**20:.0f} MiB")
    assert ours <= plain / 8
