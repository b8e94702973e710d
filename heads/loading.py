"""Reading a target through transformers: its config, model and tokenizer; failures become one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DraftsmithError
from ..files import read_json

if TYPE_CHECKING:
    import torch


def both_configs(location: str, revision: str | None) -> tuple[Any, Any]:
    """The transformers config of a folder or hub id, defaults filled in, and its text part; often the same."""
    from transformers import AutoConfig

    with explain_loading(location):
        whole = AutoConfig.from_pretrained(location, revision=revision)
        return whole, whole.get_text_config()


def text_config(location: str, revision: str | None) -> Any:
    """The text part of `both_configs`."""
    return both_configs(location, revision)[1]


def load_model(location: str, revision: str | None, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Load the transformers model of a folder or hub id.

    Args:
        device: where it is to compute. A quantised one is put there as it is read, since many formats can't be moved.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading is announced by the stage that loads
    with explain_loading(location):
        where = {"device_map": {"": device}} if device != "cpu" and quantisation(location, revision) else {}
        model = AutoModelForCausalLM.from_pretrained(location, revision=revision, dtype=dtype, **where)
        return model if where else model.to(device)


def config_value(location: str, revision: str | None, name: str) -> Any:
    """One value of a text config: as config.json says it, else what transformers makes of the file; None if nothing.

    Architectures have names of their own (GPT-2's n_layer), and published files leave defaults out.
    """
    values = read_json(resolve_folder(location, revision) / "config.json")
    found = values.get("text_config", values).get(name)
    return getattr(text_config(location, revision), name, None) if found is None else found


def quantisation(location: str, revision: str | None) -> str | None:
    """Name of the format that a checkpoint's weights are quantised in (`quant_method`), None for plain ones.

    Raises:
        DraftsmithError: the config says that they are, and not how.
    """
    found = (getattr(config, "quantization_config", None) for config in both_configs(location, revision))
    how = next((one for one in found if one is not None), None)
    if how is None:
        return None
    values = how if isinstance(how, dict) else how.to_dict()
    if method := values.get("quant_method"):
        return str(getattr(method, "value", method))
    if values.get("load_in_4bit") or values.get("load_in_8bit"):  # before configs named their format
        return "bitsandbytes"
    raise DraftsmithError(
        f"the target {location!r} is quantised, but the quantization_config in its config.json doesn't say how: "
        "write its quant_method there (gptq, awq, …), or take another copy of the model"
    )


def load_tokenizer(location: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a model folder or hub id."""
    from transformers import AutoTokenizer

    with explain_loading(location):
        return AutoTokenizer.from_pretrained(location, revision=revision)


@contextlib.contextmanager
def explain_loading(location: str) -> Iterator[None]:
    """Turn the many ways in which loading fails into one line that names the model."""
    try:
        yield
    except DraftsmithError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DraftsmithError(f"the target {location!r} can't be loaded: {reason}") from error


def resolve_folder(location: str, revision: str | None) -> Path:
    """Return the local folder of a model: itself, or the hub's cached snapshot."""
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import snapshot_download

    with explain_loading(location):
        return Path(
            snapshot_download(
                location, revision=revision, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
            )
        )
