"""Bad input through the real command lines: one line on standard error that names the thing, the
value and the remedy; exit status 2; nothing written, nothing trained, nothing followed. Ten cases
run as processes."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dlc
import opd

ROOT = Path(__file__).parents[1]
ROWS = [dict(prompt=f"{i}+1=", answer=str(i + 1)) for i in range(9)]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def jsonl(*rows):
    return "\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of everything that can be wrong, made once and never written to again."""
    torch.set_num_threads(1)
    w = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(w)
        shutil.move(dlc.tiny_base(steps=2, digits=3), "base")
        os.rmdir("runs")
        data(), models(), recipes(), runs()
    return w


def data():
    pair = lambda prompt, answer="2": dict(prompt=prompt, answer=answer)
    files = dict(
        good=jsonl(*ROWS), empty="", spaces=" \n\n\t\n", array=json.dumps(ROWS),
        half=jsonl(*ROWS, '{"prompt": "1+'), noanswer=jsonl(*ROWS, dict(prompt="1+1=")),
        null=jsonl(pair(None)), list=jsonl(pair("1+1=", ["2"])), blank=jsonl(pair(" ")),
        deep="[" * 200_000, nul=jsonl(*ROWS) + "\n\0\0", word=jsonl(*ROWS, '"prompt answer"'),
        followed=jsonl(*ROWS, pair("@base/config.json")),
        surrogate=jsonl(*ROWS, '{"prompt": "\\ud800", "answer": "2"}'),
        digits=jsonl(*ROWS, '{"prompt": ' + "1" * 9999 + ', "answer": "2"}'),
        long=jsonl(*ROWS, pair("1" * 125)),
        unread=jsonl(*ROWS, pair("1+x=")), words=jsonl(*ROWS, pair("one and one")))
    for name, text in files.items():
        Path(f"{name}.jsonl").write_text(text)
    Path("utf16.jsonl").write_bytes(jsonl(*ROWS).encode("utf-16"))
    Path("latin1.jsonl").write_bytes('{"prompt": "\xe9", "answer": "e"}'.encode("latin1"))


def model(name, config=None, tensors=None, drop=(), raw=()):
    """A copy of the base with its config, its weights or whole files changed."""
    shutil.copytree("base", name)
    if config:
        settings = json.loads(Path(name, "config.json").read_text()) | config
        settings = {k: v for k, v in settings.items() if v != "drop"}
        Path(name, "config.json").write_text(json.dumps(settings))
    if tensors:
        weights = load_file(f"{name}/model.safetensors")
        tensors(weights)
        save_file(weights, f"{name}/model.safetensors", dict(format="pt"))
    for x in drop:
        Path(name, x).unlink()
    for x, content in dict(raw).items():
        changed = content if isinstance(content, bytes) else content(Path("base", x).read_bytes())
        Path(name, x).write_bytes(changed)


