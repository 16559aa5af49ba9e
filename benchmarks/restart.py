"""Kill one of the two processes of krnet encode at a random moment, go on with one or with three, and compare.

    maps of CIFAR-100, a model -> krnet encode, one process -> what is expected
                               -> torchrun with two; SIGKILL to one -> --resume with one or three -> the same?

The moment is drawn from the time that two processes take from the first file to the last. All files are compared, byte
for byte, and all replays, value for value. A row goes to the ledger: each kill, and what came of it. The maps are those
of benchmarks/encode.py. Minutes on two cores.

    python benchmarks/restart.py --data-dir DIR
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import jobs
import numpy as np
import torch
from encode import run_trunk
from extract import load_trunk

import krnet
from krnet.device import pick_device
from krnet.io import ledger

RESTARTED_WITH = (1, 3)  # processes, in turn
POLL_S = 0.005
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


class Encoding:
    """The command, with any number of processes."""

    def __init__(self, features, model, part_samples):
        self.words = ("encode", "--model", model, features, "--part-samples", part_samples, "--device", "cpu", "-q")

    def start(self, out, num_processes, *more):
        return jobs.start(jobs.krnet(*self.words, "-o", out, *more, num_processes=num_processes), **PIPES)

    def run(self, out, num_processes, *more):
        """To the end; seconds since the first file was there."""
        job = self.start(out, num_processes, *more)
        begun = wait_for_work(job, out)
        text = job.communicate()[0]
        if job.returncode:
            raise SystemExit(f"krnet encode with {num_processes} processes ended with {job.returncode}: {text[-2000:]}")
        return time.monotonic() - begun


def wait_for_work(job, out):
    """Return when the first file is there, or the job has ended."""
    while job.poll() is None and not (out.is_dir() and any(out.iterdir())):
        time.sleep(POLL_S)
    return time.monotonic()


def pid_of_rank(job, rank):
    """The process of a rank; None if it has ended."""
    for pid in jobs.children(job.pid):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"RANK=%d" % rank in environment:
            return pid
    return None


def kill_one(encoding, out, after_s, rank):
    """Start two processes, and kill one so long after the first file; what was there then, None if all was done."""
    job = encoding.start(out, 2)
    wait_for_work(job, out)
    time.sleep(after_s)
    pid = pid_of_rank(job, rank)
    if pid is None or (out / "manifest.json").exists():
        job.communicate()
        return None
    parts = len(list(out.glob("part-*.krn")))
    os.kill(pid, signal.SIGKILL)
    text = job.communicate()[0]
    assert job.returncode and "SIGKILL" in text, f"torchrun ended with {job.returncode}: {text[-2000:]}"
    return {"rank": rank, "after_s": round(after_s, 3), "parts": parts, "manifest": (out / "manifest.json").exists()}


def trial(encoding, folder, expected, chance, whole_s, restart_with):
    """One kill and one restart. A job that is done before the kill is tried again."""
    num_late = 0
    while (
        killed := kill_one(encoding, folder / f"{num_late}", chance.uniform(0, whole_s), chance.randrange(2))
    ) is None:
        num_late += 1
    out = folder / f"{num_late}"
    taken = encoding.run(out, restart_with, "--resume")
    found = jobs.digests(out)
    return killed | {
        "late": num_late, "restarted_with": restart_with, "restart_s": round(taken, 3), "same_files": found == expected,
        "same_manifest": found.get("manifest.json") == expected["manifest.json"],
    }  # fmt: skip


def same_values(out, expected):
    values, wanted = krnet.open(out), krnet.open(expected)
    return len(values) == len(wanted) and all(
        torch.equal(values.replay(ids), wanted.replay(ids)) for ids in torch.arange(len(wanted)).split(512)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of the data sets (KRNET_DATA)")
    parser.add_argument("--samples", type=int, default=6000, help="maps that are encoded (%(default)s)")
    parser.add_argument("--fit-samples", type=int, default=1500, help="that the model is fitted to (%(default)s)")
    parser.add_argument("--part-samples", type=int, default=256, help="samples in a part (%(default)s)")
    parser.add_argument("--kills", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the processes (%(default)s)")
    args = parser.parse_args()

    ledger.commit()  # looked up now: the source may change before the run ends
    started, device, chance = time.perf_counter(), pick_device(None), random.Random(args.seed)
    images = krnet.data.load("cifar100", args.data_dir).train.images[: args.samples]
    maps = run_trunk(load_trunk(device), images, device, keep=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "maps.npy", maps.numpy())
        krnet.record(maps[: args.fit_samples], recorder="pca", budget=maps.nbytes // 128, out=folder / "model.krn")
        encoding = Encoding(folder / "maps.npy", folder / "model.krn", args.part_samples)
        encoding.run(folder / "expected", 1)
        expected = jobs.digests(folder / "expected")
        whole_s = encoding.run(folder / "undisturbed", 2)
        assert jobs.digests(folder / "undisturbed") == expected, "two processes write other files than one"
        kills = []
        for number in range(args.kills):
            work = folder / f"{number}"
            work.mkdir()
            kills.append(trial(encoding, work, expected, chance, whole_s, RESTARTED_WITH[number % 2]))
            kills[-1]["same_values"] = same_values(work / f"{kills[-1]['late']}", folder / "expected")
            print(json.dumps(kills[-1]), flush=True)
    equal = all(kill[f"same_{what}"] for kill in kills for what in ("files", "manifest", "values"))
    metrics = {
        "num_kills": len(kills), "equal": equal, "num_parts": sum(name.startswith("part-") for name in expected),
        "undisturbed_s": whole_s, "kills": kills,
    }  # fmt: skip
    settings = {name: value for name, value in vars(args).items() if name != "data_dir"}
    ledger.append(
        "restart", settings=settings, metrics=metrics, seconds=time.perf_counter() - started, seed=args.seed,
        outcome="ok" if equal else "failed",
    )  # fmt: skip
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
