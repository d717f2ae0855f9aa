"""Options that several commands share, and the kinds of values they take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import click

from reshard.cli import completion
from reshard.cli.command import Choice, option
from reshard.cli.errors import set_debug, set_quiet, set_verbose
from reshard.cli.shard import ShardType
from reshard.defaults import DEFAULT_PREFIX, MAX_MEMORY, MOST_DEVICES
from reshard.errors import UsageError
from reshard.storage import is_directory, use_endpoint

if TYPE_CHECKING:
    from reshard.checkpoints import Decryption

F = TypeVar("F", bound=Callable[..., Any])

_SHARDS = "reshard.shards"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Ranks(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Ranks as people write them: ``0-7,12``."""

    name = "ranks"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> tuple[int, ...]:
        """The ranks, ascending."""
        if isinstance(value, tuple):
            return value
        ranks: set[int] = set()
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
            if not match:
                self.fail(f"{value!r} is not a list of ranks such as 0-7,12", param, ctx)
            first = int(match[1])
            last = int(match[2]) if match[2] is not None else first
            if last < first or last >= MOST_DEVICES:
                self.fail(f"{part.strip()!r} is not a range of ranks below {MOST_DEVICES}", param, ctx)
            ranks.update(range(first, last + 1))
        return tuple(sorted(ranks))


class Form(Choice):
    """A form of checkpoint; ``hf`` is Hugging Face's."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def choices(self) -> tuple[str, ...]:
        """The names of all forms."""
        # Loaded only here: most commands start without --to.
        from reshard.forms.registry import FORMS

        return tuple(form.name for form in FORMS)

    @choices.setter
    def choices(self, names: tuple[str, ...]) -> None:
        """Names are those of the registry, whatever click sets."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The form."""
        if value in ("ckpt", "safetensors"):
            self.fail(f"{value} is a format, not a form: --format {value}", param, ctx)
        return super().convert("huggingface" if value == "hf" else value, param, ctx)


class ShardSize(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number of bytes as at Hugging Face: ``5GB`` is decimal, ``5GiB`` binary."""

    name = "size"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> int:
        """The number of bytes."""
        from reshard.forms.full.written_files import parse_size

        return value if isinstance(value, int) else parse_size(str(value))


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number of bytes in binary units: ``512M``."""

    name = "size"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value), re.IGNORECASE)
        if not match or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size such as 512M or 2G", param, ctx)
        return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def strategy(text: str, *names: str) -> Callable[[F], F]:
    """--strategy."""
    return option(
        "Strategies",
        "--strategy",
        *names,
        metavar="FILE|DIR|none",
        shell_complete=completion.strategies,
        help=text,
    )


def _keep_shards(context: click.Context, _: click.Parameter, value: Optional[int]) -> None:
    context.meta[_SHARDS] = value


def _target_strategy(context: click.Context, _: click.Parameter, value: Optional[str]) -> Optional[str]:
    """The value of --dst-strategy, or what --shards stands for: the target's layout has one name, wherever it goes."""
    shards = context.meta.get(_SHARDS)
    if shards is None:
        return value
    if value is not None:
        raise UsageError("--shards and --dst-strategy both lay out the target", hint="leave out one of them")
    return f"shards:{shards}"


def strategies(command: F) -> F:
    """--src-strategy and --dst-strategy."""
    return _all(
        command,
        [
            option(
                "Strategies",
                "--src-strategy",
                metavar="FILE|DIR|none",
                shell_complete=completion.strategies,
                help="Strategy that SRC was saved with; none if SRC is not sharded.",
            ),
            option(
                "Strategies",
                "--dst-strategy",
                metavar="FILE|DIR|none|same",
                callback=_target_strategy,
                shell_complete=completion.strategies,
                help="Strategy of the target; none for one unsharded rank, same for that of SRC.",
            ),
            option(
                "Strategies",
                "--shards",
                type=click.IntRange(min=1, max=MOST_DEVICES),
                metavar="N",
                show_default="as --dst-strategy",
                expose_value=False,
                is_eager=True,
                callback=_keep_shards,
                help="In place of --dst-strategy: cut rows over N files, as FSDP does.",
            ),
        ],
    )


def ranks(group: str, text: str) -> Callable[[F], F]:
    """--ranks."""
    return option(group, "--ranks", type=Ranks(), metavar="0-7,12", show_default="all", help=text)


def common(command: F) -> F:
    """What every command takes: --quiet, which `output.is_quiet` tells of, --endpoint-url and --debug."""
    text = "Only results, warnings and errors."
    quiet = option(
        "Output", "--quiet", "-q", is_flag=True, callback=set_quiet, expose_value=False, is_eager=True, help=text
    )
    return _all(command, [quiet, _endpoint_and_debug])


def _endpoint_and_debug(command: F) -> F:
    return _all(
        command,
        [
            option(
                "Stores",
                "--endpoint-url",
                metavar="URL",
                expose_value=False,
                is_eager=True,
                callback=_set_endpoint,
                show_default="AWS_ENDPOINT_URL or the profile",
                help="Service of s3:// paths.",
            ),
            option(
                "Output",
                "--debug",
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=set_debug,
                help="Show tracebacks.",
            ),
        ],
    )


