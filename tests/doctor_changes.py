"""Ways to spoil a head's directory: each makes a function that changes a good one in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[Path], Any]
IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
"""What ModelOpt's export puts into configs."""


def config(drop: tuple[str, ...] = (), file: str = "config.json", **values: Any) -> Change:
    """Values of a JSON file's top level."""

    def change(folder: Path) -> None:
        said = {k: v for k, v in json.loads((folder / file).read_text()).items() if k not in drop}
        (folder / file).write_text(json.dumps({**said, **values}))

    return change


def inside(group: str, drop: tuple[str, ...] = (), file: str = "config.json", **values: Any) -> Change:
    """Values of a group inside it."""

    def change(folder: Path) -> None:
        said = json.loads((folder / file).read_text())
        said[group] = {**{k: v for k, v in said[group].items() if k not in drop}, **values}
        (folder / file).write_text(json.dumps(said))

    return change


def record(**values: Any) -> Change:
    """Values of the head's own config in draftsmith.json."""
    return inside("config", file="draftsmith.json", **values)


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def ids(top: list[int], **values: Any) -> Change:
    """Layer ids at both places, each as its readers count."""
    return both(config(**{IDS: top}, **values), inside("eagle_config", **{IDS: [k - 1 for k in top]}))


def weights(folder: Path) -> Path:
    (found,) = (path for path in folder.glob("*.safetensors") if path.name != "vocab.safetensors")
    return found


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Change:
    """All tensors of the directory, as a dict to be changed in place."""

    def change(folder: Path) -> None:
        path = weights(folder)
        found = {name: x.clone() for name, x in load_file(path).items()}
        edit(found)
        save_file(found, path, metadata={"format": "pt"})

    return change


def drop(*names: str) -> Change:
    return tensors(lambda t: [t.pop(name) for name in names])


def put(**made: Callable[[dict[str, Tensor]], Tensor]) -> Change:
    """Tensors by name ("__" stands for a dot), made of those that are there."""
    return tensors(lambda t: t.update({name.replace("__", "."): make(t) for name, make in made.items()}))


def rename(old: str, new: str) -> Change:
    return tensors(lambda t: t.update({new: t.pop(old)}))


def cut(share: float, pattern: str = "*.safetensors") -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob(pattern)
        raw = path.read_bytes()
        path.write_bytes(raw[: int(len(raw) * share)])

    return change


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def longer(name: str) -> Change:
    """A file with a blank behind it."""
    return lambda folder: (folder / name).write_text((folder / name).read_text() + " ")


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def pickled(keep: bool) -> Change:
    """Weights as PyTorch pickles them; with `keep` beside the safetensors."""

    def change(folder: Path) -> None:
        path = weights(folder)
        torch.save(load_file(path), folder / "pytorch_model.bin")
        if not keep:
            path.unlink()

    return change


def rope(**values: Any) -> Change:
    """The rope in both forms."""
    return both(config(rope_theta=values["rope_theta"]), inside("rope_parameters", **values))


def absolute(t: dict[str, Tensor]) -> None:
    t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))


def end_outside(t: dict[str, Tensor]) -> None:
    t["d2t"][-1] += 5000


def twice(t: dict[str, Tensor]) -> None:
    t["d2t"][1] = t["d2t"][0] - 1


def shifted(t: dict[str, Tensor]) -> None:
    t["d2t"] += 1


def not_a_number(t: dict[str, Tensor]) -> None:
    t["fc.weight"][0, 0] = torch.nan


def zeroed(name: str) -> Change:
    return tensors(lambda t: t[name].zero_())


def transposed(t: dict[str, Tensor]) -> None:
    name = "midlayer.self_attn.k_proj.weight"
    t[name] = t[name].t().contiguous()


def fewer_rows(t: dict[str, Tensor]) -> None:
    t["lm_head.weight"] = t["lm_head.weight"][:-8].clone()


def all_renamed(t: dict[str, Tensor]) -> None:
    for name in list(t):
        t[f"x.{name}"] = t.pop(name)


def without_biases(t: dict[str, Tensor]) -> None:
    for name in [name for name in t if name.endswith("bias")]:
        del t[name]
