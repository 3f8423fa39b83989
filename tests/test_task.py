"""The default task, digits to sort, and what replaces it: --digits, --reward FILE.py, the reward
of a real model. A docstring says what a failure would mean."""

import json
import shlex
from pathlib import Path

import pytest
import torch

import dlc
import opd
from sampler import Rollout

SMALL = "--steps 1 --prompts 2 --group-size 2 --eval-rows 5 --device cpu --out run"


@pytest.fixture
def here(made_base, tmp_path, monkeypatch):
    """An empty folder, and the tiny base of three digits for every other."""
    monkeypatch.chdir(tmp_path)
    dlc.reward_of.cache_clear()  # by name, and every test has its own mine.py
    for script in (dlc, opd):
        monkeypatch.setattr(script, "tiny_base", lambda **_: made_base(40, digits=3))
    return made_base(40, digits=3)


def data(base, **how):
    """All rows of the default task: (training, held out)."""
    model, tokenizer = dlc.load_model(base, "float32", "cpu")
    return dlc.load_data(dlc.check(dlc.Config(device="cpu", **how)), tokenizer, model)


def rows():
    return [json.loads(line) for line in open("run/metrics.jsonl")]


# ---- The task.


@pytest.mark.parametrize("digits, count, held_out", [(1, 10, 2), (3, 990, 190), (16, 5000, 500)])
def test_every_prompt_is_there_once(here, digits, count, held_out):
    """A prompt that is trained on would be among those that measure it."""
    trained_on, held = data(here, digits=digits, prompts=2)
    prompts = [row["prompt"] for row in trained_on + held]
    assert len(set(prompts)) == len(prompts) >= count and len(held) >= held_out
    for row in trained_on + held:
        text = row["prompt"].removesuffix("=")
        assert len(text) == digits and text.isdigit()
        assert row["answer"] == "".join(sorted(text)) and len(row["ids"]) == digits + 1
    assert data(here, digits=digits, prompts=2) == (trained_on, held)  # the same in every run


def test_the_base_is_trained_on_other_digits(here, tmp_path, monkeypatch):
    """Else its accuracy before training is one of prompts that it knows."""
    seen, randint = [], torch.randint

    def spy(*args, **how):
        seen.append(randint(*args, **how))
        return seen[-1]

    monkeypatch.undo()  # the real tiny_base
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(torch, "randint", spy)
        base = dlc.tiny_base(steps=40)
    known = {"".join(map(str, x)) + "=" for batch in seen for x in batch.tolist()}
    trained_on, held = data(base)
    assert len(known) == 40 * 128 and not known & {row["prompt"] for row in trained_on + held}


def test_the_length_of_an_answer_follows_the_digits(here):
    for digits in (1, 3, 16):
        assert dlc.check(dlc.Config(digits=digits)).max_new_tokens == digits + 1
        assert opd.check(opd.Config(digits=digits)).max_new_tokens == digits + 1
    assert dlc.main(shlex.split(f"--digits 3 {SMALL}")) == 0
    sample = rows()[0]["sample"]
    assert len(sample["prompt"]) == 4 and rows()[0]["length"] <= 4


def test_digits_that_leave_too_few_prompts(here, capsys):
    """Ten prompts of one digit: two are held out, eight are fewer than a batch."""
    assert dlc.main(shlex.split(f"--digits 1 {SMALL}".replace("prompts 2", "prompts 9"))) == 2
    assert "--prompts 9: --digits 1 has 8 to train on" in capsys.readouterr().err
    assert dlc.main(shlex.split(f"--digits 1 {SMALL}")) == 0


# ---- The reward, without --model and with it.


def graded(base, tokens, **how):
    """The reward of a response to "321=", a text of the tiny base's tokens."""
    model, tokenizer = dlc.load_model(base, "float32", "cpu")
    y = torch.tensor([tokenizer.convert_tokens_to_ids(tokens.split())])
    rollout = Rollout(torch.cat([y[:, :1], y], 1), torch.tensor([1]), y > -1, *[None] * 6)
    stop = torch.tensor(tokenizer.convert_tokens_to_ids(["<eos>"]))
    row, cfg = dict(prompt="321=", answer="123"), dlc.check(dlc.Config(device="cpu", **how))
    (found,) = dlc.grade(rollout, [row], stop, tokenizer, cfg)
    return found["reward"]


