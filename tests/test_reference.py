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

SMALL = dict(prompts=8, eval_rows=50, device="cpu")
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
    "micro": (dlc, dict(minibatches=2, micro_batch=16, scale_advantage=True)),
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
    "jsd": (opd, dict(loss="jsd", micro_batch=8, keep_bf16="model.layers.1")),
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
default           669606 cb85c8 8b0b45 69251b 8da2e1 fd94c7 4b886e 8e2f8c f06acb 775bb8 - 474f02
seed_1            d754d1 35faae 120652 ab2824 f538bb a10ab8 6dc4aa 3e7550 a58a1e a7cb76 - ada816
lag_2             6a4ca8 3439bb 0ba8bb 134e90 e901ad e7eaec 631a16 c0bd42 0d9e0c 152c95 - a65c72
lag_0             174bd4 7e8ec9 8fc914 3292b5 90a3da 08b9c1 98d150 e074d1 3f7e05 a17044 - 186652
sync_4            3b3c5c c09ff7 d66cad 18fa59 1ff5be 26bfe8 79a4d1 056db4 a506ec 8b490b - c94eb5
sync_never        fcd891 21391d 016f42 c3fde6 710a21 4dd537 bb845d 192ae7 23eb90 ba044e - 8d22c4
ess_token         3060c0 e7e79b e8c9bd ebd5ef 50d1b4 25fa6b 746a11 af6329 314c4a 8b91ca - 291879
mini_4            3ba302 b62e05 8df1db 4d7937 5510ce 344a36 047b8c ada2a0 e51160 d0b115 - 4441fb
mini_4_anchor     7ab47d a7227d 1b4374 782f15 7bf32c c04e9c c3e602 173de6 5d0e16 238952 - 763b3c
micro             669606 09625b d48214 787272 d63714 5454de 8fef4c bd9526 f038dd 1c1271 - e517e5
sgd               dae837 5a6295 127aad f1e8fc 1f5100 6bbc6c 0ed74c 1c2090 06f43c 5adfbe - 96f2bf
int3              ee6640 55aa86 fc8e26 dbbf91 410ca5 02ec38 d8d586 c11b29 4cae8a 5c523d - b4c49d
int2              fcd891 5f0587 fc4f0a 3292b5 90a3da 1eeda9 c646b9 55eb4c 611daf a17044 - 80581d
nvfp4_noise       32e48d 185522 c83698 cd4da2 f78897 86bb7c 20e6b0 50a0e4 70b28a 806666 - aebb6a
keep              af8c09 5e864d 8f8513 bf9d34 53d8b1 e61b47 f00c43 ea7b00 c22503 5c33ae - 83bf1f
exact             7994e5 78d563 893659 3e3559 2a6483 cee1be cfbfb3 9722b3 4342f4 28df7d - 3e26d0
full              fc2869 c9b455 53e8b6 da1aa4 a59fde d55700 04a64d 6b5b7a 870d7b - a739eb bb54b0
topk              93f916 726af2 4b9b26 192a3f 8e4ae7 e492de d19743 d91a2e 03cc25 - b206f2 d96050
sampled           32e48d dc3a62 035fd1 99f05d 8014dc caf9b9 1151bb 3a72ea 8bd576 - 89adb7 b9e52d
sampled_dlc       b6992a c20951 23ad83 7bffd2 0a554e 6141e8 fe4bf2 60b07f 2abf99 - f49593 06e95d
forward           3b3c5c 289d91 be87ae 76e9a6 adb56e f07daa 18185d 03f65c 233994 - e87b9e 155e57
jsd               ee6640 2662dc a9807e 3655b9 964c52 9f136f 22a4ed c666e7 2fc3f5 - 6be234 818386
async             93f916 0f6958 1fb1af b84de7 a67364 920624 859ccf 54699f 03610e f24f6b - 3f78e5
async_ess         01ca90 16c9f6 546da9 6ae480 3e0142 70564f 0ee001 864c04 3f044f 8401ae - 595b45
async_opd         93f916 e25a09 169bb1 53e806 2adca2 095bdf 52ed4f 6da7d4 f36f9d - 193796 dedc1f
short_reinforce   225926 3c7bff f2e81c 7141eb 145d79 b5deef 2ef2ca 357c7b 26625b 537a1a - a5aae9
short_is          225926 68b1f7 194cd4 2a50fe 94861b 3072ea 2ef2ca 39bd54 5f0993 6dfc38 - 94e801
short_tis         225926 44f46c 3d5b64 2a50fe 94861b a34098 f0b374 3e6246 b3fe8d 28bc68 - 464e83
short_mis         225926 68b1f7 6533e5 d2fd8a 5bd43c 3cc2f7 2ef2ca e14cef 4dc340 3427b4 - 0e2a30
short_sc          225926 ed2899 8107a9 e9ec2e bdd4a4 9ad760 2ef2ca dd6764 8b6dcc 537a1a - e7a429
short_tis_sc      225926 68b1f7 15f419 6794dd ad40eb 042b64 2ef2ca 39bd54 c7d7d4 28bc68 - a31992
short_ppo_anchor  225926 44f46c b2ed7b 3d21d3 26c317 213a0f 14c8ad ebe6da f79af6 2424d1 - 464e83
short_ppo_stale   225926 9d2527 f44daa 243aed e1f95c 20b37e fe5468 70ec9c 768f7a 00caba - 2e6cf4
short_ppo_sampler 225926 68b1f7 5b6dd7 bd8ad4 47a046 255000 c1e42f 981dbe eb8436 ae21b9 - 7de8c0
short_dlc         225926 5b914f 03420d 5dfdeb 90bfba dbe41e 70c19f 981dbe 14363a a2eba8 - 431afe
short_dlc_tis     225926 2ad488 ad6f4e c64951 d92306 68b581 ac80df 981dbe 70242b 6ff782 - bc1497
dlc.py            15476d dc9dae 99aa28 8cd938 0b9d91 a27958 4226e8 2013aa f458e6 9fd59f - 13445b
opd.py            32764f dc3cc2 4e0270 afd18d c5c9b0 a6ad65 916164 5e45fb 195c30 - 73e9b7 a1f81b
"""
OTHER = """
bases             ea382a 3b536e
bias              43b3e5 5148b0 65a2a6 e9562f 7e1823 f95f82 45a75d
budget            02dd79 3cbc87 eb526a 0602d7 08f7f5 d91453 ccfd16 4a648a a1e13a
recipe            7832c9 933466 4f53cd b8b77a
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
    cfg = script.Config(**SMALL | dict(steps=12, out="run") | options)
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
            script.train(script.Config(**SMALL, steps=12, out="run", save_every=5, **options))
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
    for steps in (90, 300):
        model, _ = dlc.load_model(dlc.tiny_base(steps=steps), "float32", "cpu")
        sums = {n: float((p.double() ** 3).sum()) for n, p in model.named_parameters()}
        out[f"base_{steps}"] = sums
    return out


def bias():
    """What --bias prints, and its six tables."""
    tables = printed(dlc, ["--bias"]).strip().split("\n\n")
    return {f"table_{i}": [line.split() for line in x.splitlines()] for i, x in enumerate(tables)}


def budget():
    """A small calibration, and what it admits."""
    tiny = SMALL | dict(steps=8, seeds=1, levels="0,0.4")
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
    for base in [made_base()] + ([made_base(300)] if distils else []):
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
    assert shown == {"dlc.py": [0.656, 0.632], "opd.py": [0.718, 0.728]}[name]
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
        dlc.tiny_base(), dlc.tiny_base(steps=300)
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
