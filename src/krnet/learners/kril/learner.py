"""KRIL: learn new classes on replayed feature maps of the old ones, without keeping one old image.

    base task:   images -> F1, F2 (trained once; F1 is frozen from then on);   F1's features -> recorder
    each task:   replayed features of all old samples + features of the new images -> F2
                 replays + new features -> the next recorder, which so teaches itself what the last one knew

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022), section KRIL and Algorithm 1. Defaults are the paper's
for CIFAR-100: F1 of 23 layers, 160 epochs, learning rate 0.1 for the classifier and a twentieth of it for the rest of
F2, L_aux with weight 2 on replayed samples only, two recorders (base task; all later tasks). Deviations: our fast
schedule for the recorder, its iterations in proportion to the samples recorded, each from the one before
(`warm_start`); batches hold old and new samples in fixed proportion to their numbers. Where the paper is silent
(augmentation of the new features, mirrored replays, the divisor of L_aux): docs/choices.md.

Under a budget the recorder is a compact KRNet, which grows instead: one file for all tasks, whose old samples stay as
they are, as do those of pca, quantized, transform and pq. It is planned for the samples of all tasks. A task is then
recorded before F2 learns it, and F2 sees new samples as coarse as old ones (`new_features=replayed`), which it would
otherwise learn to tell apart by that.

Any recorder may stand in for KRNet. One of them, `images`, is a rival that breaks KRIL's promise for comparison's sake:
it keeps all old images, compressed, and replays them through F1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.errors import SettingError
from krnet.learners.base import EVALUATION_BATCH, Context, Learner, Work, register
from krnet.learners.kril.batches import Maps, MixedBatches, NewFeatures, for_f2
from krnet.learners.kril.recordings import RecorderFit, Recordings
from krnet.learners.kril.settings import KrilConfig
from krnet.nn import backbones, heads
from krnet.train.classifier import Group


@register
class Kril(Learner):
    name = "kril"
    config_class = KrilConfig
    config: KrilConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"recorder": "paper", "new_features": "flip"}}
    large_images: ClassVar[Mapping[str, Any]] = {"gamma": 5e-4}

    def __init__(self, context: Context, config: KrilConfig):
        super().__init__(context, config)
        backbone = self.model.backbone
        self.trunk, self.tail = backbones.cut(backbone, config.fixed_layers)
        self.f2 = heads.Classifier(self.tail, self.model.head)
        self.recordings = Recordings(context, config, self.trunk, self.tail)
        if config.flip_replays and not context.data.flip:
            raise SettingError(f"flip_replays is set, and {context.data.name} is not to be mirrored; leave it out")
        if config.budget is not None:
            self.recordings.check_budget(self._map_shape())

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        ids = self.context.task_ids(task)
        labels = self.context.train_labels[ids]
        if task == 0:
            yield self.base_work()
            self.model.eval()
            yield self.recordings.fit(task, self.apply(self.trunk, self.context.train, ids), labels)
            return
        self.recordings.forget_before(task)
        self.model.eval()
        replays, old_labels = self.recordings.replay(task - 1)
        new = NewFeatures(self.trunk, self.context.train, ids, labels, self.config.kind_of_new, self)

        def recording() -> RecorderFit:
            # The next recorder learns from the last one's replays; with two, the base task's stays as it is.
            kept = old_labels >= (0 if self.recordings.one_file else self.context.num_seen(0))
            features = torch.cat([replays[kept.to(replays.device)], new.plain])
            return self.recordings.fit(task, features, torch.cat([old_labels[kept], labels]))

        coarse = self.config.kind_of_new == "replayed"
        if coarse:
            yield recording()
            new.replace(*self.recordings.replay(task, first=self.context.new_classes(task).start))
        yield self.f2_work(replays, old_labels, new)
        if not coarse:
            yield recording()

    def f2_work(self, replays: Tensor, old_labels: Tensor, new: NewFeatures) -> Work:
        """L_cls on all samples, L_aux on the replayed ones: F2 sees those as the F2 of the last task did."""
        c = self.config
        maps = Maps(replays, replays.flip(-1) if c.flip_replays else None)
        # The last F2 does not change, nor do the replays: what it makes of them is found once.
        wanted = maps.each(self._last_features) if c.aux else None
        seed = self.context.seed_for(self.task)
        batches = MixedBatches(maps.each(for_f2), old_labels, wanted, new, c.batch_size, seed)
        divisor = batches.batch_size if c.aux_divisor == "batch" else batches.num_old
        groups = [Group(list(self.model.head.parameters())), Group(list(self.tail.parameters()), c.tail_lr)]

        def loss(features: Tensor, labels: Tensor, wanted: Tensor | None = None) -> Tensor:
            seen = self.tail(features)
            total = F.cross_entropy(self.model.head(seen).float(), labels)
            if wanted is None:
                return total
            return total + c.aux * (seen[: batches.num_old].float() - wanted).square().sum() / divisor

        return self.descent("F2", batches, loss, modules=self.f2, groups=groups)

    @torch.no_grad()
    def _last_features(self, maps: Tensor) -> Tensor:
        """(N, D), by the tail as it is before this task trains it."""
        self.tail.eval()
        return torch.cat([self.tail(part) for part in maps.split(EVALUATION_BATCH)])

    def expand(self, task: int) -> None:
        super().expand(task)
        if task > 0:
            self.trunk.requires_grad_(False)

    @torch.no_grad()
    def _map_shape(self) -> torch.Size:
        image = torch.zeros(1, *self.context.data.input_shape, device=self.device)
        return copy.deepcopy(self.trunk).eval()(image).shape[1:]

    def storage_bytes(self) -> dict[str, int]:
        return self.recordings.size_bytes(self.task)

    def finish(self) -> None:
        self.recordings.forget_before(self.task + 1)