@pytest.mark.parametrize("tokens, exact, number", [
    ("1 2 3 <eos>", 1, 1),
    ("1 2 3", 0, 1),  # it goes on
    ("1 <pad> 2 3 <eos>", 0, 1), ("<pad> 1 2 3 <eos>", 0, 1), ("1 2 3 <pad> <eos>", 0, 1),
    ("1 2 <eos>", 0, 0), ("1 2 3 4 <eos>", 0, 0), ("0 1 2 3 <eos>", 0, 1), ("<eos>", 0, 0)])
def test_the_tiny_models_reward_sees_every_token(here, tokens, exact, number):
    """A special token that decoding leaves out would make a wrong answer right: the policy would
    learn to write it. A real model's reward reads the number."""
    assert graded(here, tokens) == exact
    assert graded(here, tokens, model=str(here)) == number


# ---- --reward FILE.py


REWARDS = dict(  # name -> the file's text
    half="def reward(completion, row, stopped):\n    return 0.5 * (row['answer'] > '' and stopped)",
    boolean="def reward(completion, row, stopped):\n    return len(completion) % 2 == 1",
    whole="def reward(completion, row, stopped):\n    return len(completion) % 2",
    imports="import math\nONE = math.cos(0)\n\ndef reward(completion, row, stopped):\n"
            "    return helper(completion)\n\ndef helper(text):\n    return ONE * (len(text) % 2)")


def by_rule(name, sample):
    text = sample["completion"]
    return 0.5 * sample["stopped"] if name == "half" else float(len(text) % 2)


@pytest.mark.parametrize("script", [dlc, opd])
@pytest.mark.parametrize("name", REWARDS)
def test_the_file_is_what_rewards(here, script, name):
    """In every step and in the accuracies; a bool and an int are numbers."""
    Path("mine.py").write_text(REWARDS[name])
    how = f"--digits 3 --reward mine.py {SMALL}".replace("--steps 1", "--steps 2")
    assert script.main(shlex.split(how)) == 0
    logged = rows()
    for row in logged:
        assert row["sample"]["reward"] == by_rule(name, row["sample"])
        assert type(row["sample"]["reward"]) is float
    assert 0 <= logged[0]["reward"] <= (0.5 if name == "half" else 1)
    held = logged[-1]["held_out"]
    assert len(held) == 3 and all(x["reward"] == by_rule(name, x) for x in held)
    if name == "half":  # nothing earns the full reward
        assert logged[-1]["accuracy"] == logged[-1]["accuracy_base"] == 0
    assert json.loads(Path("run/config.json").read_text())["reward"] == "mine.py"


def test_a_reward_is_what_is_learned(here):
    """Not only logged: the advantage is that of the file's numbers."""
    Path("none.py").write_text("def reward(completion, row, stopped):\n    return 0")
    Path("some.py").write_text("def reward(completion, row, stopped):\n"
                               "    return sum(map(ord, completion)) % 7 / 7")
    moved = {}
    for name in ("none", "some"):
        how = SMALL.replace("run", name) + f" --digits 3 --reward {name}.py --group-size 8"
        assert dlc.main(shlex.split(how)) == 0
        (row,) = [json.loads(line) for line in open(f"{name}/metrics.jsonl")]
        moved[name] = row["grad_norm"]
    assert moved["none"] == 0 < moved["some"]


@pytest.mark.parametrize("script", [dlc, opd])
@pytest.mark.parametrize("text, words", [
    (None, "mine.py No such file"), ("", "--reward mine.py has no function reward"),
    ("def rewards(completion, row, stopped):\n    return 1", "--reward mine.py has no function"),
    ("raise ValueError('not today')", "not today"), ("open('none.txt')", "none.txt")])
def test_a_file_that_cannot_be_used_is_one_line(here, script, text, words, capsys, monkeypatch):
    """Before any work."""
    def untrained(**_):
        raise AssertionError("the tiny base would have been trained first")

    for module in (dlc, opd):
        monkeypatch.setattr(module, "tiny_base", untrained)
    Path("mine.py").write_text(text) if text is not None else None
    assert script.main(shlex.split(f"--reward mine.py {SMALL}")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words.split()) and not Path("run").exists()


@pytest.mark.parametrize("text, error", [
    ("def reward(completion, row:", SyntaxError), ("1 / 0", ZeroDivisionError),
    ("import no_such_module_here", ModuleNotFoundError)])
def test_a_mistake_in_the_file_is_shown_as_python_shows_it(here, text, error):
    """With a traceback that names the line: it is the user's own code."""
    Path("mine.py").write_text(text)
    with pytest.raises(error):
        dlc.main(shlex.split(f"--reward mine.py {SMALL}"))
    assert not Path("run").exists()
