"""Kills, signals, full disks: a run ends in one line with its last good state kept, and --resume
goes on from it. Each case is a fork of this process, which has imported everything."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import crash
import pytest
import torch

import dlc
import opd

SMALL = "--prompts 2 --group-size 2 --max-new-tokens 4 --lr 1e-3 --save-every 2"
ARGV = f"--model base --out run {SMALL}".split()


@pytest.fixture
def here(quick_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(quick_base, "base")
    return tmp_path


def told():
    """What a fork printed; its last line is what a command ends with."""
    text = Path("log").read_text()
    assert "Traceback" not in text and "Exception ignored" not in text, text
    return text.strip().splitlines()[-1]


def steps(folder="run"):
    return [json.loads(line)["step"] for line in open(f"{folder}/metrics.jsonl")]


def saved():
    return torch.load("run/state.pt", weights_only=True)["rows"][-1]["step"]


def wait_for(ready, seconds=60):
    until = time.time() + seconds
    while not ready() and time.time() < until:
        time.sleep(0.005)
    assert ready()


def test_kill_9_at_random_moments(tmp_path):
    """`python tests/crash.py` does 50."""
    command = [sys.executable, crash.__file__, "5", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("5 kills") and "all equal bit for bit" in done.stdout


@pytest.mark.parametrize("script", ["dlc", "opd"])
def test_ctrl_c_says_how_to_go_on(here, script):
    """The step that it meets is lost, and all since the last save is run again."""
    main, argv = dlc.main, ARGV
    if script == "opd":
        main, argv = opd.main, ["--student", "base", "--teacher", *ARGV[1:]]
    pid = crash.start(lambda: main([*argv, "--steps", "5000"]))
    wait_for(lambda: Path("run/state.pt").exists() and len(steps()) >= 3)
    os.kill(pid, signal.SIGINT)
    assert crash.end(pid) == 130
    assert told() == "stopped; go on with --resume run"
    end = saved() + 3
    assert crash.end(crash.start(lambda: main(["--resume", "run", "--steps", str(end)]))) == 0
    assert steps() == list(range(end)) and Path("run/model/model.safetensors").exists()
    whole = [*argv, "--steps", str(end)]  # an untouched run of that length: the same numbers
    whole[whole.index("run")] = "whole"
    assert crash.end(crash.start(lambda: main(whole))) == 0
    run, untouched = crash.contents(Path("run")), crash.contents(Path("whole"))
    assert all(crash.same(run[k], untouched[k]) for k in run)


@pytest.mark.parametrize("moment, words", [
    ("accuracy", "stopped"), ("write", "stopped; go on with --resume run")])
def test_before_the_first_step_and_after_the_last(here, monkeypatch, moment, words):
    real, calls = getattr(dlc, moment), iter(range(99))
    first = dict(accuracy=0, write=3)[moment]  # options, model; after the last step state, model

    def stuck(*args):
        if next(calls) == first:
            Path("reached").touch(), time.sleep(60)
        return real(*args)

    monkeypatch.setattr(dlc, moment, stuck)
    pid = crash.start(lambda: dlc.main([*ARGV, "--steps", "2"]))
    wait_for(Path("reached").exists)
    os.kill(pid, signal.SIGINT)
    assert crash.end(pid) == 130 and told() == words


def test_a_command_runs_in_a_thread_and_leaves_the_handlers_alone(here, capsys):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    seen = []
    run = lambda: seen.append(dlc.main(["--steps", "0"]))
    run(), (thread := threading.Thread(target=run)).start(), thread.join()
    assert seen == [2, 2] and capsys.readouterr().err.count("--steps") == 2
    assert before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("what", ["state", "config", "log"])
def test_a_full_disk_ends_the_run_and_keeps_the_last_state(here, what):
    """A real limit of the system: a file takes so many bytes and no more, so that a save, the first
    file of a new run or a line of a log ends in its middle."""
    assert crash.end(crash.start(lambda: dlc.main([*ARGV, "--steps", "4"]))) == 0
    kept = Path("run/state.pt").read_bytes()
    sizes = {f.name: f.stat().st_size for f in Path("run").iterdir()}
    new = ["other" if x == "run" else x for x in ARGV]
    argv = new if what != "state" else ["--resume", "run", "--steps", "8"]
    limit = dict(state=sizes["state.pt"] - 1000, config=600, log=sizes["config.json"] + 99)[what]
    out, into = os.pipe()

    def full():  # what it prints goes to a pipe: the file `log` is a file too
        os.dup2(into, 1), os.dup2(into, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return dlc.main(argv)

    assert crash.end(crash.start(full)) == 2
    os.close(into)
    text = os.fdopen(out).read()
    last = text.strip().splitlines()[-1]
    assert "Traceback" not in text and last.startswith("error: "), text
    assert "cannot be written" in last or "too large" in last, last
    if what == "state":
        assert Path("run/state.pt").read_bytes() == kept
        assert crash.end(crash.start(lambda: dlc.main(argv))) == 0 and steps() == list(range(8))
        assert not list(Path("run").glob("*.tmp"))


def test_a_write_that_fails_leaves_the_file_of_before(here, monkeypatch):
    target = Path("x.json")
    dlc.write(target, lambda new: new.write_text("good"))

    def half(new):
        new.write_text("ha")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="x.json cannot be written: PytorchStreamWriter"):
        dlc.write(target, half)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "replace", no_space)
        with pytest.raises(OSError, match="No space left on device"):
            dlc.write(target, lambda new: new.write_text("new"))
    names = lambda: sorted(x for x in os.listdir() if not x.endswith(".tmp"))
    assert target.read_text() == "good" and names() == ["base", "x.json"]
    folder = Path("model")
    for text in ("one", "two"):  # a folder is exchanged whole
        dlc.write(folder, lambda new: (new.mkdir(), (new / text).write_text(text)))
    assert os.listdir(folder) == ["two"] and names() == ["base", "model", "x.json"]


def test_a_folder_that_turns_read_only(here, monkeypatch, capsys):
    """Root may write anywhere, so the refusal of the system is played, from the second save on."""
    replace = os.replace

    def read_only(source, target):
        if str(target).endswith("state.pt") and Path(target).exists():
            raise PermissionError(30, "Read-only file system", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_only)
    assert dlc.main([*ARGV, "--steps", "8"]) == 2
    end = capsys.readouterr().err.splitlines()[-1]
    assert "Read-only file system" in end and "state.pt" in end and saved() == 1


def test_half_a_line_after_the_last_save(here, capsys):
    """What a kill or a full disk leaves behind the last saved step is cut off; half files go."""
    assert dlc.main([*ARGV, "--steps", "4"]) == 0
    want = crash.contents(Path("run"))
    with open("run/metrics.jsonl", "a") as f:
        f.write('{"step": 4, "reward": 0.5}\n{"step": 5, "rew')
    Path("run/state.pt.99.tmp").write_bytes(b"half")
    Path("run/model.99.tmp").mkdir()
    assert dlc.main(["--resume", "run"]) == 0
    got = crash.contents(Path("run"))
    assert all(crash.same(want[k], got[k]) for k in want)


def test_a_calibration_goes_on_after_it_was_stopped(here, capsys, monkeypatch):
    """Runs that ended are not made again, the one that was cut off is; and no line tells of a run
    that the user did not start."""
    how = ("--student base --teacher base --prompts 2 --group-size 2 --max-new-tokens 2 --steps 2 "
           "--levels 0,1 --seeds 1")
    argv = ["--calibrate", *how.split()]
    train, begun = opd.train, []

    def stop(self, step):
        if len(begun) == 2:
            raise KeyboardInterrupt
        return draw(self, step)

    draw = dlc.DelayedSampler.draw
    monkeypatch.setattr(opd, "train", lambda cfg: begun.append(cfg) or train(cfg))
    with monkeypatch.context() as m:
        m.setattr(dlc.DelayedSampler, "draw", stop)
        assert opd.main(argv) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped"
    assert opd.main(argv) == 0 and len(begun) == 2 + 2  # the second again, and the lag's
    first = json.loads(Path("budget.json").read_text())
    assert opd.main(argv) == 0 and len(begun) == 4
    assert json.loads(Path("budget.json").read_text()) == first


def test_too_little_gpu_memory_is_one_line(here, capsys, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(dlc.DelayedSampler, "draw", no_memory)
    assert dlc.main(ARGV) == 2
    end = capsys.readouterr().err.splitlines()[-1]
    assert end.startswith("error: CUDA out of memory. Tried to allocate 2 GiB")
