"""GPU code on a machine without one: `card`, a device that computes on the CPU and refuses what a
GPU would refuse. `python tests/fake_gpu.py` runs every check below and says which passed.

A tensor on the card wraps a CPU tensor. Each operation runs twice: on torch's fake tensors on
`cuda`, which raise where devices are mixed and know on which device a result lies, and on the real
values. So control flow is the real one, and numbers can be compared with the CPU's. What it cannot
show: memory, speed, autocast, and whether a kernel of the GPU rounds otherwise.
"""

import contextlib
import copy
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers as hf
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dlc  # noqa: E402
import opd  # noqa: E402
import sampler as S  # noqa: E402

FAKE = fake_tensor.FakeTensorMode()
UNKNOWN = fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException


class Card(torch.Tensor):
    """A tensor on the card; `held` is its value."""

    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, held):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset())
        make = torch.Tensor._make_wrapper_subclass
        self = make(cls, held.shape, dtype=held.dtype, device="card:0", **layout)
        self.held = held
        return self

    def __init__(self, held):
        pass

    def __repr__(self):
        return f"Card({self.held})"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = new = Card(self.held.clone())
            new.requires_grad_(self.requires_grad).__dict__.update(
                {k: v for k, v in self.__dict__.items() if k != "held"})
        return memo[id(self)]

    def tolist(self):
        return self.held.tolist()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new):
        torch.Tensor.data.__set__(self, new)
        self.held = new.held

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})


def on_card(x):
    return isinstance(x, Card) or (isinstance(x, torch.device) and x.type == "card")


def faked(x):
    if not isinstance(x, torch.Tensor):
        return x
    with FAKE:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def real(x):
    return x.held if isinstance(x, Card) else torch.device("cpu") if on_card(x) else x


def run(op, args, kwargs):
    """`op` on fake tensors, which say where its results lie, and on the values."""
    given = tree_leaves((args, kwargs))
    if not any(map(on_card, given)):
        return op(*args, **kwargs)
    try:
        with FAKE:
            out = op(*tree_map(faked, args), **tree_map(faked, kwargs))
        tensors = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        places = iter([x.device.type == "card" for x in tensors])
    except UNKNOWN:  # a shape or a number that depends on values
        places = iter(lambda: True, None)
    known = {id(x.held): x for x in given if isinstance(x, Card)}

    def wrapped(x):
        if not isinstance(x, torch.Tensor):
            return x
        there = next(places)
        return known[id(x)] if id(x) in known else Card(x) if there else x

    return tree_map(wrapped, op(*tree_map(real, args), **tree_map(real, kwargs)))


class Machine(TorchDispatchMode):
    """A machine with the card: tensors can be made there, or moved."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is a move
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)


class Draws(TorchFunctionMode):
    """Refuses a generator of one device for numbers on another."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), torch.device(kwargs.get("device") or "cpu")
        if generator is not None and generator.card != on_card(device):
            raise RuntimeError(f"{function.__name__}: its generator is not on {device.type}")
        return function(*args, **kwargs)


