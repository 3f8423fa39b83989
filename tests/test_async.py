"""--async: the same numbers as --lag, true overlap, and a prompt end whatever happens to a side.

A docstring says what a failure would mean. Classes that the sampler's process builds stand at the
top level, because it imports this module to find them."""

import copy
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dlc
import opd
import sampler as S

CLOCK = ("seconds_sample", "seconds_wait", "seconds_train", "tokens_per_second", "memory")


class Slow(S.TorchSampler):
    """Takes 0.25 s more a batch, asleep, and counts its batches in the file `batches`."""

    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        if not greedy:
            time.sleep(0.25)
            with open("batches", "a") as f:
                f.write("x")
        return super().sample(prompt_ids, max_new_tokens, seed, greedy)


class Broken(S.TorchSampler):
    """Fails at its third batch."""

    count, error = 0, RuntimeError

    def sample(self, prompt_ids, max_new_tokens, seed=None, greedy=False):
        self.count += not greedy
        if self.count == 3:
            raise self.error("there is\n no room")
        return super().sample(prompt_ids, max_new_tokens, seed, greedy)


class Refusing(Broken):
    error = ValueError


class Threads:
    """Draws the number of threads that its process computes with."""

    kv_scales, version, device = [], 0, torch.device("cpu")

    def __init__(self, model, **options):
        pass

    def sync(self, model, version):
        pass

    def sample(self, *request):
        return S.Rollout(*[torch.tensor([torch.get_num_threads()])] * 9)


class Small(torch.nn.Linear):
    device = torch.device("cpu")


class Sleeper(Threads):
    def sample(self, *request):
        Path("batches").touch()
        time.sleep(100)


@pytest.fixture(scope="session")
def pair(made_base):
    return made_base(40, digits=3), made_base(60, digits=3)


@pytest.fixture
def here(pair, tmp_path, monkeypatch):
    """here(script, **options) -> rows; no process outlives a test."""
    monkeypatch.chdir(tmp_path)
    for module in (dlc, opd):
        monkeypatch.setattr(module, "tiny_base", lambda steps=0, **_: pair[steps > 0])
    # There is always a gradient:
    monkeypatch.setattr(dlc, "reward_of", lambda _: lambda text, *_: sum(map(ord, text)) % 7 / 7)
    monkeypatch.setattr(dlc, "accuracy", lambda *_: (0.0, []))

    def run(script, **options):
        small = dict(digits=3, steps=6, prompts=4, group_size=2, device="cpu", lr=2e-3)
        return script.train(script.Config(**small | options))

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(120)  # a run that hangs is a failure, not a wait
    yield run
    signal.alarm(0)
    assert not multiprocessing.active_children()


def at_step(monkeypatch, step, action):
    """Do `action` in the trainer, in the middle of its step."""
    measure, seen = dlc.measure, []

    def spy(*args):
        seen.append(1)
        if len(seen) == step + 1:
            action()
        return measure(*args)

    monkeypatch.setattr(dlc, "measure", spy)


def timeless(rows, *more):
    """As JSON, without what a clock says."""
    return [json.dumps({k: v for k, v in r.items() if k not in CLOCK + more}) for r in rows]


def weights(folder):
    return Path(folder, "model", "model.safetensors").read_bytes()


def worker():
    (process,) = multiprocessing.active_children()
    return process


@pytest.mark.parametrize("script, how", [
    (dlc, dict(lag=1)), (dlc, dict(lag=2, noise=0.1, minibatches=2, dtype="bfloat16")),
    (opd, dict(lag=1, loss="sampled", correction="dlc_tis")), (opd, dict(lag=2))])  # fmt: skip
