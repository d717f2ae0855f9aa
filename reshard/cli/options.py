"""Options that several commands share, and the kinds of values they take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import click

from reshard.cli import completion
from reshard.cli.command import Parsed, option
from reshard.cli.output import set_debug, set_quiet, set_verbose
from reshard.defaults import CHOICES, DEFAULT_PREFIX, MAX_DEVICES, MAX_MEMORY
from reshard.errors import UsageError
from reshard.forms import FORM_CLASSES, SHORT_NAMES
from reshard.storage import is_directory, use_endpoint

if TYPE_CHECKING:
    from reshard.cli.shard import Share

_SHARDS = "reshard.shards"

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks of ``0-7,12``, ascending.

    Raises:
        ValueError: the text is no list of ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of ranks such as 0-7,12")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first or last >= MAX_DEVICES:
            raise ValueError(f"{part.strip()!r} is not a range of ranks below {MAX_DEVICES}")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


RANKS = Parsed("ranks", parse_ranks)


def _parse_rank(text: str) -> int:
    """A rank; no step such as ``1_0``, which Python reads as 10."""
    if not re.fullmatch(r"\s*\+?\d{1,9}\s*", text, re.ASCII):
        raise ValueError(f"{text!r} is not a rank such as 12; for several ranks: convert --ranks 0-7")
    return int(text)


RANK = Parsed("rank", _parse_rank)


class FormType(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """A form of checkpoint; ``hf`` is Hugging Face's."""

    def __init__(self) -> None:
        super().__init__(())
        # Names alone, because loading the forms would triple the time of --help.
        self.choices = FORM_CLASSES.keys()  # type: ignore[assignment, unused-ignore]

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The form."""
        if value in ("ckpt", "safetensors"):
            self.fail(f"{value} is a format, not a form: --format {value}", param, ctx)
        # Loaded only here: help does without.
        from reshard.checkpoints.formats.dtypes import dtype_named

        if isinstance(value, str) and dtype_named(value) is not None:
            self.fail(f"{value} is a type, not a form: --cast {value}", param, ctx)
        return super().convert(SHORT_NAMES.get(value, value), param, ctx)


class FormatType(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """A format of files."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The format."""
        if SHORT_NAMES.get(value, value) in FORM_CLASSES:
            self.fail(f"{value} is a form, not a format: --to {value}", param, ctx)
        return super().convert(value, param, ctx)


def _parse_shard_size(text: str) -> int:
    """The bytes of ``5GB``, decimal as at Hugging Face, or of ``5GiB``."""
    # Loaded only here: help does without.
    from reshard.forms.full.written_files import parse_size

    return parse_size(text)


