"""Names and packing of tensors: rules that make the tensors of one model code those of another.

`model` is what a table of rules says, `toml_file` reads it; `matching` finds which names fit, `apply` what is made of
which elements. Nothing here knows of files of tensors, dtypes or layouts.
"""

from reshard.names.apply import Applied, AppliedStep, MadeView, apply_rules, warning_of
from reshard.names.frameworks import plain_names, possible_plain_names, trainer_keys, trainer_names
from reshard.names.model import NameRules
from reshard.names.operations import SizedOperation
from reshard.names.options import possible_options
from reshard.names.sizes import Configuration
from reshard.names.tables import builtin_names, config_beside, parse_renames, read_config, rules_named
from reshard.names.toml_file import parse_rules, read_rules

__all__ = [
    "Applied",
    "AppliedStep",
    "Configuration",
    "MadeView",
    "NameRules",
    "SizedOperation",
    "apply_rules",
    "builtin_names",
    "config_beside",
    "parse_renames",
    "parse_rules",
    "plain_names",
    "possible_options",
    "possible_plain_names",
    "read_config",
    "read_rules",
    "rules_named",
    "trainer_keys",
    "trainer_names",
    "warning_of",
]
