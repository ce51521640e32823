"""Faults of runs in two processes, with torchrun and without (RELIABILITY, rows 3 to 8, 20, 25).

tests/test_stop_and_resume.py has stops and kills.
"""

import functools
import itertools
import re
import shutil
import signal
import tarfile
import time

import pytest
import torch

import moco.data.shards
import moco.pretraining.run
from moco.common import distributed
from moco.common.errors import DataError, NumericError, Preempted, UserError
from moco.data.images import open_images
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.pretraining.config import load_pretrain_cfg
from moco.pretraining.run import open_pretraining_images
from tests.moco.commands import pretrain as main
from tests.oracles.commands import AGENT, TORCHRUN, Fault, run
from tests.oracles.processes import run_on
from tests.oracles.training import newest

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(400)]
PRETRAIN = ("benchmarks", "pretrain")
MECHANISMS = {
    "queue": {},
    "end_to_end": {"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8},
    "memory_bank": {"MOCO__MECHANISM": "memory_bank", "MOCO__K": 12},
    "moco_v3": {
        "MOCO__MECHANISM": "moco_v3",
        "MOCO__K": 8,
        "MOCO__BN_SPLITS": 1,
        "MOCO__SYMMETRIC": True,
        "MOCO__MLP_DIM": 32,
    },
}


@pytest.fixture
def words(opts):
    """Return `words(mechanism, KEY=value)`, the arguments of a run of 8 steps in tmp_path/run."""
    return lambda mechanism="queue", **changes: opts(
        LOG__EVERY_ITERS=1, **MECHANISMS[mechanism], **changes
    )


@pytest.fixture(scope="module")
def straight(images, tiny, tmp_path_factory):
    """Return `straight(mechanism)`, the weights of an uninterrupted run in two processes."""

    @functools.cache
    def run(mechanism="queue"):
        tmp, keys = tmp_path_factory.mktemp("straight"), MECHANISMS[mechanism]
        words = tiny(DATA__ROOT=images, OUTPUT_DIR=tmp / "run", **keys)
        run_on(2, main, words, connect=False)
        return newest(tmp / "run")["state_dict"]

    return run


def stopped(words):
    """Run the command until it stops by itself."""
    with pytest.raises(Preempted):
        main(words)


def session_error(work, seconds=20):
    """Return the message of the error that leaves a session of this process, or None."""
    try:
        with distributed.session(torch.device("cpu"), seconds):
            work()
    except UserError as error:
        return str(error)


def error_in_process_0(error):
    """Return what each process raises when process 0 does."""

    def work():
        if distributed.is_main():
            raise error
        distributed.barrier()

    try:
        return session_error(work)
    except RuntimeError as error:
        return repr(error)


def two_on_one_gpu():
    def work():
        raise torch.distributed.DistBackendError(
            "NCCL error in: Utils.cpp:77, invalid usage\nncclInvalidUsage: This usually\n"
            "Last error:\nDuplicate GPU detected : rank 0\n"
        )

    return session_error(work)


def slow_scan(root, folder):
    """Open shards twice in both processes, while a collective would give up after 5 seconds."""
    scan, scanned = moco.data.shards.scan, []

    def slow(path):
        time.sleep(7)
        scanned.append(path.name)
        return scan(path)

    moco.data.shards.scan = slow
    images = []

    def work():
        for _ in range(2):
            images.append(len(opened(root, folder)))

    return session_error(work, seconds=5), images, scanned


def opened(root, folder):
    return open_pretraining_images(load_pretrain_cfg(None, ["DATA.ROOT", str(root)]), folder)


def bad_shard(root, folder):
    return session_error(lambda: opened(root, folder))


def open_together(root, folder):
    """Let each process wait for the other while it opens the images."""

    def together(*args):
        distributed.gather_rows(torch.zeros(1))  # unlike a barrier between turns
        return open_images(*args)

    moco.pretraining.run.open_images = together
    return session_error(lambda: opened(root, folder), seconds=10)


def nan_in_one(words):
    """Return the command's error if process 1 has a loss of NaN in its fifth step."""
    calls, forward = itertools.count(1), MomentumQueue.forward

    def poisoned(self, *args):
        out = forward(self, *args)
        bad = distributed.rank() == 1 and next(calls) == 5
        return out._replace(loss=out.loss * float("nan")) if bad else out

    MomentumQueue.forward = poisoned
    try:
        main(words)
    except NumericError as error:
        return str(error)


class TestOtherProcesses:
    """Row 8; tests/test_stop_and_resume.py: they are refused unless requested."""

    @pytest.mark.parametrize("mechanism", ["queue", "memory_bank", "moco_v3"])
    @pytest.mark.parametrize("before, after", [(1, AGENT), (2, ())])
    def test_continues_with_the_same_batch_if_requested(
        self, words, straight, tmp_path, mechanism, before, after
    ):
        stop = ("SOLVER.STOP_AT_ITERS", "3")
        run_on(before, stopped, [*words(mechanism), *stop], connect=False)
        flags = ("--resume", "--other-processes")
        done = run([*after, *PRETRAIN, *words(mechanism), *flags], tmp_path)
        assert done.code == 0 and f"batch 8: {2 if after else 1} process" in done.out, done
        # Sums in another order, and nothing else: weights, queue or bank, momentum.
        ended = newest(tmp_path / "run")
        assert (ended["step"], ended["processes"]) == (8, 2 if after else 1)
        if mechanism == "moco_v3":
            # Its loss amplifies rounding from step to step; modeling/ compares in float64.
            return
        for name, expected in straight(mechanism).items():
            if "running_" not in name:  # statistics start from the mean
                got = ended["state_dict"][name]
                torch.testing.assert_close(got, expected, atol=3e-3, rtol=3e-3, msg=name)


class TestLostProcess:
    """Rows 5 and 6."""

    def test_hangs(self, words, images, tmp_path):
        """A stopped process does not even react to SIGTERM."""
        fault = Fault(signal.SIGSTOP, str(images), 12, where="child")
        command = [*TORCHRUN, *PRETRAIN, *words(), "--dist-timeout", 5]
        done = run(command, tmp_path, fault)
        assert done.code != 0
        expected = r"did not answer in 5 s.*--resume to continue \(.*imed out"
        assert re.search(f"process . of 2: process . of this run died or {expected}", done.err)
        # torchrun's report is of the first failure by time; it ends the process that hangs.
        assert re.search(rf"Root Cause.*traceback : process . of 2: .*{expected}", done.err, re.S)

    def test_restarts_on_several_machines_are_refused(self, monkeypatch):
        """Each torchrun counts its own restarts, so rank 0 might start from scratch."""
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        assert distributed.restart_count() == 0
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        with pytest.raises(UserError, match="--max-restarts 3: works on one machine only"):
            distributed.restart_count()

    @pytest.mark.parametrize(
        ("error", "shown"),
        [
            (DataError("image 3 is empty"), "image 3 is empty"),
            # Its text does not make it a lost process.
            (
                RuntimeError("the tracking server timed out (Connection closed)"),
                "RuntimeError('the tracking server timed out (Connection closed)')",
            ),
        ],
        ids=["of data", "of a server"],
    )
    def test_an_error_of_one_is_not_contradicted_by_the_other(self, error, shown):
        """The process with the error is not ended while it closes its data-loader workers."""
        assert run_on(2, error_in_process_0, error, connect=False) == [
            shown,
            "process 1 of 2: process 0 stopped with an error; see its message",
        ]

    def test_the_cause_is_kept(self):
        """Two processes on one GPU are not reported as a lost process."""
        for message in run_on(2, two_on_one_gpu, connect=False):
            assert message.endswith(
                "(NCCL error in: Utils.cpp:77, invalid usage; Duplicate GPU detected : rank 0)"
            )

    def test_an_error_in_one_process_ends_all(self, words, tmp_path, images):
        """Each process reads its own images; a bad one is named, and no process waits forever."""
        folder = tmp_path / "one_bad"
        shutil.copytree(images, folder)
        (folder / "004.jpg").write_bytes(b"")
        done = run([*AGENT, *PRETRAIN, *words(), "DATA.ROOT", folder], tmp_path)
        assert done.code != 0 and "one_bad/004.jpg: the file is empty" in done.err


def test_a_loss_that_is_no_number_in_one_process(words, tmp_path):
    """Row 20."""
    for message in run_on(2, nan_in_one, words(), connect=False):
        assert re.match(r"loss is nan at step 4; .*checkpoint_0000.pth", message)
    last = newest(tmp_path / "run")
    assert last["step"] == 3
    assert all(value.isfinite().all() for value in last["state_dict"].values())


class TestOpeningImages:
    """The main process scans shards, and the others wait as long as that takes."""

    def test_a_scan_longer_than_the_timeout(self, images, tmp_path):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            tar.add(images, "images")
        (tmp_path / "run").mkdir()
        main, other = run_on(2, slow_scan, tmp_path / "a.tar", tmp_path / "run", connect=False)
        assert main == (None, [26, 26], ["a.tar"])
        assert other == (None, [26, 26], [])

    def test_a_scan_that_fails(self, tmp_path):
        (tmp_path / "a.tar").write_text("no tar")
        main, other = run_on(2, bad_shard, tmp_path, tmp_path / "run", connect=False)
        assert "a.tar: not a tar" in main
        assert other == "process 1 of 2: process 0 stopped with an error; see its message"

    def test_other_data_in_no_turns(self, images, tmp_path):
        assert run_on(2, open_together, images, tmp_path, connect=False) == [None, None]