def test_the_numbers_are_those_of_lag(here, script, how, monkeypatch):
    """A race, other seeds or other weights: every bit of every step must be the same."""
    late = here(script, out="late", **how)
    D = how.pop("lag")
    if not how:  # Ctrl-C reaches both processes, and is for the trainer
        at_step(monkeypatch, 2, lambda: os.kill(worker().pid, signal.SIGINT))
        monkeypatch.setattr(opd, "measure", dlc.measure)
    rows = here(script, out="async", async_=True, lag=D, **how)
    assert [r["version"] for r in rows] == [max(0, t - D) for t in range(6)]
    assert timeless(rows) == timeless(late) and weights("async") == weights("late")
    assert len({r["lag"] for r in rows}) == 6 and all(r["kv_scales"] for r in rows)
    assert all(r["seconds_wait"] >= 0 and r["seconds_sample"] > 0 for r in rows)


@pytest.mark.parametrize("how", [
    dict(sync_ess=0.8, lag=2), dict(sync_every=3), dict(sync_every=0)])
def test_a_rule_publishes_for_a_fixed_later_step(here, how, monkeypatch):
    """The version of a step would depend on who is faster, or its weights be another version's."""
    past, draw, made = [], S.DelayedSampler.draw, dlc.Run.__init__
    D = how.get("lag", 1)

    def keep(run, cfg, model, *rest):
        past.append(model)
        made(run, cfg, model, *rest)

    def spy(self, step):
        out = draw(self, step)
        past.append((copy.deepcopy(past[0]), out))
        return out

    monkeypatch.setattr(dlc.Run, "__init__", keep)
    monkeypatch.setattr(S.DelayedSampler, "draw", spy)
    rows = here(dlc, async_=True, steps=10, weights="none", kv="none", **how)
    due, latest = {}, 0
    for t, row in enumerate(rows):
        if how.get("sync_every"):
            fires = t + 1 - latest >= how["sync_every"]
        else:
            fires = row["ess"] < how.get("sync_ess", 0)
        latest = t + 1 if fires else latest
        due[t + 1 + D] = latest
        assert row["version"] == due.get(t, 0)
        assert row["synced"] == (due.get(t + 1, 0) != row["version"])
        told = (row["sync_reason"] or "no").split()[0]
        assert told == ([*how][0][5:] if fires else "no")  # at the step that publishes
        model, rollout = past[row["version"] + 1][0], past[t + 1][1]
        assert torch.equal(S.token_logps(model, rollout, rows=8).detach(), rollout.logp_stale)
    kept, versions = sum(not r["synced"] for r in rows), len({r["version"] for r in rows})
    assert kept > 2 and (versions > 2 if how.get("sync_every", 1) else versions == 1)


