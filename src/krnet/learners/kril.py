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
they are, as do those of pca, quantized, transform and pq. It is planned for the samples of all tasks.

Any recorder may stand in for KRNet. One of them, `images`, is a rival that breaks KRIL's promise for comparison's sake:
it keeps all old images, compressed, and replays them through F1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet import api, augment, backbones
from krnet.config import PAPER_FITS, SCHEDULES, FitConfig, check_choice, check_int, check_range
from krnet.descent import Group, Saving, Watch
from krnet.errors import BudgetError, SettingError
from krnet.learners._kril_batches import Maps, MixedBatches, NewFeatures, for_f2
from krnet.learners.base import EVALUATION_BATCH, Context, Learner, LearnerConfig, Work, register
from krnet.recorders.base import FIT_NAMES, check_names, choose
from krnet.replay import Recording
from krnet.typed import parse_setting

# Feature maps whose sizes the paper gives a network for.
PRESET_SHAPES: dict[tuple[int, ...], str] = {
    (64, 8, 8): "cifar100",
    (256, 14, 14): "imagenet",
    (256, 16, 16): "imagenet",
}


# Settings of a fit that have a place of their own.
SET_ELSEWHERE = {
    "iterations": "is KRIL's recorder_iterations",
    "schedule": "is KRIL's recorder_schedule",
    "gamma": "is a setting of KRIL",
    "head_share": "is a setting of KRIL",
    "seed": "follows from the run's",
    "device": "is the run's",
    "checkpoint_s": "is the run's",
}


@dataclass(frozen=True, kw_only=True)
class KrilConfig(LearnerConfig):
    fixed_layers: int = 23
    """Layers of F1, counted as in the paper: the first convolution is one, each basic block two."""
    tail_lr: float = 0.05
    """Learning rate of F2 without its classifier, as a share of the classifier's."""
    aux: float = 2.0
    """Weight of L_aux, which holds F2's features of replayed samples where the last F2 had them; 0 leaves it out."""
    aux_divisor: str = "batch"
    """L_aux is divided by the size of the batch, or of its replayed part: batch or replayed."""
    new_features: str = "flip"
    """Features of the new images: plain, flip (mirrored at random), crop (cropped and mirrored anew each step), or
    replayed (recorded first, and then as coarse as those of old ones). Data that are not mirrored elsewhere are not
    mirrored here, and without `augment` flip and crop are plain."""
    flip_replays: bool = False
    """Mirror replayed maps at random."""
    recorder: str = "krnet"
    """How features are kept: krnet; raw, the real ones, the upper bound; images, a rival that keeps every image; ..."""
    recorder_schedule: str = "fast"
    """Schedule of a network's fit (krnet, autoencoder): fast or paper."""
    recorder_iterations: int | None = None
    """Iterations of the base recorder; by default the schedule's own number, with paper that of its data set."""
    recorder_settings: str = ""
    """Other settings of the recorder, as name=value,name=value."""
    scaled: bool = True
    """Later recorders get iterations in proportion to their samples, never more than the base; else as many."""
    warm_start: bool = True
    """A later recorder starts from the one before, where its size is one of the paper's."""
    kr2: bool = True
    """L_kr2: the recorder's error is also seen through F2."""
    gamma: float | None = None
    """Weight of L_kr2; by default 0.001, with schedule paper that of its data set."""
    head_share: float = 0.25
    """Share of a batch of the recorder's that F2 is shown for L_kr2."""
    budget: int | None = None
    """Most bytes of all recordings together, when every task is learned: each has a share of them, by its samples."""
    single: bool = False
    """One recorder for all samples instead of one for the base task and one for the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("fixed_layers", self.fixed_layers, 1)
        check_int("batch_size", self.batch_size, 2)  # one replayed, one new
        if self.ce != "seen":
            raise SettingError(f"ce is {self.ce!r}; expected seen: replays are of old classes, which 'new' leaves out")
        check_choice("aux_divisor", self.aux_divisor, ("batch", "replayed"))
        check_choice("new_features", self.new_features, ("plain", "flip", "crop", "replayed"))
        check_choice("recorder_schedule", self.recorder_schedule, SCHEDULES)
        for name in ("flip_replays", "scaled", "warm_start", "kr2", "single"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("tail_lr", "aux"):
            check_range(name, getattr(self, name), 0)
        if self.gamma is not None:
            check_range("gamma", self.gamma, 0)
        check_range("head_share", self.head_share, 0, 1)
        for name in ("recorder_iterations", "budget"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        own = self.own_settings()
        for name in own:
            if name in SET_ELSEWHERE:
                raise SettingError(f"recorder_settings has {name}, which {SET_ELSEWHERE[name]}; leave it out there")
        check_names(choose(self.recorder), own)
        # Refused now, not after a base task.
        FitConfig(**{name: value for name, value in own.items() if name in FIT_NAMES})

    @property
    def kind_of_new(self) -> str:
        return self.new_features if self.augment or self.new_features == "replayed" else "plain"

    def own_settings(self) -> dict[str, Any]:
        if not isinstance(self.recorder_settings, str):
            raise SettingError(f"recorder_settings is {self.recorder_settings!r}; expected name=value,name=value")
        try:
            return dict(parse_setting(part) for part in self.recorder_settings.split(",") if part)
        except ValueError as error:
            raise SettingError(f"recorder_settings: {error}") from error


class RecorderFit:
    """A Work: features into a recording file."""

    shared: dict[str, Any] | None = None
    epochs: int | None = None

    def __init__(
        self,
        name: str,
        path: Path,
        features: Tensor,
        labels: Tensor,
        device: torch.device,
        too_large: Callable[[int], BudgetError],
        **options: Any,
    ):
        """too_large: the refusal of a recording that takes so many bytes, in terms of the whole run's budget."""
        self.name, self.path, self.device = name, path, device
        self.features, self.labels, self.too_large, self.options = features, labels, too_large, options

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        options = self.options | {"device": str(self.device), "resume": saving is not None and saving.resume}
        if saving is not None and choose(options["recorder"]).takes_head:
            options["checkpoint_s"] = saving.every_s
        tell = None if watch is None else (lambda status, r2: watch(status))
        try:
            api.record(self.features, self.labels, out=self.path, watch=tell, **options)
        except BudgetError as error:
            raise self.too_large(error.needed) from error

    def result(self) -> dict[str, Tensor]:
        return {"samples": torch.tensor(len(self.labels))}  # the file itself is what counts

    def take(self, result: dict[str, Tensor]) -> None:
        pass


