"""MindFormers' own conversions between Hugging Face's names and its own.

``python -m tests.conformance.workers.mindformers_names DIRECTORY``: DIRECTORY holds the package `mindformers` of one
version. Of a model, the tables in ``models/MODEL/utils.py`` are loaded, with the operations and the converter that they
are made for; classes of whole networks and of configurations, which only stand beside them, are stand-ins.

Jobs:

* ``{"do": "to_mindformers"|"to_huggingface", "model", "file", "out", "config"}``: the tensors of a safetensors file,
  converted by the model's `weight_converters`; `config` are attributes of MindFormers' configuration.
* ``{"do": "names", "model", "names"}``: the names that `convert_name` makes of these by the model's `weight_mapping`.
* ``{"do": "legacy_names", "names", "back"}``: those that `name_replace` of Llama's scripts makes.
* ``{"do": "known", "model"}``: all names of MindFormers in the model's `weight_converters`.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import mindspore
import safetensors.numpy

from tests.conformance.workers.protocol import Job, serve

_PACKAGES = ("", ".tools", ".core", ".core.context", ".models", ".parallel_core", ".parallel_core.utils", ".checkpoint")
_MODELS = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "deepseek3": "DeepseekV3", "deepseek4": "DeepseekV4"}
_STAND_INS = (
    "checkpoint.sharded_tensor",
    "models.deepseek3.configuration_deepseek_v3",
    "models.deepseek4.configuration_deepseek_v4",
    "models.modeling_utils",
    "models.qwen3.configuration_qwen3",
    "models.qwen3_moe.configuration_qwen3_moe",
    "parallel_core.transformer_config",
    "parallel_core.transformer_config_utils",
)


class StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def main(directory: Path) -> None:
    """Answer the jobs on standard input with the package in `directory`."""
    home = directory / "mindformers"
    for name in (*_PACKAGES, *(f".models.{model}" for model in _MODELS)):
        package = types.ModuleType(f"mindformers{name}")
        package.__path__ = [str(home.joinpath(*name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    for name in _STAND_INS:
        sys.modules[f"mindformers.{name}"] = StandIn(f"mindformers.{name}")
    context = types.ModuleType("mindformers.core.context.build_context")
    context.is_legacy_model = lambda: False  # type: ignore[attr-defined]
    sys.modules[context.__name__] = context
    work = {"to_mindformers": convert, "to_huggingface": convert, "names": names, "known": known}
    serve(lambda job: legacy_names(home, job) if job["do"] == "legacy_names" else work[job["do"]](job))


def model_of(name: str) -> Any:
    """The class that holds a model's tables."""
    module = importlib.import_module(f"mindformers.models.{name}.utils")
    return getattr(module, f"{_MODELS[name]}PreTrainedModel")


def convert(job: Job) -> None:
    """Convert all tensors of a file."""
    template = importlib.import_module("mindformers.checkpoint.converter.template")
    converter = template.WeightTemplate(model_of(job["model"]).weight_converters)
    # One device: the result is full tensors.
    one = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
    converter.set_model_config(types.SimpleNamespace(**one, **job["config"]))
    for each in converter.weight_converters:
        if hasattr(each, "optimizer_parallel_size"):
            each.optimizer_parallel_size = 1
    tensors = safetensors.numpy.load_file(job["file"])
    if job["do"] == "to_huggingface":
        arrays = converter.get_hf_state_dict(tensors)
    else:
        arrays = {name: value.asnumpy() for name, value in converter.get_mf_state_dict(tensors).items()}
    safetensors.numpy.save_file({name: value.copy() for name, value in arrays.items()}, job["out"])


def names(job: Job) -> list[str]:
    """MindFormers' names of Hugging Face's."""
    model = object.__new__(model_of(job["model"]))
    return [model.convert_name(name) for name in job["names"]]


def known(job: Job) -> list[str]:
    """The names that converters make."""
    return [name for each in model_of(job["model"]).weight_converters for name in each.mf_names]


def legacy_names(home: Path, job: Job) -> list[str]:
    """Names as the scripts of Llama make them; their modules need packages that are absent here."""
    path = home / "models" / "llama" / ("convert_reversed.py" if job["back"] else "convert_weight.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "name_replace"
    ]
    scope: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), str(path), "exec"), scope)
    return [scope["name_replace"](name) for name in job["names"]]


if __name__ == "__main__":
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    main(Path(sys.argv[1]))
