"""Load networks from files: heads that classify feature maps, and trunks that compute them from images.

x.pt2 (torch.export), x.pt (TorchScript), or the folder of a `krnet learn kril` run
    -> read_head  -> LoadedHead: feature maps (B, *shape) -> logits (B, classes)   measures replay accuracy
    -> read_trunk -> LoadedTrunk: images (B, C, H, W) -> feature maps (B, *shape)  replays recorded images
"""

from __future__ import annotations

import copy
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from krnet.device import exact_math
from krnet.errors import InputError, LabelError, NotARecordingError, UnsafeNetworkError
from krnet.io import archive
from krnet.io.atomic import AnyPath, read_json
from krnet.io.header import digest as file_digest
from krnet.nn import backbones, exported, heads

# What the names in a pickle of tensors and plain values begin with.
PLAIN_PICKLES = ("torch ", "torch.", "collections ", "__builtin__ ", "builtins ", "_codecs ", "numpy")
HEAD_BATCH = 512  # samples per call of a network that accepts any batch size


class Loaded(nn.Module):
    """A network from a file, in evaluation mode, that accepts batches of any size."""

    kind: ClassVar[str]
    """What the network is called in messages."""
    input_noun: ClassVar[str]
    """What it reads, in messages."""
    output_noun: ClassVar[str]
    """What it returns, in messages."""
    remedy: ClassVar[str]
    """What the user should pass instead of a network that does not fit."""

    def __init__(self, name: str, module: nn.Module, fixed_batch: int | None = None, *, digest: str):
        """`fixed_batch`: the only batch size that the module accepts, if it was exported for one."""
        super().__init__()
        self.name, self.module, self.digest, self.fixed_batch = name, module, digest, fixed_batch

    def train(self, mode: bool = True) -> Loaded:
        return self  # a torch.export program has one mode and raises an error if asked for another

    def __deepcopy__(self, memo: Any) -> Loaded:
        return self  # it is never trained and stays on its device, so copies can share it

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for part in x.split(self.fixed_batch or HEAD_BATCH):
            # A module exported for one batch size refuses all others. One exported with several samples refuses a
            # single sample. Copies of the last sample pad the part.
            num_missing = (self.fixed_batch or min(2, len(x))) - len(part)
            padded = torch.cat([part, part[-1:].expand(max(0, num_missing), *part.shape[1:])])
            try:
                output = self.module(padded)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                why = str(error).strip().rpartition("\n")[2][:200]  # TorchScript begins with pages of traceback
                raise InputError(
                    f"{self.name}: refuses {self.input_noun} of shape {tuple(part.shape[1:])} ({why}). "
                    f"Give {self.remedy}"
                ) from error
            if not self.is_valid_output(output, len(padded)):
                shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise InputError(
                    f"{self.name}: gives {shape} for {len(padded)} samples; expected {self.output_noun}. "
                    f"Give {self.remedy}"
                )
            outputs.append(output[: len(part)])
        return torch.cat(outputs)

    def is_valid_output(self, output: object, num_samples: int) -> bool:
        return isinstance(output, Tensor) and output.shape[:1] == (num_samples,)


class LoadedHead(Loaded):
    """Feature maps (B, *shape) -> logits (B, classes)."""

    kind, input_noun, output_noun = "head", "feature maps", "logits of each class"
    remedy = "the head that reads these features"

    @property
    def trainable(self) -> nn.Module | None:
        """The module to backpropagate through while a recorder is fitted; None if it has a fixed batch size."""
        return Unfused(self.module) if self.fixed_batch is None else None

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        with exact_math():
            logits: Tensor = self(features)
        return logits

    def is_valid_output(self, output: object, num_samples: int) -> bool:
        return super().is_valid_output(output, num_samples) and isinstance(output, Tensor) and output.dim() == 2

    def num_right(self, features: Tensor, labels: Tensor) -> int:
        """Number of samples whose largest logit is that of their label."""
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

    kind, input_noun, output_noun = "trunk", "images", "a feature map of each"
    remedy = "the trunk that made the features of these images"


Kind = TypeVar("Kind", LoadedHead, LoadedTrunk)


class Unfused(nn.Module):
    """TorchScript without its fuser, which would compile during the capture of a CUDA graph."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def __deepcopy__(self, memo: Any) -> Unfused:
        with warnings.catch_warnings():  # copying a torch.export program warns of torch's own classes
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            return Unfused(copy.deepcopy(self.module, memo))

    def forward(self, x: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):
            return self.module(x)


def read_head(path: AnyPath, device: torch.device) -> LoadedHead:
    """Read a head from a torch.export (.pt2) or TorchScript file, or the F2 and classifier of a KRIL run's folder."""
    return _read(LoadedHead, Path(path), device)


