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


@pytest.mark.parametrize("number, status, script", [
    (signal.SIGINT, 130, "dlc"), (signal.SIGTERM, 143, "dlc"), (signal.SIGTERM, 143, "opd")])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(here, number, status, script):
    main, argv = dlc.main, ARGV
    if script == "opd":
        main, argv = opd.main, ["--student", "base", "--teacher", *ARGV[1:]]
    long = [*argv, "--steps", "5000", "--save-every", "5000"]
    pid = crash.start(lambda: main(long))
    wait_for(lambda: Path("run/metrics.jsonl").exists() and len(steps()) >= 3)
    os.kill(pid, number)
    assert crash.end(pid) == status
    name = signal.Signals(number).name
    go_on = "go on from its last saved step with --resume run"
    assert told() == f"{script}.py: stopped by {name}; {go_on}"
    done = len(steps())
    assert torch.load("run/state.pt", weights_only=True)["step"] == done - 1 >= 2
    assert crash.end(crash.start(lambda: main(["--resume", "run", "--steps", str(done + 2)]))) == 0
    assert steps() == list(range(done + 2)) and Path("run/result.json").exists()
    end = [*argv, "--steps", str(done + 2)]  # an untouched run of that length: the same numbers
    end[end.index("run")] = "whole"
    assert crash.end(crash.start(lambda: main(end))) == 0
    run, untouched = crash.contents(Path("run")), crash.contents(Path("whole"))
    assert all(crash.same(run[k], untouched[k]) for k in run)


def slow(monkeypatch, method, seconds=60):
    """`method` of Run tells that it is reached, and then takes a minute, as a large model would."""
    plain = getattr(dlc.Run, method)

    def wait(self, *args, **how):
        if method != "draw" or args[0] == 3:
            Path("reached").touch()
            time.sleep(seconds)
        return plain(self, *args, **how)

    monkeypatch.setattr(dlc.Run, method, wait)


def test_a_second_signal_ends_at_once_with_the_last_saved_state(here, monkeypatch):
    slow(monkeypatch, "draw")
    pid = crash.start(lambda: dlc.main(ARGV))
    wait_for(Path("reached").exists)
    state = Path("run/state.pt").read_bytes()
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # the first one lets the step finish
    os.kill(pid, signal.SIGTERM)
    start = time.time()
    assert crash.end(pid) == 143 and time.time() - start < 20
    assert told() == "dlc.py: stopped by SIGTERM; go on from its last saved step with --resume run"
    assert Path("run/state.pt").read_bytes() == state
    assert torch.load("run/state.pt", weights_only=True)["step"] == 1


@pytest.mark.parametrize("method, left", [
    ("accuracies", "no step of run was saved"), ("finish", "--resume run")])
def test_before_the_first_step_and_after_the_last(here, monkeypatch, method, left):
    """While the base is measured a second signal is needed; at the end, all steps saved, one is
    enough."""
    slow(monkeypatch, method) if method == "accuracies" else None
    if method == "finish":
        stuck = lambda *_: (Path("reached").touch(), time.sleep(60))
        monkeypatch.setattr(dlc, "save_model", stuck)
    pid = crash.start(lambda: dlc.main([*ARGV, "--steps", "2"]))
    wait_for(Path("reached").exists)
    for _ in range(2 if method == "accuracies" else 1):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
    assert crash.end(pid) == 130
    assert told().startswith("dlc.py: stopped by SIGINT") and told().endswith(left)
    assert not list(Path("run").glob("*.tmp"))


