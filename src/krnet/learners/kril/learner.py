"""KRIL: learn new classes on replayed features of the old ones, without keeping any old image.

By default the network is frozen after the base task, and a head learns from recorded vectors:

    images -> F1, F2 -> readings: statistics of F1's last map and of all layers of F2 -> recorder
    each task:   replayed readings of all samples, old and new -> a new head (mlp, or solved in closed form)

As published (preset paper, head=trained), feature maps are recorded and F2 learns on:

    base task:   images -> F1, F2 (both are trained once; then F1 is frozen);   F1's feature maps -> recorder
    each task:   replayed feature maps of all old samples + feature maps of the new images -> F2
                 replays + new feature maps -> the next recorder, which so learns what the last one knew

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022), section KRIL and Algorithm 1. The preset has the
paper's values for CIFAR-100: F1 of 23 layers, 160 epochs, learning rate 0.1 for the classifier and a twentieth of it
for the rest of F2, L_aux with weight 2 on replayed samples only, two recorders (base task; all later tasks).

Deviations of the preset from the paper:
- The recorder has our fast schedule, with iterations in proportion to the samples it records. Each recorder starts from
  the previous one (`warm_start`).
- Batches hold old and new samples in fixed proportion to their numbers.
- docs/choices.md lists our choices where the paper is silent: augmentation of the new features, mirrored replays, the
  divisor of L_aux.

Under a budget the recorder grows: one file, planned for the samples of all tasks, holds them, and old samples stay as
they are. Where F2 learns on, each task is recorded first, so that F2 sees new samples as coarse as old ones
(`new_features=replayed`); otherwise it would learn to tell them apart by their precision.

Replayed maps are smoother than those of test images. With `through_recorder` the head sees test maps as the recorder
would replay them; the recording then belongs to the network.

Any recorder may replace KRNet. One of them, `images`, is a rival for comparison, which breaks KRIL's promise: it keeps
all old images, compressed, and replays them through F1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.errors import SettingError
from krnet.learners.base import (
    EVALUATION_BATCH,
    PAPER_PRESET,
    RANDOM_FEATURES_PART,
    Context,
    Learner,
    Work,
    register,
)
from krnet.learners.kril.batches import MixedBatches, NewFeatures, ReadingBatches, SampleValues, to_f2_layout
from krnet.learners.kril.recordings import RecorderFit, Recordings
from krnet.learners.kril.settings import KrilConfig
from krnet.nn import backbones, heads
from krnet.nn.mlp_head import MLPHead
from krnet.nn.readout import Readout
from krnet.nn.solved_head import SolvedHead
from krnet.train.classifier import Group, Schedule

HEAD_SEED_PART = 5  # so that the head's batches have another order than those of F2
# The training of head=mlp.
HEAD_BATCH = 512
LEAST_BATCHES = 20  # in an epoch; batches of few samples are smaller than HEAD_BATCH
HEAD_DECAY = 0.05
HEAD_WARM_UP = 0.1


class ThroughRecorder(nn.Module):
    """maps (B, c, h, w) -> the same maps as the recording of a task would replay them"""

    def __init__(self, recordings: Recordings, task: int):
        super().__init__()
        self.recordings, self.task = recordings, task

    def forward(self, maps: Tensor) -> Tensor:
        return self.recordings.project(self.task, maps)

    def __deepcopy__(self, memo: dict[int, Any]) -> ThroughRecorder:
        return self  # it has no weights: they are in the recording's file


@register
class Kril(Learner):
    name = "kril"
    config_class = KrilConfig
    config: KrilConfig
    unsupported: ClassVar[Mapping[str, str]] = {
        "outputs_per_class": "recordings hold one label per sample, its class",
        "transform": "after the base task it trains on recorded feature maps, not on images",
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**PAPER_PRESET, "head": "trained", "recorder": "paper", "new_features": "flip"}
    }
    large_images: ClassVar[Mapping[str, Any]] = {"gamma": 5e-4}

    def __init__(self, context: Context, config: KrilConfig):
        super().__init__(context, config)
        backbone = self.model.backbone
        assert config.fixed_layers is not None, "resolved when the settings are made"
        self.trunk, self.tail = backbones.cut(backbone, config.fixed_layers)
        self.f2 = heads.Classifier(self.tail, self.model.head)
        self.readout = Readout(self.tail)
        # With recorded=vectors the trunk of the recordings ends in the readout.
        self.encoder = self.trunk if config.recorded == "maps" else nn.Sequential(self.trunk, self.readout)
        shape = self.output_shape(self.encoder)
        self.recordings = Recordings(context, config, self.encoder, self.tail, shape)
        self.reading_head = self._make_reading_head()
        if config.flip_replays and not context.data.flip:
            raise SettingError(f"flip_replays is set, and {context.data.name} is not to be mirrored; leave it out")
        self.recordings.check_budget()

    def _make_reading_head(self) -> SolvedHead | MLPHead | None:
        """The head that reads all layers of F2; None for a linear head, which belongs to F2."""
        c, num_classes = self.config, self.context.num_seen(0)
        if c.head == "trained":
            return None
        (num_readings,) = self.output_shape(nn.Sequential(self.trunk, self.readout))
        if c.head == "mlp":
            return MLPHead(num_readings, c.head_width, num_classes).to(self.device)
        seed = self.context.seed_for(0, RANDOM_FEATURES_PART)
        return SolvedHead(num_readings, c.random_features, num_classes, seed, c.ridge).to(self.device)

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        ids = self.context.task_ids(task)
        labels = self.context.train_labels[ids]
        if task == 0:
            yield self.base_work()
            self.model.eval()
            yield self.recordings.fit(task, self.apply(self.encoder, self.context.train, ids), labels)
        else:
            self.recordings.delete_before(task)
            self.model.eval()
            yield from self._learn_later(task, ids, labels)
        if self.reading_head is not None:
            self.model.eval()
            readings, labels = self._read_replays(task)
            if isinstance(self.reading_head, SolvedHead):
                self.reading_head.solve(readings, labels)
            else:
                yield self.head_work(self.reading_head, readings, labels)

    def _learn_later(self, task: int, ids: Tensor, labels: Tensor) -> Iterator[Work]:
        replays, old_labels = self.recordings.replay(task - 1)

        def fit_recorder(features: Tensor) -> RecorderFit:
            # The next recorder learns from the replays of the last one. With two files, that of the base task stays.
            recorded = old_labels >= (0 if self.recordings.one_file else self.context.num_seen(0))  # (N,) bool
            features = torch.cat([replays[recorded.to(replays.device)], features])
            return self.recordings.fit(task, features, torch.cat([old_labels[recorded], labels]))

        if not self.config.plastic:
            yield fit_recorder(self.apply(self.encoder, self.context.train, ids))
            return
        new = NewFeatures(self.trunk, self.context.train, ids, labels, self.config.new_features_kind, self)
        record_first = self.config.new_features_kind == "replayed"
        if record_first:
            yield fit_recorder(new.plain)
            new.replace(*self.recordings.replay(task, first=self.context.new_classes(task).start))
        yield self.f2_work(replays, old_labels, new)
        if not record_first:
            yield fit_recorder(new.plain)

    def f2_work(self, replays: Tensor, old_labels: Tensor, new: NewFeatures) -> Work:
        """Train F2 by L_cls on all samples and L_aux on the replayed ones; L_aux keeps F2's features of old samples."""
        c = self.config
        replay_values = SampleValues(replays, replays.flip(-1) if c.flip_replays else None)
        # Neither the last F2 nor the replays change during this training: compute the targets once.
        aux_targets = replay_values.map(self._last_f2_features) if c.aux else None
        seed = self.context.seed_for(self.task)
        batches = MixedBatches(replay_values.map(to_f2_layout), old_labels, aux_targets, new, c.batch_size, seed)
        divisor = batches.batch_size if c.aux_divisor == "batch" else batches.num_old
        groups = [Group(list(self.model.head.parameters())), Group(list(self.tail.parameters()), c.tail_lr)]

        def loss(maps: Tensor, labels: Tensor, aux_targets: Tensor | None = None) -> Tensor:
            features = self.tail(maps)  # (B, D)
            total = F.cross_entropy(self.model.head(features).float(), labels)
            if aux_targets is None:
                return total
            return total + c.aux * (features[: batches.num_old].float() - aux_targets).square().sum() / divisor

        return self.descent("F2", batches, loss, modules=self.f2, groups=groups)

    @torch.no_grad()
    def _last_f2_features(self, maps: Tensor) -> Tensor:
        """Features (N, D) of F2's tail, before this task trains it."""
        self.tail.eval()
        return torch.cat([self.tail(part) for part in maps.split(EVALUATION_BATCH)])

    def expand(self, task: int) -> None:
        super().expand(task)
        if task > 0:
            self.trunk.requires_grad_(False)
            if self.reading_head is not None:
                self.reading_head.grow(len(self.context.split.tasks[task]))

    # ------------------------------------------------------------------ a head that reads all layers of F2

    def _read_replays(self, task: int) -> tuple[Tensor, Tensor]:
        """Readings (N, D) and labels of all replays, and of their mirror images if `flip_replays` is set."""
        replays, labels = self.recordings.replay(task)
        views = [replays, replays.flip(-1)] if self.config.flip_replays else [replays]
        return torch.cat([self._read(view) for view in views]), labels.repeat(len(views))

    def head_work(self, head: MLPHead, readings: Tensor, labels: Tensor) -> Work:
        """Train the head with a hidden layer, from new weights, by cross entropy with smoothed labels."""
        c, seed = self.config, self.context.seed_for(self.task, HEAD_SEED_PART)
        head.set_scale(readings)
        head.restart(seed)
        batch_size = max(1, min(HEAD_BATCH, len(labels) // LEAST_BATCHES))
        batches = ReadingBatches(readings, labels, batch_size, seed, c.head_width, c.dropout)
        schedule = Schedule(
            epochs=c.head_epochs, lr=c.head_lr, shape="cosine", warm_up=HEAD_WARM_UP, weight_decay=HEAD_DECAY,
            optimizer="adamw",
        )  # fmt: skip

        def loss(readings: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
            return F.cross_entropy(head(readings, factors).float(), labels, label_smoothing=c.smoothing)

        return self.descent("head", batches, loss, modules=head, schedule=schedule)

    @torch.no_grad()
    def _read(self, recorded: Tensor) -> Tensor:
        """Readings (N, D) of recorded maps; recorded vectors are readings already."""
        if self.config.recorded == "vectors":
            return recorded
        return torch.cat([self.readout(part) for part in recorded.split(EVALUATION_BATCH)])

    def classifier(self) -> nn.Module:
        modules: list[nn.Module] = [self.trunk]
        if self.config.through_recorder:
            modules.append(ThroughRecorder(self.recordings, self.task))
        modules += [self.f2] if self.reading_head is None else [self.readout, self.reading_head]
        return nn.Sequential(*modules).eval()

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.classifier()(images)}

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | ({} if self.reading_head is None else {"reading_head": self.reading_head})

    def deployed(self) -> dict[str, nn.Module]:
        return self.modules()

    def storage_bytes(self) -> dict[str, int]:
        return {part: path.stat().st_size for part, path in self.kept_files().items()}

    def kept_files(self) -> dict[str, Path]:
        return self.recordings.parts(self.task)

    def finish(self) -> None:
        self.recordings.delete_before(self.task + 1)
