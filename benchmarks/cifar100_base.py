"""Train ResNet-32 on the base task of CIFAR-100 and write its feature maps, on which the other benchmarks record.

    cifar-100-python/ -> ResNet-32, 160 epochs -> trunk F1 (23 layers) -> base/features.npy (25000, 64, 8, 8)
                                                  head F2 ( 9 layers) -> base/network.safetensors
                         images                                       -> base/images.npy (25000, 32, 32, 3)
                         labels 0..49                                 -> base/labels.npy (25000,)

The base task is the first 50 classes of LUCIR's order, drawn with seed 1993 (68, 56, 78, 8, ...). Settings of the KRNet
paper: SGD with learning rate 0.1 (x 0.1 at epochs 80 and 120), momentum 0.9, weight decay 5e-4, batch 128, pad-4 crop
and flip. Expect a test accuracy of about 76.8 % in under two minutes on an H200. --epochs 1 --limit 2000 is a trial run
on a CPU.

    python benchmarks/cifar100_base.py --data-dir DIR --out runs/base
"""

import argparse
import json
import math
import pickle
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from krnet.io import ledger

MEAN, STD = (0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)


class NumpyOnly(pickle.Unpickler):
    """Unpickle arrays and their types, which the publisher's files need, and refuse everything that could run code."""

    ALLOWED = ("_reconstruct", "ndarray", "dtype", "_frombuffer", "encode")

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused to load {module}.{name}")


def load_split(folder, split, classes):
    """Return images (N, 3, 32, 32) uint8 of the given classes, and their places in `classes` as labels (N,)."""
    with open(Path(folder) / "cifar-100-python" / split, "rb") as file:
        record = NumpyOnly(file, encoding="bytes").load()
    images = torch.from_numpy(np.asarray(record[b"data"])).reshape(-1, 3, 32, 32)
    labels = torch.tensor(record[b"fine_labels"])
    place = torch.full((100,), -1)
    place[torch.tensor(classes)] = torch.arange(len(classes))
    keep = place[labels] >= 0
    return images[keep].contiguous(), place[labels[keep]]


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:  # option B of the ResNet paper: a projection
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet32(num_classes, cut=11):
    """Return the trunk F1 (stem and the first `cut` basic blocks) and the head F2 (the rest)."""
    widths = [16] * 5 + [32] * 5 + [64] * 5
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks, last = [], 16
    for i, width in enumerate(widths):
        blocks.append(Block(last, width, 2 if i in (5, 10) else 1))
        last = width
    trunk = nn.Sequential(stem, *blocks[:cut])
    head = nn.Sequential(*blocks[cut:], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
    for module in [*trunk.modules(), *head.modules()]:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return trunk, head


def standardise(images):
    # Channel by channel with plain numbers: a CUDA graph cannot create a tensor of constants.
    return torch.stack([(images[:, c].float() / 255 - MEAN[c]) / STD[c] for c in range(3)], dim=1)


def augment(images):
    """Crop (after padding by 4) and flip a uint8 batch at random, by one gather, which a CUDA graph can hold."""
    b, device = len(images), images.device
    padded = F.pad(images, (4, 4, 4, 4))
    dy, dx = torch.randint(0, 9, (2, b, 1), device=device)
    column = torch.arange(32, device=device).expand(b, 32)
    column = torch.where(torch.rand(b, 1, device=device) < 0.5, column, 31 - column) + dx
    row = torch.arange(32, device=device).expand(b, 32) + dy
    index = torch.arange(b, device=device).view(b, 1, 1)
    return padded.permute(0, 2, 3, 1)[index, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


def train(trunk, head, images, labels, epochs, batch, device):
    net = nn.Sequential(trunk, head).to(device).to(memory_format=torch.channels_last)
    ids = torch.zeros(batch, dtype=torch.long, device=device)
    loss = torch.zeros((), device=device)
    cuda = device.type == "cuda"
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, foreach=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        x = standardise(augment(images[ids])).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            out = F.cross_entropy(net(x).float(), labels[ids])
        out.backward()
        optimizer.step()
        loss.copy_(out.detach())

    def capture():
        # Captured again for each learning rate, which is a constant in the graph.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        saved = {k: v.clone() for k, v in net.state_dict().items()}
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        net.load_state_dict(saved)
        return graph.replay

    run = capture() if cuda else step
    for epoch in range(epochs):
        if epoch in (epochs // 2, epochs * 3 // 4):
            optimizer.param_groups[0]["lr"] *= 0.1
            run = capture() if cuda else step
        order = torch.randperm(len(images), device=device)
        for start in range(0, len(order) - batch + 1, batch):
            ids.copy_(order[start : start + batch])
            run()
        if epoch % 20 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.3f}", flush=True)
            if not math.isfinite(loss.item()):
                raise SystemExit("the loss is not finite; nothing was written")
    return net


@torch.inference_mode()
def apply_in_batches(module, x, batch=1000):
    module.eval()
    return torch.cat([module(part) for part in x.split(batch)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder that holds cifar-100-python/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--epochs", type=int, default=160, help="epochs of the training (%(default)s)")
    parser.add_argument("--limit", type=int, help="number of training and of test images (all)")
    parser.add_argument("--network", type=Path, help="network.safetensors to read instead of training (none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    args = parser.parse_args()

    ledger.commit()  # looked up now: the source may change before the run ends
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    order = np.random.RandomState(1993).permutation(100).tolist()
    images, labels = (t[: args.limit].to(device) for t in load_split(args.data_dir, "train", order[:50]))
    tests, truths = (t[: args.limit].to(device) for t in load_split(args.data_dir, "test", order[:50]))

    trunk, head = resnet32(50)
    started = time.perf_counter()
    if args.network:
        nn.Sequential(trunk, head).load_state_dict(load_file(args.network))
        trunk.to(device), head.to(device)
    else:
        torch.backends.cudnn.benchmark = True
        train(trunk, head, images, labels, args.epochs, min(128, len(images)), device)
        torch.backends.cudnn.benchmark = False
    seconds = time.perf_counter() - started

    features = apply_in_batches(trunk, standardise(images))
    scores = apply_in_batches(head, features)
    test_scores = apply_in_batches(head, apply_in_batches(trunk, standardise(tests)))
    metrics = {
        "test_accuracy": (test_scores.argmax(1) == truths).float().mean().item(),
        "train_accuracy": (scores.argmax(1) == labels).float().mean().item(),
        "zero_ratio": (features == 0).float().mean().item(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "features.npy", features.cpu().numpy())
    np.save(args.out / "labels.npy", labels.cpu().numpy())
    np.save(args.out / "images.npy", images.permute(0, 2, 3, 1).cpu().numpy())
    state = nn.Sequential(trunk, head).state_dict()
    save_file({k: v.contiguous().cpu() for k, v in state.items()}, args.out / "network.safetensors")
    if not args.network and not args.limit:
        ledger.append(
            "cifar100-base-task",
            settings={"epochs": args.epochs, "network": "resnet32, option B, cut after block 11"},
            metrics=metrics,
            seconds=seconds,
            seed=args.seed,
            class_order="lucir1993",
        )
    print(json.dumps({**metrics, "seconds": round(seconds, 1), "features": list(features.shape)}))


if __name__ == "__main__":
    main()
