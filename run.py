"""Where a run lies, and its target."""

from __future__ import annotations

import functools
import gc
import time
from typing import TYPE_CHECKING

from .data_recipes.recipe import recipe_folder
from .files import probe_writable, read_json
from .heads.resolve import TargetSource, require_reachable, resolve_target
from .manifest import MANIFEST, PLAN
from .progress import say
from .run_config import RunConfig

if TYPE_CHECKING:
    from pathlib import Path

    from .data_recipes.candidates import Answers
    from .data_recipes.layout import TargetInfo
    from .heads.target import Target
    from .train.settings import HeadRecipe


class Run:
    """Where one run lies, and its target, read or loaded once when a stage first asks for it.

    Attributes:
        data: folder of prompts, answers and features, which all heads of a target share.
        folder: of the head: its evaluations and reports.
        answers: "target" or "dataset": whose the head is trained on.
        online: whether the target's states are computed while training, instead of being read from the disk.
        training: of the stage that trains it; another head's where that one's weights are only decoded another way.
    """

    def __init__(self, config: RunConfig, writes: bool = True) -> None:
        """Find the run.

        Args:
            config: of the run.
            writes: whether stages will write; False only looks, so that a read-only folder does.
        """
        self.config = config
        self.started = time.monotonic()
        if writes:
            probe_writable(config.runs)
        self.source: TargetSource = resolve_target(config.model, notify=say)
        home = config.runs / self.source.name
        self.data = home / "data" / recipe_folder(config.recipe)
        run = f"@{config.run}" if config.run else ""
        self.folder = home / (config.head + run)
        self.training = home / ((config.weights_of or config.head) + run) / "train"
        self.answers = self._answers()
        self.online = self._online()

    @property
    def features(self) -> Path:
        """Folder of what training reads: the target's states, or, online, the documents alone."""
        return self.data / ("tokens" if self.online else "features")

    def _online(self) -> bool:
        """Whether the target runs in training: what the configuration says, else how this run's training began."""
        if self.config.train.mode != "auto":
            return self.config.train.mode == "online"
        begun = self.training / PLAN
        return begun.exists() and read_json(begun).get("mode") == "online"

    def _answers(self) -> Answers:
        """Whose answers: what the configuration says, else what the data was prepared for, else the target's."""
        if self.config.answers != "auto":
            return self.config.answers
        made = self.data / "prompts" / PLAN
        return "dataset" if made.exists() and read_json(made)["answers"] == "dataset" else "target"

    @functools.cached_property
    def reached(self) -> TargetSource:
        """The source, its revision pinned; a hub that can't be reached is an error here."""
        return require_reachable(self.source)

    @functools.cached_property
    def info(self) -> TargetInfo:
        """What identities need of the target, read without loading it."""
        from .data_recipes.layout import TargetInfo

        return TargetInfo.read(self.reached.location, self.reached.revision if not self.source.is_local else None)

    @property
    def recipe(self) -> HeadRecipe:
        """The head's settings, and how it is trained."""
        from .train.settings import HeadRecipe

        return HeadRecipe(head=self.config.head_options, train=self.config.train)

    @property
    def names(self) -> tuple[str, str | None]:
        """Id and revision of the target as the head's config records them."""
        return self.source.hub_id or self.source.name, self.reached.revision

    @functools.cached_property
    def head_init(self) -> str | None:
        """The checkpoint that the head starts from; of a hub model at one commit in all stages and processes."""
        if self.config.head_init is None:
            return None
        from .train.warm import pinned

        return pinned(self.config.head_init, self.training)

    @functools.cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Aux layers that the head reads."""
        from .heads.config import stored_layer_ids
        from .heads.loading import config_value

        source, asked = self.head_init, self.config.head_options.layer_ids
        if source is None and asked is not None:
            return tuple(asked)
        layers = config_value(self.reached.location, self.hub_revision, "num_hidden_layers")
        if source is None:
            return tuple(stored_layer_ids(layers, self.config.head_options.family))
        from .train.warm import start_layer_ids

        return tuple(start_layer_ids(source, self.training, asked, layers))

    def check_start(self) -> None:
        """Refuse a HEAD_INIT that doesn't fit, before any work is done; raises DraftsmithError.

        Weights of another head, which are only decoded here, `stages.has_weights` compares.
        """
        decoded = self.config.weights_of is not None and (self.training / MANIFEST).exists()
        if self.head_init is None or decoded:
            return
        from .train.stage import check_start

        check_start(self.recipe, self.head_init, self.training, self.reached.location, self.hub_revision, self.names)

    @property
    def hub_revision(self) -> str | None:
        """Revision that `from_pretrained` understands: none for a local folder."""
        return None if self.source.is_local else self.reached.revision

    def load_target(self) -> Target:
        """Load the target once and keep it for later stages."""
        if "target" not in self.__dict__:
            say(f"loading the target {self.source.name}")
        return self.target

    @functools.cached_property
    def target(self) -> Target:
        """The loaded target."""
        from .heads.target import Target

        target = Target.load(self.reached.location, revision=self.hub_revision)
        target.check_trainable()
        return target

    def load_tuned(self, adapter: Path) -> Target:
        """Load the target with an adapter merged into its weights, in place of the plain one."""
        from .heads.target import Target

        self.release_target()
        say(f"loading the target {self.source.name} as it was tuned with the head")
        return Target.load(self.reached.location, revision=self.hub_revision, adapter=adapter)

    def release_target(self) -> None:
        """Free the target's memory, on the devices, too, before training takes them."""
        if self.__dict__.pop("target", None) is not None:
            import torch

            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def minutes_since_start(self) -> float:
        """Minutes of this process's work so far."""
        return (time.monotonic() - self.started) / 60
