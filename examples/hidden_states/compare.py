"""Train a draft head from hidden states that are cached in several ways, and compare.

    text -> a small language model of bytes -> hidden states of sequences of 16 to 64 tokens
         -> bf16; fp8; recorder pca in 1/4, 1/8 and 1/16 of the bytes -> a draft head each -> agreement with the model

    python examples/hidden_states/compare.py --out DIR            minutes on two cores
    python examples/hidden_states/compare.py --out DIR --quick    seconds; the numbers mean nothing

The model and its text are those of benchmarks/zoo.py. DIR keeps the model and the caches. All heads are judged on other
texts, whose states are real: in use, a head sees real states. A row of the ledger for each way and seed.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks"), str(Path(__file__).resolve().parent)]
from cached_states import CachedStates
from draft_head import agreement, train
from zoo import TOKENS, WIDTH, Zoo

import krnet
from krnet.device import pick_device
from krnet.features.sequences import Sequences
from krnet.io import ledger

SHORTEST = 16
TEST_SHARE = 0.1  # of the text, its end: heads are judged on it
WAYS = {  # how states are stored, and in what share of the bytes of bf16
    "fp8": ({"recorder": "fp8"}, None),
    "krnet, 4 times smaller": ({"recorder": "pca"}, 4),
    "krnet, 8 times smaller": ({"recorder": "pca"}, 8),
    "krnet, 16 times smaller": ({"recorder": "pca"}, 16),
}


@dataclass(frozen=True)
class Effort:
    layers: tuple[int, ...]  # whose outputs are cached; that of the last one is the model's last hidden state
    model_steps: int
    num_sequences: int
    num_test_sequences: int
    head_steps: int


EFFORT, QUICK = Effort((1, 3, 5, 6), 300, 1500, 1500, 500), Effort((5, 6), 2, 16, 16, 2)


@dataclass(frozen=True)
class Texts:
    """Sequences of different length, one after the other."""

    input_ids: torch.Tensor  # (tokens,)
    lengths: torch.Tensor  # (S,)
    states: torch.Tensor  # (tokens, values) bfloat16

    def real(self):
        """The states themselves, in the form that cached ones have."""
        sequences = Sequences(self.lengths, lambda ids: self.states[ids].float(), "real states")
        return CachedStates(sequences, self.input_ids, WIDTH)


def make_texts(model, text, count, layers, generator, device):
    """Pieces of a text from random places, and what the model makes of them."""
    lengths = torch.randint(SHORTEST, TOKENS + 1, (count,), generator=generator)
    starts = torch.randint(len(text) - TOKENS, (count,), generator=generator)
    pieces = [text[start : start + length].long() for start, length in zip(starts.tolist(), lengths.tolist())]
    states = []
    for some in torch.arange(count).split(250):
        ids = pad_sequence([pieces[number] for number in some.tolist()], batch_first=True)
        ids = torch.nn.functional.pad(ids, (0, TOKENS - ids.shape[1])).to(device)  # the model takes TOKENS of them
        with torch.no_grad():
            found = torch.cat([model.tokens(ids, depth) for depth in layers], -1)  # (B, TOKENS, values)
        # What follows a sequence does not reach it: each token sees those before it alone.
        states += [one[: lengths[number]].bfloat16().cpu() for one, number in zip(found, some.tolist())]
    return Texts(torch.cat(pieces), lengths, torch.cat(states))


def write_caches(texts, folder):
    """{way: (path, seconds)}: the states as a bf16 file, and as recordings with token IDs and lengths."""
    path = folder / "states.safetensors"
    started = time.perf_counter()
    save_file({"features": texts.states, "labels": texts.input_ids, "lengths": texts.lengths}, path)
    caches = {"real states, bf16": (path, time.perf_counter() - started)}
    for way, (settings, ratio) in WAYS.items():
        out, started = folder / f"{settings['recorder']}-{ratio or 2}.krn", time.perf_counter()
        budget = {} if ratio is None else {"budget": path.stat().st_size // ratio}
        recording = krnet.record(path, out=out, **settings, **budget)  # takes labels and lengths from the file
        caches[way] = out, time.perf_counter() - started
        say(f"{way}: {out.stat().st_size:,} bytes, R2 {recording.r2:.4f}, in {caches[way][1]:.0f} s")
    return caches


def compare(out, *, effort, seeds=(0,), device=None, row=True):
    ledger.commit()  # looked up now: the source may change before the run ends
    device = pick_device(device)
    zoo = Zoo(Path(out), None, "small", 0, device)
    zoo.effort = replace(zoo.effort, transformer_steps=effort.model_steps)
    model, end = zoo.language_model, int((1 - TEST_SHARE) * len(zoo.text))
    generator = torch.Generator().manual_seed(1)
    texts = make_texts(model, zoo.text[:end], effort.num_sequences, effort.layers, generator, device)
    test = make_texts(model, zoo.text[end:], effort.num_test_sequences, effort.layers, generator, device)
    test = test.real()
    say(f"{len(texts.lengths):,} sequences, {len(texts.input_ids):,} tokens of {texts.states.shape[1]} values")
    results = {}
    for way, (path, write_s) in write_caches(texts, Path(out)).items():
        dataset = CachedStates.open(path, WIDTH) if path.suffix == ".krn" else texts.real()
        for seed in seeds:
            head, read_s, train_s = train(model, dataset, num_steps=effort.head_steps, seed=seed, device=device)
            found = {
                "way": way,
                "bytes": path.stat().st_size,
                "r2": krnet.open(path).r2 if path.suffix == ".krn" else 1.0,
                "agreement": agreement(head, test, device),
                "write_s": write_s,
                "read_s": read_s,
                "train_s": train_s,
            }
            results.setdefault(way, []).append(found)
            say(f"{way}, seed {seed}: agreement {100 * found['agreement']:.2f} %")
            if row:
                settings = {"way": way, **vars(effort), "tokens": len(texts.input_ids), "width": WIDTH}
                about = {"seconds": write_s + train_s, "seed": seed, "files": [path]}
                ledger.append("hidden-states", settings=settings, metrics=found, **about)
    return results


def show(results):
    real, *_ = results.values()
    names = ["MB", "smaller", "R2", "agreement", "write s", "read s", "train s"]
    print(f"{'states':24}" + "".join(f"{name:>11}" for name in names))
    for way, runs in results.items():
        mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0] if name != "way"}
        print(
            f"{way:24}{mean['bytes'] / 1e6:11.1f}{real[0]['bytes'] / mean['bytes']:11.2f}{mean['r2']:11.4f}"
            f"{100 * mean['agreement']:9.2f} %{mean['write_s']:11.1f}{mean['read_s']:11.1f}{mean['train_s']:11.1f}"
        )


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the caches, 0.4 GB")
    parser.add_argument("--quick", action="store_true", help="seconds, to see it work; writes no row")
    parser.add_argument("--seeds", default="0", metavar="N,...", help="seeds of the heads of each way (%(default)s)")
    parser.add_argument("--device", help="cpu or cuda (a GPU if there is one)")
    args = parser.parse_args()
    effort = QUICK if args.quick else EFFORT
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    show(compare(args.out, effort=effort, seeds=seeds, device=args.device, row=not args.quick))


if __name__ == "__main__":
    main()
