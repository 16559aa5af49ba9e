"""Work out a large encoding job: its time, bytes and machines, with ranks that are slow and ranks that die.

    samples, rate of a rank, ranks, spread of rates, failures -> simulate -> hours, and where they went

The job is one of torchrun: each rank codes whole parts of its own share. When a rank dies all stop, parts that are not
finished are lost, and after a pause all go on with the parts that are left. The rate of a rank is that of the newest
row of benchmarks/encode.py in the ledger, or --rate. Nothing is encoded; it takes seconds.

    python benchmarks/schedule.py --samples 1e9 --ranks 8,64,512
    python benchmarks/schedule.py --samples 1e9 --ranks 64 --rate 20000 --values 65536 --bits 0.25
"""

import argparse
import heapq
import json
import random
from dataclasses import dataclass
from pathlib import Path

LEDGER = Path(__file__).resolve().parent.parent / "results" / "ledger.jsonl"
HOUR = 3600.0


@dataclass(frozen=True)
class Job:
    """What there is to do, and on what."""

    num_samples: int
    rate: float
    """Samples a second of a rank of ordinary speed."""
    num_ranks: int
    part_samples: int = 65_536
    spread: float = 0.1
    """Standard deviation of the logarithm of the ranks' speeds: 0.1 means that most are within 10 %."""
    hours_to_failure: float = 10_000.0
    """Mean time until a rank dies."""
    restart_s: float = 120.0
    """From the death of a rank to the work of all ranks."""

    @property
    def num_parts(self) -> int:
        return -(-self.num_samples // self.part_samples)

    @property
    def ideal_s(self) -> float:
        """All ranks alike, and none dies."""
        return self.num_samples / self.rate / self.num_ranks


@dataclass
class Outcome:
    """How a job went, in seconds."""

    seconds: float = 0.0
    num_restarts: int = 0
    lost: float = 0.0
    """Work of all ranks on parts that were not finished when a rank died."""
    restarting: float = 0.0


def simulate(job: Job, seed: int = 0) -> Outcome:
    """Run the schedule once: shares of whole parts, in rounds that end when all parts are done or a rank dies."""
    chance = random.Random(seed)
    part_s = [job.part_samples / job.rate * chance.lognormvariate(0, job.spread) for _ in range(job.num_ranks)]
    left, outcome = job.num_parts, Outcome()
    while left:
        shares = [left // job.num_ranks + (rank < left % job.num_ranks) for rank in range(job.num_ranks)]
        whole = max(share * own for share, own in zip(shares, part_s, strict=True))
        dies = chance.expovariate(job.num_ranks / (job.hours_to_failure * HOUR))
        if dies >= whole:
            outcome.seconds += whole
            return outcome
        done = [min(share, int(dies / own)) for share, own in zip(shares, part_s, strict=True)]
        busy = [min(dies, share * own) for share, own in zip(shares, part_s, strict=True)]
        outcome.lost += sum(time - count * own for time, count, own in zip(busy, done, part_s, strict=True))
        left -= sum(done)
        outcome.num_restarts += 1
        outcome.restarting += job.restart_s
        outcome.seconds += dies + job.restart_s
    return outcome


def simulate_queue(job: Job, seed: int = 0) -> float:
    """Seconds if ranks took the next part from a queue, and none died: what equal shares cost beside it."""
    chance = random.Random(seed)
    ranks = [(0.0, job.part_samples / job.rate * chance.lognormvariate(0, job.spread)) for _ in range(job.num_ranks)]
    heapq.heapify(ranks)
    for _ in range(job.num_parts):
        free, own = ranks[0]
        heapq.heapreplace(ranks, (free + own, own))
    return max(free for free, _ in ranks)


def measured(path: Path = LEDGER) -> dict | None:
    """The newest row of benchmarks/encode.py; None if there is none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [row for row in rows if (row["recipe"], row["outcome"]) == ("encode", "ok")]
    return max(found, key=lambda row: row["date"]) if found else None


def line(job: Job, values: int, bits: float, trials: int = 20) -> dict:
    """One line of the table: the mean of some simulated runs."""
    runs = [simulate(job, seed) for seed in range(trials)]
    hours = sum(run.seconds for run in runs) / trials / HOUR
    return {
        "ranks": job.num_ranks,
        "ideal_hours": job.ideal_s / HOUR,
        "hours": hours,
        "restarts": sum(run.num_restarts for run in runs) / trials,
        "lost_share": sum(run.lost for run in runs) / trials / (hours * HOUR * job.num_ranks),
        "queue_hours": simulate_queue(job) / HOUR,
        "rank_hours": hours * job.num_ranks,
        "feature_bytes": 2 * job.num_samples * values,  # as bfloat16
        "kept_bytes": round(job.num_samples * values * bits / 8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=float, default=1e9, help="number of samples (%(default)g)")
    parser.add_argument("--ranks", default="8,64,512", help="numbers of ranks (%(default)s)")
    parser.add_argument("--rate", type=float, help="samples a second of a rank (the ledger's)")
    parser.add_argument("--values", type=int, help="values of a sample (the ledger's)")
    parser.add_argument("--bits", type=float, default=0.25, help="a value (%(default)s)")
    parser.add_argument("--spread", type=float, default=Job.spread, help="of the ranks' speeds (%(default)s)")
    parser.add_argument("--hours-to-failure", type=float, default=Job.hours_to_failure, help="of a rank (%(default)g)")
    parser.add_argument("--restart-s", type=float, default=Job.restart_s, help="pause (%(default)g)")
    args = parser.parse_args()
    rate, values = args.rate, args.values
    if rate is None or values is None:
        row = measured()
        if row is None:
            raise SystemExit("no row of benchmarks/encode.py in the ledger; run it, or give --rate and --values")
        metrics = row["metrics"]
        rate = rate or metrics["samples_per_second"]["encode"]
        values = values or metrics["shape"][0] * metrics["shape"][1] * metrics["shape"][2]
    print(
        f"{args.samples:,.0f} samples of {values:,} values, {rate:,.0f} a second and rank, {args.bits:g} bits a value"
    )
    for ranks in map(int, args.ranks.split(",")):
        job = Job(
            int(args.samples), rate, ranks, spread=args.spread, hours_to_failure=args.hours_to_failure,
            restart_s=args.restart_s,
        )  # fmt: skip
        print(json.dumps(line(job, values, args.bits)), flush=True)


if __name__ == "__main__":
    main()