def models():
    def put(key, row, value):
        return lambda weights: weights[key][row].fill_(value)

    embedding, norm, weights = "model.embed_tokens.weight", "model.norm.weight", "model.safetensors"
    model("truncated", raw={weights: lambda x: x[:-100]})
    model("nothing", raw={weights: b""})
    model("noconfig", drop=["config.json"])
    model("halfconfig", raw={"config.json": lambda x: x[:99]})
    model("untyped", config=dict(model_type="drop", architectures=None))
    model("future", config=dict(model_type="qwen99"))
    model("notokenizer", drop=["tokenizer.json", "tokenizer_config.json"])
    model("halftokenizer", raw={"tokenizer.json": lambda x: x[:200]})
    model("noeos", config=dict(eos_token_id=None), drop=["generation_config.json"])
    model("nan", tensors=put(norm, 3, float("nan")))
    model("inf", tensors=put(embedding, 12, float("inf")))
    model("part", tensors=lambda x: x.pop("model.layers.1.mlp.up_proj.weight"))
    model("wide", config=dict(hidden_size=96))
    auto = dict(AutoConfig="evil.C", AutoModelForCausalLM="evil.M")
    model("code", config=dict(model_type="custom", auto_map=auto),
          raw={"evil.py": b"import os\nos.mkdir('PWNED')\n"})
    model("pickled", drop=[weights], raw={"pytorch_model.bin": pickle.dumps(Evil())})
    model("torched", drop=[weights])
    torch.save(load_file(f"base/{weights}"), "torched/pytorch_model.bin")
    shards = json.dumps(dict(metadata={}, weight_map={embedding: "a.safetensors"})).encode()
    model("shardless", drop=[weights], raw={"model.safetensors.index.json": shards})
    odd = hf.AutoTokenizer.from_pretrained("base")
    odd.add_tokens(["x"])
    model("odd"), odd.save_pretrained("odd")
    model("stop", raw={"generation_config.json": b'{"eos_token_id": 11}'})
    model("stripped")  # its tokenizer drops what it does not know, perhaps the whole prompt
    tokenizer = json.loads(Path("stripped/tokenizer.json").read_text())
    tokenizer["normalizer"] = dict(type="Replace", pattern=dict(Regex="[^0-9+=]"), content="")
    Path("stripped/tokenizer.json").write_text(json.dumps(tokenizer))
    sizes = dict(vocab_size=14, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                 num_attention_heads=1)
    bert = hf.BertForMaskedLM(hf.BertConfig(**sizes, eos_token_id=13))
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=14, d_model=32, d_ff=32, num_layers=1, num_heads=1, d_kv=32))
    gemma = hf.Gemma2ForCausalLM(hf.Gemma2Config(
        **sizes, num_key_value_heads=1, head_dim=32, final_logit_softcapping=0.5, eos_token_id=13))
    for name, other in dict(bert=bert, t5=t5, gemma=gemma).items():
        dlc.write(Path(name), other.save_pretrained, odd.save_pretrained)
    Path("bare").mkdir(), Path("file").write_text("a file")
    # These are unusual and good: a padded vocabulary, an untied head, neither pad token nor pad id.
    grown = hf.AutoModelForCausalLM.from_pretrained("base")
    grown.resize_token_embeddings(32)
    again = hf.AutoTokenizer.from_pretrained("base")
    dlc.write(Path("padded"), grown.save_pretrained, again.save_pretrained)
    model("untied", config=dict(tie_word_embeddings=False),
          tensors=lambda x: x.update({"lm_head.weight": x[embedding].clone()}))
    settings = json.loads(Path("base/tokenizer_config.json").read_text())
    del settings["pad_token"]
    pad = json.dumps(settings).encode()
    model("nopad", config=dict(pad_token_id=None), raw={"tokenizer_config.json": pad})


def recipes():
    mine = dlc.checksum(hf.AutoModelForCausalLM.from_pretrained("base"))
    fit = opd.fingerprint(opd.check(opd.Config()))
    good = {"for": fit, "budget": 0.1, "censored": False, "lag": {"1": 0.1}, "seconds": 1.0}
    for name, x in dict(
        r_other=dict(model=["qwen3", 9, 9, 9, 9.0], keep_bf16=[]),
        r_list=["model.layers.0"],
        r_text=dict(model=mine, keep_bf16="model"),
        r_follow=dict(model=mine, keep_bf16=["@r_other.json"]),
        r_keys={},
        b_list=["for"],
        b_other=good | {"for": fit | dict(lr=7.0)},
        b_keys=dict(budget=1.0),
    ).items():
        Path(f"{name}.json").write_text(json.dumps(x))
    Path("r_half.json").write_text('{"model": ["qwen3"')
    Path("b_half.json").write_text('{"for": {"student"')