def test_handlers_are_those_of_before_and_only_the_main_thread_has_any(here, capsys):
    def mine(*_): ...

    before = {s: signal.signal(s, mine) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert dlc.main(["--steps", "0"]) == 2 and dlc.main(["--bias"]) is None
        assert all(signal.getsignal(s) is mine for s in before) and dlc.Run.live is None
        seen = []
        thread = threading.Thread(target=lambda: seen.append(dlc.main(["--steps", "0"])))
        thread.start(), thread.join()
        assert seen == [2] and capsys.readouterr().err.count("--steps 0: must be") == 2
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


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
    assert "Traceback" not in text and "Exception ignored" not in text, text
    assert last.startswith("dlc.py: error: "), last
    assert "is the disk full" in last or "too large" in last, last
    assert not [*Path("run").glob("*.tmp"), *Path(".").glob("other/*.tmp")]
    if what == "state":
        assert last.endswith("go on from its last saved step with --resume run")
        assert Path("run/state.pt").read_bytes() == kept
        assert crash.end(crash.start(lambda: dlc.main(argv))) == 0 and steps() == list(range(8))
    if what == "log":
        assert last.endswith("the disk is full, make room; no step of other was saved"), last


def test_a_write_that_fails_leaves_the_file_of_before(here, monkeypatch):
    target = Path("x.json")
    dlc.write(target, lambda new: new.write_text("good"))

    def half(new):
        new.write_text("ha")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"x.json cannot be written \(PytorchStreamWriter.*disk full"):
        dlc.write(target, half)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "replace", no_space)
        with pytest.raises(OSError, match="No space left on device.*disk full"):
            dlc.write(target, lambda new: new.write_text("new"))
    assert target.read_text() == "good" and sorted(os.listdir()) == ["base", "x.json"]
    folder = Path("model")
    for text in ("one", "two"):  # a folder is exchanged whole
        dlc.write(folder, lambda new: (new.mkdir(), (new / text).write_text(text)))
    assert os.listdir(folder) == ["two"]
    assert sorted(os.listdir()) == ["base", "model", "x.json"]


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
    assert "Read-only file system" in end and "state.pt" in end and end.endswith("--resume run")
    assert torch.load("run/state.pt", weights_only=True)["step"] == 1


def test_half_a_line_after_the_last_save(here, capsys):
    """What a kill or a full disk leaves behind the last saved step is cut off; half files go."""
    assert dlc.main([*ARGV, "--steps", "4"]) is None
    want = crash.contents(Path("run"))
    for log in ("metrics", "samples"):
        with open(f"run/{log}.jsonl", "a") as f:
            f.write('{"step": 4, "reward": 0.5}\n{"step": 5, "rew')
    Path("run/state.pt.99.tmp").write_bytes(b"half")
    Path("run/model.99.tmp").mkdir()
    assert dlc.main(["--resume", "run"]) is None
    got = crash.contents(Path("run"))
    assert all(crash.same(want[k], got[k]) for k in want)


def test_a_calibration_goes_on_after_half_a_line(here, capsys, monkeypatch):
    """And a signal in it tells of no --resume."""
    how = ("--student base --teacher base --prompts 2 --group-size 2 --max-new-tokens 2 --steps 2 "
           "--levels 0,1 --seeds 1")
    argv = how.split()
    assert opd.main(["--calibrate", *argv]) == 0
    log = Path("budget-runs/runs.jsonl")
    before = log.read_text()
    log.write_text(before + '{"key": {"stu')
    assert opd.main(["--calibrate", *argv]) == 0 and log.read_text() == before
    capsys.readouterr()
    log.write_text("{" + before)
    assert opd.main(["--calibrate", *argv]) == 2
    assert "runs.jsonl: is broken" in capsys.readouterr().err
    log.unlink()

    def stop(self, step):
        raise dlc.Stop(signal.SIGTERM)

    monkeypatch.setattr(dlc.Run, "draw", stop)
    assert opd.main(["--calibrate", *argv]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "opd.py: stopped by SIGTERM"


def test_too_little_gpu_memory_is_one_line(here, capsys, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(dlc.Run, "draw", no_memory)
    assert dlc.main(ARGV) == 2
    end = capsys.readouterr().err.splitlines()[-1]
    assert "CUDA out of memory. Tried to allocate 2 GiB; make --micro-batch smaller" in end