def interrupt():
    """What SIGINT does, also where the shell that started the tests had it ignored."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("script, how", [
    (dlc, dict(sync_ess=0.95, lag=2)), (dlc, dict(lag=3)), (opd, dict())])
def test_a_killed_run_goes_on_with_the_same_numbers(here, script, how, monkeypatch):
    """What was published and not yet due is lost."""
    if "sync_ess" in how:
        whole = here(script, out="whole", steps=7, async_=True, **how)
    else:  # without a rule it is the same run, and needs no process
        whole = here(script, out="whole", steps=7, lag=how.get("lag", 1))
    with monkeypatch.context() as m:
        at_step(m, 5, interrupt)
        if script is opd:
            m.setattr(opd, "measure", dlc.measure)
        with pytest.raises(KeyboardInterrupt):  # steps 0-4 were logged, steps 0-2 saved
            here(script, out="part", steps=7, save_every=3, async_=True, **how)
    assert not multiprocessing.active_children()
    rows = script.train(dlc.parse(script.Config, ["--resume", "part", "--steps", "7"], ""))
    assert timeless(rows) == timeless(whole) and weights("part") == weights("whole")


def test_sampling_and_training_overlap(here, monkeypatch):
    """The trainer waits for its rollouts as long as they take to make: no overlap at all."""
    monkeypatch.setattr(dlc, "TorchSampler", Slow)
    measure = dlc.measure
    monkeypatch.setattr(dlc, "measure", lambda *args: time.sleep(0.25) or measure(*args))
    rows = here(dlc, async_=True, steps=8)[2:]
    total = lambda key: sum(r[key] for r in rows)
    assert total("seconds_sample") > 0.25 * 6 < total("seconds_train")
    assert total("seconds_wait") < 0.5 * total("seconds_sample")
    wall = sum(r["tokens"] / r["tokens_per_second"] for r in rows)
    assert wall < 0.8 * (total("seconds_sample") + total("seconds_train"))


def test_a_full_queue_stops_the_sampler_and_an_error_in_the_trainer_stops_both(here, monkeypatch):
    """A batch of 256 responses is more than a pipe holds: the process may be stuck in it when it
    must end."""
    monkeypatch.setattr(dlc, "TorchSampler", Slow)

    def fail():
        time.sleep(4)  # time for many more batches
        raise RuntimeError("trainer")

    at_step(monkeypatch, 1, fail)
    with pytest.raises(RuntimeError, match="trainer"):
        here(dlc, async_=True, lag=2, prompts=32, group_size=8, steps=20, out="run")
    assert not multiprocessing.active_children()
    assert len(Path("batches").read_text()) == 4  # step 0, step 1, and the two that may wait
    assert whole_files("run") == 1


def whole_files(folder):
    """The steps logged; nothing is half-written and nothing left over."""
    assert not list(Path(folder).glob("*.tmp"))
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").open()]
    assert [r["step"] for r in rows] == list(range(len(rows)))
    return len(rows)


def test_a_killed_process_ends_the_run(here, monkeypatch, capsys, pair):
    at_step(monkeypatch, 2, lambda: os.kill(worker().pid, signal.SIGKILL))
    start = time.perf_counter()
    assert dlc.main("--async --steps 500 --prompts 4 --group-size 2 --out run".split()) == 2
    err = [x for x in capsys.readouterr().err.splitlines() if "error" in x]
    assert len(err) == 1 and "process pool was terminated" in err[0]
    assert 3 <= whole_files("run") <= 5 and time.perf_counter() - start < 40


def test_an_error_in_the_process_is_the_run_s(here, monkeypatch, capsys):
    """A refusal is its one line; anything else is raised in the trainer, where it can be read."""
    how = "--async --lag 2 --steps 9 --prompts 4 --group-size 2 --out".split()
    monkeypatch.setattr(dlc, "TorchSampler", Refusing)
    assert dlc.main([*how, "refused"]) == 2
    shown = capsys.readouterr().err
    (err,) = (x for x in shown.splitlines() if "error" in x)
    assert "there is no room" in err and "Traceback" not in shown
    monkeypatch.setattr(dlc, "TorchSampler", Broken)
    with pytest.raises(RuntimeError, match="no room"):
        dlc.main([*how, "broken"])
    assert whole_files("refused") == whole_files("broken") == 2


def test_weights_that_are_not_finite_are_the_process_s_error(here, monkeypatch):
    update, count = dlc.update, iter(range(99))

    def spoil(model, optimizer):
        out = update(model, optimizer)
        if next(count) == 2:
            model.lm_head.weight.data[0, 0] = math.nan
        return out

    monkeypatch.setattr(dlc, "update", spoil)
    with pytest.raises(ValueError, match="at step 3; not synced"):
        here(dlc, async_=True, correction="reinforce")


def test_each_side_gets_half_of_the_threads():
    """On two cores two threads each are slower than one."""
    before = torch.get_num_threads()
    try:
        for given, want in ((4, 2), (1, 1)):
            torch.set_num_threads(given)
            delayed = S.DelayedSampler(Threads, Small(1, 1), lambda step: (), 1, 1, process=True)
            assert torch.get_num_threads() == want
            assert int(delayed.draw(0).tokens) == want
            delayed.close()
            assert torch.get_num_threads() == given
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_queue_is_that_of_its_docstring(lag):
    """Step t draws with version max(0, t - lag); what is not published is repeated."""
    model = Small(1, 1)
    delayed = S.DelayedSampler(Threads, model, lambda step: (), 99, lag)
    for step in range(6):
        assert [v for v, _ in delayed.queue] == [max(0, step - lag + i) for i in range(lag + 1)]
        torch.nn.init.constant_(model.weight, step + 1)
        changed = delayed.advance(step, model, publish=True)
        assert changed == (step + 1 - lag > 0)
    assert all(float(x[0]) == v for v, x in delayed.queue)
    moved = [delayed.advance(step, model, publish=False) for step in range(6, 12)]
    assert moved == [True] * lag + [False] * (6 - lag)
    assert len({v for v, _ in delayed.queue}) == 1


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("what, script", [(signal.SIGINT, "dlc"), (signal.SIGTERM, "opd")])
def test_a_signal_ends_both_processes(pair, tmp_path, what, script):
    """Ctrl-C reaches both processes and must be shown once; SIGTERM reaches the trainer alone."""
    small = "--async --steps 9999 --prompts 2 --group-size 2 --out run".split()
    models = ["--model", str(pair[0])]
    if script == "opd":
        models = ["--student", str(pair[0]), "--teacher", str(pair[1])]
    path = Path(dlc.__file__).with_name(f"{script}.py")
    log = (tmp_path / "stderr").open("w")
    run = subprocess.Popen([sys.executable, path, *models, *small], cwd=tmp_path, stdout=log,
                           stderr=log, start_new_session=True)
    try:
        metrics, end = tmp_path / "run" / "metrics.jsonl", time.time() + 90
        begun = lambda: metrics.exists() and metrics.stat().st_size > 5000
        while run.poll() is None and time.time() < end and not begun():
            time.sleep(0.1)
        assert run.poll() is None, Path(log.name).read_text()
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert children
        os.killpg(run.pid, what) if what == signal.SIGINT else os.kill(run.pid, what)
        run.wait(15)
        end = time.time() + 10
        while any(map(alive, children)) and time.time() < end:
            time.sleep(0.1)
        assert not any(map(alive, children))
    finally:
        run.kill()
    shown = Path(log.name).read_text()
    assert "Traceback" not in shown and shown.count("stopped") == (what == signal.SIGINT)
    assert run.returncode == (130 if what == signal.SIGINT else -what)
    assert whole_files(tmp_path / "run") > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_process_does_not_outlive_a_trainer_that_is_killed(tmp_path):
    """In the middle of a batch, which may take minutes."""
    code = f"""if True:
        import os, sys, threading, time
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(dlc.__file__).parent)]}
        import test_async as t, torch
        delayed = t.S.DelayedSampler(t.Sleeper, t.Small(1, 1), lambda step: (), 1, 1, True)
        threading.Thread(target=delayed.draw, args=(0,), daemon=True).start()
        while not os.path.exists("batches"):
            time.sleep(0.1)
        print(*delayed.pool._processes, flush=True)
        os.kill(os.getpid(), 9)"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE,
                         text=True, timeout=60)
    pid, end = int(run.stdout), time.time() + 10
    while alive(pid) and time.time() < end:
        time.sleep(0.1)
    assert not alive(pid)


def test_ctrl_c_while_the_process_is_still_starting_ends_in_one_line(pair, tmp_path):
    """SIGINT goes to every process of a terminal; the one that samples may be importing."""
    how = f"--async --steps 50 --max-new-tokens 4 --out {tmp_path}/run --model {pair[0]}".split()
    child = subprocess.Popen([sys.executable, dlc.__file__, *how], stderr=subprocess.PIPE,
                             stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    begun = (tmp_path / "run" / "metrics.jsonl").exists  # opened just before the process is started
    while not begun() and child.poll() is None:
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(child.pid, signal.SIGINT)
    _, told = child.communicate(timeout=120)
    assert child.returncode == 130 and "stopped" in told, told
    assert "Traceback" not in told
