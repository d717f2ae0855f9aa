"""Megatron-Core's own saving and loading of a tiny GPT model, by processes of gloo on a CPU.

usage: python -m tests.conformance.workers.megatron DIRECTORY    DIRECTORY has the package megatron of one version

A `model` and a `layout` are numbers with the defaults `MODEL` and `LAYOUT`. Values, and gradients of two steps of Adam,
follow from the names of whole tensors, so that every layout trains the same model: the answers of two runs are equal
if the same weights and the same state of the optimizer lie on the same ranks. Jobs:

* ``{"do": "train", "model", "layout", "directory", "format", "optimizer"}``: two steps, and a save unless `directory`
  is null. `format` is ``torch_dist`` or ``torch``; `optimizer` is ``plain``, the distributed optimizer's kind of
  sharding, or null. Answers a dictionary for every rank: hashes of its weights and of its parts of the optimizer's
  state, and the step.
* ``{"do": "start", ...}``: the same model with other values loads `directory`. Answers the same.
* ``{"do": "logits", "model"}``: logits of one fixed text, as numbers, by the trained model on one rank in float32.
* ``{"do": "plain", "directory"}``: hashes of all tensors of an iteration, by key, as Megatron loads them without a
  model.
* ``{"do": "transformers", "directory"}``: logits of that text by Hugging Face's model of `directory`, and the missing
  and unexpected names of its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.workers.megatron_model import LATENT, MODEL
from tests.conformance.workers.protocol import Job, serve_lines

warnings.filterwarnings("ignore")
os.environ.update(OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="lo")

LAYOUT: dict[str, Any] = {"tp": 1, "pp": 1, "ep": 1, "dp": 1, "vpp": None, "first": None, "bucket": None}
STEPS = 2
ITERATION = 20
SECONDS = 90


class _OnCpu(importlib.abc.MetaPathFinder):
    """Finds megatron.core, and has its tensors made on the CPU."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _CpuLoader(spec.loader.name, spec.loader.path)
        return spec


class _CpuLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text(encoding="utf-8")
        text = re.sub(r"device=(['\"])cuda\1", r"device=\1cpu\1", text)
        text = re.sub(r"torch\.cuda\.(Float|Half|BFloat16)Tensor", r"torch.\1Tensor", text)
        # torch's norms are whole on every rank.
        text = re.sub(r"(?s)assert \(?\s*not config\.sequence_parallel\s*\)?, f?(['\"]).*?\1", "pass", text)
        if ".optimizer" in fullname:
            text = text.replace(".cuda()", ".cpu()")
        return compile(text, self.path, "exec", dont_inherit=True)


sys.meta_path.insert(0, _OnCpu())
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

np.product = np.prod  # type: ignore[attr-defined]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.empty_cache = lambda: None
torch.Tensor.cuda = lambda self, *_, **__: self

import megatron.core  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core import parallel_state as ranks  # noqa: E402
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))

if VERSION < (0, 13):
    # It calls torch's function with an argument less, and without Transformer Engine it refuses all parameters.
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    _write_item = filesystem_async._write_item
    filesystem_async._write_item = lambda *each: _write_item(*each, serialization_format=SerializationFormat.TORCH_SAVE)
    distrib_optimizer.quantize_param_shard = lambda *_: None


def _set_state(self: Any, parameter: Any, tensors: Mapping[str, Any]) -> None:
    """What Megatron's own function does, but for the step of torch's AdamW, which no checkpoint has."""
    group, order = self.model_param_group_index_map[parameter]
    master = self.optimizer.param_groups[group]["params"][order]
    for name, tensor in {"param": master, **self.optimizer.state[master]}.items():
        if name in tensors:
            tensor.copy_(tensors[name])


distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = _set_state