class Generator(torch.Generator):
    """torch.Generator, which has to be made for the device it draws on."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.card = torch.device(device).type == "card"
        return self

    def __init__(self, device="cpu"):
        pass


def to_card(model, *_):
    """`model.to("card")`, tied parameters staying tied."""
    moved = {}
    for module in model.modules():
        for mine in (module._parameters, module._buffers):
            for name, x in mine.items():
                if x is None or isinstance(x, Card):
                    continue
                if id(x) not in moved:
                    new = Card(x.data.clone())
                    is_parameter = isinstance(x, torch.nn.Parameter)
                    moved[id(x)] = torch.nn.Parameter(new) if is_parameter else new
                mine[name] = moved[id(x)]
    return model


def install():
    class Backend(torch.utils.backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    setup = torch.utils.backend_registration._setup_privateuseone_for_python_backend
    setup("card", backend_module=Backend())
    torch.Generator = Generator
    to = hf.PreTrainedModel.to
    hf.PreTrainedModel.to = lambda model, where, *a: (
        to_card(model) if torch.device(where).type == "card" else to(model, where, *a))


# --------------------------------------------------------------------------------------------------
# Checks: the same call on the CPU and on the card.


def near(a, b, tol=1e-5):
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(y, Card):
            y = y.held
        elif isinstance(y, torch.Tensor):
            assert not y.dim(), "a result came back on the CPU"
        x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
        torch.testing.assert_close(x, y, rtol=tol, atol=tol, equal_nan=True)


def both(call, *tensors, tol=1e-5):
    """call(*tensors) on the CPU and on the card; its results and gradients agree."""
    results = []
    for move in (lambda x: x, Card):
        given = [move(x.detach().clone()).requires_grad_(x.requires_grad) for x in tensors]
        out = call(*given)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.sum().backward(retain_graph=True)
        results.append((out, [x.grad for x in given if x.grad is not None]))
    near(*results, tol)


def model_of(**more):
    torch.manual_seed(0)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**dict(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1,
        initializer_range=0.2) | more)).eval()


PROMPTS = [[3, 4, 5, 6, 7], [8], [0, 9, 1], [3, 4, 5, 6, 7]]


def mixed_devices_are_refused():
    here, there = torch.ones(3), Card(torch.ones(3))
    for wrong in (lambda: here + there, lambda: F.linear(there[None], here[None]),
                  lambda: torch.where(there > 0, here, there), lambda: torch.cat([here, there]),
                  lambda: torch.rand(3, device="card", generator=torch.Generator())):
        try:
            wrong()
        except RuntimeError:
            continue
        raise AssertionError("mixed devices went through")
    assert (there + torch.tensor(1.0)).device.type == "card"  # a number may come from the CPU
    assert type(there.cpu()) is torch.Tensor and float(there.sum()) == 3


def losses_and_measures():
    g = torch.Generator().manual_seed(0)
    rows = lambda *shape: torch.rand(shape, generator=g) * -4 - 0.1
    logp, stale, logq = rows(6, 5).requires_grad_(), rows(6, 5), rows(6, 5)
    heads = [torch.randn(6, 5, 9, generator=g).log_softmax(-1)[..., :4] for _ in range(3)]
    heads[0].requires_grad_()
    mask, A = torch.arange(5) < torch.tensor([[5], [3], [1], [5], [2], [4]]), rows(6) + 2
    for correction in dlc.CORRECTIONS:
        both(lambda logp, h, logq, A, mask, stale, hq, hs, c=correction: dlc.policy_loss(
            c, logp, logq, A, mask, logp_stale=stale, logp_anchor=stale, head_logp=h, head_logq=hq,
            head_logp_stale=hs), logp, heads[0], logq, A, mask, stale, *heads[1:])
    for level in ("sequence", "token"):
        both(lambda x, mask, level=level: dlc.ess(x, mask, level), stale - logq, mask)
    both(S.mismatch, stale, logq, mask, *heads[1:])


def scoring_by_chunks():
    S.LinearLogps.CHUNK, kept = 7 * 11, S.LinearLogps.CHUNK  # several chunks
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(20, 8), torch.randn(11, 8), torch.randint(11, (20, 3))
    for frozen in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        both(S.LinearLogps.apply, *leaves, ids)
    teacher = torch.randn(20, 6), torch.randn(11, 6)
    for loss in set(opd.LOSSES) - {"sampled"}:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        both(lambda *x, loss=loss: opd.ChunkedDivergence.apply(*x, loss, 4), *leaves, *teacher)
    S.LinearLogps.CHUNK = kept


def narrow_layers():
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32), torch.randn(3, 5, 32).bfloat16()
    for hardware in (False, True):
        S.hardware_fp8 = lambda x, on=hardware: on
        for fmt in S.FORMATS[2:]:
            layer = S.NarrowLinear(torch.nn.Parameter(torch.randn(48).bfloat16(), False), fmt)
            layer.load(weight, torch.bfloat16)
            here = layer(x)
            layer.bias = torch.nn.Parameter(Card(layer.bias.data), False)
            layer.load(Card(weight), torch.bfloat16)
            assert layer.working is None  # nothing but codes and scales stays on the card
            assert layer.codes.dtype.itemsize == 1 and isinstance(layer.codes, Card)
            near(here, layer(Card(x)), 0.01 if fmt == "fp8" else 1e-5)
    S.hardware_fp8 = lambda x: False
    for fmt in S.KV_FORMATS[1:]:
        for dtype in (torch.bfloat16, torch.float32):
            both(lambda k, v, k1, v1, f=fmt: [S.NarrowKV(f, 0.5, 2.0).update(*x) for x in
                 ((k, v), (k1, v1))], *(torch.randn(2, 3, n, 8).to(dtype) for n in (4, 4, 1, 1)))


def sampling_and_syncs():
    for weights, kv, hardware in (("none", "none", 0), ("int3", "fp8", 0), ("fp8", "fp8", 1)):
        S.hardware_fp8 = lambda x, on=hardware: on
        model, other = model_of(), model_of(initializer_range=0.21)
        theirs, drawn = to_card(copy.deepcopy(model)), []
        for m, change in ((model, other), (theirs, to_card(copy.deepcopy(other)))):
            q = S.TorchSampler(m, weights, kv, head_k=5, noise=0.01)
            q.sync(change, 3)
            drawn.append(q.sample(PROMPTS, 4, seed=0))
            assert (drawn[-1].version == 3).all()
            logp, head = S.token_logps(change, drawn[-1], head=True)
            (logp.sum() + head.sum()).backward()
            assert all(p.grad is not None for p in change.parameters())
            q.sample(PROMPTS, 2, greedy=True)
        here, there = drawn
        assert all(isinstance(x, Card) for x in vars(there).values())
        if weights == "none":  # the same draws; a narrow format may flip one by its rounding
            near(vars(here), vars(there), 1e-4)
        gaps = [S.mismatch(r.logp_stale, r.logq, r.mask)["mean_abs"] for r in drawn]
        assert gaps[0] / 2 < gaps[1] < gaps[0] * 2, gaps


def training():
    base = dlc.tiny_base(2, layers=1)
    dlc.Run.finish = lambda run: run.rows  # save_pretrained looks at storage
    for script, how in ((dlc, dict(correction="dlc", minibatches=2)),
                        (opd, dict(loss="full", teacher=str(base))),
                        (opd, dict(loss="sampled", teacher=str(base)))):
        if script is opd:
            how |= dict(noise=0.2)
        rows = []
        for device in ("cpu", "card"):
            with tempfile.TemporaryDirectory() as folder:
                cfg = script.Config(device=device, steps=2, prompts=4, max_new_tokens=2,
                                    sync_every=1, base=str(base), weights="int3",
                                    out=folder + "/run", **how)
                rows.append(script.train(cfg))
        for here, there in zip(*rows, strict=True):
            for key in ("reward", "discrepancy", "lag", "ess", "grad_norm"):
                near(here[key], there[key], 1e-3)


CHECKS = [mixed_devices_are_refused, losses_and_measures, scoring_by_chunks, narrow_layers,
          sampling_and_syncs, training]

if __name__ == "__main__":
    torch.set_num_threads(1)
    install()
    for check in CHECKS:
        silent = contextlib.ExitStack()
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            silent.enter_context(redirect(io.StringIO()))
        try:
            with silent, Machine(), Draws():
                check()
            print(check.__name__, "ok", flush=True)
        except Exception:
            print(check.__name__, "FAILED", traceback.format_exc(), flush=True)
    os._exit(0)  # torch cannot end the backward thread of a device that is not there
