"""decrypt: plain `.ckpt` files of encrypted ones."""

from __future__ import annotations

from reshard.cli import options
from reshard.cli.command import argument, command, option, paths
from reshard.cli.output import is_quiet, listener, say
from reshard.text.messages import plural


@command(
    "decrypt",
    """
reshard decrypt ckpt/ plain/ --key-file key
print-the-key | reshard decrypt net.ckpt plain/ --key-file -
""",
)
@argument("src")
@argument("dst")
@option(
    "Source",
    "--key-file",
    required=True,
    metavar="FILE|-",
    shell_complete=paths,
    help="File with the key, MindSpore's enc_key; - is standard input.",
)
@options.common
def decrypt(src: str, dst: str, key_file: str) -> None:
    """Decrypt the .ckpt files of SRC, saved with enc_key, into the directory DST.

    SRC is a file or a rank tree, whose modes of encryption (AES-GCM, AES-CBC, SM4-CBC) may be mixed; plain .ckpt
    files in it are copied. Files keep their names, get mode 0600, and their final name only after their tags, or
    padding and records, were checked. The same command continues an interrupted run.
    """
    # Loaded only here: help does without.
    from reshard.decryption import decrypt as decrypt_files
    from reshard.decryption import read_key
    from reshard.text.messages import Report

    written, finished = decrypt_files(src, dst, read_key(key_file), Report(listener()))
    if not is_quiet():
        earlier = f"; {finished} finished before" if finished else ""
        say(f"{dst}: wrote {plural(written, 'file')}{earlier}")