def parse_memory(text: str) -> int:
    """The bytes of a size in binary units, such as ``512M``.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(B)|([KMGT])(?:i?B)?)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size such as 512M or 2G")
    unit = match[2] or match[3]
    if unit is None:
        raise ValueError(f"{text!r} has no unit: {match[1]}M or {match[1]}G")
    return max(1, int(float(match[1]) * _UNITS[unit.upper()]))


def _parse_share(text: str) -> Share:
    # Loaded only here: most runs do all the work.
    from reshard.cli.shard import parse_share

    return parse_share(text)


def _set_endpoint(_: click.Context, __: click.Parameter, value: Optional[str]) -> None:
    if value is not None and not re.match("https?://[^/]", value):
        raise UsageError("--endpoint-url: is no URL", hint="name the service as in --endpoint-url https://host:port")
    if value is not None:
        use_endpoint(value)


def path_to_write(
    name: str, *endings: str, standard_output: bool = False
) -> Callable[[click.Context, click.Parameter, Optional[str]], Optional[str]]:
    """Callback of an option that names a file to write: a name typed by mistake may be that of a checkpoint.

    Args:
        name: of the option, for messages.
        endings: of the file's name.
        standard_output: ``-`` is allowed.
    """

    def check(_: click.Context, __: click.Parameter, value: Optional[str]) -> Optional[str]:
        if value is None or (standard_output and value == "-"):
            return value
        if not value.lower().endswith(endings):
            raise UsageError(f"{name} {value}: the name has to end in {' or '.join(endings)}")
        if is_directory(value):
            raise UsageError(f"{name} {value}: is a directory", hint="name a file to write")
        return value

    return check


def choice(group: str, name: str, text: str) -> Callable[[F], F]:
    """An option with a few choices; the first is the default."""
    words = CHOICES[name]
    flag = "--" + name.replace("_", "-")
    kind = FormatType if name == "format" else click.Choice
    return option(group, flag, name, type=kind(words), default=words[0], show_default=True, help=text)


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Options that go together, in the order of the help."""

    def add(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def strategy(text: str, *names: str, flag: str = "--strategy") -> Callable[[F], F]:
    """A strategy; --strategy by default."""
    return option("Strategies", flag, *names, metavar="FILE|DIR|none", shell_complete=completion.paths, help=text)


def _keep_shards(context: click.Context, _: click.Parameter, value: Optional[int]) -> None:
    context.meta[_SHARDS] = value


def _target_strategy(context: click.Context, _: click.Parameter, value: Optional[str]) -> Optional[str]:
    """The value of --dst-strategy, or what --shards stands for: the target's layout has one name, wherever it goes."""
    shards = context.meta.get(_SHARDS)
    if shards is None:
        return value
    # Loaded only here: most commands have no --shards.
    from reshard.strategies import target_named

    return target_named(value, shards)


def source_strategy(*names: str) -> Callable[[F], F]:
    """--src-strategy, with other names."""
    text = "Strategy that the source was saved with; none if it is not sharded."
    return strategy(text, "src_strategy", *names, flag="--src-strategy")


def target_layout(command: F) -> F:
    """--dst-strategy and --shards."""
    return together(
        option(
            "Strategies",
            "--dst-strategy",
            metavar="FILE|DIR|none|same",
            callback=_target_strategy,
            shell_complete=completion.paths,
            help="Strategy of the target; none for one unsharded rank, same for the source's.",
        ),
        option(
            "Strategies",
            "--shards",
            type=click.IntRange(min=1, max=MAX_DEVICES),
            metavar="N",
            expose_value=False,
            is_eager=True,
            callback=_keep_shards,
            help="Cut rows over N files, as FSDP does, in place of --dst-strategy.",
        ),
    )(command)


def strategies(command: F) -> F:
    """--src-strategy and --dst-strategy."""
    return source_strategy()(target_layout(command))


def ranks(group: str, text: str) -> Callable[[F], F]:
    """--ranks."""
    return option(group, "--ranks", type=RANKS, metavar="0-7,12", show_default="all", help=text)


def flag(group: str, *names: str, text: str, **attributes: Any) -> Callable[[F], F]:
    """An option without a value."""
    return option(group, *names, is_flag=True, help=text, **attributes)


def verbose(text: str, **attributes: Any) -> Callable[[F], F]:
    """-v; messages name every parameter with it."""
    return flag("Output", "-v", "--verbose", text=text, callback=set_verbose, **attributes)


def svg(text: str) -> Callable[[F], F]:
    """--svg, for `output.write_picture`."""
    return option(
        "Output",
        "--svg",
        metavar="FILE",
        callback=path_to_write("--svg", ".svg"),
        shell_complete=completion.paths,
        help=text,
    )


def crc(text: str) -> Callable[[F], F]:
    """--crc."""
    return choice("Checks", "crc", text)


def proof(text: str) -> Callable[[F], F]:
    """--verify of commands that write."""
    return flag("Checks", "--verify", text=text)


def prefix(default: Optional[str], shown: Optional[str] = None) -> Callable[[F], F]:
    """--prefix; ``shown`` describes the default, if it is not the text itself."""
    return option(
        "Target",
        "--prefix",
        metavar="TEXT",
        default=default,
        show_default=shown or True,
        help="Prefix of target file names; with {rank}, {epoch} or {step} in it, the whole name.",
    )


# Options that act by themselves: the function of the command does not get their value.
_ASIDE = {"expose_value": False, "is_eager": True}

_service_and_debug = together(
    option(
        "Stores",
        "--endpoint-url",
        metavar="URL",
        callback=_set_endpoint,
        show_default="AWS_ENDPOINT_URL or the profile",
        help="Service of s3:// paths.",
        **_ASIDE,
    ),
    flag("Output", "--debug", text="Show tracebacks.", callback=set_debug, **_ASIDE),
)

common = together(
    flag("Output", "--quiet", "-q", text="Only results, warnings and errors.", callback=set_quiet, **_ASIDE),
    _service_and_debug,
)
"""Options of every command; `output.is_quiet` returns the value of --quiet."""

names_in_full = verbose("Name every parameter in messages.", **_ASIDE)
"""-v of commands that list parameters in messages only."""

json_output = flag("Output", "--json", "as_json", text="Print JSON to standard output.")
"""--json."""

output = together(
    json_output,
    flag("Output", "--quiet", "-q", text="Only warnings and errors.", callback=set_quiet),
    option(
        "Output",
        "--progress/--no-progress",
        default=None,
        show_default="unless --quiet",
        help="Show progress: a bar, or without a terminal a line every 30 s.",
    ),
    verbose("Print details: phases, checks, and the name of every parameter."),
    _service_and_debug,
)
"""Options of output for long-running commands."""

source = together(
    option(
        "Source",
        "--step",
        default="latest",
        show_default=True,
        metavar="EPOCH_STEP|latest",
        help="Step to read; latest is the newest complete one.",
    ),
    option(
        "Source",
        "--file-suffix",
        metavar="TEXT",
        show_default="all files",
        help="Read only files whose names end in TEXT before .ckpt or .safetensors.",
    ),
)
"""Which of the source's files are taken."""

without_ranks = option(
    "Source",
    "--without-ranks",
    type=RANKS,
    metavar="3,7",
    show_default="none",
    help="Count these source ranks as lost: replicas on other ranks are read.",
)
"""--without-ranks."""

selection = together(
    option(
        "Parameters",
        "--include",
        multiple=True,
        metavar="GLOB",
        show_default="all",
        help="Select only parameters that match GLOB (repeatable).",
    ),
    option(
        "Parameters",
        "--exclude",
        multiple=True,
        metavar="GLOB",
        show_default="none",
        help="Skip parameters that match GLOB (repeatable; overrides --include).",
    ),
)
"""Which parameters are taken."""

allow_missing = option(
    "Parameters",
    "--allow-missing",
    multiple=True,
    metavar="GLOB",
    show_default="none",
    help="Go on although the source lacks parameters that match GLOB and that the target strategy lists (repeatable).",
)
"""--allow-missing."""

dequantize = option(
    "Names and types",
    "--dequantize",
    metavar="DTYPE",
    shell_complete=completion.types,
    show_default="unchanged",
    help="Turn quantised weights (block FP8, FP8 and Int8 with scales, MXFP4) into BFloat16, Float16 or Float32; "
    "scales are left out.",
)
"""--dequantize."""

edits = together(
    option(
        "Names and types",
        "--names",
        metavar="RULES",
        shell_complete=completion.tables,
        show_default="unchanged",
        help="Convert names and packing to another framework's: a built-in table (`reshard names list`) or a "
        "TOML file. none: keep them, those of fused experts, too.",
    ),
    option(
        "Names and types",
        "--reverse",
        is_flag=True,
        help="Apply the table from right to left; by default the side that fits SRC is the left.",
    ),
    option(
        "Names and types",
        "--config",
        metavar="FILE|DIR",
        shell_complete=completion.paths,
        show_default="config.json in SRC",
        help="config.json with the model's type, and sizes for the table, such as heads and experts; --to huggingface "
        "copies it, and of a DIR also the tokenizer's files.",
    ),
    option(
        "Names and types",
        "--optimizer",
        type=click.Choice(["keep"]),
        show_default="left out",
        help="keep: apply the table to optimizer state, too.",
    ),
    option(
        "Names and types",
        "--rename",
        multiple=True,
        metavar="OLD=NEW",
        help="Rename a parameter; a * in OLD and NEW renames all that match (repeatable).",
    ),
    dequantize,
    option(
        "Names and types",
        "--cast",
        multiple=True,
        metavar="[GLOB=]DTYPE",
        shell_complete=completion.types,
        show_default="unchanged",
        help="Cast all floating-point weights, or tensors that match GLOB, to Float32, Float16 or BFloat16 "
        "(also fp32, fp16, bf16; repeatable; the last match wins).",
    ),
)
"""Names and types, for `plan.edits.edits_of`."""

effort = together(
    option(
        "Effort",
        "--jobs",
        "-j",
        type=click.IntRange(min=1, max=1024),
        metavar="N",
        show_default="all available",
        help="Number of CPUs to use.",
    ),
    option(
        "Effort",
        "--max-memory",
        type=Parsed("size", parse_memory),
        metavar="SIZE",
        default=MAX_MEMORY,
        show_default="8M for each CPU, at least 64M",
        help="Memory for all buffers together (binary units: 512M, 2G).",
    ),
)
"""How much of the machine is used."""

fallback = flag(
    "Source", "--no-fallback", text="Fail if the newest step is not complete, instead of using an older one."
)
"""--no-fallback."""

reading = choice(
    "Effort",
    "io",
    "How sources are read; auto is pread. With mmap, a file that is truncated meanwhile kills the run.",
)
"""--io."""

dry_run = flag("Checks", "--dry-run", "-n", text="Plan and check everything, but write nothing.")
"""--dry-run."""

writing = together(
    effort,
    reading,
    crc("Check the CRCs of source files, and of tensors in archives, that are read whole."),
    choice(
        "Checks",
        "check_replicas",
        "Compare replicas on the source ranks before writing: auto compares samples, and all that recover uses.",
    ),
    choice(
        "Checks", "checksum", "Record checksums in the manifest for `reshard verify DST`, and CRCs in archives of dcp."
    ),
    flag("Target", "--overwrite", text="Replace existing targets, including those of another conversion."),
    dry_run,
)
"""How files are read and written."""

divided = together(
    option(
        "Target",
        "--shard",
        type=Parsed("shard", _parse_share),
        metavar="I/N|auto",
        help="Write only share I of N, counted from 0; auto reads I/N from Slurm, MPI, Kubernetes, torchrun or "
        "MindSpore.",
    ),
    option(
        "Effort",
        "--scheduler",
        metavar="ADDRESS|FILE",
        help="Run on the workers of this Dask cluster. Use only clusters that you trust: Dask exchanges pickles.",
    ),
)
"""How the work is divided among processes."""

targets = together(ranks("Target", "Write only these target ranks; with --to, these files."), divided)
"""Which target ranks are written."""


def target_form(default: str, text: str = "Form of the target; hf is short for huggingface.") -> Callable[[F], F]:
    """The form of the target, and the size of its files; ``default`` describes the default."""
    return together(
        option("Target", "--to", type=FormType(), show_default=default, help=text),
        option(
            "Target",
            "--max-shard-size",
            type=Parsed("size", _parse_shard_size),
            metavar="SIZE",
            show_default="5GB, unified 3GiB",
            help="Largest file of --to huggingface or unified: 500M, 5GB (decimal) or 5GiB.",
        ),
    )


target_files = together(prefix(DEFAULT_PREFIX), choice("Target", "format", "Format of the target files."))
"""Names and format of target files."""

conversion = together(
    target_form("ranks"),
    target_files,
    source,
    without_ranks,
    fallback,
    selection,
    edits,
    allow_missing,
    writing,
    proof("Compare every tensor with the source after writing."),
    output,
)
"""Options of convert and by-rank alike."""
