"""Other words for forms and formats, and what to type; loaded only for an error."""

from __future__ import annotations

from reshard.forms import FORM_CLASSES, SHORT_NAMES

_FORMS = {
    **dict.fromkeys(("pytorch", "torch", "fsdp", "fsdp2", "torch-dcp", "torchtitan"), "--to dcp"),
    **dict.fromkeys(("mindspore", "mindformers", "rank"), "--to ranks, a file for each rank"),
    **dict.fromkeys(("mcore", "megatron-core", "megatron-lm", "mindspeed", "torch-dist"), "--to megatron"),
    **dict.fromkeys(("transformers", "vllm", "hugging-face"), "--to huggingface"),
    "verl": "verl's form can only be read; --to dcp and --to huggingface can be written",
}


def advice_on(value: str) -> str | None:
    """What is wrong with a word that is no form or format where one was expected, if it is known."""
    from reshard.checkpoints.formats.dtypes import dtype_named

    if value in ("ckpt", "safetensors"):
        return f"{value} is a format, not a form: --format {value}"
    if value in FORM_CLASSES or value in SHORT_NAMES:
        return f"{value} is a form, not a format: --to {value}"
    if dtype_named(value) is not None:
        return f"{value} is a type: --cast {value}"
    spelled = value.lower().replace("_", "-")
    spelled = SHORT_NAMES.get(spelled, spelled)
    advice = f"--to {spelled}" if spelled in FORM_CLASSES else _FORMS.get(spelled)
    return None if advice is None else f"{value} is not the name of a form: {advice}"
