"""Make a zoo of feature sets, on which `krnet reproduce zoo` compares the recorders.

    CIFAR-100      -> ResNet-32 of results/cifar100-base.safetensors, three cuts   -> maps, pooled vectors
                   -> a small vision transformer, trained here                     -> tokens as maps
    Tiny-ImageNet  -> ResNet-18 for small images, trained here                     -> maps, pooled vectors
    text of this machine -> a small language model of bytes, trained here          -> hidden states
                                                                 each set -> OUT/zoo-SCALE/NAME.safetensors (features)

Sets follow from the seed; the last digits also from the machine and its number of threads. What is there is kept. The
scale `small` is for two CPU cores: a set takes seconds to a minute, the first one of a network a minute more for its
training. The scale `full` is for a GPU, and takes about a quarter of an hour and 14 GB.

    python benchmarks/zoo.py --list
    python benchmarks/zoo.py --out DIR --scale full
    python benchmarks/zoo.py --out DIR --only resnet32-late,lm-vectors

DIR holds cifar-100-python/ and tiny-imagenet-100/, as KRNET_DATA does.
"""

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cifar100_base import resnet32, standardise
from safetensors.torch import load_file, save_file
from torch import nn

import krnet
from krnet.device import exact_math, pick_device
from krnet.nn import backbones

ROOT = Path(__file__).resolve().parent.parent
CIFAR_NETWORK = ROOT / "results" / "cifar100-base.safetensors"
TINY_IMAGENET = "tiny-imagenet-100"
TEXT_FOLDERS = (Path("/usr/share/doc"), Path("/usr/share/common-licenses"))  # Debian's
TEXT_BYTES, LEAST_TEXT_BYTES = 20_000_000, 4_000_000
BATCH = 250  # images or sequences that a network sees at once when features are made
WIDTH, DEPTH, TOKENS = 192, 6, 64  # of both transformers; features come from the middle


@dataclass(frozen=True)
class Set:
    """One feature set: how many samples it has in each scale, and how to make them."""

    name: str
    shape: tuple[int, ...]
    num_samples: dict[str, int]
    make: Callable  # (zoo, number of samples) -> (N, *shape)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Effort:
    """How long the networks of a scale are trained: steps of so many samples."""

    resnet_steps: int
    resnet_batch: int
    resnet_crop: int  # pixels: the network pools over all positions, so it may train on smaller images
    transformer_steps: int
    transformer_batch: int


EFFORT = {
    "tiny": Effort(2, 8, 16, 2, 4),  # for tests
    "small": Effort(24, 64, 32, 60, 32),
    "full": Effort(4000, 256, 64, 6000, 256),
}