def quiet(command: F) -> F:
    """--quiet, whose value the command gets."""
    return option("Output", "--quiet", "-q", is_flag=True, callback=set_quiet, help="Only warnings and errors.")(
        command
    )


def _set_endpoint(_: click.Context, __: click.Parameter, value: Optional[str]) -> None:
    if value is not None and not re.match("https?://[^/]", value):
        raise UsageError("--endpoint-url: is no URL", hint="name the service as in --endpoint-url https://host:port")
    if value is not None:
        use_endpoint(value)


def verbose(text: str) -> Callable[[F], F]:
    """-v; messages name every parameter with it."""
    return option("Output", "-v", "--verbose", is_flag=True, callback=set_verbose, help=text)


def names_in_full(command: F) -> F:
    """-v of commands that list parameters in messages only."""
    text = "Name every parameter in messages."
    return option(
        "Output", "-v", "--verbose", is_flag=True, callback=set_verbose, expose_value=False, is_eager=True, help=text
    )(command)


def json_output(command: F) -> F:
    """--json."""
    return option("Output", "--json", "as_json", is_flag=True, help="Print JSON to standard output.")(command)


def svg(text: str) -> Callable[[F], F]:
    """--svg, for `output.write_picture`."""
    return option("Output", "--svg", metavar="FILE", callback=_svg_path, shell_complete=completion.paths, help=text)


def _svg_path(_: click.Context, __: click.Parameter, value: Optional[str]) -> Optional[str]:
    # A name typed by mistake may be that of a strategy or a checkpoint.
    if value is not None and not value.lower().endswith(".svg"):
        raise UsageError(f"--svg {value}: the name has to end in .svg")
    if value is not None and is_directory(value):
        raise UsageError(f"--svg {value}: is a directory", hint="name a file to write")
    return value


def _all(command: F, options: list[Callable[[F], F]]) -> F:
    for decorator in reversed(options):
        command = decorator(command)
    return command


def source(command: F) -> F:
    """Which of the source's files are taken."""
    return _all(
        command,
        [
            option(
                "Source",
                "--step",
                default="latest",
                show_default=True,
                metavar="EPOCH_STEP|latest",
                shell_complete=completion.steps,
                help="Step to convert; latest is the newest complete one.",
            ),
            option(
                "Source",
                "--file-suffix",
                metavar="TEXT",
                show_default="all files",
                help="Read only files whose names end in TEXT before .ckpt or .safetensors.",
            ),
            decryption,
        ],
    )


def decryption(command: F) -> F:
    """--decrypt-key-file and --decrypt-mode, for `decryption_of`."""
    return _all(
        command,
        [
            option(
                "Source",
                "--decrypt-key-file",
                metavar="FILE|-",
                shell_complete=completion.paths,
                help="File with the key of encrypted source files; - is standard input. Targets are not encrypted.",
            ),
            option(
                "Source",
                "--decrypt-mode",
                type=Choice(["AES-GCM", "AES-CBC", "SM4-CBC"]),
                show_default="as each file records",
                help="Refuse files encrypted in another mode.",
            ),
        ],
    )


def decryption_of(key_file: Optional[str], mode: Optional[str]) -> Optional[Decryption]:
    """How encrypted source files are read, by the values of these options; None where they are not.

    Raises:
        UsageError: there is a mode without a key.
        InputError: there is no key where it should be.
    """
    # Help and the commands that read no checkpoint do without.
    from reshard.checkpoints import decryption

    return decryption.decryption_of(key_file, mode)


def selection(command: F) -> F:
    """Which parameters are taken."""
    return _all(
        command,
        [
            option(
                "Parameters",
                "--include",
                multiple=True,
                metavar="GLOB",
                show_default="all",
                help="Convert only parameters that match GLOB (repeatable).",
            ),
            option(
                "Parameters",
                "--exclude",
                multiple=True,
                metavar="GLOB",
                show_default="none",
                help="Skip parameters that match GLOB (repeatable; overrides --include).",
            ),
        ],
    )


def edits(command: F) -> F:
    """Names and types, for `plan.typed_edits.edits_of`."""
    return _all(
        command,
        [
            option(
                "Names and types",
                "--names",
                metavar="RULES",
                shell_complete=completion.tables,
                show_default="unchanged",
                help="Convert names and packing to another framework's: a built-in table (`reshard names list`) or a "
                "TOML file.",
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
                help="File with the sizes that the table needs, such as heads and experts.",
            ),
            option(
                "Names and types",
                "--optimizer",
                type=Choice(["keep"]),
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
        ],
    )


def crc(text: str) -> Callable[[F], F]:
    """--crc."""
    return option("Checks", "--crc", type=Choice(["auto", "never"]), default="auto", show_default=True, help=text)


def effort(command: F) -> F:
    """How much of the machine is used."""
    return _all(
        command,
        [
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
                type=Size(),
                metavar="SIZE",
                default=f"{MAX_MEMORY >> 20}M",
                show_default=True,
                help="Memory for all buffers together (binary units: 512M, 2G).",
            ),
        ],
    )