def read_trunk(path: AnyPath, device: torch.device) -> LoadedTrunk:
    """Read a trunk from a torch.export (.pt2) or TorchScript file, or the F1 of a KRIL run's folder."""
    return _read(LoadedTrunk, Path(path), device)


def _read(kind: type[Kind], path: Path, device: torch.device) -> Kind:
    if path.is_dir():
        trunk, head, checksum = _load_run(path)
        return kind(path.name, (head if kind is LoadedHead else trunk).to(device).eval(), digest=checksum)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; expected a {kind.kind}, as torch.export.save or torch.jit.save write it"
        )
    digest = file_digest(path.read_bytes())
    try:
        archived = zipfile.ZipFile(path)
        members = {name.rpartition("/")[2]: name for name in archived.namelist()}
        if exported.is_exported(members.keys()):
            return kind(path.name, *_load_exported(path, device), digest=digest)
        if "constants.pkl" in members:
            exported.check_script(path, archived)
            return kind(path.name, torch.jit.load(str(path), map_location=device).eval(), digest=digest)
        found = _saved_by_torch(archived.read(members["data.pkl"])) if "data.pkl" in members else "some other archive"
    except UnsafeNetworkError:
        raise
    except zipfile.BadZipFile:
        found = "not an archive"
    except Exception as error:  # torch raises errors of many types for a damaged file or another version's
        found = f"it does not load: {str(error).strip()[:200]}"
    raise InputError(
        f"{path}: {found}; expected TorchScript or a torch.export program. Save the {kind.kind} with "
        f"torch.jit.script(module).save(path) or torch.export.save(torch.export.export(module, ...), path)"
    )


def _saved_by_torch(content: bytes) -> str:
    """Say what a file of torch.save holds. Its pickle is searched for the classes that it names, and not loaded."""
    names = [str(value) for code, value, _ in pickletools.genops(content) if code.name == "GLOBAL"]
    if any(name.startswith("torch.nn.modules.") or not name.startswith(PLAIN_PICKLES) for name in names):
        return "a whole module that torch.save has pickled, which could run any code when it is loaded"
    return "a file of weights alone, without the module that they belong to"


def _load_exported(path: Path, device: torch.device) -> tuple[nn.Module, int | None]:
    """The module, and its batch size if it was exported for a single one."""
    from torch.export.passes import move_to_device_pass

    program = exported.read_exported(path)
    input_name = program.graph_signature.user_inputs[0]
    example = next(node for node in program.graph.nodes if node.name == input_name).meta["val"]
    moved = program if example.device == device else move_to_device_pass(program, device)
    return moved.module(), example.shape[0] if isinstance(example.shape[0], int) else None


def _load_run(folder: Path) -> tuple[nn.Module, nn.Module, str]:
    """Read a KRIL run's folder: F1; F2, which is the layers after the cut and the classifier; the file's checksum."""
    try:
        run = read_json(folder / "settings.json")
        method, settings = run["method"], run["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: not the folder of a `krnet learn` run (settings.json: {error})") from error
    if "fixed_layers" not in settings:
        raise InputError(
            f"{folder}: a run of {method}, whose classifier reads images; only that of kril is cut into layers that "
            f"make feature maps and a head that reads them. Give a kril run, or the module as a file"
        )
    if settings["backbone"] not in backbones.BACKBONES:
        raise InputError(
            f"{folder}: its backbone was made by a function, {settings['backbone']}, not by a registered name. Give "
            f"the module as a file (torch.jit.script(module).save)"
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
        num_parts = sum(".parts." in name for name in state) // 2  # each part has a weight and a bias
        parts = [state[f"model.head.parts.{i}.weight"] for i in range(num_parts)]
        backbone = _build_backbone(settings, in_channels=3)
        if num_channels := _other_channels(backbone, state):
            backbone = _build_backbone(settings, in_channels=num_channels)
        head = heads.LinearHead(backbone.feature_dim, len(parts[0]))
        for part in parts[1:]:
            head.grow(len(part))
        model = heads.Classifier(backbone, head)
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
        trunk, tail = backbones.cut(backbone, settings["fixed_layers"])
    except (KeyError, IndexError, RuntimeError) as error:
        raise NotARecordingError(f"{path}: not the state of the network that {folder} names ({error})") from error
    return trunk, heads.Classifier(tail, head), kept.checksum


def _build_backbone(settings: Mapping[str, Any], in_channels: int) -> Any:
    options = {name: settings[name] for name in ("shortcut", "last_relu")}
    return backbones.build(settings["backbone"], in_channels=in_channels, **options)


def _other_channels(backbone: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The channels of the images, read from the one weight whose shape depends on them; None if they are as built."""
    for name, tensor in backbone.state_dict().items():
        kept_shape = state[f"model.backbone.{name}"].shape
        if kept_shape != tensor.shape:
            return kept_shape[1]
    return None
