"""The command line of dlc.py: options, refusals before any work, data files, output. In process
where it can be, so that a case costs milliseconds."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dlc

ROOT = Path(__file__).parents[1]
OPTIONS = """correction weights kv keep-bf16 noise sync-every sync-ess lag async ess-level model
    base data digits reward steps prompts group-size minibatches micro-batch lr optimizer dtype
    scale-advantage clip cap sampler sampler-memory head-k max-new-tokens seed device out resume
    save-every eval-rows eval-every bias""".split()
GOOD = [json.dumps(dict(prompt=f"{i}+1=", answer=str(i + 1))) for i in range(4)]
FILES = dict(
    broken='{"prompt": "1', missing='{"prompt": "1+1="}', array='["1+1=", "2"]', few=GOOD[0],
    nothing=None, empty='{"prompt": "", "answer": "2"}',
    blank='{"prompt": "1+1=", "answer": " "}', latin1='{"prompt": "\xe9", "answer": "e"}',
)  # fmt: skip


@pytest.fixture
def cli(quick_base, tmp_path, monkeypatch, capsys):
    """cli("--a 1") -> (exit status, stdout, stderr), in a folder of bad files. cli.bases counts how
    often the tiny base, seconds of training for a user, was asked for."""
    monkeypatch.chdir(tmp_path)
    for name, last in FILES.items():
        Path(name).write_bytes("\n".join([] if last is None else [*GOOD, last]).encode("latin1"))
    Path("bare").mkdir(), Path("full").mkdir(), Path("full/x").write_text("")

    def run(command):
        capsys.readouterr()
        try:
            code = dlc.main(shlex.split(command))
        except SystemExit as e:
            code = e.code
        return code or 0, *capsys.readouterr()

    run.bases = []
    monkeypatch.setattr(dlc, "tiny_base", lambda **_: run.bases.append(1) or quick_base)
    return run


def python(*argv, cwd):
    command = [sys.executable, str(ROOT / "dlc.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_help_names_every_option_with_its_default(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    done = python("--help", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    text = " ".join(done.stdout.replace("│", " ").split())
    assert all(f" --{option} " in text for option in OPTIONS)
    small, large = dlc.check(dlc.Config()), dlc.check(dlc.Config(model="x"))
    for f in dataclasses.fields(dlc.Config):
        if f.name in ("steps", "prompts", "lr", "max_new_tokens", "save_every", "eval_rows"):
            a, b = getattr(small, f.name), getattr(large, f.name)
            a = "digits + 1" if f.name == "max_new_tokens" else a
            assert f"(default: {a}; {b} with --model)" in text
        elif f.default not in (None, "", False):
            assert f"(default: {f.default})" in text, f.name


BAD = """--steps -1|--steps 0|--lr nan|--lr 0|--noise nan|--noise -1|--group-size 1|--lag -1
--sync-ess 1.5|--sync-ess nan|--sync-every -1|--minibatches 4 --prompts 2 --group-size 3
--micro-batch 0|--minibatches 0|--head-k 0|--max-new-tokens 0|--save-every 0|--seed -1
--device tpu|--device cuda:x|--model bare|--model ./none|--seed 99999999999999999999|--data none
--data .|--out full|--out full/x|--lag 0 --async|--async --sampler vllm
--resume full|--resume none""".replace("\n", "|").split("|")
BAD += [f"--data {x} --prompts 1" for x in "broken missing array empty blank latin1".split()]
BAD += [] if torch.cuda.is_available() else ["--device cuda"]
WORDS = """--correction ppo|--weights fp4|--kv int8|--steps two|--optimizer lion|--dtype float16
--ess-level batch|--sampler sglang|--max-lag 2|--resum full|--stepz 3|--correctio dlc|--async yes
train""".replace("\n", "|").split("|")


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_and_status_2(cli, command):
    """A traceback, a message without the option and its value, or work done before the refusal."""
    code, out, err = cli(command)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: "), err
    option, value = command.split()[:2]
    file = option in ("--data", "--resume", "--out")  # of which the system tells the path alone
    assert (option in err or file) and (value in err or option == "--async"), err
    assert not Path("runs").exists() and len(list(Path("full").iterdir())) == 1
    assert not cli.bases, "the tiny base would have been trained first"


@pytest.mark.parametrize("command", WORDS)
def test_a_word_that_is_no_option_or_choice(cli, command):
    """The command line's own check: it names the word, and what may stand there."""
    code, out, err = cli(command)
    assert code == 2 and out == "" and "Traceback" not in err
    assert command.split()[-1] in err or command.split()[0] in err, err
    assert not Path("runs").exists() and not cli.bases