def fallback(command: F) -> F:
    """--no-fallback."""
    return option(
        "Source",
        "--no-fallback",
        is_flag=True,
        help="Fail if the newest step is not complete, instead of using an older one.",
    )(command)


def reading(command: F) -> F:
    """--io."""
    return option(
        "Effort",
        "--io",
        type=Choice(["auto", "mmap", "pread"]),
        default="auto",
        show_default=True,
        help="How sources are read; auto is pread. With mmap, a file that is truncated meanwhile kills the run.",
    )(command)


def accept_changed_source(command: F) -> F:
    """--accept-changed-source."""
    return option(
        "Target",
        "--accept-changed-source",
        is_flag=True,
        help="Continue although existing targets were made from other source files.",
    )(command)


def dry_run(command: F) -> F:
    """--dry-run."""
    return option("Checks", "--dry-run", "-n", is_flag=True, help="Plan and check everything, but write nothing.")(
        command
    )


def writing(command: F) -> F:
    """How files are read and written."""
    return _all(
        command,
        [
            effort,
            reading,
            crc("Check the CRCs of source files that are read whole."),
            option(
                "Checks",
                "--check-replicas",
                type=Choice(["auto", "all", "never"]),
                default="auto",
                show_default=True,
                help="Compare replicas on the source ranks before writing: auto compares samples.",
            ),
            option(
                "Checks",
                "--checksum",
                type=Choice(["none", "crc32"]),
                default="none",
                show_default=True,
                help="Record checksums in the manifest for `reshard verify DST`.",
            ),
            option(
                "Target",
                "--overwrite",
                is_flag=True,
                help="Replace existing targets, also those of another conversion.",
            ),
            accept_changed_source,
            dry_run,
        ],
    )


def output(command: F) -> F:
    """What is said."""
    return _all(
        command,
        [
            json_output,
            quiet,
            option(
                "Output",
                "--progress/--no-progress",
                default=None,
                show_default="on a terminal",
                help="Show progress: a bar, or without a terminal a line every 30 s.",
            ),
            verbose("Print details: phases, checks, and the name of every parameter."),
            _endpoint_and_debug,
        ],
    )


def divided(command: F) -> F:
    """How the work is divided among processes."""
    return _all(
        command,
        [
            option(
                "Target",
                "--shard",
                type=ShardType(),
                metavar="I/N|auto",
                help="Write only share I of N, counted from 0; auto reads I/N from Slurm, MPI, Kubernetes, torchrun or "
                "MindSpore.",
            ),
            option(
                "Effort",
                "--scheduler",
                metavar="ADDRESS|FILE",
                help="Run on the workers of this Dask cluster. Use only clusters that you trust: Dask exchanges "
                "pickles.",
            ),
        ],
    )


def targets(command: F) -> F:
    """Which target ranks are written."""
    return _all(command, [ranks("Target", "Write only these target ranks; with --to, these files."), divided])


def prefix(default: Optional[str], shown: Optional[str] = None) -> Callable[[F], F]:
    """--prefix; ``shown`` says what the default is, if not itself."""
    return option(
        "Target",
        "--prefix",
        metavar="TEXT",
        default=default,
        show_default=shown or True,
        help="Prefix of target file names; with {rank}, {epoch} or {step} in it, the whole name.",
    )


def target_form(default: str) -> Callable[[F], F]:
    """What is written: its form, names and format; ``default`` says which form is the default."""

    def add(command: F) -> F:
        return _all(
            command,
            [
                option(
                    "Target",
                    "--to",
                    type=Form(),
                    show_default=default,
                    help="Form of the target; hf is short for huggingface.",
                ),
                option(
                    "Target",
                    "--max-shard-size",
                    type=ShardSize(),
                    metavar="SIZE",
                    show_default="5GB, unified 3GiB",
                    help="Largest file of --to huggingface or unified: 500M, 5GB (decimal) or 5GiB.",
                ),
                prefix(DEFAULT_PREFIX),
                option(
                    "Target",
                    "--format",
                    "format",
                    type=Choice(["same", "ckpt", "safetensors"]),
                    default="same",
                    show_default=True,
                    help="Format of the target files.",
                ),
            ],
        )

    return add


def proof(text: str) -> Callable[[F], F]:
    """The option of commands that verify what they wrote."""
    return option("Checks", "--verify", is_flag=True, help=text)


def conversion(command: F) -> F:
    """Options of convert and by-rank alike."""
    return _all(
        command,
        [
            target_form("ranks"),
            source,
            fallback,
            selection,
            edits,
            option(
                "Parameters",
                "--strict",
                is_flag=True,
                help="Fail on parameters that SRC lacks, and on tied ones that a stage's strategy does not list.",
            ),
            writing,
            proof("Compare every tensor with the source after writing."),
            output,
        ],
    )
