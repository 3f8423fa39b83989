"""kill -9 at random moments while a run writes:  python tests/crash.py [kills, 50] [seed, 0]

A run is killed, resumed, killed again, until it ends. After each kill every file must be whole; at
the end numbers, samples, state (weights, optimizer, the sampler's weights and version) and model
must equal, bit for bit, those of a run that nobody touched. Children are forked from a process that
has imported everything, so a kill costs a second."""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import dlc  # noqa: E402
import opd  # noqa: E402

SMALL = " --steps 10 --save-every 1 --prompts 2 --group-size 2 --max-new-tokens 4"
RUNS = [(main, (how + SMALL).split()) for main, how in (  # every kind of state that a run has
    (dlc.main, "--model base --lr 1e-3 --sync-ess 0.95"),
    (dlc.main, "--model base --lr 1e-3 --async --lag 2 --sync-every 1"),
    (dlc.main, "--model base --lr 1e-3 --lag 2 --noise 0.05 --minibatches 2"),
    (dlc.main, "--model base --dtype bfloat16 --optimizer sgd --lr 0.1 --weights int4 "
               "--sync-every 3"),
    (opd.main, "--student base --teacher teacher --lr 1e-3 --loss topk --sync-every 2"),
)]


def start(call):
    """The process id of a fork that runs `call`; what it prints goes to the file `log`."""
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)  # a pool of threads does not survive a fork, and would be waited for
    fd = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1), os.dup2(fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    try:
        status = call() or 0
    except BaseException as e:  # shown in `log`
        print(repr(e), flush=True)
        status = 99
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def end(pid, seconds=300):
    """Its exit status; a process that hangs is killed, -9, so that the tests do not."""
    limit = time.time() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.time() > limit:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def writing(pid, folder):
    """Wait until the process saves a state, or is no more."""
    state = folder / "state.pt"
    stamp = lambda: state.stat().st_mtime_ns if state.exists() else 0
    gone = lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    first = stamp()
    while stamp() == first and not gone():
        time.sleep(0.002)


def read_lines(f):
    return [json.loads(line) for line in f.read_text().splitlines()]


READ = {".json": lambda f: json.loads(f.read_text()), ".jsonl": read_lines,
        ".pt": lambda f: torch.load(f, weights_only=True), ".safetensors": load_file}


def whole(folder):
    """Read every file of a run, however it ended; the number of temporary files that it left."""
    left = [f for f in folder.iterdir() if f.suffix == ".tmp"]
    for f in folder.rglob("*"):
        if f.is_file() and not any(x in [f, *f.parents] for x in left):
            if f.suffix == ".png":
                assert f.read_bytes().endswith(b"IEND\xaeB`\x82"), f
            else:
                READ[f.suffix](f)
    model = folder / "model"  # a folder is there with all of its files or not at all
    need = {"config.json", "model.safetensors", "tokenizer.json"}
    assert not model.exists() or need <= set(os.listdir(model))
    return len(left)


FILES = ("model/model.safetensors",)


def contents(folder):
    clock = ("seconds_sample", "seconds_train", "seconds_wait", "tokens_per_second", "memory")
    timeless = lambda rows: [{k: v for k, v in r.items() if k not in clock} for r in rows]
    rows = timeless([json.loads(line) for line in (folder / "metrics.jsonl").open()])
    state = torch.load(folder / "state.pt", weights_only=True)
    state["rows"] = timeless(state["rows"])
    files = [(folder / f).read_bytes() for f in FILES]
    names = sorted(f.name for f in folder.iterdir())
    return dict(rows=rows, state=state, files=files, names=names)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def crash(kills, seed):
    rng, killed, torn, saved, chains, i = random.Random(seed), 0, 0, 0, 0, 0
    for name, steps in (("base", 2), ("teacher", 4)):
        made = end(start(lambda: shutil.move(dlc.tiny_base(steps), name) and 0))
        assert made == 0, Path("log").read_text()
    while killed < kills:
        (main, argv), i = RUNS[i % len(RUNS)], i + 1
        shutil.rmtree("whole", ignore_errors=True), shutil.rmtree("part", ignore_errors=True)
        pid = start(lambda: main([*argv, "--out", "whole"]))
        writing(pid, Path("whole"))
        begun = time.time()
        assert end(pid) == 0, Path("log").read_text()
        seconds = time.time() - begun  # from the first save to the end
        part, ended = Path("part"), None
        while ended != 0:
            resumed = (part / "state.pt").exists()
            if not resumed:
                shutil.rmtree(part, ignore_errors=True)
            again = ["--resume", "part"] if resumed else [*argv, "--out", "part"]
            pid = start(lambda: main(again))
            if killed < kills:
                if rng.random() < 0.9:  # the others may come before a first save
                    writing(pid, part)
                time.sleep(rng.uniform(0, 0.5) * seconds)
                os.kill(pid, signal.SIGKILL)
            ended = end(pid)
            assert ended in (0, -signal.SIGKILL), Path("log").read_text()
            killed += ended != 0
            torn += whole(part) if part.exists() else 0
            saved += (part / "state.pt").exists() and ended != 0
        want, got = contents(Path("whole")), contents(part)
        for key in want:
            assert same(want[key], got[key]), f"{key} differ after a kill: {argv}"
        chains += 1
    return (f"{killed} kills, {saved} of them after a save, {torn} in the middle of a write; "
            f"{chains} runs ended, all equal bit for bit")


if __name__ == "__main__":
    torch.set_num_threads(1)
    n, seed = ([int(x) for x in sys.argv[1:]] + [50, 0][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(crash(n, seed))
