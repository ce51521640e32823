"""Faults of runs in two processes, with torchrun and without (RELIABILITY, rows 3 to 8, 20, 25).

Each fault is built in at a step (`tests.oracles.launch`), so nothing here waits for a time.
"""

import functools
import os
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
from moco.common.errors import DataError, UserError
from moco.common.files import sha256_state
from moco.common.run import RunFolder
from moco.data.images import open_images
from moco.engine.checkpoint import list_checkpoints
from moco.pretraining.config import load_pretrain_cfg
from moco.pretraining.run import open_pretraining_images
from tests.oracles.launch import Fault, processes_of, run_ranks, torchrun
from tests.oracles.processes import run_on
from tests.oracles.training import newest, weights

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(400)]
MECHANISMS = {
    "queue": {},
    "end_to_end": {"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8},
    "memory_bank": {"MOCO__MECHANISM": "memory_bank", "MOCO__K": 12},
    "moco_v3": {
        **{"MOCO__MECHANISM": "moco_v3", "MOCO__K": 8, "MOCO__BN_SPLITS": 1},
        **{"MOCO__SYMMETRIC": True, "MOCO__MLP_DIM": 32},
    },
}


@pytest.fixture
def words(opts):
    """`words(mechanism, KEY=value)`: of a tiny run of 8 steps in tmp_path/run."""
    return lambda mechanism="queue", **changes: opts(
        LOG__EVERY_ITERS=1, **MECHANISMS[mechanism], **changes
    )


@pytest.fixture(scope="module")
def straight(images, tiny, tmp_path_factory):
    """`straight(mechanism)`: weights of the uninterrupted run in two processes."""

    @functools.cache
    def run(mechanism="queue"):
        tmp, keys = tmp_path_factory.mktemp("straight"), MECHANISMS[mechanism]
        done = run_ranks(2, tiny(DATA__ROOT=images, OUTPUT_DIR=tmp / "run", **keys), tmp)
        assert done.codes == [0, 0], done.err
        return newest(tmp / "run")["state_dict"]

    return run


def said_by_session(work, seconds=20):
    """The error that leaves a session of this process, in the words of the command."""
    os.environ["GROUP_RANK"] = "0"  # as torchrun, whose processes may end each other
    try:
        with distributed.session(torch.device("cpu"), seconds):
            work()
    except UserError as error:
        return str(error)


def error_in_process_0():
    def work():
        if distributed.is_main():
            raise DataError("image 3 is empty")
        distributed.barrier()

    message = said_by_session(work)
    if os.environ["RANK"] == "0":
        time.sleep(distributed.ROLL_CALL_SECONDS + 1)
    return message


def two_on_one_gpu():
    def work():
        raise torch.distributed.DistBackendError(
            "NCCL error in: Utils.cpp:77, invalid usage\nncclInvalidUsage: This usually\n"
            "Last error:\nDuplicate GPU detected : rank 0\n"
        )

    return said_by_session(work)


def slow_scan(root, folder):
    """Both processes open shards, twice; a collective would give up after 5 seconds."""
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

    return said_by_session(work, seconds=5), images, scanned


def opened(root, folder):
    return open_pretraining_images(load_pretrain_cfg(None, ["DATA.ROOT", str(root)]), folder)


def bad_shard(root, folder):
    return said_by_session(lambda: opened(root, folder))


def open_together(root, folder):
    """Each process waits for the other while it opens the images."""

    def together(*args):
        distributed.gather_rows(torch.zeros(1))  # unlike a barrier between turns
        return open_images(*args)

    moco.pretraining.run.open_images = together
    return said_by_session(lambda: opened(root, folder), seconds=10)


def equals(folder, state):
    """Bitwise."""
    return weights(folder) == sha256_state(state)


def resume(words, tmp_path, *flags, world=2):
    done = run_ranks(world, [*words, "--resume", *flags], tmp_path)
    assert done.codes == [0] * world, done.err
    return done


class TestResume:
    """Row 7: q, k, queue, bank, statistics and momentum as if nothing had happened."""

    @pytest.mark.parametrize(
        "mechanism, stop, workers",
        [
            *(("queue", 1, 2), ("queue", 3, 0), ("queue", 5, 2)),
            *(("end_to_end", 4, 0), ("memory_bank", 4, 2)),
        ],
    )
    def test_equals_the_straight_run(self, words, straight, tmp_path, mechanism, stop, workers):
        same = words(mechanism, DATA__NUM_WORKERS=workers)
        done = run_ranks(2, [*same, "SOLVER.STOP_AT_ITERS", str(stop)], tmp_path)
        assert done.codes == [85, 85], done.err
        assert newest(tmp_path / "run")["step"] == stop
        resume(same, tmp_path)
        assert equals(tmp_path / "run", straight(mechanism))

    def test_every_process_has_its_own_statistics(self, straight, tmp_path, words):
        """The mean would be another run: the test above can tell."""
        run_ranks(2, words(SOLVER__STOP_AT_ITERS=3), tmp_path)
        path = list_checkpoints(tmp_path / "run")[-1]
        saved = torch.load(path, weights_only=True)
        assert not torch.equal(*saved["statistics"])
        saved["statistics"][:] = saved["statistics"].mean(dim=0)
        torch.save(saved, path)
        resume(words(), tmp_path)
        assert not equals(tmp_path / "run", straight())


class TestOtherProcesses:
    """Row 8."""

    def test_are_refused(self, words, tmp_path):
        """tests/moco/classification/test_linear.py: also one instead of two."""
        done = run_ranks(1, words(SOLVER__STOP_AT_ITERS=3), tmp_path)
        assert done.codes == [85], done.err
        saved = weights(tmp_path / "run")
        done = run_ranks(2, [*words(), "--resume"], tmp_path)
        assert done.codes == [2, 2]
        message = "was trained by 1 processes, this run has 2; .*--other-processes"
        assert re.search(message, done.err)
        assert done.err.count("\n") == 2  # a line of each process
        assert weights(tmp_path / "run") == saved

    @pytest.mark.parametrize("mechanism", ["queue", "memory_bank", "moco_v3"])
    @pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
    def test_goes_on_with_the_same_batch_if_asked(
        self, words, straight, tmp_path, mechanism, before, after
    ):
        done = run_ranks(before, words(mechanism, SOLVER__STOP_AT_ITERS=3), tmp_path)
        assert done.codes == [85] * before, done.err
        done = resume(words(mechanism), tmp_path, "--other-processes", world=after)
        assert f"batch 8: {after} process" in done.out
        # Sums in another order, and nothing else: weights, queue or bank, momentum.
        ended = newest(tmp_path / "run")
        assert (ended["step"], ended["processes"]) == (8, after)
        if mechanism == "moco_v3":
            # Its loss amplifies the last bits from step to step; modeling/ compares in float64.
            return
        for name, expected in straight(mechanism).items():
            if "running_" not in name:  # statistics start from the mean
                got = ended["state_dict"][name]
                torch.testing.assert_close(got, expected, atol=3e-3, rtol=3e-3, msg=name)


class TestSignals:
    """Rows 3 and 4."""

    def test_one_process_gets_it_and_all_stop(self, words, straight, tmp_path):
        done = run_ranks(2, words(), tmp_path, Fault(1, 3, signal.SIGUSR2))
        assert done.codes == [85, 85], done.err
        assert done.err.count("stopped after step 4 of 8 and saved") == 2
        assert newest(tmp_path / "run")["step"] == 4
        resume(words(), tmp_path)
        assert equals(tmp_path / "run", straight())

    @pytest.mark.parametrize(
        "number, flags",
        [
            (signal.SIGTERM, []),
            (signal.SIGUSR1, ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"]),
            (signal.SIGUSR1, []),  # it kills torchrun, which leaves its processes behind
        ],
        ids=["SIGTERM", "SIGUSR1-passed-on", "SIGUSR1"],
    )
    def test_to_torchrun(self, words, straight, tmp_path, number, flags):
        fault = Fault(0, 3, number, to_parent=True, hold=True)
        done = torchrun(words(), fault, *flags)
        assert done.codes[0] != 0
        stopped = re.findall(r"error: stopped after step (\d) of 8", done.err)
        # The step at hand is finished and saved, so nothing is lost.
        assert stopped == ["4", "4"], done.err
        assert newest(tmp_path / "run")["step"] == 4
        while processes_of(str(tmp_path)):  # where torchrun is gone before them
            time.sleep(0.1)
        resume(words(), tmp_path)
        assert equals(tmp_path / "run", straight())

    def test_only_torchruns_children_follow_their_parent(self, monkeypatch):
        """A run started by a shell with nohup continues when the shell has gone."""
        monkeypatch.setattr(distributed, "_LAUNCHER", os.getppid() + 1)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        assert not distributed.launcher_died()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert distributed.launcher_died()
        monkeypatch.setattr(distributed, "_LAUNCHER", os.getppid())
        assert not distributed.launcher_died()


class TestLostProcess:
    """Rows 5 and 6."""

    def test_hangs(self, words, tmp_path):
        """A stopped process does not even react to SIGTERM."""
        done = torchrun([*words(), "--dist-timeout", "5"], Fault(1, 3, signal.SIGSTOP))
        assert done.codes != [0]
        said = r"did not answer in 5 s.*--resume to continue \(.*imed out"
        assert re.search(f"process 0 of 2: process 1 of this run died or {said}", done.err)
        assert re.search(r"Root Cause.*rank +: 1 .*SIGKILL", done.err, re.S)  # torchrun's report
        assert not processes_of(str(tmp_path))

    def test_dies_and_is_started_again_by_torchrun(self, words, straight, tmp_path):
        """--overwrite must not throw away what the first attempt had done."""
        (tmp_path / "run").mkdir()
        (tmp_path / "run/metrics.json").write_text("an earlier run's\n")
        fault = Fault(1, 5, signal.SIGKILL)
        done = torchrun([*words(), "--overwrite"], fault, "--max-restarts=1")
        assert done.codes == [0], done.err
        said = "process 0 of 2: process 1 of this run died or did not .*--resume"
        assert re.search(said, done.err)
        assert re.search(r"resuming from .*checkpoint_0000.pth.tar after step 3 of 8", done.out)
        assert equals(tmp_path / "run", straight())

    def test_restarts_on_several_machines_are_refused(self, monkeypatch):
        """Each torchrun counts its own: rank 0 might not know, and begin anew."""
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        assert distributed.restarted() == 0
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        with pytest.raises(UserError, match="--max-restarts 3: is for one machine"):
            distributed.restarted()

    def test_an_error_of_one_is_not_contradicted_by_the_other(self):
        """Nor is it ended while it closes its data-loader workers."""
        assert run_on(2, error_in_process_0, connect=False) == [
            "image 3 is empty",
            "process 1 of 2: process 0 stopped with an error, see its message",
        ]

    def test_the_cause_is_kept(self):
        """Two processes on one GPU are no lost process."""
        for message in run_on(2, two_on_one_gpu, connect=False):
            assert message.endswith(
                "(NCCL error in: Utils.cpp:77, invalid usage; Duplicate GPU detected : rank 0)"
            )

    def test_an_error_in_one_process_ends_all(self, words, tmp_path, images):
        """Each process reads its own images; one bad one is named and nobody waits for ever."""
        folder = tmp_path / "one_bad"
        shutil.copytree(images, folder)
        (folder / "004.jpg").write_bytes(b"")
        done = run_ranks(2, [*words(), "DATA.ROOT", str(folder)], tmp_path)
        assert sorted(done.codes) in ([2, 3], [3, 3]), done.err
        assert "one_bad/004.jpg: the file is empty" in done.err


def test_a_loss_that_is_no_number_in_one_process(words, tmp_path):
    """Row 20."""
    done = run_ranks(2, words(), tmp_path, Fault(1, 5, nan=float("nan")))
    assert done.codes == [4, 4], done.err
    lines = done.err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.match(r"error: loss is nan at step 4; .*checkpoint_0000.pth", line)
    last = newest(tmp_path / "run")
    assert last["step"] == 3
    assert all(value.isfinite().all() for value in last["state_dict"].values())


def test_a_locked_folder(words, tmp_path):
    """Row 25, with torchrun; tests/moco/pretraining/test_reliability.py has it without."""
    with RunFolder(tmp_path / "run"):
        done = torchrun(words())
    assert done.codes != [0]
    assert "is in use by another process" in done.err
    assert re.search(r"rank +: 0 .*exitcode +: 5 ", done.err, re.S), done.err
    assert not processes_of(str(tmp_path))


class TestOpeningImages:
    """The main process scans shards; the others wait as long as that takes."""

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
        assert other == "process 1 of 2: process 0 stopped with an error, see its message"

    def test_other_data_in_no_turns(self, images, tmp_path):
        assert run_on(2, open_together, images, tmp_path, connect=False) == [None, None]