class _Setting:
    """A job's model on its layout."""

    def __init__(self, job: Job) -> None:
        latent = LATENT if job.get("model", {}).get("family") == "deepseek_v3" else {}
        self.model: dict[str, Any] = {**MODEL, **latent, **job.get("model", {})}
        self.layout: dict[str, Any] = {**LAYOUT, **job.get("layout", {})}
        self.format: str = job.get("format", "torch_dist")
        self.optimizer: str | None = job.get("optimizer")
        self.directory: str | None = job.get("directory")
        unit = self.model["divisible"] * self.layout["tp"]
        self.padded = -(-self.model["vocab"] // unit) * unit
        self.world: int = self.layout["tp"] * self.layout["pp"] * self.layout["dp"]

    @property
    def family(self) -> str:
        return str(self.model["family"])

    @property
    def mla(self) -> bool:
        return self.family == "deepseek_v3"

    @property
    def distributed(self) -> bool:
        return self.optimizer not in (None, "plain")

    def config(self) -> Any:
        model, layout = self.model, self.layout
        options: dict[str, Any] = {
            "num_layers": model["layers"],
            "hidden_size": model["hidden"],
            "num_attention_heads": model["heads"],
            "ffn_hidden_size": model["ffn"],
            "tensor_model_parallel_size": layout["tp"],
            "pipeline_model_parallel_size": layout["pp"],
            "use_cpu_initialization": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "bf16": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.family == "qwen2",
            "qk_layernorm": self.family in ("qwen3", "qwen3_moe", "deepseek_v3"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
        }
        if layout["vpp"]:
            options["virtual_pipeline_model_parallel_size"] = layout["vpp"]
        if layout["first"]:
            options["num_layers_in_first_pipeline_stage"] = layout["first"]
        if model["mtp"]:
            options["mtp_num_layers"] = model["mtp"]
        if model["experts"]:
            options.update(
                num_moe_experts=model["experts"],
                moe_ffn_hidden_size=model["moe_ffn"],
                moe_router_topk=2,
                moe_layer_freq=model["frequency"] or 1,
                expert_model_parallel_size=layout["ep"],
                sequence_parallel=layout["tp"] > 1,
                moe_router_load_balancing_type="none",
                moe_token_dispatcher_type="allgather",
                moe_aux_loss_coeff=0.0,
                moe_grouped_gemm=model["grouped"],
            )
        if model["shared_ffn"]:
            options["moe_shared_expert_intermediate_size"] = model["shared_ffn"]
        if not self.mla:
            return TransformerConfig(num_query_groups=model["groups"], kv_channels=model["head_dim"], **options)
        options.update(
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5
        )
        return MLATransformerConfig(
            multi_latent_attention=True,
            q_lora_rank=model["q_lora"],
            kv_lora_rank=model["kv_lora"],
            qk_head_dim=model["nope"],
            qk_pos_emb_head_dim=model["rope"],
            v_head_dim=model["value"],
            kv_channels=model["value"],
            rope_type="rope",
            rotary_base=10000,
            rotary_scaling_factor=1.0,
            **options,
        )

    def args(self) -> argparse.Namespace:
        """Arguments of the model and its layout, as Megatron's training has them."""
        model, layout = self.model, self.layout
        return argparse.Namespace(
            num_layers=model["layers"],
            hidden_size=model["hidden"],
            num_attention_heads=model["heads"],
            group_query_attention=not self.mla,
            num_query_groups=1 if self.mla else model["groups"],
            kv_channels=model["value"] if self.mla else model["head_dim"],
            ffn_hidden_size=model["ffn"],
            swiglu=True,
            normalization="RMSNorm",
            norm_epsilon=1e-6,
            apply_layernorm_1p=False,
            add_bias_linear=False,
            add_qkv_bias=self.family == "qwen2",
            qk_layernorm=self.family in ("qwen3", "qwen3_moe", "deepseek_v3"),
            untie_embeddings_and_output_weights=not model["tied"],
            position_embedding_type="rope",
            rotary_base=10000,
            rotary_percent=1.0,
            rotary_interleaved=False,
            max_position_embeddings=64,
            vocab_size=model["vocab"],
            padded_vocab_size=self.padded,
            make_vocab_size_divisible_by=model["divisible"],
            tensor_model_parallel_size=layout["tp"],
            pipeline_model_parallel_size=layout["pp"],
            expert_model_parallel_size=layout["ep"],
            expert_tensor_parallel_size=layout["tp"],
            context_parallel_size=1,
            data_parallel_size=layout["dp"],
            world_size=self.world,
            virtual_pipeline_model_parallel_size=layout["vpp"],
            num_virtual_stages_per_pipeline_rank=layout["vpp"],
            num_layers_per_virtual_pipeline_stage=None,
            decoder_first_pipeline_num_layers=layout["first"],
            decoder_last_pipeline_num_layers=None,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            num_experts=model["experts"] or None,
            moe_ffn_hidden_size=model["moe_ffn"] if model["experts"] else None,
            moe_shared_expert_intermediate_size=model["shared_ffn"] or None,
            moe_router_topk=2,
            moe_layer_freq=model["frequency"] or 1,
            moe_grouped_gemm=model["grouped"],
            moe_use_legacy_grouped_gemm=model["grouped"],
            moe_router_score_function="sigmoid" if self.mla else "softmax",
            moe_router_enable_expert_bias=self.mla,
            moe_router_topk_scaling_factor=2.5 if self.mla else None,
            multi_latent_attention=self.mla,
            q_lora_rank=model.get("q_lora"),
            kv_lora_rank=model.get("kv_lora", 32),
            qk_head_dim=model.get("nope", 128),
            qk_pos_emb_head_dim=model.get("rope", 64),
            v_head_dim=model.get("value", 128),
            mtp_num_layers=model["mtp"] or None,
            transformer_impl="transformer_engine" if model["norms_in_linears"] else "local",
            params_dtype=torch.bfloat16,
            bf16=True,
            fp16=False,
            optimizer="adam",
            use_distributed_optimizer=self.distributed,
            overlap_grad_reduce=bool(layout["bucket"]),
            ddp_bucket_size=layout["bucket"],
            ddp_pad_buckets_for_high_nccl_busbw=False,
            ckpt_format=self.format,
            lr=1e-3,
            min_lr=1e-5,
            lr_decay_style="cosine",
            lr_warmup_iters=10,
            lr_decay_iters=None,
            train_iters=500,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            weight_decay=0.1,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
            global_batch_size=8,
            iteration=ITERATION,
            consumed_train_samples=ITERATION * 8,
        )


class _Run:
    """One rank's model and optimizer."""

    def __init__(self, setting: _Setting, seed: int) -> None:
        self.setting = setting
        self.seed = seed
        layout = setting.layout
        sizes: dict[str, Any] = {"expert_model_parallel_size": layout["ep"]} if layout["ep"] > 1 else {}
        if layout["vpp"]:
            sizes["virtual_pipeline_model_parallel_size"] = layout["vpp"]
        ranks.initialize_model_parallel(layout["tp"], layout["pp"], create_gloo_process_groups=True, **sizes)
        torch.manual_seed(5)
        config = setting.config()
        self.chunks = [self._chunk(config, stage).bfloat16() for stage in range(layout["vpp"] or 1)]
        for router in (module for chunk in self.chunks for module in chunk.modules()):
            if getattr(router, "expert_bias", None) is not None:
                # As Megatron's Float16Module keeps it.
                router.expert_bias.data = router.expert_bias.data.float()
        for _, tensor, whole in self._tensors("value"):
            tensor.data.copy_(torch.from_numpy(whole))
        self.optimizer: Any = self._optimizer() if setting.optimizer else None

    def _chunk(self, config: Any, stage: int) -> Any:
        setting, pp, vpp = self.setting, self.setting.layout["pp"], self.setting.layout["vpp"]
        place = ranks.get_pipeline_model_parallel_rank()
        chosen: dict[str, Any] = {"vp_stage": stage if vpp else None} if VERSION >= (0, 13) else {}
        spec = self._spec(config, chosen)
        more = dict(chosen)
        if setting.model["mtp"]:
            more["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=False, **chosen
            )
        if VERSION < (0, 13) and vpp:
            ranks.set_virtual_pipeline_model_parallel_rank(stage)
        return GPTModel(
            config,
            spec,
            vocab_size=setting.padded,
            max_sequence_length=64,
            pre_process=place == 0 and stage == 0,
            post_process=place == pp - 1 and stage == (vpp or 1) - 1,
            share_embeddings_and_output_weights=setting.model["tied"],
            position_embedding_type="rope",
            rotary_base=10000,
            **more,
        )

    def _spec(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        model = self.setting.model
        grouped: dict[str, Any] = {}
        if model["grouped"]:
            from megatron.core.transformer.moe import grouped_gemm_util

            # Only its forward needs the package.
            grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
            config.moe_use_legacy_grouped_gemm = True
            grouped = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
        if isinstance(model["frequency"], list):
            # 0.12 has no argument for a virtual stage and no normalization here.
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, **({"normalization": "RMSNorm", **chosen} if chosen else {})
            )
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(
                num_experts=model["experts"] or None,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=self.setting.mla,
                **({"normalization": "RMSNorm"} if VERSION >= (0, 13) else {}),
                **grouped,
            )
        for each in {id(each): each for each in getattr(spec, "layer_specs", [spec])}.values():
            if self.setting.mla:
                each.submodules.self_attention.submodules.core_attention = _mla_attention()
            if model["norms_in_linears"]:
                _put_norms_in_linears(each)
        return spec

    def _optimizer(self) -> Any:
        setting, bucket = self.setting, self.setting.layout["bucket"]
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=setting.distributed,
            overlap_grad_reduce=bool(bucket),
            overlap_param_gather=False,
            bucket_size=bucket,
        )
        wrapped = [
            DistributedDataParallel(setting.config(), options, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=setting.distributed,
            clip_grad=0.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.1,
        )
        return get_megatron_optimizer(adam, wrapped)

    def train(self, steps: int = STEPS) -> None:
        for step in range(steps):
            for _, tensor, whole in self._tensors(f"gradient {step}", buffers=False):
                tensor.main_grad.copy_(torch.from_numpy(whole * 1e-2))
            assert self.optimizer.step()[0]

    # ---- tensors by names of the whole model

    def _tensors(self, what: str, buffers: bool = True) -> Iterator[tuple[str, Any, Any]]:
        """The name in the whole model, this rank's parameter, and an array for it that follows from the name."""
        for chunk in self.chunks:
            named = [*chunk.named_parameters()]
            if buffers:
                named += [(name, each) for name, each in chunk.named_buffers() if name.endswith("expert_bias")]
            for name, tensor in named:
                whole = self.whole_name(chunk, name)
                yield whole, tensor, self._made(whole, tensor, what).reshape(tuple(tensor.shape))

    def whole_name(self, chunk: Any, name: str) -> str:
        """With the numbers of layers and experts in the whole model."""
        if layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            name = f"decoder.layers.{chunk.decoder.layers[int(layer[1])].layer_number - 1}.{layer[2]}"
        if expert := re.match(r"(.*local_experts\.)(\d+)(\..*)", name):
            name = f"{expert[1]}{int(expert[2]) + self._first_expert}{expert[3]}"
        if self.setting.model["tied"] and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        return name

    @property
    def _own_experts(self) -> int:
        return int(self.setting.model["experts"] // self.setting.layout["ep"])

    @property
    def _first_expert(self) -> int:
        return int(ranks.get_expert_model_parallel_rank() * self._own_experts)

    def _made(self, name: str, tensor: Any, what: str) -> Any:
        """This rank's part of the whole tensor's array."""
        model, shape = self.setting.model, list(tensor.shape)
        if grouped := re.fullmatch(r"(.*experts\.)weight([12])", name):
            # Memory is a transposed matrix for every expert.
            hidden, width = model["hidden"], model["moe_ffn"]
            whole_shape = [2 * width, hidden] if grouped[2] == "1" else [hidden, width]
            experts = []
            for expert in range(self._first_expert, self._first_expert + self._own_experts):
                one = f"{grouped[1]}local_experts.{expert}.linear_fc{grouped[2]}.weight"
                whole = self._whole(one, whole_shape, what)
                experts.append(self._cut(one, whole, 0 if grouped[2] == "1" else 1, expert_part=True).T)
            return np.stack(experts)
        if not getattr(tensor, "tensor_model_parallel", False):
            return self._whole(name, shape, what)
        expert = ".experts." in name
        parts = self.setting.layout["tp"]
        dimension = tensor.partition_dim
        shape[dimension] *= parts
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole = np.zeros(shape)
            whole[: model["vocab"]] = self._whole(name, [model["vocab"], *shape[1:]], what)
        else:
            whole = self._whole(name, shape, what)
        return self._cut(name, whole, dimension, expert)

    def _whole(self, name: str, shape: Sequence[int], what: str) -> Any:
        random = np.random.default_rng(zlib.crc32(f"{self.seed} {what} {name}".encode()))
        array = random.standard_normal(tuple(shape))
        if what != "value":
            return array
        return 1 + 0.2 * array if "norm" in name else array * 0.25

    def _cut(self, name: str, whole: Any, dimension: int, expert_part: bool) -> Any:
        rank = ranks.get_expert_tensor_parallel_rank() if expert_part else ranks.get_tensor_model_parallel_rank()
        parts = self.setting.layout["tp"]
        if "linear_fc1.weight" in name:
            gate, up = np.split(whole, 2, 0)
            return np.concatenate([np.split(gate, parts, 0)[rank], np.split(up, parts, 0)[rank]])
        return np.split(whole, parts, dimension)[rank]

    # ---- what a rank holds

    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        states = self._states() if self.optimizer else {}
        for chunk in self.chunks:
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                if name.endswith("_extra_state") or "rotary" in name or name.endswith("local_tokens_per_expert"):
                    continue
                whole = self.whole_name(chunk, name)
                found[whole] = _digest(tensor)
                for kind, first, values in states.pop(tensor, []) if isinstance(tensor, torch.nn.Parameter) else []:
                    found[f"{kind}.{whole}@{first}"] = _digest(values)
        assert not states
        if self.optimizer:
            found["steps"] = self._steps()
        return found

    def _states(self) -> dict[Any, list[tuple[str, int, Any]]]:
        states: dict[Any, list[tuple[str, int, Any]]] = {}
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if getattr(each, "is_stub_optimizer", False) or each.optimizer is None:
                continue
            if hasattr(each, "model_param_group_index_map"):
                for parameter in each.model_param_group_index_map:
                    first = each._get_model_param_range_map(parameter)["param"].start
                    tensors = each._get_main_param_and_optimizer_states(parameter)
                    states[parameter] = [(kind, first, tensors[kind]) for kind in ("param", "exp_avg", "exp_avg_sq")]
                continue
            for live, masters in zip(each.float16_groups, each.fp32_from_float16_groups):
                for parameter, master in zip(live, masters):
                    moments = each.optimizer.state[master]
                    states[parameter] = [
                        ("param", 0, master),
                        *((kind, 0, moments[kind]) for kind in ("exp_avg", "exp_avg_sq")),
                    ]
        return states

    def _steps(self) -> list[float]:
        """Of every parameter group with parameters, and of every parameter where torch's AdamW counts."""
        steps: set[float] = set()
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if getattr(each, "is_stub_optimizer", False) or each.optimizer is None:
                continue
            steps.update(float(state["step"]) for state in each.optimizer.state.values() if "step" in state)
            steps.update(float(group["step"]) for group in each.optimizer.param_groups if "step" in group)
        return sorted(steps)

    # ---- checkpoints

    @property
    def _names(self) -> list[str]:
        return ["model"] if len(self.chunks) == 1 else [f"model{number}" for number in range(len(self.chunks))]

    def _rank_directory(self, directory: str) -> str:
        layout = self.setting.layout
        name = f"mp_rank_{ranks.get_tensor_model_parallel_rank():02d}"
        if layout["pp"] > 1:
            name += f"_{ranks.get_pipeline_model_parallel_rank():03d}"
        if layout["ep"] > 1:
            name += f"_{ranks.get_expert_model_parallel_rank():03d}"
        return os.path.join(directory, name)

    def save(self) -> None:
        setting = self.setting
        assert setting.directory
        directory = os.path.join(setting.directory, f"iter_{ITERATION:07d}")
        if dist.get_rank() == 0:
            os.makedirs(directory)
        dist.barrier()
        state: dict[str, Any] = {
            "args": setting.args(),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "num_floating_point_operations_so_far": 1.5e15,
        }
        if self.optimizer:
            state["opt_param_scheduler"] = self._scheduler().state_dict()
        if setting.format == "torch":
            self._save_tree(directory, state)
        else:
            self._save_distributed(directory, state)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(setting.directory, "latest_checkpointed_iteration.txt").write_text(str(ITERATION))

    def _scheduler(self) -> Any:
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-3,
            min_lr=1e-5,
            lr_warmup_steps=10,
            lr_decay_steps=1000,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=1000,
            wd_incr_style="constant",
        )

    def _save_tree(self, directory: str, state: dict[str, Any]) -> None:
        where = self._rank_directory(directory)
        os.makedirs(where, exist_ok=True)
        dist.barrier()
        if self.setting.distributed:
            self.optimizer.save_parameter_state(os.path.join(where, "distrib_optim.pt"))
        first = ranks.get_data_parallel_rank() == 0
        if self.setting.layout["ep"] > 1:
            first = first or ranks.get_expert_data_parallel_rank() == 0
        if first:
            for name, chunk in zip(self._names, self.chunks):
                state[name] = chunk.state_dict_for_save_checkpoint()
            if self.optimizer:
                state["optimizer"] = self.optimizer.state_dict()
            torch.save(state, os.path.join(where, "model_optim_rng.pt"))

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.setting.distributed:
            content["distrib_optim_sharding_type"] = self.setting.optimizer
            if self.setting.optimizer == "fully_reshardable":
                content["distrib_optim_fully_reshardable_mem_efficient"] = False
        return content

    def _sharded(self, content: Mapping[str, Any], loading: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = dict(content)
        with contextlib.suppress(ImportError):
            from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

            metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(self._names, self.chunks)}
        if self.optimizer:
            options: dict[str, Any] = {"metadata": metadata}
            if VERSION < (0, 13):
                options = {"sharding_type": self.setting.optimizer} if self.setting.distributed else {}
            sharded["optimizer"] = self.optimizer.sharded_state_dict(dict(sharded), is_loading=loading, **options)
        return sharded

    def _save_distributed(self, directory: str, state: dict[str, Any]) -> None:
        content = self._content()
        try:
            strategy = get_default_save_sharded_strategy("torch_dist")
        except TypeError:
            strategy = get_default_save_sharded_strategy()
        if self.setting.optimizer != "dp_zero_gather_scatter":
            group = ranks.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelSaveStrategyWrapper(strategy, group, False)
        options = {"content_metadata": content} if VERSION >= (0, 13) else {}
        dist_checkpointing.save({**state, **self._sharded(content, False)}, directory, strategy, **options)

    def load(self) -> None:
        setting = self.setting
        assert setting.directory
        (directory,) = map(
            str, (each for each in Path(setting.directory).iterdir() if each.name.startswith(("iter_", "release")))
        )
        if setting.format == "torch":
            self._load_tree(directory)
            return
        content = None
        if VERSION >= (0, 13):
            content = dist_checkpointing.load_content_metadata(directory)
        state = dist_checkpointing.load(self._sharded(content or self._content(), True), directory)
        for name, chunk in zip(self._names, self.chunks):
            keys = chunk.load_state_dict(state[name], strict=False)
            assert not keys.unexpected_keys, keys
        if self.optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def _load_tree(self, directory: str) -> None:
        where = self._rank_directory(directory)
        state = torch.load(os.path.join(where, "model_optim_rng.pt"), weights_only=False)
        for name, chunk in zip(self._names, self.chunks):
            keys = chunk.load_state_dict(state[name], strict=False)
            assert not keys.unexpected_keys, keys
            assert all(each.endswith("_extra_state") for each in keys.missing_keys), keys
        if self.optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
            if self.setting.distributed:
                self.optimizer.load_parameter_state(os.path.join(where, "distrib_optim.pt"))


def _mla_attention() -> Any:
    """Local attention that takes the two sizes that MLA passes; Megatron's own that does is Transformer Engine's."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *words: Any, k_channels: Any = None, v_channels: Any = None, **more: Any) -> None:
            super().__init__(*words, **more)

    return Attention


def _put_norms_in_linears(spec: Any) -> None:
    """Parameters with Transformer Engine's names and order: a norm is one of the linear layer that it feeds."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class WithNorm(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
            made = torch.nn.Module.__init__

            def begin(module: Any, *words: Any, **others: Any) -> None:
                made(module, *words, **others)
                if module is self:
                    norm = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
                    norm.sequence_parallel = config.sequence_parallel
                    module.register_parameter("layer_norm_weight", norm)

            torch.nn.Module.__init__ = begin
            try:
                super().__init__(input_size, output_size, config=config, **more)
            finally:
                torch.nn.Module.__init__ = made

        def forward(self, values: Any, *words: Any, **more: Any) -> Any:
            wide = values.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon)
            return super().forward((scaled * self.layer_norm_weight.float()).to(values.dtype), *words, **more)

    parts = spec.submodules
    parts.input_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = WithNorm
    # Since 0.19 a partial function builds it.
    mlp = parts.mlp.keywords["submodules"] if isinstance(parts.mlp, functools.partial) else parts.mlp.submodules
    if hasattr(mlp, "linear_fc1"):
        parts.pre_mlp_layernorm = IdentityOp
        mlp.linear_fc1 = WithNorm
    parts.sharded_state_dict_keys_map = {}


def _digest(tensor: Any, whole: bool = False) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[: None if whole else 16]


def _train(setting: _Setting) -> dict[str, Any]:
    run = _Run(setting, setting.model["seed"])
    if setting.optimizer:
        run.train()
    held = run.held()
    if setting.directory:
        run.save()
    return held


def _start(setting: _Setting) -> dict[str, Any]:
    run = _Run(setting, setting.model["seed"] + 1000)
    if setting.optimizer:
        run.train(1)
    run.load()
    return run.held()


def _logits(setting: _Setting) -> dict[str, Any]:
    setting.optimizer = "plain"
    run = _Run(setting, setting.model["seed"])
    run.train()
    (model,) = run.chunks
    biases = {name: each.clone().float() for name, each in model.named_buffers() if name.endswith("expert_bias")}
    model = model.float().eval()
    for name, each in model.named_buffers():
        if name in biases:
            each.data = biases[name]
    for module in model.modules():
        for flag in ("input_in_bf16", "input_in_float16"):
            if hasattr(module, flag):
                setattr(module, flag, False)
        if hasattr(module, "config"):
            module.config.bf16, module.config.params_dtype = False, torch.float32
    model.config.mtp_num_layers = None
    model.mtp_process = False
    if setting.model["experts"]:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.te_general_gemm = None
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    count = 12
    mask = torch.triu(torch.ones(1, 1, count, count, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(_text(setting.model["vocab"]), torch.arange(count)[None], mask)[..., : setting.model["vocab"]]
    return {"logits": logits.reshape(-1).tolist()}


def _plain(setting: _Setting) -> dict[str, Any]:
    assert setting.directory
    loaded = dist_checkpointing.load_plain_tensors(setting.directory)
    tensors = {name: each for name, each in loaded.items() if torch.is_tensor(each)}
    return {name: _digest(each, whole=True) for name, each in tensors.items() if not name.endswith("_extra_state")}


def _text(vocabulary: int) -> Any:
    return (torch.arange(12)[None] * 5 + 3) % vocabulary


def _transformers(directory: str) -> dict[str, Any]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, experts_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        logits = model.eval()(_text(model.config.vocab_size)).logits
    return {
        "missing": sorted(map(str, info["missing_keys"])),
        "unknown": sorted(map(str, info["unexpected_keys"])),
        "logits": logits.reshape(-1).tolist(),
    }


_JOBS = {"train": _train, "start": _start, "logits": _logits, "plain": _plain}


def _rank(rank: int, job: Job, place: str, world: int) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS // 2)
    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=world, timeout=limit)
    answer = _JOBS[job["do"]](_Setting(job))
    Path(place, f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _on_all_ranks(job: Job) -> Any:
    """The answers of all ranks. Whatever they start ends with them: a rank that fails leaves others waiting."""
    if job["do"] == "transformers":
        return _transformers(job["directory"])
    world = _Setting(job).world
    with tempfile.TemporaryDirectory() as place:
        child = os.fork()
        if not child:
            os.setsid()
            status = 1
            try:
                torch.multiprocessing.start_processes(_rank, (dict(job), place, world), world, start_method="fork")
                status = 0
            except Exception as error:
                Path(place, "error").write_text(str(error))
            finally:
                os._exit(status)
        limit = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < limit:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended[0]:
            os.waitpid(child, 0)
            raise RuntimeError(f"no answer within {SECONDS} seconds")
        if ended[1]:
            report = Path(place, "error")
            raise RuntimeError(report.read_text()[-1500:] if report.exists() else f"exit status {ended[1]}")
        return [json.loads(Path(place, f"answer{rank}").read_text()) for rank in range(world)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_lines(_on_all_ranks)