@register
class Kril(Learner):
    name = "kril"
    config_class = KrilConfig
    config: KrilConfig

    def __init__(self, context: Context, config: KrilConfig):
        super().__init__(context, config)
        backbone = self.model.backbone
        assert isinstance(backbone, backbones.ResNet)
        self.trunk, self.tail = backbones.cut(backbone, config.fixed_layers)
        self.f2 = backbones.Classifier(self.tail, self.model.head)
        if config.flip_replays and not context.data.flip:
            raise SettingError(f"flip_replays is set, and {context.data.name} is not to be mirrored; leave it out")
        if config.budget is not None:
            self._check_budget(config.budget)

    # ------------------------------------------------------------------ learning

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        ids = self.context.task_ids(task)
        labels = self.context.train_labels[ids]
        if task == 0:
            yield self.base_work()
            self.model.eval()
            yield self._recording(task, self.apply(self.trunk, self.context.train, ids), labels, labels)
            return
        self._forget_older_files(task)
        self.model.eval()
        replays, old_labels = self._replay_all(task - 1)
        new = NewFeatures(self.trunk, self.context.train, ids, labels, self.config.kind_of_new, self)

        def recording() -> RecorderFit:
            # The next recorder learns from the last one's replays; with two, the base task's stays as it is.
            kept = old_labels >= (0 if self.one_file else self.context.num_seen(0))
            features = torch.cat([replays[kept.to(replays.device)], new.plain])
            return self._recording(task, features, torch.cat([old_labels[kept], labels]), self._base_labels())

        if self.config.kind_of_new == "replayed":
            yield recording()
            new.replace(*self._replay_all(task, first=self.context.new_classes(task).start))
            yield self.f2_work(replays, old_labels, new)
        else:
            yield self.f2_work(replays, old_labels, new)
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

    def _base_labels(self) -> Tensor:
        return self.context.train_labels[self.context.task_ids(0)]

    @property
    def grows(self) -> bool:
        """The recording leaves samples that it holds as they are, and takes up new ones: one serves all tasks."""
        c = self.config
        return choose(c.recorder).grows and (c.recorder != "krnet" or c.budget is not None)

    @property
    def one_file(self) -> bool:
        return self.config.single or self.grows

    def _recording(self, task: int, features: Tensor, labels: Tensor, base_labels: Tensor) -> RecorderFit:
        c = self.config
        by_class = labels.argsort(stable=True)  # labels then need no bytes of their own
        features, labels = features[by_class.to(features.device)], labels[by_class]
        options: dict[str, Any] = {"recorder": c.recorder, "seed": self.context.seed_for(task, 3), **c.own_settings()}
        # Whose samples, in the same order, are the first of this one's.
        earlier = self._files(task - 1)[-1] if task > (0 if self.one_file else 1) else None
        if c.budget is not None:
            options["budget"] = self._budget(task)
        if choose(c.recorder).takes_trunk:
            options |= self._images(task)
        if self.grows or choose(c.recorder).takes_trunk:
            options["start"] = earlier
        if self.grows and c.budget is not None and task == 0:
            options["room"] = sum(self._counts())
        if choose(c.recorder).takes_head:
            preset = PRESET_SHAPES.get(tuple(features.shape[1:])) if c.budget is None else None
            paper = PAPER_FITS.get(preset or "", {}) if c.recorder_schedule == "paper" else {}
            iterations = c.recorder_iterations or paper.get("iterations", SCHEDULES[c.recorder_schedule])
            if c.scaled:
                learned = self._counts()[task] if self.grows else len(labels)
                iterations = max(1, round(iterations * min(1.0, learned / len(base_labels))))
            gamma = paper.get("gamma", FitConfig.gamma) if c.gamma is None else c.gamma
            options |= {"iterations": iterations, "schedule": c.recorder_schedule, "gamma": gamma, "preset": preset}
            options |= {"head": self.tail if c.kr2 else None, "head_share": c.head_share}
            # A network sized by its samples has to grow with them; one of the paper's is large enough from the start.
            if c.recorder == "krnet" and c.warm_start and preset is not None and earlier is not None:
                options |= {"start": earlier, "preset": None}
        name = "recorder of the base task" if task == 0 else "recorder"

        def too_large(needed: int) -> BudgetError:
            text = self._too_large(needed, len(labels), options["budget"])
            return BudgetError(f"{text}. A run keeps its budget: start again in another folder (--out)")

        return RecorderFit(name, self._files(task)[-1], features, labels, self.device, too_large, **options)

    def _images(self, task: int) -> dict[str, Any]:
        """For a recorder that stores images: those of a task, class by class, and how F1 is shown them."""
        ids, data = self.context.task_ids(task), self.context.data
        by_class = ids[self.context.train_labels[ids].argsort(stable=True)]
        images = augment.centre(data.train.images[by_class], data.crop)
        return {"images": images, "trunk": self.trunk, "mean": data.mean, "std": data.std}

    # ------------------------------------------------------------------ recordings

    def _counts(self) -> list[int]:
        """Samples of each task."""
        return [len(self.context.task_ids(task)) for task in range(self.context.split.num_tasks)]

    def _budget(self, task: int) -> int:
        """What a recording may take after a task.

        One that grows is planned for the samples of all tasks, and those of a task get their share of what is left.
        Of two that do not, the base task's gets its share, the later one all the rest from the start: what is learned
        from replays again and again is worth it.
        """
        assert self.config.budget is not None
        budget, counts = self.config.budget, self._counts()
        if self.grows:
            held = self._files(task - 1)[-1].stat().st_size if task > 0 else 0
            return budget if task == 0 else held + (budget - held) * counts[task] // sum(counts[task:])
        if self.config.single:
            return budget
        return budget * counts[0] // sum(counts) if task == 0 else budget - self._files(0)[0].stat().st_size

    def _check_budget(self, budget: int) -> None:
        """Where a recorder's least size is known, a budget below it is refused before the base task is trained."""
        recorder, counts = choose(self.config.recorder), self._counts()
        with torch.no_grad():
            image = torch.zeros(1, *self.context.data.input_shape, device=self.device)
            shape = copy.deepcopy(self.trunk).eval()(image).shape[1:]
        for num_samples, share in ((counts[0], self._budget(0)), (sum(counts), budget)):
            least = recorder.least_bytes(num_samples, shape, self.config.own_settings())
            if least > share:
                raise BudgetError(self._too_large(least, num_samples, share))

    def _too_large(self, needed: int, num_samples: int, share: int) -> str:
        """What is wrong with a budget of which a recording of so many samples may take a share, and needs more."""
        recorder, num_all = self.config.recorder, sum(self._counts())
        # Shares go by samples, and so does a size, nearly: every file has a header, too.
        enough = 1000 * math.ceil((1.01 * needed * num_all / num_samples + 5000) / 1000)
        return (
            f"the budget is {self.config.budget} bytes for all {num_all} samples, of which a recording of "
            f"{num_samples} of them may take {share}; recorder {recorder} needs {needed} for it. Give a budget of "
            f"about {enough} bytes (--budget {enough}), leave out settings of your own, or take another recorder"
        )

    def _files(self, task: int) -> list[Path]:
        """Recordings that hold all samples up to and including a task."""
        folder = self.context.folder
        if self.one_file or task == 0:
            return [folder / (f"recording-{task}.krn" if self.one_file else "base.krn")]
        return [folder / "base.krn", folder / f"later-{task}.krn"]

    def _forget_older_files(self, task: int) -> None:
        """Those of the last task are still needed; those before it are not, now that its state is written."""
        needed = set(self._files(task - 1))
        for older in range(task - 1):
            for path in self._files(older):
                if path not in needed:
                    path.unlink(missing_ok=True)

    def _recordings(self, task: int) -> list[Recording]:
        trunk = self.trunk if choose(self.config.recorder).takes_trunk else None
        return [api.open(path, self.device, trunk=trunk) for path in self._files(task)]

    def _replay_all(self, task: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Features (N, c, h, w) and labels of every sample up to a task, as its recordings have them.

        first: the first class of those wanted
        """
        features, labels = [], []
        for recording in self._recordings(task):
            assert recording.labels is not None
            ids = (recording.labels >= first).nonzero()[:, 0]
            features.append(recording.replay(ids))
            labels.append(recording.labels[ids])
        return torch.cat(features), torch.cat(labels)

    def storage_bytes(self) -> dict[str, int]:
        names = {"base": "base recording", "later": "later recording"}
        files = {path.stem.split("-")[0]: path for path in self._files(self.task)}
        return {names.get(stem, stem): path.stat().st_size for stem, path in files.items()}

    def finish(self) -> None:
        self._forget_older_files(self.task + 1)
