"""The numbers of a fixed set of runs, bit for bit: what should change no number changes none.

A line of REFERENCE is a run; an entry is the start of the SHA-256 of some columns over all steps.
After a change that is meant to move numbers, `python tests/test_reference.py` prints them anew.
`python tests/test_reference.py lag_2` prints the numbers behind a line, to compare two trees."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dlc  # noqa: E402
import opd  # noqa: E402

# What an entry of a line is the digest of. Timings and explanations in words are left out.
RL, OPD = "clip_share weight_max", "teacher_kl teacher_kl_by_q"
gap = "{0} {0}_k1 {0}_k3 {0}_mean_abs {0}_max_abs".format
GROUPS = dict(
    sync="step version synced", reward="reward", gap=gap("discrepancy"), lag=gap("lag"),
    ess="ess ess_token", head="head_mass entropy", tokens="tokens length truncated dropped skipped",
    cap="cap_share", norm="grad_norm", rl=RL, opd=OPD,
    end="accuracy_base accuracy_sampler_base accuracy_teacher accuracy accuracy_sampler",
)  # fmt: skip

SHORT = {  # name of a run -> (script, its options)
    "default": (dlc, {}),
    "seed_1": (dlc, dict(seed=1)),
    "lag_2": (dlc, dict(lag=2)),
    "lag_0": (dlc, dict(lag=0)),
    "sync_4": (dlc, dict(sync_every=4)),
    "sync_never": (dlc, dict(sync_every=0)),
    "ess_token": (dlc, dict(sync_ess=0.97, ess_level="token")),
    "mini_4": (dlc, dict(minibatches=4)),
    "mini_4_anchor": (dlc, dict(minibatches=4, correction="ppo_anchor")),
    "micro": (dlc, dict(minibatches=2, micro_batch=32, scale_advantage=True)),
    "sgd": (dlc, dict(optimizer="sgd", lr=0.1, sync_every=2)),
    "int3": (dlc, dict(weights="int3")),
    "int2": (dlc, dict(weights="int2", kv="fp8_e5m2")),
    "nvfp4_noise": (dlc, dict(weights="nvfp4", noise=0.1)),
    "keep": (dlc, dict(weights="int4", keep_bf16="model.layers.0,model.layers.1.kv")),
    "exact": (dlc, dict(weights="none", kv="none", head_k=4)),
    "full": (opd, {}),
    "topk": (opd, dict(loss="topk", lag=1)),
    "sampled": (opd, dict(loss="sampled")),
    "sampled_dlc": (opd, dict(loss="sampled", correction="dlc", weights="int3")),
    "forward": (opd, dict(loss="forward", sync_every=4)),
    "jsd": (opd, dict(loss="jsd", micro_batch=32, keep_bf16="model.layers.1")),
    "async": (dlc, dict(async_=True)),
    "async_ess": (dlc, dict(async_=True, sync_ess=0.9)),
    "async_opd": (opd, dict(async_=True)),
    **{f"short_{k}": (dlc, dict(steps=4, minibatches=2, correction=k)) for k in dlc.CORRECTIONS},
}
RESUMED = ("sync_4", "lag_2", "async", "full")
LONG = {"dlc.py": (dlc, []), "opd.py": (opd, [])}

MACHINE = "b377a3"  # digest of `machine` where the lines below were made
REFERENCE = """
                  sync   reward gap    lag    ess    head   tokens cap    norm   rl     opd    end
