"""The command group. Commands are imported when they are run, which keeps --help fast."""

from __future__ import annotations

import click

from reshard._version import __version__
from reshard.cli.command import spelling
from reshard.cli.errors import ReshardGroup

# Name on the command line: module, attribute, one line of help (spares importing the module).
_COMMANDS = {
    "convert": ("convert", "convert", "Convert a checkpoint to another layout or another form."),
    "by-rank": ("convert", "by_rank", "Convert a checkpoint for one target rank, for shell loops."),
    "merge-lora": ("merge_lora", "merge_lora", "Merge a LoRA adapter into the weights that it was trained on."),
    "plan": ("plan", "plan", "Print the plan of a conversion: ranks, files, bytes, memory."),
    "rank-list": ("strategy", "rank_list", "Print the source ranks that a target rank needs."),
    "merge-pipeline": ("strategy", "merge_pipeline", "Merge the pipeline stages' strategy files into one."),
    "group-info": ("strategy", "group_info", "Read group_info files."),
    "decrypt": ("decrypt", "decrypt", "Decrypt .ckpt files that were saved with enc_key."),
    "inspect": ("inspect", "inspect", "Show the contents of a checkpoint of any form."),
    "suggest": ("suggest", "suggest", "Print the commands for the usual aims with a checkpoint."),
    "view": ("view", "view", "Write an HTML page that shows a checkpoint and a conversion."),
    "status": ("status", "status", "Print which targets of a conversion are done and which are missing."),
    "resume": ("resume", "resume", "Resume a conversion or recovery."),
    "verify": ("verify", "verify", "Prove that a converted checkpoint is right, or that copies agree."),
    "fingerprint": ("fingerprint", "fingerprint", "Print layout-independent fingerprints of all parameters."),
    "get": ("get", "get", "Print a tensor or a slice of one, or write it to a .npy file."),
    "stats": ("stats", "stats", "Print statistics of every tensor: NaN, zeros, min, max, mean, norm."),
    "diff": ("diff", "diff", "Compare the tensors of two checkpoints."),
    "replicas": ("strategy", "replicas", "Print the groups of ranks with identical checkpoints."),
    "recover": ("convert", "recover", "Rebuild the checkpoints of lost ranks from replicas."),
    "strategy": ("strategy", "strategy_group", "Show, compare, check and make strategy files."),
    "names": ("strategy", "names", "Show tables for --names: names and packing of other frameworks."),
}
_ALIASES = {"transform-dir": "convert", "transform-all": "convert", "transform-by-rank": "by-rank"}


@click.group(
    cls=ReshardGroup,
    entries=_COMMANDS,
    aliases=_ALIASES,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": spelling},
)
@click.version_option(__version__, "-V", "--version", prog_name="reshard")
def cli() -> None:
    """Convert distributed MindSpore checkpoints from one parallel layout to another.

    MindSpore and accelerators are not needed. `reshard COMMAND --help` shows the options of a command. They may be
    typed with underscores, and as in MindSpore's functions: --src_strategy_file, --dst_strategy_file.
    """


def main() -> None:
    """Run the command line of this process, and raise SystemExit; `reshard.entry` is the program."""
    cli(prog_name="reshard")