class Zoo:
    """The networks and the data that sets are made from; each is made when it is first needed."""

    def __init__(self, folder, data_dir, scale, seed, device):
        self.folder, self.data_dir, self.effort, self.seed, self.device = folder, data_dir, EFFORT[scale], seed, device

    # -------------------------------------------------------------- data

    @cached_property
    def cifar(self):
        """(50000, 3, 32, 32) uint8 in an order of the seed, and labels."""
        split = krnet.data.load("cifar100", self.data_dir, download=False).train
        order = self.order(len(split.images))
        return split.images[order], split.labels[order]

    @cache  # noqa: B019, the zoo lives as long as the command
    def tiny_images(self, count):
        """`count` images (count, 3, 64, 64) uint8 in an order of the seed, and labels."""
        from PIL import Image

        folder = Path(self.data_dir or ".", TINY_IMAGENET, "train")
        paths = sorted(folder.glob("*/*.JPEG"))
        if not paths:
            raise SystemExit(
                f"{folder}: no images; expected Tiny-ImageNet as WNID/*.JPEG. Give its folder as --data-dir"
            )
        classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in paths}))}
        chosen = [paths[i] for i in self.order(len(paths))[:count]]
        images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in chosen])
        labels = torch.tensor([classes[path.parent.name] for path in chosen])
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels

    @cached_property
    def text(self):
        """Bytes of this machine's documentation, else of Python's own library."""
        files = sorted(path for folder in TEXT_FOLDERS for path in folder.rglob("*"))
        files = [path for path in files if path.suffix in ("", ".txt", ".md", ".html", ".rst") and path.is_file()]
        text = joined(files)
        if len(text) < LEAST_TEXT_BYTES:
            text += joined(sorted(Path(os.__file__).parent.rglob("*.py")))
        return torch.from_numpy(np.frombuffer(text[:TEXT_BYTES], np.uint8).copy())

    def order(self, count):
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))

    # -------------------------------------------------------------- networks

    @cached_property
    def resnet32(self):
        trunk, head = resnet32(50)
        nn.Sequential(trunk, head).load_state_dict(load_file(CIFAR_NETWORK))
        return nn.Sequential(*trunk, *head).to(self.device).eval()  # stem, 15 blocks, pool, flatten, classifier

    @cached_property
    def resnet18(self):
        effort, crop = self.effort, self.effort.resnet_crop
        count = min(50_000, effort.resnet_steps * effort.resnet_batch)

        def build():
            network = backbones.build("resnet18-small")
            return nn.Sequential(network, nn.Linear(network.feature_dim, 100)).to(memory_format=torch.channels_last)

        def batch(generator):
            images, labels = self.tiny_images(count)
            ids = torch.randint(len(images), (effort.resnet_batch,), generator=generator)
            x = images[ids].to(self.device)
            x = F.interpolate(x.float(), crop, mode="area") if crop < x.shape[-1] else shifted(x, generator)
            x = x.flip(3) if torch.rand((), generator=generator) < 0.5 else x
            return standardise(x), labels[ids].to(self.device)

        def optimize(parameters):
            return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)

        return self.trained("resnet18", build, optimize, batch, effort.resnet_steps)[0]

    @cached_property
    def vit(self):
        """A vision transformer: 64 patches of 4x4, and the mean of its tokens classifies."""

        def batch(generator):
            images, labels = self.cifar
            ids = torch.randint(len(images), (self.effort.transformer_batch,), generator=generator)
            x = images[ids].to(self.device)
            x = x.flip(3) if torch.rand((), generator=generator) < 0.5 else x
            return standardise(x), labels[ids].to(self.device)

        return self.transformer("vit", lambda: Transformer(nn.Conv2d(3, WIDTH, 4, 4), 100, causal=False), batch)

    @cached_property
    def language_model(self):
        """A transformer that predicts the next byte."""

        def batch(generator):
            text = self.sequences(self.effort.transformer_batch, generator, TOKENS + 1).to(self.device)
            return text[:, :-1], text[:, 1:].flatten()

        return self.transformer("lm", lambda: Transformer(nn.Embedding(256, WIDTH), 256, causal=True), batch)

    def transformer(self, name, build, batch):
        def optimize(parameters):
            return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.05)

        return self.trained(name, build, optimize, batch, self.effort.transformer_steps)

    def trained(self, name, build, optimize, batch, num_steps):
        """Train a network, or read the weights that an earlier call left."""
        path = self.folder / "networks" / f"{name}.safetensors"
        torch.manual_seed(self.seed)
        model = build().to(self.device)
        if path.exists():
            model.load_state_dict(load_file(path, device=str(self.device)))
            return model.eval().requires_grad_(False)
        say(f"training {name}: {num_steps:,} steps")
        optimizer, generator, losses = optimize(model.parameters()), torch.Generator().manual_seed(self.seed), []

        def share_of_rate(step):  # a warm-up over a tenth of the steps, then half a cosine
            return min((step + 1) / (0.1 * num_steps + 1), 0.5 * (1 + math.cos(math.pi * step / num_steps)))

        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
        for _ in range(num_steps):
            x, target = batch(generator)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = F.cross_entropy(model(x).float(), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            losses.append(loss.detach())
        say(f"training {name}: loss {torch.stack(losses[-50:]).mean().item():.3f}")
        write(path, {key: value.contiguous().cpu() for key, value in model.state_dict().items()})
        return model.eval().requires_grad_(False)

    # -------------------------------------------------------------- features

    def sequences(self, count, generator, length=TOKENS):
        """(count, length) int64: pieces of the text from random places."""
        starts = torch.randint(len(self.text) - length, (count, 1), generator=generator)
        return self.text[starts + torch.arange(length)].long()

    def run(self, network, inputs):
        """What the network makes of all inputs, in batches; images of bytes are standardised."""
        parts = []
        with torch.no_grad(), exact_math():
            for part in inputs.split(BATCH):
                x = part.to(self.device)
                parts.append(network(standardise(x) if x.dtype == torch.uint8 else x).float().cpu())
        return torch.cat(parts)

    def cifar_maps(self, count, cut, pool=False):
        network = self.resnet32[: 1 + cut]
        return self.run(nn.Sequential(network, Mean()) if pool else network, with_mirrors(self.cifar[0], count))

    def tiny_maps(self, count, layers, pool=False):
        images = self.tiny_images(min(count, 50_000))[0]
        network = backbones.cut(self.resnet18, layers)[0]
        return self.run(nn.Sequential(network, Mean()) if pool else network, with_mirrors(images, count))

    def vit_tokens(self, count):
        tokens = self.run(self.vit.hidden, with_mirrors(self.cifar[0], count))  # (N, 64, WIDTH)
        return tokens.transpose(1, 2).unflatten(2, (8, 8))  # channels first, and the patches where they are

    def language_tokens(self, count):
        generator = torch.Generator().manual_seed(self.seed + 1)
        return self.run(self.language_model.hidden, self.sequences(count, generator)).transpose(1, 2)

    def language_vectors(self, count):
        """One position of each sequence."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        return self.run(nn.Sequential(self.language_model.hidden, LastToken()), self.sequences(count, generator))


class Mean(nn.Module):
    def forward(self, maps):
        return maps.mean((2, 3))


class LastToken(nn.Module):
    def forward(self, tokens):
        return tokens[:, -1]


class Transformer(nn.Module):
    """Tokens -> blocks -> logits: of each token if causal, else of their mean. `hidden` stops in the middle."""

    def __init__(self, embed, num_outputs, causal):
        super().__init__()
        self.causal = causal
        self.embed = embed
        self.place = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 3, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_outputs)
        self.hidden = Middle(self)

    def tokens(self, x, depth):
        x = self.embed(x)
        x = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x  # (B, TOKENS, WIDTH)
        x = x + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=x.device) if self.causal else None
        for block in self.blocks[:depth]:
            x = block(x, src_mask=mask, is_causal=self.causal)
        return x

    def forward(self, x):
        x = self.norm(self.tokens(x, DEPTH))
        return self.head(x).flatten(0, 1) if self.causal else self.head(x.mean(1))


class Middle(nn.Module):
    def __init__(self, transformer):
        super().__init__()
        self.tokens = [transformer]  # in a list: it is no part of this module

    def forward(self, x):
        return self.tokens[0].tokens(x, DEPTH // 2)


def shifted(images, generator):
    """The images, moved by up to 4 pixels at random, all alike."""
    dy, dx = torch.randint(0, 9, (2,), generator=generator).tolist()
    size = images.shape[-1]
    return F.pad(images, (4, 4, 4, 4))[:, :, dy : dy + size, dx : dx + size]


def with_mirrors(images, count):
    """The first `count` images; where there are fewer, their mirror images follow."""
    if count <= len(images):
        return images[:count]
    assert count <= 2 * len(images), f"{count} samples of {len(images)} images"
    return torch.cat([images, images[: count - len(images)].flip(3)])


def joined(paths):
    """The text of the files, equal ones once."""
    seen, parts, size = set(), [], 0
    for path in paths:
        content = path.read_bytes() if size < TEXT_BYTES and path.is_file() else b""
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            parts.append(content)
            size += len(content)
    return b"".join(parts)


def sizes(small, full):
    return {"tiny": 12, "small": small, "full": full}


RESNET32, RESNET18 = (64, 8, 8), (512, 8, 8)
SETS = [
    Set("resnet32-early", (16, 32, 32), sizes(400, 5_000), lambda zoo, n: zoo.cifar_maps(n, 5)),
    Set("resnet32-middle", (32, 16, 16), sizes(1_000, 10_000), lambda zoo, n: zoo.cifar_maps(n, 10)),
    Set("resnet32-late", RESNET32, sizes(2_500, 25_000), lambda zoo, n: zoo.cifar_maps(n, 11)),
    Set("resnet32-late-few", RESNET32, sizes(300, 300), lambda zoo, n: zoo.cifar_maps(n, 11)),
    Set("resnet32-late-many", RESNET32, sizes(6_000, 100_000), lambda zoo, n: zoo.cifar_maps(n, 11)),
    Set("resnet32-late-float16", RESNET32, sizes(2_500, 25_000), lambda zoo, n: zoo.cifar_maps(n, 11), torch.float16),
    Set("resnet32-vectors", (64,), sizes(10_000, 100_000), lambda zoo, n: zoo.cifar_maps(n, 15, pool=True)),
    Set("resnet18-middle", (256, 16, 16), sizes(300, 5_000), lambda zoo, n: zoo.tiny_maps(n, 13)),
    Set("resnet18-late", RESNET18, sizes(500, 10_000), lambda zoo, n: zoo.tiny_maps(n, 17)),
    Set("resnet18-late-few", RESNET18, sizes(300, 300), lambda zoo, n: zoo.tiny_maps(n, 17)),
    Set("resnet18-late-bfloat16", RESNET18, sizes(500, 10_000), lambda zoo, n: zoo.tiny_maps(n, 17), torch.bfloat16),
    Set("resnet18-vectors", (512,), sizes(600, 100_000), lambda zoo, n: zoo.tiny_maps(n, 17, pool=True)),
    Set("vit-tokens", (WIDTH, 8, 8), sizes(1_000, 20_000), lambda zoo, n: zoo.vit_tokens(n)),
    Set("lm-tokens", (WIDTH, TOKENS), sizes(1_000, 20_000), lambda zoo, n: zoo.language_tokens(n)),
    Set("lm-vectors", (WIDTH,), sizes(10_000, 200_000), lambda zoo, n: zoo.language_vectors(n)),
]


def say(text):
    print(text, file=sys.stderr, flush=True)


def write(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def make(names, *, out, data_dir, scale, seed=0, device=None):
    """Write the sets of these names that are not there yet; returns their files."""
    folder = Path(out) / (f"zoo-{scale}" if seed == 0 else f"zoo-{scale}-seed{seed}")
    zoo, paths = Zoo(folder, data_dir, scale, seed, pick_device(device)), []
    for one in SETS:
        if one.name not in names:
            continue
        paths.append(folder / f"{one.name}.safetensors")
        if not paths[-1].exists():
            started = time.perf_counter()
            features = one.make(zoo, one.num_samples[scale])
            assert features.shape == (one.num_samples[scale], *one.shape), f"{one.name}: {tuple(features.shape)}"
            write(paths[-1], {"features": features.to(one.dtype).contiguous()})
            say(f"{paths[-1]}: {tuple(features.shape)} in {time.perf_counter() - started:.0f} s")
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the sets and exit")
    parser.add_argument("--out", type=Path, help="folder for zoo-SCALE/ (KRNET_DATA), where `krnet reproduce` looks")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets (KRNET_DATA)")
    parser.add_argument("--only", metavar="NAME,...", help="make only these sets (all)")
    parser.add_argument("--scale", choices=("small", "full"), default="small", help="(%(default)s)")
    parser.add_argument("--device", help="cpu or cuda (a GPU if there is one)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples and of networks trained here (%(default)s)")
    args = parser.parse_args()
    known = [one.name for one in SETS]
    if args.list:
        for one in SETS:
            shape = "x".join(map(str, one.shape))
            counts = ", ".join(f"{scale} {one.num_samples[scale]:,}" for scale in ("small", "full"))
            print(f"{one.name:24} {shape:10} {str(one.dtype).removeprefix('torch.'):9} {counts}")
        return
    data_dir = args.data_dir or os.environ.get("KRNET_DATA")
    out = args.out or data_dir
    if out is None:
        parser.error("no folder: give --out, or set KRNET_DATA")
    names = known if args.only is None else args.only.split(",")
    for name in names:
        if name not in known:
            parser.error(f"unknown set {name!r}; known: {', '.join(known)}")
    for path in make(names, out=out, data_dir=data_dir, scale=args.scale, seed=args.seed, device=args.device):
        print(path)


if __name__ == "__main__":
    main()