def runs():
    """A finished run of two steps, and copies of it with one thing broken in each."""
    dlc.train(dlc.Config(steps=2, prompts=2, group_size=2, model=str(Path("base").resolve()),
                         out="run", max_new_tokens=4, device="cpu"))
    config = json.loads(Path("run/config.json").read_text())

    def broken(name, **files):
        shutil.copytree("run", name)
        for file, change in files.items():
            file = Path(name, file.replace("_", "."))
            file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))

    edit = lambda **how: lambda _: json.dumps(config | how).encode()
    cut, junk = lambda x: x[:-500], lambda x: b"\x00garbage" * 9
    broken("run_noconfig", config_json=None)
    broken("run_extra", config_json=edit(temperature=0.7))
    broken("run_range", config_json=edit(lr=-1.0))
    broken("run_nostate", state_pt=None)
    broken("run_cutstate", state_pt=cut)
    broken("run_junk", state_pt=junk)
    broken("run_evil")
    torch.save(dict(rows=[], model=Evil()), "run_evil/state.pt")
    broken("run_model", config_json=edit(model=str(Path("untied").resolve())))
    broken("run_gone", config_json=edit(model="nowhere/at/all"))
    broken("run_nolog", metrics_jsonl=None)
    broken("run_shortlog", metrics_jsonl=lambda x: x[: len(x) // 2])


# The script, its command line ({w}: the folder above; {m}: with its base, two prompts a step), and
# what must be said: thing, value, remedy. A P in front: as a process.
CASES = """
dlc: --steps 1e3 | --steps 1e3 int
P dlc: --steps two | --steps two int
dlc: --steps= | --steps int
dlc: --steps 0 | --steps 1 or more
dlc: --prompts 0 | --prompts 1 or more
dlc: --digits 0 | --digits 0 1 or more
dlc: --digits -3 | --digits -3 1 or more
dlc: --digits few | --digits few int
dlc: --eval-rows 0 | --eval-rows 0 1 or more
dlc: --minibatches 0 | --minibatches 1 or more
dlc: --max-new-tokens -1 | --max-new-tokens 1 or more
dlc: --save-every 0 | --save-every 1 or more
dlc: --group-size 1 | --group-size 1 advantage
dlc: --lr 0 | --lr 0.0 above 0
dlc: --lr -1 | --lr -1.0 above 0
dlc: --lr nan | --lr nan above 0
dlc: --cap nan | --cap nan 0 or more
dlc: --clip -0.1 | --clip -0.1 0 or more
dlc: --noise inf | --noise inf 0 or more
dlc: --seed -1 | --seed -1 0 or more
dlc: --lag 2 --sync-every 0 | --lag 2 sync
dlc: --sync-every 1.5 | --sync-every 1.5 int
dlc: --sync-ess 2 | --sync-ess 2.0 from 0 to 1
dlc: --sync-ess nan | --sync-ess nan 0 or more
dlc: --lag -1 | --lag -1 0 or more
dlc: --lag 0 --async | --lag 0 --async 1 or more
dlc: --async --sampler vllm | --async --sampler torch
dlc: --sampler vllm {m} | pip install vllm
dlc: --weights FP8 | --weights FP8 nvfp4
dlc: --kv nvfp4 | --kv nvfp4 fp8_e5m2
dlc: --sampler sglang | --sampler sglang vllm
dlc: --ess-level batch | --ess-level batch sequence token
dlc: --optimizer lion | --optimizer lion adam sgd
dlc: --dtype float16 | --dtype float16 bfloat16
dlc: --minibatches 3 | --minibatches 3 divide 128
dlc: --device gpu {m} | cuda gpu
dlc: --correction | --correction value
dlc: --correction ppo | --correction ppo ppo_stale
dlc: train | train --help
P dlc: --bias=yes | yes --help
dlc: --temperature 0.7 | --temperature --help
dlc: --step 3 | --step --steps
dlc: --keep-bf16 model.layers.0.nope {m} | model.layers.0.nope model.layers.0.kv
dlc: --keep-bf16 @{w}/none.json | none.json --sensitivity
dlc: --keep-bf16 @{w} {m} | directory --sensitivity
P dlc: --keep-bf16 @{w}/r_half.json {m} | r_half.json --sensitivity
dlc: --keep-bf16 @{w}/r_list.json {m} | r_list.json --sensitivity
dlc: --keep-bf16 @{w}/r_keys.json {m} | r_keys.json keep_bf16 --sensitivity
dlc: --keep-bf16 @{w}/r_text.json {m} | keep_bf16 no such module
dlc: --keep-bf16 @{w}/r_other.json {m} | r_other.json other weights
dlc: --keep-bf16 @{w}/r_follow.json {m} | '@r_other.json' no such module
dlc: --data {w}/empty.jsonl {m} | empty.jsonl no rows
dlc: --data {w}/spaces.jsonl | spaces.jsonl no rows
P dlc: --data {w}/half.jsonl | half.jsonl line 10 must be
dlc: --data {w}/noanswer.jsonl | noanswer.jsonl line 10 must be answer
dlc: --data {w}/null.jsonl | null.jsonl line 1 must be
dlc: --data {w}/list.jsonl | list.jsonl line 1 must be
dlc: --data {w}/blank.jsonl | blank.jsonl line 1 empty
dlc: --data {w}/deep.jsonl | deep.jsonl line 1 must be
dlc: --data {w}/nul.jsonl | nul.jsonl line 10 must be
dlc: --data {w}/word.jsonl | word.jsonl line 10 must be
dlc: --data {w}/array.jsonl | array.jsonl line 1 must be
dlc: --data {w}/digits.jsonl | digits.jsonl line 10 must be
dlc: --data {w}/surrogate.jsonl | surrogate.jsonl line 10 must be
dlc: --data {w}/utf16.jsonl | utf16.jsonl line 1
dlc: --data {w}/latin1.jsonl | latin1.jsonl line 1
dlc: --data {w} | directory
dlc: --data {w}/missing.jsonl | missing.jsonl No such file
dlc: --data /dev/null {m} | /dev/null no rows
dlc: --data {w}/long.jsonl {m} --max-new-tokens 4 | long.jsonl 125 tokens 124 --max-new-tokens 4
dlc: --model {w}/base --max-new-tokens 128 | --max-new-tokens context
dlc: --data {w}/words.jsonl --model {w}/stripped --prompts 2 | words.jsonl 'one and one' empty
dlc: --data {w}/unread.jsonl --model {w}/odd --prompts 2 | unread.jsonl '1+x=' no token for
dlc: --data {w}/good.jsonl --model {w}/base --prompts 9 | --prompts 9 has 8
dlc: --model {w}/none | --model /none no causal LM
P dlc: --model nobody/no-such-model | --model nobody/no-such-model no causal LM
dlc: --model ../*? | --model ../*? no causal LM
dlc: --model {w}/bare | bare no causal LM
dlc: --model {w}/file | file no causal LM
P dlc: --model {w}/truncated | truncated no causal LM
dlc: --model {w}/nothing | nothing no causal LM
dlc: --model {w}/noconfig | noconfig no causal LM
dlc: --model {w}/halfconfig | halfconfig no causal LM
dlc: --model {w}/untyped | untyped no causal LM
dlc: --model {w}/future | future no causal LM qwen99
dlc: --model {w}/notokenizer | notokenizer no tokenizer tokenizer.json
dlc: --model {w}/halftokenizer | halftokenizer no causal LM
dlc: --model {w}/noeos | noeos no stop token generation_config.json
dlc: --model {w}/nan | Qwen3ForCausalLM nan not finite choose another
dlc: --model {w}/inf | Qwen3ForCausalLM not finite choose another
dlc: --model {w}/part | part model.layers.1.mlp.up_proj.weight missing
dlc: --model {w}/wide | wide no causal LM
P dlc: --model {w}/code | code no causal LM code
P dlc: --model {w}/pickled | pickled no causal LM safetensors
dlc: --model {w}/torched | torched no causal LM safetensors
dlc: --model {w}/shardless | shardless no causal LM
dlc: --model {w}/bert | BertLMHeadModel off body times head choose another
dlc: --model {w}/t5 | t5 no causal LM
dlc: --model {w}/gemma | Gemma2ForCausalLM soft-capping choose another
dlc: --out {w}/file {m} | file directory
dlc: --out {w}/file/below {m} | below directory
dlc: --out {w}/run | --out run new or an empty
dlc: --resume {w}/run --steps 1 | --resume run --steps
dlc: --resume {w}/run --lag 3 | --resume run lag
dlc: --resume {w}/nowhere | nowhere config.json
dlc: --resume {w}/run_noconfig | run_noconfig config.json
dlc: --resume {w}/run_extra | run_extra version
dlc: --resume {w}/run_range | --lr -1.0 above 0
dlc: --resume {w}/run_nostate | run_nostate state.pt
dlc: --resume {w}/run_cutstate | run_cutstate broken
dlc: --resume {w}/run_junk | run_junk broken
P dlc: --resume {w}/run_evil | run_evil broken
dlc: --resume {w}/run_model | run_model weights not those
dlc: --resume {w}/run_gone | --model nowhere/at/all
opd: --model {w}/base | --model --help
opd: --student {w}/base | --student base --teacher
opd: --loss kl | --loss kl full
opd: --loss-k 0 | --loss-k 0 1 or more
opd: --seeds 0 --calibrate | --seeds 0 1 or more
opd: --tolerance nan --calibrate | --tolerance nan 0 or more
opd: --target -1 --sensitivity | --target -1.0 0 or more
opd: --levels 0,x --calibrate --student {w}/base --teacher {w}/base | 'x'
P opd: --admit | --budget budget.json --calibrate
opd: --admit --budget {w}/b_half.json | b_half.json not a budget --calibrate
opd: --admit --budget {w}/b_list.json | b_list.json not a budget --calibrate
opd: --admit --budget {w}/b_keys.json | b_keys.json not a budget --calibrate
opd: --admit --budget {w}/b_other.json | b_other.json lr 7.0 calibrate
opd: --capacity 0 | --capacity 0.0 no room more
opd: --capacity nan | --capacity nan no room more
opd: --capacity 1e-9 | --capacity 1e-09 more
opd: --capacity 1 --student {w}/bare --teacher {w}/bare | --student bare
opd: --capacity 1 --keep-bf16 model.layers.99.kv | model.layers.99.kv 28 layers
opd: --student {w}/nan --teacher {w}/base | Qwen3ForCausalLM not finite choose another
opd: --student {w}/base --teacher {w}/part | --teacher part missing
opd: --student {w}/base --teacher {w}/bert | bert tokenizer
opd: --student {w}/base --teacher {w}/odd | --teacher odd tokenizer
opd: --student {w}/base --teacher {w}/stop | --teacher stop tokens [11] [13]
opd: --resume {w}/run | --resume run another script
""".strip().splitlines()
IN_PROCESS = [x for x in CASES if not x.startswith("P ")]
PROCESSES = [x.removeprefix("P ") for x in CASES if x.startswith("P ")]


def pictures(world):
    return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in world.rglob("*"))


@pytest.fixture
def refuse(world, tmp_path, monkeypatch):
    """refuse(case, run): `run(script, argv)` -> (status, stdout, stderr) must refuse, and write and
    train nothing. Ours is one line; that of a value that is not of the option's type is tyro's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    before = pictures(world)

    def check(case, run):
        script, line = case.split(": ", 1)
        line = line.format(w=world, m=f"--model {world}/base --prompts 2")
        command, words = line.rsplit(" | ", 1)
        code, out, err = run(script, shlex.split(command))
        assert code == 2 and "Traceback" not in err, (code, err)
        ours = err.startswith("error: ") and err.count("\n") == 1
        assert ours or "For full helptext" in err, err
        assert not (missing := [x for x in words.split() if x not in err]), (missing, err)
        assert "RESULT" not in out and not list(tmp_path.iterdir()), "something was begun"
        assert pictures(world) == before

    return check


@pytest.mark.parametrize("case", IN_PROCESS)
def test_bad_input(refuse, case, capsys, monkeypatch):
    def untrained(*_, **__):
        raise AssertionError("the tiny base would have been trained first")

    def run(script, argv):
        start = time.process_time()
        try:
            code = dict(dlc=dlc, opd=opd)[script].main(argv)
        except SystemExit as e:  # tyro's
            code = e.code
        assert time.process_time() - start < 5
        return code, *capsys.readouterr()

    monkeypatch.setattr(dlc, "tiny_base", untrained)
    monkeypatch.setattr(opd, "tiny_base", untrained)
    capsys.readouterr()
    refuse(case, run)


@pytest.mark.parametrize("case", PROCESSES)
def test_bad_input_as_a_process(refuse, case):
    def run(script, argv):
        argv = [sys.executable, ROOT / f"{script}.py", *argv]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    refuse(case, run)


def test_there_are_enough():
    assert len(IN_PROCESS) >= 50 and len(PROCESSES) >= 10
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("name", ["run", "run_nolog", "run_shortlog"])
def test_an_option_given_again_wins(world, tmp_path, monkeypatch, name):
    """And the log, whatever is left of it, is written again from the state."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world / name, "again")
    assert dlc.main("--resume again --steps 3 --clip 0.5".split()) == 0
    rows = [json.loads(line) for line in open("again/metrics.jsonl")]
    assert [r["step"] for r in rows] == [0, 1, 2]
    before = [json.loads(line) for line in open(world / "run/metrics.jsonl")]
    assert all({**a, **b} == a for a, b in zip(rows, [r for r in before]))


@pytest.mark.parametrize("how", [
    "--model {w}/padded", "--model {w}/untied", "--model {w}/nopad",
    "--model {w}/base --data {w}/crlf.jsonl"])
def test_unusual_and_good(world, tmp_path, monkeypatch, how, capsys):
    """A refusal too many: a padded vocabulary, an untied head, no pad token, Windows' lines."""
    monkeypatch.chdir(tmp_path)
    windows = b"\xef\xbb\xbf" + jsonl(*ROWS).replace("\n", "\r\n").encode()
    (world / "crlf.jsonl").write_bytes(windows)
    how = how.format(w=world) + " --steps 1 --prompts 2 --group-size 2 --max-new-tokens 4"
    assert dlc.main(shlex.split(how)) == 0
    assert "RESULT" in capsys.readouterr().out
    (world / "crlf.jsonl").unlink()


def test_a_folder_that_cannot_be_written(world, tmp_path, monkeypatch, capsys):
    """Root may write anywhere, so the answer of the system is played."""
    def refused(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert dlc.main(["--model", str(world / "base"), "--out", "new"]) == 2
    err = capsys.readouterr().err
    assert "Permission denied: 'new'" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