default           55a652 af973c ca71d7 81f385 de3a4e 8d01f2 9d66fd 2af4f8 397417 3aef0c - f7b6ac
seed_1            fcd891 4737d4 3d108d e839a1 d4af03 2741d2 dad3a0 1f780f 2df27d a5013c - 241b9c
lag_2             6a4ca8 029a22 f1fa01 105114 9190ae c59e2d bb85be f717c0 1ec439 4232e1 - 9fcdf0
lag_0             174bd4 3039f2 a616ec 3292b5 90a3da 382101 5c5e14 3f6bc3 f94577 a17044 - fcb783
sync_4            3b3c5c 5fd7d7 4ebb9b 300585 e2a871 21839f 1df2b6 1783d3 b2f79a d37f1b - 7325ed
sync_never        fcd891 af973c ca71d7 81f385 de3a4e 8d01f2 9d66fd 2af4f8 397417 3aef0c - f7b6ac
ess_token         f9be03 479710 ba0c02 48a47a bca596 a624b9 89cc1d 7a5398 645102 ff4e25 - 436aae
mini_4            27d36a af4758 6e0f7c 315743 ab0e3f c756e4 7b7291 a60724 fecb7f 5320c2 - 3c81fc
mini_4_anchor     46c7c1 2af2c8 353ad1 ca35e6 0fc161 96256f 4c9c0f a66836 6fecbe 5b5474 - 259bc3
micro             55a652 af973c ca71d7 acf3ef c6f81b 6cdf8e 9d66fd 5535a0 f2e2a8 ba49d7 - 226e1e
sgd               dae837 984f2d 139972 3bd064 959df7 34ad35 194c15 529aac 8dc4b9 2d669f - 076076
int3              fcd891 e9553e c3690f 026ca1 1b489e 4ad07e 30a1f6 2efc78 e94f94 570c6f - edaf1a
int2              fcd891 2bf42a 23356c 083fc9 e28a7c 4f27b7 a31f2d 4bada6 337651 038718 - 333a8a
nvfp4_noise       fcd891 e44e31 f45103 b3233d f7fd9e 3de4c8 12d70a a1b984 90588a bfe68d - 998c3d
keep              55a652 f3ee42 0450ae ce000c fbfa38 a6cdd4 99ad71 d15c85 2f0ba1 7c8995 - 84bc50
exact             fcd891 51141a fcb6d8 50e4cc ef5056 bfb992 b2d8d5 b2c35d 509f45 b8ddd8 - a4cef5
full              3ba302 47183e 942a87 d8feec f36300 37ae6a 4a740c 79b6a5 106eea - ec01ea 6a18c6
topk              93f916 5ffb16 8c16ba f19517 45c77a be1a36 523b66 ceae36 b27d5b - ab5ebd d9ee46
sampled           dae837 66f89f 9c7505 5b281e 3f832d 02e7da 12e9bc cc0402 bd924f - 50849d bc903b
sampled_dlc       1ae18e cda843 8a0827 b31f98 fa32b4 25a2e8 bf757a f54475 6c2029 - 77a826 a8d4ab
forward           3b3c5c 751a47 dd92f2 6eea50 9903ec 74a6d9 0fb058 0f73be 5cfad3 - 1f7fa5 409eb3
jsd               4efc0d d4c6f3 f2516a 490bc1 b31a22 9e4683 c5bc1d 350189 298bd6 - b56d86 2752ac
async             93f916 33963e becc5a 973e75 e07823 f8d303 9b7f41 eea6f6 dd245e b1998f - 313f98
async_ess         eaf53c 0b90c2 8437f6 73d81b 64c77a f9f4b8 334abf 1dff3f 0b0e77 1bb1f4 - abae4e
async_opd         93f916 090f77 2b12fa 1dbb73 8d1c1e 16b810 d96ef9 b5443a 525481 - 673c61 26fc44
short_reinforce   74e77b c896e2 b81bf5 6f5c01 8619a8 1c126f 9238ab 6d8cee 2e1196 537a1a - f81525
short_is          7069ef ecd85c 9a78c5 145655 f65f4d 8e5ac6 26c966 cb51ff 6aac55 b19cdc - 573c90
short_tis         7069ef ecd85c 9a78c5 ec6f17 5a6727 3e67dc 26c966 83c3d4 71c460 28bc68 - 213f4d
short_mis         7069ef ecd85c 9a78c5 16dfa5 e78f75 e3a44e 26c966 942a13 b52472 25313b - 396462
short_sc          74e77b 6bf79e 762673 01aca7 d2ba34 571896 242e8c 5c033f 4810da 537a1a - faffd4
short_tis_sc      7069ef ecd85c 9a78c5 786c34 213997 b289a7 26c966 ae1488 bd70ab 28bc68 - eaca8d
short_ppo_anchor  b2b5f4 ecd85c 9a78c5 a799d4 f3eeaf 676388 26c966 bd57ee ee4f04 88d726 - 616d9a
short_ppo_stale   7069ef ecd85c 9a78c5 118d1a 4a4aba 002433 26c966 f4ed86 f0fd5e 8387c5 - 9d577b
short_ppo_sampler 7069ef ecd85c 9a78c5 f46aca 3026ec 854a00 26c966 6d27d7 8959c7 82b6ac - 898c52
short_dlc         7069ef ecd85c 9a78c5 66d59b b200e1 cac065 26c966 8dc36d fc4f12 6df65c - 5643af
short_dlc_tis     7069ef ecd85c 9a78c5 bbb103 db8ea3 df5ddc 26c966 b1a2b5 f196bd 89d388 - 60d127
dlc.py            0c8bf8 c4f108 ab6481 39ca2f 8bfce1 1cea2b 868a78 0e11d8 685ca7 403837 - 9a3e75
opd.py            198f8c 89621b 5a7e49 cd0a92 e35a97 b0af3e 08a7ca 47cff3 167220 - 2cdb86 9c51f8
"""
OTHER = """
bases             bb7862 5f571d
bias              5148b0 63567c e9562f eef625 f95f82 093a2f
budget            6026ce 3cbc87 5ad1fa 0602d7 693923 5f616e 7db77b b5ba98 ad2fdf
recipe            7dec39 606308 5ad32d bb331d
capacity          f45a5c
"""


def digest(x):
    return hashlib.sha256(repr(x).encode()).hexdigest()[:6]


def machine():
    """Digest of a few steps of training by torch and transformers alone: on another kind of CPU, or
    with another release of torch, rounding differs, and so does every number of this file."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=14, hidden_size=64, intermediate_size=160, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, bos_token_id=None, eos_token_id=13,
        pad_token_id=12, max_position_embeddings=64, tie_word_embeddings=True))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for _ in range(20):
        tokens = torch.randint(14, (128, 9))
        logp = model(tokens).logits.log_softmax(-1)
        loss = -logp[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest([float(loss), [float(p.detach().double().sum()) for p in model.parameters()]])


def columns(rows, name):
    """{group: {column: its values over the steps}}; `rows`: what `train` returned."""
    script = (SHORT | LONG)[name][0]
    groups = {k: v for k, v in GROUPS.items() if k != ("opd" if script is dlc else "rl")}
    number = lambda x: None if x is None else float(x)
    out = {k: {c: [number(r.get(c)) for r in rows] for c in v.split()} for k, v in groups.items()}
    out["end"] = {c: number(rows[-1].get(c)) for c in GROUPS["end"].split()}
    return out


def short(name):
    script, options = SHORT[name]
    cfg = script.Config(**dict(steps=12, device="cpu", out="run") | options)
    return columns(script.train(cfg), name)


def resumed(name):
    """The run `name`, stopped in step 7 and gone on with from what was saved after step 4."""
    script, options = SHORT[name]
    measure, calls = script.measure, []

    def stopping(*args):
        calls.append(0)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return measure(*args)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(script, "measure", stopping)
        with pytest.raises(KeyboardInterrupt):
            script.train(script.Config(steps=12, device="cpu", out="run", save_every=5, **options))
    assert len(calls) == 8
    return by_command(name, ["--resume", "run", "--steps", "12"])


def by_command(name, argv):
    """The columns of a run from its log and from what the command printed."""
    text = printed((SHORT | LONG)[name][0], argv)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    rows[-1] |= json.loads(re.search("^RESULT (.*)$", text, re.M)[1])
    return columns(rows, name)


def printed(script, argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert script.main(argv) in (None, 0)
    return out.getvalue()


def bases():
    """The weights of both tiny bases."""
    out = {}
    for steps in (350, 1200):
        model, _ = dlc.load_model(dlc.tiny_base(steps=steps), "float32", "cpu")
        sums = {n: float((p.double() ** 3).sum()) for n, p in model.named_parameters()}
        out[f"base_{steps}"] = sums
    return out


def bias():
    """The six tables of --bias."""
    tables = printed(dlc, ["--bias"]).strip().split("\n\n")
    return {f"table_{i}": [line.split() for line in x.splitlines()] for i, x in enumerate(tables)}


def budget():
    """A small calibration, and what it admits."""
    tiny = dict(steps=8, seeds=1, levels="0,0.4", device="cpu")
    b = opd.calibrate(opd.Config(**tiny))
    out = {k: b[k] for k in ("budget", "censored", "lag", "tolerance")}
    keys = ("noise", "mismatch", "quality", "fitted")
    out["curve"] = [{k: r[k] for k in keys} for r in b["curve"]]
    for name, how in dict(fp8={}, int3_noise=dict(weights="int3", kv="bf16", noise=0.1),
                          keep_lag_2=dict(keep_bf16="model.layers.1", lag=2),
                          lag_9=dict(lag=9)).items():  # fmt: skip
        found = opd.admit(opd.Config(**tiny | how), b)
        out[name] = {k: found[k] for k in ("mismatch", "by_source", "admitted")}
    return out


def recipe():
    """The sensitivity of each layer at int3, and the recipe."""
    out = dict(order=opd.sensitivity(opd.Config(weights="int3", device="cpu")))
    argv = "--sensitivity --weights int3 --target 0.05 --device cpu --out recipe.json"
    text = printed(opd, argv.split())
    found = json.loads(Path("recipe.json").read_text())
    assert found == json.loads(re.search("^RESULT (.*)$", text, re.M)[1])
    return out | {k: found[k] for k in ("model", "keep_bf16", "mismatch")}


def capacity():
    """Bytes a token, tokens and ratio of each row that is printed."""
    plain = printed(opd, ["--capacity", "16"])
    kept = printed(opd, ["--capacity", "2.5", "--keep-bf16", "model.layers.0.kv,model.layers.3.kv"])
    rows = re.findall(r"^(?:bf16|fp8).*? {2,}([\d,.]+) +([\d,]+) +([\d.]+)x$", plain + kept, re.M)
    assert len(rows) == 6
    return dict(rows=rows)


TOOLS = dict(bases=bases, bias=bias, budget=budget, recipe=recipe, capacity=capacity)


def line(found):
    """The digests of a run, one a group."""
    return [digest(found[k]) if k in found else "-" for k in GROUPS]


def compare(name, found, keys, stored):
    """Fail with the names and the numbers of the groups whose digests are not those of `stored`."""
    assert len(stored) == len(keys), f"{name}: {len(stored)} digests are stored, for {list(keys)}"
    wrong = {k: found.get(k) for k, d in zip(keys, stored)
             if (digest(found[k]) if k in found else "-") != d}  # fmt: skip
    told = "\n".join(f"  {k}: {str(v)[:300]}" for k, v in wrong.items())
    assert not wrong, f"{name}: {', '.join(wrong)} differ from the reference. Now:\n{told}"


def stored(table):
    return {name: digests for name, *digests in map(str.split, table.strip().splitlines())}


# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def same_machine():
    torch.set_num_threads(1)
    if machine() != MACHINE:
        pytest.skip(f"torch {torch.__version__} on this CPU rounds unlike where REFERENCE was made")


@pytest.fixture(autouse=True)
def folder(same_machine, made_base, tmp_path, monkeypatch, request):
    """An empty folder but for the tiny base and, where it is used, the teacher (slow to make)."""
    torch.set_num_threads(1)
    params = request.node.callspec.params
    name = params.get("name") or params["tool"]
    distils = name in ("bases", "budget") or name in SHORT | LONG and (SHORT | LONG)[name][0] is opd
    (tmp_path / "runs").mkdir()
    for base in [made_base()] + ([made_base(1200)] if distils else []):
        (tmp_path / "runs" / base.name).symlink_to(base)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("tool", TOOLS)
def test_tool(tool):
    found = TOOLS[tool]()
    compare(tool, found, list(found), stored(OTHER)[tool])


@pytest.mark.parametrize("name", SHORT)
def test_run(name):
    found = short(name)
    compare(name, found, GROUPS, stored(REFERENCE)[name])
    if name == "async_ess":  # else this run shows nothing of a sync
        assert 0 < sum(found["sync"]["synced"]) < 11


@pytest.mark.parametrize("name", RESUMED)
def test_resumed(name):
    compare(name, resumed(name), GROUPS, stored(REFERENCE)[name])


@pytest.mark.parametrize("name", LONG)
def test_long(name):
    found = by_command(name, ["--out", "run"])
    shown = [found["end"][k] for k in ("accuracy", "accuracy_sampler")]
    assert shown == {"dlc.py": [0.600, 0.632], "opd.py": [0.720, 0.672]}[name]
    compare(name, found, GROUPS, stored(REFERENCE)[name])


def show(names):
    """Print the lines of REFERENCE and OTHER, or the numbers behind those that are named."""
    torch.set_num_threads(1)
    made = {k: lambda k=k: short(k) for k in SHORT} | TOOLS
    made |= {k: lambda k=k: by_command(k, ["--out", "run"]) for k in LONG}
    print(f"machine {machine()}")
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    with contextlib.redirect_stdout(sys.stderr):
        dlc.tiny_base(), dlc.tiny_base(steps=1200)
    for name in names or made:
        (folder / name).mkdir()
        (folder / name / "runs").symlink_to(folder / "runs")
        os.chdir(folder / name)
        with contextlib.redirect_stdout(sys.stderr):
            found = made[name]()
        digests = map(digest, found.values()) if name in TOOLS else line(found)
        print(f"{name:18}" + " ".join(digests), flush=True)
        for group, values in found.items() if names else ():
            print(f"  {group}: {values}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    show(sys.argv[1:])
