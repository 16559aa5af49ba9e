"""Networks from files: heads that read feature maps, and trunks that make them of images.

x.pt2 (torch.export), x.pt (TorchScript), the folder of a `krnet learn kril` run
    -> read_head  -> Head: feature maps (B, *shape) -> logits     are replays still worth learning from?
    -> read_trunk -> Trunk: images (B, C, H, W) -> feature maps   what recordings of images are replayed through
"""

from __future__ import annotations

import copy
import warnings
import zipfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from krnet.device import exact_math
from krnet.errors import InputError, LabelError, NotARecordingError
from krnet.io import archive
from krnet.io.atomic import AnyPath, read_json
from krnet.io.header import digest as file_digest
from krnet.nn import backbones, heads

HEAD_BATCH = 512


class Loaded(nn.Module):
    """A network from a file, for batches of any size, in the mode in which it judges."""

    kind: ClassVar[str]
    reads: ClassVar[str]
    makes: ClassVar[str]
    wanted: ClassVar[str]
    """What to give where this one does not fit."""

    def __init__(self, name: str, module: nn.Module, batch: int | None = None, *, digest: str):
        """`batch`: the only size that it takes, where it was exported for one."""
        super().__init__()
        self.name, self.module, self.digest, self.batch = name, module, digest, batch

    def train(self, mode: bool = True) -> Loaded:
        return self  # programs of torch.export have one mode, and refuse to be asked for another

    def __deepcopy__(self, memo: Any) -> Loaded:
        return self  # nobody trains it, and it is on its device: whoever wants a copy can share it

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for part in x.split(self.batch or HEAD_BATCH):
            # An exported module may take one size only, and none takes a single sample where it was shown several.
            missing = (self.batch or min(2, len(x))) - len(part)
            filled = torch.cat([part, part[-1:].expand(max(0, missing), *part.shape[1:])])
            try:
                made = self.module(filled)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                why = str(error).strip().rpartition("\n")[2][:200]  # TorchScript begins with pages of traceback
                raise InputError(
                    f"{self.name}: refuses {self.reads} of shape {tuple(part.shape[1:])} ({why}). Give {self.wanted}"
                ) from error
            if not self.fits(made, len(filled)):
                shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise InputError(
                    f"{self.name}: gives {shape} for {len(filled)} samples; expected {self.makes}. Give {self.wanted}"
                )
            found.append(made[: len(part)])
        return torch.cat(found)

    def fits(self, made: object, num_samples: int) -> bool:
        return isinstance(made, Tensor) and made.shape[:1] == (num_samples,)


class LoadedHead(Loaded):
    """Feature maps (B, *shape) -> logits (B, classes)."""

    kind, reads, makes = "head", "feature maps", "logits of each class"
    wanted = "the head that reads these features"

    @property
    def trainable(self) -> nn.Module | None:
        """To be looked through while a network is fitted; not where it takes one size of batch only."""
        return Unfused(self.module) if self.batch is None else None

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        with exact_math():
            logits: Tensor = self(features)
        return logits

    def fits(self, made: object, num_samples: int) -> bool:
        return super().fits(made, num_samples) and isinstance(made, Tensor) and made.dim() == 2

    def num_right(self, features: Tensor, labels: Tensor) -> int:
        logits = self.logits(features)
        first, last = (int(edge) for edge in labels.aminmax())
        if first < 0 or last >= logits.shape[1]:
            raise LabelError(
                f"labels run from {first} to {last}; {self.name} tells 0 to {logits.shape[1] - 1} apart. Number the "
                f"classes as the head does"
            )
        return int((logits.argmax(1).cpu() == labels).sum())


class LoadedTrunk(Loaded):
    """Normalised images (B, C, H, W) -> feature maps (B, *shape)."""

    kind, reads, makes = "trunk", "images", "a feature map of each"
    wanted = "the trunk that made the features of these images"


Kind = TypeVar("Kind", LoadedHead, LoadedTrunk)


