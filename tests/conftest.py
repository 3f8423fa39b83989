"""Scripts importable from the tests; one thread, so that a busy machine slows the tests down and
does not stop them."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it would be ignored

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def made_base(tmp_path_factory):
    """made_base(steps, digits=...): a tiny base's folder, each made once for all tests."""
    import torch

    import dlc

    make, folder = dlc.tiny_base, tmp_path_factory.mktemp("bases")

    def made(*steps, **how):
        torch.set_num_threads(1)  # two threads on busy cores are slower than one
        with pytest.MonkeyPatch.context() as m:
            m.chdir(folder)
            return make(*steps, **how).resolve()

    return made


@pytest.fixture(scope="session")
def quick_base(made_base):
    """Two steps: it answers nothing, and is made in a second."""
    return made_base(2, digits=3)
