"""Settings of KRIL, and checks of those that concern its recorder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from krnet.config import check_choice, check_int, check_range, check_rate, parse_settings, parse_size
from krnet.errors import SettingError
from krnet.learners.base import LearnerConfig
from krnet.recorders.base import FIT_NAMES, Recorder, get_recorder, recorder_name
from krnet.recorders.checks import check_names
from krnet.train.config import SCHEDULES, FitConfig

# Settings of a fit that recorder_settings must not hold -> why.
RESERVED_SETTINGS = {
    "iterations": "is KRIL's recorder_iterations",
    "schedule": "is KRIL's recorder_schedule",
    "gamma": "is a setting of KRIL",
    "head_share": "is a setting of KRIL",
    "seed": "follows from the run's",
    "device": "is the run's",
    "checkpoint_s": "is the run's",
}

RECORDERS_OF_MAPS = ("paper", "images")
OF_MLP = ("head_width", "head_epochs", "head_lr", "dropout", "smoothing")

# Of runs that an earlier version made, which had no such settings.
BEFORE_SOLVED_HEADS = {
    "head": "trained",
    "plastic": True,
    "recorded": "maps",
    "through_recorder": False,
    "random_features": 8192,
    "ridge": 1e-3,
    "head_width": 4096,
    "head_epochs": 60,
    "head_lr": 1e-3,
    "dropout": 0.5,
    "smoothing": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class KrilConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "fixed_layers",
        "tail_lr",
        "aux",
        "aux_divisor",
        "new_features",
        "flip_replays",
        "recorder",
        "recorder_schedule",
        "recorder_iterations",
        "recorder_settings",
        "scaled",
        "warm_start",
        "kr2",
        "gamma",
        "head_share",
        "budget",
        "single",
        "head",
        "plastic",
        "recorded",
        "through_recorder",
        "random_features",
        "ridge",
        "head_width",
        "head_epochs",
        "head_lr",
        "dropout",
        "smoothing",
    }
    head: str = "mlp"
    """Head: mlp (a hidden layer) or solved (ridge regression on random features), which read all of F2's layers and
    learn from the replays of all samples after each task; or trained (a linear layer, with F2)."""
    plastic: bool | None = None
    """Train F2 in every task; otherwise it stays as the base task left it. By default only with head=trained."""
    recorded: str | None = None
    """What is recorded: vectors (what head=mlp and solved read) or maps (F1's feature maps). By default vectors, if
    nothing needs maps: training F2, mirrored replays, test maps through the recorder, or a recorder of maps."""
    through_recorder: bool = False
    """Show the classifier test maps as the recorder would replay them, so that they are as smooth as its replays."""
    random_features: int = 8192
    """Random features of the solved head."""
    ridge: float = 1e-3
    """Ridge of the solved head, per sample."""
    head_width: int = 4096
    """Hidden values of head=mlp."""
    head_epochs: int = 60
    """Epochs of head=mlp, in every task."""
    head_lr: float = 1e-3
    """Peak learning rate of head=mlp, by AdamW."""
    dropout: float = 0.5
    """Share of the hidden values of head=mlp that each update leaves out."""
    smoothing: float = 0.1
    """Label smoothing of head=mlp."""
    fixed_layers: int | str | None = None
    """Layers of F1, counted as in the paper: the first convolution is one layer, each basic block two. With 0,
    F1 is the identity, and images are recorded. The head reads the last map of F1 and all layers of F2. By default 19,
    and 23 with recorded=maps."""
    tail_lr: float = 0.05
    """Learning rate of F2 without its classifier, as a fraction of the classifier's learning rate."""
    aux: float = 2.0
    """Weight of L_aux, the distance of F2's features of replayed samples to those of the last F2; 0 turns it off."""
    aux_divisor: str = "batch"
    """Divisor of L_aux: batch (all samples of the batch) or replayed (its replayed samples)."""
    new_features: str | None = None
    """Features of the new images: plain, flip (mirrored at random), crop (cropped and mirrored at random in each step)
    or replayed (recorded first, so as coarse as those of old images). By default replayed; flip with head=trained and
    no budget. Data sets that may not be mirrored are not mirrored here either; without `augment`, flip and crop become
    plain."""
    flip_replays: bool = False
    """Mirror replayed maps at random."""
    recorder: str | None = None
    """Recorder of the features: paper (the paper's network), krnet (the compact network), raw (the exact features, an
    upper bound), images (a rival that keeps every image), ... By default pca for vectors and krnet for maps; with
    head=trained and no budget, paper."""
    recorder_schedule: str = "fast"
    """Training schedule of a recorder with a network (krnet, paper, autoencoder): fast or paper."""
    recorder_iterations: int | None = None
    """Iterations of the base recorder. By default those of the schedule; with schedule paper those of the data set."""
    recorder_settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of the recorder; on the command line as name=value,name=value."""
    scaled: bool = True
    """Give later recorders iterations in proportion to their samples, at most those of the base recorder."""
    warm_start: bool = True
    """Start a later recorder from the previous one, if its network is one of the paper's."""
    kr2: bool = True
    """Use L_kr2: the recorder is also trained on its error at the output of F2."""
    gamma: float | None = None
    """Weight of L_kr2. By default 0.001; with schedule paper that of the data set."""
    head_share: float = 0.25
    """Fraction of the recorder's batch that L_kr2 is computed on."""
    budget: int | None = None
    """Limit of all recordings together after the last task, in bytes or as 6.1MB; each gets a share by its samples. By
    default one bit a recorded value, at least 64 kB, for recorders that can grow and have no settings of yours. With
    budget=0 there is no limit."""
    single: bool = False
    """Use one recorder for all samples instead of one for the base task and one for the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("head", self.head, ("trained", "mlp", "solved"))
        for name in ("flip_replays", "through_recorder"):
            check_choice(name, getattr(self, name), (True, False))
        if self.budget:
            object.__setattr__(self, "budget", parse_size(self.budget))
        object.__setattr__(self, "recorder_settings", self._own_settings())
        self._resolve()
        if not isinstance(self.fixed_layers, str):
            check_int("fixed_layers", self.fixed_layers, 0)
        check_int("batch_size", self.batch_size, 2)  # at least one replayed and one new sample
        if self.ce != "seen":
            raise SettingError(f"ce is {self.ce!r}; expected seen: replays are of old classes, which 'new' leaves out")
        check_choice("aux_divisor", self.aux_divisor, ("batch", "replayed"))
        check_choice("new_features", self.new_features, ("plain", "flip", "crop", "replayed"))
        check_choice("recorder_schedule", self.recorder_schedule, SCHEDULES)
        check_choice("recorded", self.recorded, ("maps", "vectors"))
        for name in ("random_features", "head_width", "head_epochs"):
            check_int(name, getattr(self, name), 1)
        check_rate("head_lr", self.head_lr)
        for name in ("dropout", "smoothing"):
            check_range(name, getattr(self, name), 0, 0.99)
        check_range("ridge", self.ridge, 0)
        for name in ("scaled", "warm_start", "kr2", "single", "plastic"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("tail_lr", "aux"):
            check_range(name, getattr(self, name), 0)
        if self.gamma is not None:
            check_range("gamma", self.gamma, 0)
        check_range("head_share", self.head_share, 0, 1)
        if self.recorder_iterations is not None:
            check_int("recorder_iterations", self.recorder_iterations, 1)
        if self.budget is not None:
            check_int("budget", self.budget, 0)
        self._check_head()
        own = self.recorder_settings
        for name in own:
            if name in RESERVED_SETTINGS:
                raise SettingError(f"recorder_settings has {name}, which {RESERVED_SETTINGS[name]}; leave it out there")
        check_names(self.chosen_recorder, own)
        # Raise now, not after the base task is trained.
        FitConfig(**{name: value for name, value in own.items() if name in FIT_NAMES})

    def _resolve(self) -> None:
        """Replace settings that are None by their defaults, which depend on others; so the saved settings show them."""
        if self.head != "mlp":
            for name in OF_MLP:  # so that runs without this head do not differ in its settings
                object.__setattr__(self, name, getattr(type(self), name))
        reads = self.head != "trained"
        self._set_default("plastic", not reads)
        needs_maps = self.plastic or self.flip_replays or self.through_recorder or self.recorder in RECORDERS_OF_MAPS
        self._set_default("recorded", "maps" if needs_maps else "vectors")
        of_maps = "krnet" if reads or self.budget else "paper"
        self._set_default("recorder", of_maps if self.recorded == "maps" else "pca")
        self._set_default("fixed_layers", 23 if self.recorded == "maps" else 19)
        self._set_default("new_features", "replayed" if reads or self.limited else "flip")

    def _set_default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def limited(self) -> bool:
        """Whether the recordings have a budget, given or by default."""
        by_default = self.budget is None and self.chosen_recorder.grows and not self.recorder_settings
        return bool(self.budget) or by_default

    def _check_head(self) -> None:
        if not self.plastic and self.head == "trained":
            raise SettingError("plastic is off and head is 'trained': nothing would learn. Set head=mlp or head=solved")
        if self.recorded == "vectors" and (self.plastic or self.through_recorder or self.flip_replays):
            raise SettingError(
                "recorded is 'vectors', which F2 cannot be trained on, nor mirrored, nor tests shown through. Set "
                "head=mlp and plastic=False, and leave through_recorder and flip_replays out"
            )
        if self.head != "trained" and self.new_features_kind != "replayed":
            raise SettingError(
                f"new_features is {self.new_features!r}; expected replayed: head={self.head} reads the replays of "
                f"all samples"
            )
        recorder = self.chosen_recorder
        if self.through_recorder and not (recorder.projects and (self.single or recorder.grows)):
            raise SettingError(
                f"through_recorder is set, and recorder {self.recorder} cannot show maps that it does not hold. Leave "
                f"it out, or take krnet, pca, quantized, transform or pq"
            )

    @classmethod
    def renewed(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        saved = {"head_width" if name == "hidden" else name: value for name, value in saved.items()}
        own_settings = saved.get("recorder_settings")
        names = {"recorder": recorder_name(str(saved.get("recorder")), saved)}
        # There was no default budget.
        had_none = "head_width" not in saved and not saved.get("budget") and get_recorder(names["recorder"]).grows
        unlimited = {"budget": 0} if had_none else {}
        renamed = dict(super().renewed(saved))
        if "hidden" in renamed:
            renamed["head_width"] = renamed.pop("hidden")
        return {
            **BEFORE_SOLVED_HEADS,
            **renamed,
            **names,
            **unlimited,
            "recorder_settings": parse_settings(own_settings) if isinstance(own_settings, str) else own_settings or {},
        }

    def comparable(self) -> dict[str, Any]:
        settings = super().comparable()
        if self.gamma is None and self.recorder_schedule == "fast":
            settings["gamma"] = FitConfig.gamma  # earlier versions named it in their rows
        return settings

    @property
    def new_features_kind(self) -> str:
        """Setting new_features, with flip and crop replaced by plain if `augment` is off."""
        assert self.new_features is not None
        return self.new_features if self.augment or self.new_features == "replayed" else "plain"

    @property
    def chosen_recorder(self) -> Recorder:
        assert self.recorder is not None, "resolved when the settings are made"
        return get_recorder(self.recorder)

    def _own_settings(self) -> dict[str, Any]:
        given = self.recorder_settings
        if isinstance(given, Mapping):
            return dict(given)
        if not isinstance(given, str):
            raise SettingError(f"recorder_settings is {given!r}; expected settings by name, or name=value,name=value")
        return parse_settings(given)