class Unfused(nn.Module):
    """TorchScript without its fuser, which would compile in the middle of a CUDA graph."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def __deepcopy__(self, memo: Any) -> Unfused:
        with warnings.catch_warnings():  # of a program of torch.export, about torch's own classes
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            return Unfused(copy.deepcopy(self.module, memo))

    def forward(self, x: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):
            return self.module(x)


def read_head(path: AnyPath, device: torch.device) -> LoadedHead:
    """torch.export (.pt2), TorchScript, or the folder of a `krnet learn kril` run: its F2 and classifier."""
    return _read(LoadedHead, Path(path), device)


def read_trunk(path: AnyPath, device: torch.device) -> LoadedTrunk:
    """torch.export (.pt2), TorchScript, or the folder of a `krnet learn kril` run: its F1."""
    return _read(LoadedTrunk, Path(path), device)


def _read(kind: type[Kind], path: Path, device: torch.device) -> Kind:
    if path.is_dir():
        trunk, head, checksum = _network_of_run(path)
        return kind(path.name, (head if kind is LoadedHead else trunk).to(device).eval(), digest=checksum)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; expected a {kind.kind}, as torch.export.save or torch.jit.save write it"
        )
    digest = file_digest(path.read_bytes())
    try:
        held = {name.rpartition("/")[2] for name in zipfile.ZipFile(path).namelist()}
        if "constants.pkl" in held:
            return kind(path.name, torch.jit.load(str(path), map_location=device).eval(), digest=digest)
        if held & {"archive_format", "serialized_exported_program.json"}:
            return kind(path.name, *_exported(path, device), digest=digest)
        found = "a file of weights alone" if "data.pkl" in held else "some other archive"
    except zipfile.BadZipFile:
        found = "not an archive"
    except Exception as error:  # whatever torch makes of a damaged file, or of one from another version
        found = f"it does not load: {str(error).strip()[:200]}"
    raise InputError(
        f"{path}: {found}; expected TorchScript or a torch.export program. Save the {kind.kind} with "
        f"torch.jit.script(module).save(path) or torch.export.save(torch.export.export(module, ...), path)"
    )


def _exported(path: Path, device: torch.device) -> tuple[nn.Module, int | None]:
    """The module, and the batch size where it takes one only."""
    from torch.export.passes import move_to_device_pass

    with path.open("rb") as file:
        program = torch.export.load(file)
    wanted = program.graph_signature.user_inputs[0]
    example = next(node for node in program.graph.nodes if node.name == wanted).meta["val"]
    moved = program if example.device == device else move_to_device_pass(program, device)
    return moved.module(), example.shape[0] if isinstance(example.shape[0], int) else None


def _network_of_run(folder: Path) -> tuple[nn.Module, nn.Module, str]:
    """F1 of a KRIL run; F2, that is the layers after the cut, and the classifier of all classes so far; a checksum."""
    try:
        run = read_json(folder / "settings.json")
        method, settings = run["method"], run["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: not the folder of a `krnet learn` run (settings.json: {error})") from error
    if method != "kril":
        raise InputError(
            f"{folder}: a run of {method}, whose classifier reads images; only that of kril is cut into layers that "
            f"make feature maps and a head that reads them. Give a kril run, or the module as a file"
        )
    path = folder / "state.krn"
    if not path.exists():
        raise InputError(
            f"{folder}: holds no {path.name}, the network as it was after the latest task. Give the module as a file "
            f"(torch.jit.script(module).save), or run at least one task"
        )
    kept = archive.open_archive(path)
    state = {name: kept.tensor(name) for name in kept.names if name.startswith("model.")}
    try:
        parts = [state[f"model.head.parts.{i}.weight"] for i in range(sum(".parts." in name for name in state) // 2)]
        backbone = backbones.build(
            settings["backbone"], in_channels=next(tensor.shape[1] for tensor in state.values() if tensor.dim() == 4),
            shortcut=settings["shortcut"], last_relu=settings["last_relu"],
        )  # fmt: skip
        head = heads.LinearHead(backbone.feature_dim, len(parts[0]))
        for part in parts[1:]:
            head.grow(len(part))
        model = heads.Classifier(backbone, head)
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
        trunk, tail = backbones.cut(backbone, settings["fixed_layers"])
    except (KeyError, IndexError, RuntimeError) as error:
        raise NotARecordingError(f"{path}: not the state of the network that {folder} names ({error})") from error
    return trunk, heads.Classifier(tail, head), kept.checksum