@pytest.mark.parametrize("command, words", [
    ("--keep-bf16 model.layers.9", "keep_bf16 model.layers.9 model.layers.0"),
    ("--data few", "--prompts 16"), ("--data nothing", "--data nothing"),
    ("--prompts 9999", "--prompts 9999")])  # fmt: skip
def test_what_only_the_model_and_the_data_tell(cli, command, words):
    code, out, err = cli(command)
    assert code == 2 and err.count("\n") == 1 and not Path("runs").exists()
    assert all(word in err for word in words.split()), err


def test_a_refusal_as_a_process(tmp_path):
    done = python("--lag", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--lag -1" in done.stderr and not list(tmp_path.iterdir())
    done = python("--correction", "grpo", cwd=tmp_path)
    assert done.returncode == 2 and "grpo" in done.stderr and "dlc_tis" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_a_run_prints_columns_table_and_result(cli):
    for i in (1, 2):  # a second run never touches the first
        code, out, err = cli("--steps 1 --prompts 2 --group-size 2 --digits 3 --eval-rows 9")
        assert code == 0 and Path(f"runs/dlc-dlc-{i}/state.pt").is_file()
    rows = [x.split() for x in out.splitlines()]
    names = "step version reward discrepancy lag".split()
    header = next(i for i, x in enumerate(rows) if x[:5] == names)
    assert rows[header + 1][:2] == ["0", "0"] and len(rows[header + 1]) == len(rows[header])
    assert re.search(r"before +after\n.*\d\.\d{3} +\d\.\d{3}\n.*\d\.\d{3} +\d\.\d{3}\n"
                     r"(\{'prompt': '\d{3}=', .*\}\n){3}RESULT", out)
    result = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert {"accuracy_base", "accuracy", "accuracy_sampler_base", "accuracy_sampler"} <= set(result)
    code, _, err = cli("--resume runs/dlc-dlc-2 --lag 1 --steps 2")
    assert code == 2 and "--resume" in err and "lag" in err and err.count("\n") == 1
    code, *_ = cli("--resume runs/dlc-dlc-2 --steps 2")  # one step more, in the same folder
    steps = [json.loads(x)["step"] for x in open("runs/dlc-dlc-2/metrics.jsonl")]
    assert code == 0 and steps == [0, 1] and len(list(Path("runs").iterdir())) == 2


@pytest.mark.parametrize("text", [
    "\n".join(GOOD), "\ufeff" + "\n".join(GOOD) + "\n", "\r\n".join(GOOD) + "\r\n",
    "\n".join(x[:-1] + ', "extra": [1]}' for x in GOOD),
    "\n".join(x[:-1] + ', "note": "\u2028"}' for x in GOOD)],
    ids="no-last-newline bom crlf extra-field line-separator".split())  # fmt: skip
def test_data_of_ones_own(cli, monkeypatch, text):
    """U+2028 may stand inside a JSON string: only a newline ends a line of JSONL."""
    seen = []
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda *args: seen.append(args[1]) or 0.0)
    Path("my.jsonl").write_bytes(text.encode())
    code, _, err = cli("--steps 1 --prompts 2 --group-size 2 --data my.jsonl --out mine")
    assert code == 0, err
    shown = json.loads(Path("mine/metrics.jsonl").read_text())["sample"]
    lines = [json.loads(x) for x in text.removeprefix("\ufeff").split("\n") if x.strip()]
    assert (shown["prompt"], shown["answer"]) in [(x["prompt"], x["answer"]) for x in lines]
    assert all({k: v for k, v in row.items() if k != "ids"} in lines for row in seen)


def test_bias_prints_every_correction(cli):
    """In each of six tables the five terms are shares of one bias: a row sums to 100 %."""
    code, out, _ = cli("--bias")
    assert code == 0 and not Path("runs").exists()
    rows = re.findall(r"^(\w+) +([\d.]+)((?: +-?[\d.]+){5})$", out, re.M)
    assert [r[0] for r in rows] == list(dlc.CORRECTIONS) * 6
    assert all(abs(sum(map(float, r[2].split())) - 100) < 0.4 for r in rows)


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="README.md missing")
def test_every_readme_command_parses():
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    commands = re.findall(r"python dlc\.py(.*)", "\n".join(blocks).replace("\\\n", " "))
    assert commands
    for command in commands:
        argv = shlex.split(re.split(r"&&|;|\|", command)[0], comments=True)
        if "--help" not in argv:
            dlc.parse(dlc.Config, ["--out" if x == "--resume" else x for x in argv], "")
